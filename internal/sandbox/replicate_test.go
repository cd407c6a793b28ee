package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/tier"
)

// newReplicatedHost returns a host with a template and a remote store.
func newReplicatedHost(t *testing.T) *host {
	t.Helper()
	h := newEmptyHost(t, new(sandboxtest.Remote))
	h.build()
	return h
}

// asleep makes a sandbox in standby that keeps a word.
func (h *host) asleep(name, word string) sandbox.Sandbox {
	h.t.Helper()
	s := h.create(sandbox.CreateOptions{Name: name, Env: map[string]string{"A": "b"}})
	h.ask(s.ID, "set "+word)
	return h.hibernate(s.ID)
}

func (h *host) imports(takeOver bool) sandbox.Imported {
	h.t.Helper()
	out, err := h.core.Import(h.t.Context(), takeOver, nil)
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

// TestCommitsAreReplicated, and say so; deletions are, too.
func TestCommitsAreReplicated(t *testing.T) {
	h := newReplicatedHost(t)
	s := h.create()
	if r := h.get(s.ID).Replication; r == nil || r.State != "local" {
		t.Errorf("a sandbox that never slept: %+v", r)
	}
	if _, ok := h.remote.Replica(s.ID); ok {
		t.Error("a sandbox that never slept was replicated")
	}
	var record []byte
	for range 3 {
		s = h.hibernate(s.ID)
		if r := s.Replication; r == nil || r.State != "replicated" || r.Error != "" {
			t.Fatalf("after hibernation: %+v", r)
		}
		rep, ok := h.remote.Replica(s.ID)
		if !ok || rep.Snapshot.ID != s.Snapshot.ID || len(rep.Template.Bases) != 1 || rep.LastUsed.IsZero() {
			t.Fatalf("replica %+v", rep)
		}
		for _, local := range []string{"handle", "pending", "last_", "secret"} {
			if strings.Contains(string(rep.Record), local) {
				t.Errorf("the replica's record has %q: %s", local, rep.Record)
			}
		}
		record = rep.Record
		h.resume(s.ID)
	}
	h.crash()
	if rep, _ := h.remote.Replica(s.ID); string(rep.Record) != string(record) {
		t.Errorf("another start makes another record of the same snapshot:\n%s\n%s", record, rep.Record)
	}
	if err := h.core.Delete(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if f := h.remote.Forgotten(); len(f) != 1 || f[0] != s.ID {
		t.Errorf("forgotten: %v", f)
	}
}

// TestStoreThatIsDown delays nothing, is told, and is caught up with.
func TestStoreThatIsDown(t *testing.T) {
	h := newReplicatedHost(t)
	h.remote.SetDown(true)
	s := h.asleep("anna", "kept")
	if r := s.Replication; r == nil || r.State != "local" || r.Error != sandboxtest.ErrDown.Error() {
		t.Errorf("replication: %+v", r)
	}
	h.resume(s.ID)
	h.hibernate(s.ID)
	h.remote.SetDown(false)
	h.crash()
	if r := h.get(s.ID).Replication; r == nil || r.State != "replicated" || r.Error != "" {
		t.Errorf("after a start: %+v", r)
	}
}

// TestRemoteResumeIsPromoted and reported.
func TestRemoteResumeIsPromoted(t *testing.T) {
	h := newReplicatedHost(t)
	s := h.asleep("anna", "kept")
	h.w.Remote = true
	if s = h.resume(s.ID); s.LastResume.Tier != "remote" {
		t.Errorf("the tier of the resume is %s", s.LastResume.Tier)
	}
	if p := h.remote.Promoted(); len(p) != 1 || p[0] != s.Snapshot.ID {
		t.Errorf("promoted: %v", p)
	}
}

// TestImport: a host that lost everything gets back what was replicated.
func TestImport(t *testing.T) {
	lost := newReplicatedHost(t)
	a, b := lost.asleep("anna", "spam"), lost.asleep("", "eggs")
	lost.resume(b.ID) // what ran on when the host was lost comes back where it slept last
	lost.ask(b.ID, "set lost")
	gone := lost.asleep("gone", "x")
	if err := lost.core.Delete(t.Context(), gone.ID); err != nil {
		t.Fatal(err)
	}

	h := newEmptyHost(t, lost.remote)
	var last [2]int64
	out, err := h.core.Import(t.Context(), false, func(done, total int64) { last = [2]int64{done, total} })
	if err != nil || len(out.Sandboxes) != 2 || len(out.Skipped) != 0 || len(out.Templates) != 1 || out.Templates[0] != "base" {
		t.Fatalf("imported %+v, %v", out, err)
	}
	if last != [2]int64{2, 2} {
		t.Errorf("the last progress was %v", last)
	}
	for id, want := range map[string]string{a.ID: "spam", b.ID: "eggs"} {
		s := h.get(id)
		if s.State != sandbox.StateStandby || s.Env["A"] != "b" || s.Replication.State != "replicated" {
			t.Errorf("imported as %+v", s)
		}
		if got := h.ask(id, "get"); got != want {
			t.Errorf("it has %q, want %q", got, want)
		}
		h.hibernate(id) // by an attempt that its agent has not seen
	}
	if h.get("anna").ID != a.ID {
		t.Error("the name leads to another sandbox")
	}
	h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
		if s.Name == "boot" {
			return errors.New("the base snapshot was not imported")
		}
		return nil
	})
	h.create()
	h.hook.set(nil)
	if out = h.imports(false); len(out.Sandboxes) != 0 || len(out.Skipped) != 2 || !strings.Contains(out.Skipped[0], "here already") {
		t.Errorf("once more: %+v", out)
	}
	h.crash()
	if got := h.ask(a.ID, "get"); got != "spam" {
		t.Errorf("after a restart it has %q", got)
	}
}

