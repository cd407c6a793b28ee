package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
)

func (h *host) checkpoint(id, name string) sandbox.Checkpoint {
	h.t.Helper()
	k, err := h.core.Checkpoint(h.t.Context(), id, name)
	if err != nil {
		h.t.Fatal(err)
	}
	return k
}

func (h *host) restore(id, name string) (kept string) {
	h.t.Helper()
	_, kept, err := h.core.Restore(h.t.Context(), id, name)
	if err != nil {
		h.t.Fatal(err)
	}
	return kept
}

func (h *host) fork(id string, o sandbox.ForkOptions) []sandbox.Sandbox {
	h.t.Helper()
	forks, err := h.core.Fork(h.t.Context(), id, o)
	if err != nil {
		h.t.Fatal(err)
	}
	return forks
}

// names returns the names of a sandbox's checkpoints, with their kinds.
func (h *host) names(id string) (list []string) {
	h.t.Helper()
	all, err := h.core.Checkpoints(h.t.Context(), id)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, k := range all {
		list = append(list, k.Name+" "+string(k.Kind))
	}
	return list
}

// TestCheckpointOfARunningSandbox goes on with its machine and its connections,
// and the next capture builds upon the checkpoint.
func TestCheckpointOfARunningSandbox(t *testing.T) { each(t, checkpointRunning) }