// TestImportBesideOthers leaves alone what is here.
func TestImportBesideOthers(t *testing.T) {
	lost := newReplicatedHost(t)
	lost.asleep("anna", "theirs")
	other := lost.asleep("other", "kept")

	h := newEmptyHost(t, lost.remote)
	h.w.Base = "of this host"
	h.build()
	mine := h.create(sandbox.CreateOptions{Name: "anna"})
	h.ask(mine.ID, "set mine")
	out := h.imports(false)
	if len(out.Sandboxes) != 1 || out.Sandboxes[0] != other.ID || len(out.Skipped) != 1 || !strings.Contains(out.Skipped[0], "its name anna") {
		t.Fatalf("imported %+v", out)
	}
	if got := h.get(other.ID).TemplateVersion; got != 2 {
		t.Errorf("it is of version %d of the template", got)
	}
	if got := h.ask(other.ID, "get"); got != "kept" {
		t.Errorf("it has %q", got)
	}
	if got := h.ask("anna", "get"); got != "mine" {
		t.Errorf("what was here has %q", got)
	}
	if s := h.create(); s.TemplateVersion != 1 {
		t.Errorf("new sandboxes are of version %d", s.TemplateVersion)
	}
	// Both versions are told apart when they are replicated in turn.
	if err := h.core.Delete(t.Context(), other.ID); err != nil {
		t.Fatal(err)
	}
	wait(t, "the imported version is gone", func() bool { return len(h.versions("base")) == 1 })
}

// TestForeignStore is only taken over by order.
func TestForeignStore(t *testing.T) {
	lost := newReplicatedHost(t)
	lost.asleep("anna", "kept")
	lost.remote.Foreign = true
	h := newEmptyHost(t, lost.remote)
	_, err := h.core.Import(t.Context(), false, nil)
	isA(t, err, sandbox.ErrConflict)
	if !strings.Contains(sandbox.Hint(err), "--take-over") {
		t.Errorf("hint: %q", sandbox.Hint(err))
	}
	if out := h.imports(true); len(out.Sandboxes) != 1 {
		t.Errorf("taken over: %+v", out)
	}
	alone := newHost(t)
	_, err = alone.core.Import(t.Context(), false, nil)
	isA(t, err, sandbox.ErrInvalid)
}