func checkpointRunning(h *host) {
	t := h.t
	s := h.create()
	h.ask(s.ID, "set one")
	conn, err := h.core.Dial(t.Context(), s.ID, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	k := h.checkpoint(s.ID, "first")
	if k.Name != "first" || k.Kind != sandbox.CheckpointUser || !k.Current || k.Report == nil || k.Report.Phases["thaw"] == 0 && k.Report.Phases["commit"] == 0 {
		t.Errorf("the checkpoint is %+v", k)
	}
	if now := h.get(s.ID); now.State != sandbox.StateRunning || now.Snapshot.ID != k.Snapshot.ID || now.Checkpoints != 1 {
		t.Errorf("the sandbox is %+v", now)
	}
	fmt.Fprintln(conn, "set two")
	answer := make([]byte, 4)
	if _, err := conn.Read(answer); err != nil || string(answer) != "two\n" {
		t.Errorf("over the connection of before: %q, %v", answer, err)
	}
	second := h.checkpoint(s.ID, "")
	if second.Snapshot.Parent != k.Snapshot.ID {
		t.Errorf("it builds upon %s, not upon the checkpoint %s", second.Snapshot.Parent, k.Snapshot.ID)
	}
	h.ask(s.ID, "set three")
	h.hibernate(s.ID)
	third := h.checkpoint(s.ID, "third")
	if third.Report != nil || third.Snapshot.ID != h.get(s.ID).Snapshot.ID {
		t.Errorf("of a sandbox that sleeps: %+v", third)
	}
	for name, want := range map[string]string{"first": "one", second.Name: "two", "third": "three"} {
		kept := h.restore(s.ID, name)
		if kept != "" && !strings.HasPrefix(kept, "before-restore-") {
			t.Errorf("what was there was kept as %q", kept)
		}
		if got := h.ask(s.ID, "get"); got != want {
			t.Errorf("at %s it has %q, want %q", name, got, want)
		}
		if reason := h.w.Reason(s.ID); reason != "restore" {
			t.Errorf("the guest was told %q", reason)
		}
		h.ask(s.ID, "set again")
		h.hibernate(s.ID)
		h.resume(s.ID)
	}
	before := h.w.Snapshots()
	for _, name := range h.names(s.ID) {
		name, _, _ = strings.Cut(name, " ")
		if err := h.core.RemoveCheckpoint(t.Context(), s.ID, name); err != nil {
			t.Fatal(err)
		}
	}
	wait(t, "the snapshots of checkpoints are gone", func() bool { return h.w.Snapshots() < before-2 })
	if got := h.ask(s.ID, "get"); got != "again" {
		t.Errorf("it has %q", got)
	}
}

func TestCheckpointsThatAreRefused(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.checkpoint(s.ID, "a")
	ctx := t.Context()
	for _, tt := range []struct {
		what string
		do   func() error
		kind error
	}{
		{"a name twice", func() error { _, err := h.core.Checkpoint(ctx, s.ID, "a"); return err }, sandbox.ErrConflict},
		{"no name", func() error { _, err := h.core.Checkpoint(ctx, s.ID, "A b"); return err }, sandbox.ErrInvalid},
		{"no sandbox", func() error { _, err := h.core.Checkpoint(ctx, "none", ""); return err }, sandbox.ErrNotFound},
		{"remove none", func() error { return h.core.RemoveCheckpoint(ctx, s.ID, "b") }, sandbox.ErrNotFound},
		{"restore none", func() error { _, _, err := h.core.Restore(ctx, s.ID, "b"); return err }, sandbox.ErrNotFound},
		{"fork of none", func() error { _, err := h.core.Fork(ctx, s.ID, sandbox.ForkOptions{Checkpoint: "b"}); return err }, sandbox.ErrNotFound},
		{"too many forks", func() error { _, err := h.core.Fork(ctx, s.ID, sandbox.ForkOptions{Count: 101}); return err }, sandbox.ErrInvalid},
		{"a bad name", func() error { _, err := h.core.Fork(ctx, s.ID, sandbox.ForkOptions{Name: "-"}); return err }, sandbox.ErrInvalid},
		{"a bad template", func() error { _, err := h.core.CreateTemplateFrom(ctx, s.ID, "", "A"); return err }, sandbox.ErrInvalid},
		{"a template of none", func() error { _, err := h.core.CreateTemplateFrom(ctx, s.ID, "b", "other"); return err }, sandbox.ErrNotFound},
	} {
		if err := tt.do(); !errors.Is(err, tt.kind) {
			t.Errorf("%s: %v, want %v", tt.what, err, tt.kind)
		}
	}
	if got := h.get(s.ID).State; got != sandbox.StateRunning {
		t.Errorf("it is %s", got)
	}
	if _, err := h.core.Template(ctx, "other"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("something is left of the template: %v", err)
	}
}

// TestRequestWaitsForACheckpoint: it does not cancel one, as it does a hibernation.
func TestRequestWaitsForACheckpoint(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set kept")
	g := newGate()
	h.hook.set(at("seal", true, g.wait))
	taken := make(chan error, 1)
	go func() { _, err := h.core.Checkpoint(t.Context(), s.ID, "a"); taken <- err }()
	<-g.reached
	asked := make(chan string, 1)
	go func() {
		answer, err := sandboxtest.Ask(t.Context(), h.core, s.ID, "get")
		asked <- fmt.Sprint(answer, err)
	}()
	close(g.open)
	if err := <-taken; err != nil {
		t.Fatal(err)
	}
	if got := <-asked; got != "kept<nil>" {
		t.Fatal(got)
	}
}

// TestRestoreKeepsWhatWasThere, also without a resume and of a failed sandbox.
func TestRestoreKeepsWhatWasThere(t *testing.T) { each(t, restoreKeeps) }

func restoreKeeps(h *host) {
	t := h.t
	s := h.create()
	h.ask(s.ID, "set one")
	h.checkpoint(s.ID, "one")
	h.ask(s.ID, "set two")
	h.hibernate(s.ID)
	kept := h.restore(s.ID, "one")
	if now := h.get(s.ID); now.State != sandbox.StateStandby {
		t.Errorf("it slept and is %s", now.State)
	}
	if got := h.ask(s.ID, "get"); got != "one" || h.w.Reason(s.ID) != "restore" {
		t.Errorf("it has %q, woken for %q", got, h.w.Reason(s.ID))
	}
	h.ask(s.ID, "set three")
	h.w.KillShims(s.ID)
	h.waitState(s.ID, sandbox.StateFailed)
	if again := h.restore(s.ID, kept); again != "" { // its last snapshot is checkpoint one
		t.Errorf("kept once more as %s", again)
	}
	if got := h.ask(s.ID, "get"); got != "two" {
		t.Errorf("it has %q", got)
	}
	for range 2 * 5 {
		h.ask(s.ID, "set more")
		h.restore(s.ID, "one")
	}
	if list := h.names(s.ID); len(list) != 1+5 || list[0] != "one user" {
		t.Errorf("its checkpoints are %v", list)
	}
}

// TestRestoreToTheOldestOfRestores goes to what the checkpoint that it leaves
// would push out.
func TestRestoreToTheOldestOfRestores(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set first")
	h.checkpoint(s.ID, "base")
	var oldest string
	for i := range 6 {
		h.ask(s.ID, fmt.Sprint("set ", i))
		if kept := h.restore(s.ID, "base"); i == 1 {
			oldest = kept
		}
	}
	if names := h.names(s.ID); len(names) != 6 || names[1] != oldest+" restore" {
		t.Fatalf("it has %q, the oldest is to be %s", names, oldest)
	}
	h.ask(s.ID, "set last")
	kept := h.restore(s.ID, oldest)
	if got := h.ask(s.ID, "get"); got != "1" {
		t.Errorf("at %s it has %q", oldest, got)
	}
	h.restore(s.ID, kept)
	if got := h.ask(s.ID, "get"); got != "last" {
		t.Errorf("at %s it has %q", kept, got)
	}
	if names := h.names(s.ID); len(names) > 7 {
		t.Errorf("it has %q", names)
	}
}

// TestForks have identities of their own, share the snapshot and live on
// without the sandbox.
func TestForks(t *testing.T) { each(t, forks) }

func forks(h *host) {
	t := h.t
	ctx := t.Context()
	s := h.create(sandbox.CreateOptions{Name: "parent", Labels: map[string]string{"a": "b"}, Env: map[string]string{"X": "1"}})
	h.ask(s.ID, "set one")
	h.checkpoint(s.ID, "one")
	h.ask(s.ID, "set two")
	now := h.fork(s.ID, sandbox.ForkOptions{Count: 3, Name: "copy"})
	old := h.fork("parent", sandbox.ForkOptions{Checkpoint: "one"})
	asleep := h.fork(s.ID, sandbox.ForkOptions{Count: 2, Standby: true, Name: "asleep"})
	if got := h.get(s.ID); got.State != sandbox.StateRunning || len(h.names(s.ID)) != 1 {
		t.Errorf("the parent is %s with %v", got.State, h.names(s.ID))
	}
	tokens := map[string]bool{}
	for i, f := range slices.Concat(now, old, asleep) {
		token, err := h.core.AgentToken(ctx, f.ID)
		if err != nil || tokens[token] {
			t.Errorf("%s has the token of another, or %v", f.ID, err)
		}
		tokens[token] = true
		if f.ForkedFrom != s.ID || f.Labels["a"] != "b" || f.Env["X"] != "1" || f.Checkpoints != 0 {
			t.Errorf("a copy is %+v", f)
		}
		want, state := "two", sandbox.StateRunning
		if i == 3 {
			want = "one"
		}
		if i > 3 {
			state = sandbox.StateStandby
		}
		if f.State != state {
			t.Errorf("copy %d is %s", i, f.State)
		}
		if got := h.ask(f.ID, "get"); got != want || h.w.Reason(f.ID) != "fork" {
			t.Errorf("copy %d has %q, woken for %q", i, got, h.w.Reason(f.ID))
		}
	}
	if now[1].Name != "copy-2" || old[0].Name != "" || asleep[0].Name != "asleep-1" {
		t.Errorf("names: %q, %q, %q", now[1].Name, old[0].Name, asleep[0].Name)
	}
	// One that never slept is itself again after its machine was lost.
	h.w.KillShims(now[0].ID)
	h.waitState(now[0].ID, sandbox.StateFailed)
	h.resume(now[0].ID)
	if got := h.ask(now[0].ID, "get"); got != "two" || h.w.Reason(now[0].ID) != "fork" {
		t.Errorf("after a failure it has %q, woken for %q", got, h.w.Reason(now[0].ID))
	}
	h.ask(now[0].ID, "set mine")
	h.hibernate(now[0].ID)
	if got := h.ask(now[0].ID, "get"); got != "mine" {
		t.Errorf("it has %q", got)
	}
	if err := h.core.Delete(ctx, s.ID); err != nil {
		t.Fatal(err)
	}
	h.crash()
	for _, f := range slices.Concat(now[1:], old, asleep) {
		h.hibernate(f.ID)
		if got, want := h.ask(f.ID, "get"), map[bool]string{true: "one", false: "two"}[f.ID == old[0].ID]; got != want {
			t.Errorf("without its parent a copy has %q, want %q", got, want)
		}
	}
	checkAll(h)
}

// TestForkOfAForkThatSleeps gives the second an identity as well, and so does a
// checkpoint of one that never woke.
func TestForkOfAForkThatSleeps(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set one")
	first := h.fork(s.ID, sandbox.ForkOptions{Standby: true})[0]
	second := h.fork(first.ID, sandbox.ForkOptions{})[0]
	h.checkpoint(first.ID, "unborn")
	h.ask(first.ID, "set two")
	h.restore(first.ID, "unborn")
	for _, id := range []string{first.ID, second.ID} {
		if got := h.ask(id, "get"); got != "one" || h.w.Reason(id) != "fork" {
			t.Errorf("it has %q, woken for %q", got, h.w.Reason(id))
		}
	}
}

// TestCopiesAreCreated: each copy is told of once, whether it runs or sleeps.
func TestCopiesAreCreated(t *testing.T) {
	var mu sync.Mutex
	created := map[string]int{}
	h := newHost(t, func(c *sandbox.Config) {
		c.Events.OnEvent = func(ev sandbox.Event) {
			mu.Lock()
			defer mu.Unlock()
			if ev.Type == sandbox.EventCreated {
				created[ev.Sandbox]++
			}
		}
	})
	s := h.create()
	h.fork(s.ID, sandbox.ForkOptions{Count: 2, Standby: true})
	h.fork(s.ID, sandbox.ForkOptions{})
	mu.Lock()
	defer mu.Unlock()
	for _, s := range h.list() {
		if created[s.ID] != 1 {
			t.Errorf("of %s %d creations were told", s.ID, created[s.ID])
		}
	}
}

// TestForkIsAllOrNothing: where one copy cannot be made, none is there.
func TestForkIsAllOrNothing(t *testing.T) {
	t.Run("a name is taken", func(t *testing.T) {
		h := newHost(t)
		s := h.create()
		h.create(sandbox.CreateOptions{Name: "x-3"})
		_, err := h.core.Fork(t.Context(), s.ID, sandbox.ForkOptions{Count: 4, Name: "x"})
		isA(t, err, sandbox.ErrConflict)
		if list := h.list(); len(list) != 2 {
			t.Errorf("%d sandboxes", len(list))
		}
		checkAll(h)
	})
	t.Run("no memory for all", func(t *testing.T) {
		h := newHost(t, func(c *sandbox.Config) { c.GuestMemory = 8 << 30 })
		s := h.create()
		_, err := h.core.Fork(t.Context(), s.ID, sandbox.ForkOptions{Count: 4})
		isA(t, err, sandbox.ErrUnavailable)
		if got := h.get(s.ID); got.Snapshot.Parent != "" {
			t.Error("the sandbox was captured all the same")
		}
		h.fork(s.ID, sandbox.ForkOptions{Count: 2})
		if host, err := h.core.Host(t.Context()); err != nil || host.Guests != 3 {
			t.Errorf("%+v, %v", host, err)
		}
	})
	t.Run("one does not start", func(t *testing.T) {
		h := newHost(t)
		s := h.create()
		h.ask(s.ID, "set kept")
		var mu sync.Mutex
		n := 0
		h.hook.set(func(_ context.Context, step sandboxtest.Step) error {
			mu.Lock()
			defer mu.Unlock()
			if step.Name == "resume" && !step.After {
				if n++; n == 3 {
					return errInjected
				}
			}
			return nil
		})
		_, err := h.core.Fork(t.Context(), s.ID, sandbox.ForkOptions{Count: 5})
		h.hook.set(nil)
		if err == nil || !strings.Contains(err.Error(), "was not forked") || !strings.Contains(err.Error(), "injected") {
			t.Errorf("error: %v", err)
		}
		if list := h.list(); len(list) != 1 {
			t.Errorf("%d sandboxes", len(list))
		}
		if got := h.ask(s.ID, "get"); got != "kept" {
			t.Errorf("the parent has %q", got)
		}
		checkAll(h)
	})
	t.Run("the caller leaves", func(t *testing.T) {
		h := newHost(t)
		s := h.create()
		g := newGate()
		h.hook.set(at("seal", true, g.wait))
		ctx, leave := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { _, err := h.core.Fork(ctx, s.ID, sandbox.ForkOptions{Count: 3}); done <- err }()
		<-g.reached
		leave()
		<-done
		close(g.open)
		h.ask(s.ID, "get")
		if list := h.list(); len(list) != 1 {
			t.Errorf("%d sandboxes", len(list))
		}
		checkAll(h)
	})
}

// TestTemplateFromASandbox: its sandboxes begin where that one was, as others.
func TestTemplateFromASandbox(t *testing.T) { each(t, templateFrom) }

func templateFrom(h *host) {
	t := h.t
	ctx := t.Context()
	s := h.create()
	h.ask(s.ID, "set prepared")
	made, err := h.core.CreateTemplateFrom(ctx, s.ID, "", "ready")
	if err != nil || made.Version != 1 || made.MadeOf != s.ID || len(made.Bases) != 1 {
		t.Fatalf("%+v, %v", made, err)
	}
	first := h.create(sandbox.CreateOptions{Template: "ready"})
	if got := h.ask(first.ID, "get"); got != "prepared" || h.w.Reason(first.ID) != "create" {
		t.Errorf("it has %q, woken for %q", got, h.w.Reason(first.ID))
	}
	_, err = h.core.Create(ctx, sandbox.CreateOptions{Template: "ready", MemoryMiB: 512})
	isA(t, err, sandbox.ErrInvalid)
	_, err = h.core.Create(ctx, sandbox.CreateOptions{Template: "ready", ColdBoot: true})
	isA(t, err, sandbox.ErrInvalid)
	h.ask(s.ID, "set later")
	h.checkpoint(s.ID, "later")
	if made, err = h.core.CreateTemplateFrom(ctx, s.ID, "later", "ready"); err != nil || made.Version != 2 {
		t.Fatalf("%+v, %v", made, err)
	}
	if err := h.core.Delete(ctx, s.ID); err != nil {
		t.Fatal(err)
	}
	h.crash()
	second := h.create(sandbox.CreateOptions{Template: "ready"})
	if got := h.ask(second.ID, "get"); got != "later" {
		t.Errorf("it has %q", got)
	}
	h.hibernate(first.ID)
	if got := h.ask(first.ID, "get"); got != "prepared" {
		t.Errorf("it has %q", got)
	}
	for _, id := range []string{first.ID, second.ID} {
		if err := h.core.Delete(ctx, id); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.core.RemoveTemplate(ctx, "ready"); err != nil {
		t.Fatal(err)
	}
	checkAll(h)
}

// TestScheduledCheckpoints are taken while the sandbox runs, and the last are kept.
func TestScheduledCheckpoints(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.checkpoint(s.ID, "mine")
	_, err := h.core.Update(t.Context(), s.ID, func(set *sandbox.Settings) error {
		set.Policy.Checkpoints = sandbox.Schedule{Every: time.Second, Keep: 1}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	wait(t, "two are taken and one is kept", func() bool {
		list := h.names(s.ID)
		for _, name := range list {
			seen[name] = true
		}
		return len(seen) >= 3 && len(list) == 2 && list[0] == "mine user"
	})
	h.hibernate(s.ID)
	last := h.names(s.ID)
	_, err = h.core.Update(t.Context(), s.ID, func(set *sandbox.Settings) error {
		set.Policy.Checkpoints = sandbox.Schedule{}
		return nil
	})
	if err != nil || !slices.Equal(h.names(s.ID), last) {
		t.Errorf("%v, before %v, %v", h.names(s.ID), last, err)
	}
}

// TestCheckpointsAreImported with the sandbox, and so are forks that never woke;
// what happens to them goes on behind the attempts of all.
func TestCheckpointsAreImported(t *testing.T) {
	lost := newReplicatedHost(t)
	s := lost.create(sandbox.CreateOptions{Name: "anna"})
	lost.ask(s.ID, "set one")
	lost.checkpoint(s.ID, "one")
	for range 3 {
		lost.ask(s.ID, "set two")
		lost.hibernate(s.ID)
	}
	lost.checkpoint(s.ID, "two")
	lost.restore(s.ID, "one")
	fork := lost.fork(s.ID, sandbox.ForkOptions{Standby: true, Name: "copy"})[0]

	h := newEmptyHost(t, lost.remote)
	if out := h.imports(false); len(out.Sandboxes) != 2 || len(out.Skipped) != 0 {
		t.Fatalf("imported %+v", out)
	}
	if got := h.names(s.ID); !slices.Equal(got, []string{"one user", "two user"}) {
		t.Errorf("its checkpoints are %v", got)
	}
	if got := h.ask("copy", "get"); got != "one" || h.w.Reason(fork.ID) != "fork" {
		t.Errorf("the copy has %q, woken for %q", got, h.w.Reason(fork.ID))
	}
	if got := h.ask(s.ID, "get"); got != "one" || h.w.Reason(s.ID) != "restore" {
		t.Errorf("it has %q, woken for %q", got, h.w.Reason(s.ID))
	}
	h.ask(s.ID, "set three")
	h.hibernate(s.ID)
	h.restore(s.ID, "two")
	if got := h.ask(s.ID, "get"); got != "two" {
		t.Errorf("it has %q", got)
	}
	h.hibernate(s.ID)
	checkAll(h)
}

// TestRecordsOfBefore are read: of a sandbox without checkpoints, and of a
// template that no sandbox was made into.
func TestRecordsOfBefore(t *testing.T) {
	h := newHost(t)
	s := h.create(sandbox.CreateOptions{Name: "anna"})
	h.ask(s.ID, "set old")
	h.hibernate(s.ID)
	h.crash(func() {
		for _, kind := range []string{"template", "sandbox"} {
			list, err := h.w.Catalog.List(t.Context(), kind)
			if err != nil {
				t.Fatal(err)
			}
			for _, rec := range list {
				old := strings.Replace(string(rec.Value), `"version":2`, `"version":1`, 1)
				if _, err := h.w.Catalog.Put(t.Context(), kind, rec.Key, []byte(old), rec.Revision); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
	if got := h.ask(s.ID, "get"); got != "old" {
		t.Errorf("it has %q", got)
	}
	h.checkpoint(s.ID, "new")
	h.crash()
	if got := h.names(s.ID); len(got) != 1 {
		t.Errorf("its checkpoints are %v", got)
	}
	checkAll(h)
}