// TestDamagedReplicas are skipped with a reason each.
func TestDamagedReplicas(t *testing.T) {
	for name, tt := range map[string]struct {
		damage func(r *tier.Replica)
		why    string
	}{
		"newer record":    {func(r *tier.Replica) { replace(&r.Record, `"version":2`, `"version":3`) }, "newer"},
		"newer template":  {func(r *tier.Replica) { replace(&r.Template.Record, `"version":1`, `"version":2`) }, "newer"},
		"no JSON":         {func(r *tier.Replica) { r.Record = []byte("{") }, "its record"},
		"another id":      {func(r *tier.Replica) { replace(&r.Record, r.Sandbox, "../../../etc/passwdx") }, "wrong id"},
		"another state":   {func(r *tier.Replica) { replace(&r.Record, "standby", "running") }, "standby"},
		"other snapshot":  {func(r *tier.Replica) { r.Snapshot.Manifest = "another" }, "another snapshot"},
		"odd shape":       {func(r *tier.Replica) { replace(&r.Record, `"cpus":1`, `"cpus":100000`) }, "CPUs"},
		"other template":  {func(r *tier.Replica) { replace(&r.Record, `"template":"base"`, `"template":"b"`) }, "another template"},
		"path in a name":  {func(r *tier.Replica) { replace(&r.Template.Record, `"name":"base"`, `"name":"../x"`) }, "another template"},
		"damaged version": {func(r *tier.Replica) { replace(&r.Template.Record, "sha256:base", "sha256:odd") }, "not the one that was built"},
	} {
		t.Run(name, func(t *testing.T) {
			lost := newReplicatedHost(t)
			s := lost.asleep("anna", "kept")
			rep, _ := lost.remote.Replica(s.ID)
			tt.damage(&rep)
			lost.remote.Put(rep)
			h := newEmptyHost(t, lost.remote)
			out := h.imports(false)
			if len(out.Sandboxes) != 0 || len(out.Skipped) != 1 || !strings.Contains(out.Skipped[0], s.ID) || !strings.Contains(out.Skipped[0], tt.why) {
				t.Errorf("imported %+v", out)
			}
			if v := h.versions("base"); len(v) != len(out.Templates) {
				t.Errorf("%v is there of the templates %v", v, out.Templates)
			}
		})
	}
}

func replace(b *[]byte, old, now string) { *b = []byte(strings.ReplaceAll(string(*b), old, now)) }

// TestImportThatBreaksOff at every step is repeated without harm.
func TestImportThatBreaksOff(t *testing.T) {
	for faultName, fault := range faults {
		for n := 1; ; n++ {
			lost := newReplicatedHost(t)
			a, b := lost.asleep("anna", "spam"), lost.asleep("berta", "eggs")
			h := newEmptyHost(t, lost.remote)
			var steps atomic.Int64
			h.hook.set(func(context.Context, sandboxtest.Step) error {
				if steps.Add(1) != int64(n) {
					return nil
				}
				return fault.do(h)
			})
			_, err := h.core.Import(t.Context(), false, nil)
			h.hook.set(nil)
			if steps.Load() < int64(n) {
				t.Logf("%s: %d steps", faultName, n-1)
				break
			}
			t.Logf("%s at step %d: %v", faultName, n, err)
			if fault.dies {
				h.crash()
			}
			settled(h)
			h.imports(false)
			for id, want := range map[string]string{a.ID: "spam", b.ID: "eggs"} {
				if got := h.ask(id, "get"); got != want {
					t.Errorf("%s at step %d: it has %q, want %q", faultName, n, got, want)
				}
				if h.get(id).Replication.State != "replicated" {
					t.Errorf("%s at step %d: it is not replicated any more", faultName, n)
				}
			}
			if f := h.remote.Forgotten(); len(f) != 0 {
				t.Errorf("%s at step %d: %v was deleted from the remote store", faultName, n, f)
			}
		}
	}
}

// TestCollectionOfBothTiers keeps what is needed, and bears a store that is down.
func TestCollectionOfBothTiers(t *testing.T) {
	h := newReplicatedHost(t)
	s := h.asleep("anna", "kept")
	h.resume(s.ID)
	s = h.hibernate(s.ID)
	wait(t, "the parent is gone", func() bool { return h.w.Snapshots() == 2 })
	out, err := h.core.Collect(t.Context(), sandbox.CollectOptions{DryRun: true})
	if err != nil || !out.DryRun || len(out.Tiers) != 2 || out.Tiers[1].Tier != "remote" || len(out.Objects) != out.Tiers[0].Objects+out.Tiers[1].Objects {
		t.Fatalf("dry run: %+v, %v", out, err)
	}
	if _, err = h.core.Collect(t.Context(), sandbox.CollectOptions{}); err != nil {
		t.Fatal(err)
	}
	if n := h.remote.Snapshots(); n != 2 {
		t.Errorf("the remote store has %d snapshots", n)
	}
	if out, err = h.core.Collect(t.Context(), sandbox.CollectOptions{DryRun: true}); err != nil || len(out.Objects) != 0 {
		t.Errorf("garbage after a collection: %+v, %v", out, err)
	}
	h.remote.SetDown(true)
	out, err = h.core.Collect(t.Context(), sandbox.CollectOptions{})
	if err != nil || out.Tiers[1].Error != sandboxtest.ErrDown.Error() {
		t.Errorf("with a store that is down: %+v, %v", out, err)
	}
	h.remote.SetDown(false)
	h.resume(s.ID)
}

func TestEvict(t *testing.T) {
	h := newReplicatedHost(t)
	s := h.create()
	_, err := h.core.Evict(t.Context(), s.ID, sandbox.EvictOptions{Local: true})
	isA(t, err, sandbox.ErrConflict)
	h.remote.SetDown(true)
	h.hibernate(s.ID)
	_, err = h.core.Evict(t.Context(), s.ID, sandbox.EvictOptions{Local: true})
	isA(t, err, sandbox.ErrConflict)
	h.remote.SetDown(false)
	h.resume(s.ID)
	h.hibernate(s.ID)
	var dropped atomic.Bool
	h.hook.set(func(_ context.Context, step sandboxtest.Step) error {
		if step.Name == "drop cache" {
			dropped.Store(true)
		}
		return nil
	})
	out, err := h.core.Evict(t.Context(), s.ID, sandbox.EvictOptions{Local: true, Parked: true})
	if err != nil || out.Packs != 1 || out.Bytes != 4096 || dropped.Load() {
		t.Errorf("evicted %+v, %v", out, err)
	}
	if out, err = h.core.Evict(t.Context(), s.ID, sandbox.EvictOptions{PageCache: true}); err != nil || out != (sandbox.Evicted{}) || !dropped.Load() {
		t.Errorf("evicted %+v, %v", out, err)
	}
	_, err = h.core.Evict(t.Context(), "nobody", sandbox.EvictOptions{})
	isA(t, err, sandbox.ErrNotFound)
	h.resume(s.ID)

	alone := newHost(t)
	s = alone.hibernate(alone.create().ID)
	_, err = alone.core.Evict(t.Context(), s.ID, sandbox.EvictOptions{Local: true})
	isA(t, err, sandbox.ErrInvalid)
}

func TestStoreStatusOfTiersAndSandboxes(t *testing.T) {
	h := newReplicatedHost(t)
	fresh := h.create(sandbox.CreateOptions{Name: "fresh"})
	s := h.asleep("anna", "kept")
	st, err := h.core.StoreStatus(t.Context())
	if err != nil || len(st.Tiers) != 2 || st.Tiers[0].Tier != "local" || st.Tiers[1].Where != "s3://bucket" || st.Tiers[1].Objects != 2 {
		t.Fatalf("tiers %+v, %v", st.Tiers, err)
	}
	want := []sandbox.StoreSandbox{
		{ID: s.ID, Name: "anna", Packs: 2, LiveBytes: 8192, StoredBytes: 4097, LocalBytes: 4096, Replication: "replicated"},
		{ID: fresh.ID, Name: "fresh", Replication: "local"},
	}
	if fmt.Sprint(st.Sandboxes) != fmt.Sprint(want) {
		t.Errorf("sandboxes:\n%+v, want\n%+v", st.Sandboxes, want)
	}
	h.remote.SetDown(true)
	h.w.Lose(s.Snapshot.ID)
	if st, err = h.core.StoreStatus(t.Context()); err != nil || st.Tiers[1].Error != sandboxtest.ErrDown.Error() || !strings.Contains(st.Sandboxes[0].Error+st.Sandboxes[1].Error, "missing") {
		t.Errorf("with faults: %+v, %v", st, err)
	}
}
