package sandbox_test

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

func TestLife(t *testing.T) {
	h := newHost(t)
	s := h.create(sandbox.CreateOptions{Name: "anna", Labels: map[string]string{"a": "b"}})
	if s.State != sandbox.StateRunning || s.Snapshot == nil || s.Snapshot.Parent != "" || s.LastResume.Tier != "local" {
		t.Fatalf("created: %+v", s)
	}
	if _, ok := s.LastResume.Phases["vmm"]; !ok {
		t.Errorf("phases of creation: %v", s.LastResume.Phases)
	}
	h.ask("anna", "set one")
	s = h.hibernate("anna")
	for _, phase := range []string{"freeze", "pause", "state", "scan", "write", "commit", "release"} {
		if _, ok := s.LastHibernate.Phases[phase]; !ok {
			t.Errorf("no phase %s in %v", phase, s.LastHibernate.Phases)
		}
	}
	if m := h.w.Machines(); len(m) != 0 {
		t.Errorf("in standby there are machines: %v", m)
	}
	h.hibernate(s.ID) // again is no error
	if got := h.ask(s.ID, "get"); got != "one" {
		t.Fatalf("woke up with %q", got)
	}
	h.resume(s.ID)
	if s = h.get(s.ID); s.Snapshot.Parent == "" || s.LastResume.Phases["guest_init"] == 0 {
		t.Errorf("after a resume: %+v", s)
	}
	if token, err := h.core.AgentToken(t.Context(), "anna"); err != nil || len(token) < 20 {
		t.Errorf("token %q, %v", token, err)
	}
	if logs, err := h.core.Logs(t.Context(), "anna"); err != nil {
		t.Error(err)
	} else if text, err := io.ReadAll(logs); err != nil || len(text) != 0 {
		t.Errorf("logs: %q, %v", text, err)
	}
	if err := h.core.Delete(t.Context(), "anna"); err != nil {
		t.Fatal(err)
	}
	isA(t, h.core.Delete(t.Context(), "anna"), sandbox.ErrNotFound)
	if _, err := h.core.Get(t.Context(), s.ID); err == nil {
		t.Error("it is still there")
	}
	wait(t, "only the base snapshot is left", func() bool { return h.w.Snapshots() == 1 })
	h.create(sandbox.CreateOptions{Name: "anna"})
}

func TestManyCyclesKeepABoundedStore(t *testing.T) {
	h := newHost(t)
	s := h.create()
	for i := range 30 {
		want := fmt.Sprint("cycle-", i)
		h.ask(s.ID, "set "+want)
		h.hibernate(s.ID)
		if got := h.ask(s.ID, "get"); got != want {
			t.Fatalf("cycle %d: %q", i, got)
		}
	}
	// While it runs, what it was resumed from is kept besides what a compaction made of that.
	h.hibernate(s.ID)
	wait(t, "the base and one generation", func() bool { return h.w.Snapshots() == 2 })
}

func TestRealCatalog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "catalog.db")
	open := func() *catalog.Catalog {
		cat, err := catalog.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		return cat
	}
	w := sandboxtest.NewWorld(t)
	cat := open()
	cfg := w.Daemon().Config()
	cfg.Catalog, w.Truth = cat, cat
	core, err := sandbox.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := core.BuildTemplate(t.Context(), sandbox.BuildOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	s, err := core.Create(t.Context(), sandbox.CreateOptions{ColdBoot: true})
	if err != nil {
		t.Fatal(err)
	}
	if s.LastResume.Tier != "boot" || s.Snapshot != nil {
		t.Errorf("cold boot: %+v", s)
	}
	if _, err := core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{}); err != nil {
		t.Fatal(err)
	}
	core.Close()
	cat.Close()
	cat = open()
	defer cat.Close()
	cfg.Catalog, w.Truth = cat, cat
	if core, err = sandbox.New(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	defer core.Close()
	if s, err := core.Get(t.Context(), s.ID); err != nil || s.State != sandbox.StateStandby {
		t.Fatalf("after a restart: %+v, %v", s, err)
	}
}

func TestInvalidOptions(t *testing.T) {
	h := newHost(t, func(c *sandbox.Config) {
		c.CheckEgress = func(e sandbox.Egress) error {
			if len(e.Deny) > 0 {
				return errInjected
			}
			return nil
		}
	})
	for name, o := range map[string]sandbox.CreateOptions{
		"name":        {Name: "Not A Name"},
		"name as id":  {Name: "abcdefghij0123456789"},
		"memory":      {MemoryMiB: 3},
		"odd memory":  {MemoryMiB: 513},
		"cpus":        {CPUs: 1000},
		"environment": {Env: map[string]string{"A=B": "c"}},
		"labels":      {Labels: map[string]string{"a": strings.Repeat("x", 1<<20)}},
		"egress":      {Policy: &sandbox.Policy{Egress: sandbox.Egress{Deny: []string{"x"}}}},
	} {
		if _, err := h.core.Create(t.Context(), o); err == nil {
			t.Errorf("%s: accepted", name)
		} else {
			isA(t, err, sandbox.ErrInvalid)
		}
	}
	_, err := h.core.Create(t.Context(), sandbox.CreateOptions{Template: "nothing"})
	isA(t, err, sandbox.ErrNotFound)
	if hint := sandbox.Hint(err); !strings.Contains(hint, "hib template build nothing") {
		t.Errorf("hint: %q", hint)
	}
	h.create(sandbox.CreateOptions{Name: "anna"})
	_, err = h.core.Create(t.Context(), sandbox.CreateOptions{Name: "anna"})
	isA(t, err, sandbox.ErrConflict)
	_, err = h.core.Dial(t.Context(), "anna", 70000)
	isA(t, err, sandbox.ErrInvalid)
	_, err = h.core.Dial(t.Context(), "anna", 1)
	isA(t, err, sandbox.ErrUnavailable)
}

func TestFullDiskRefusesCreation(t *testing.T) {
	free := int64(1 << 40)
	h := newHost(t, func(c *sandbox.Config) { c.FreeBytes = func() (int64, error) { return free, nil } })
	s := h.create()
	free = 1 << 20
	_, err := h.core.Create(t.Context(), sandbox.CreateOptions{})
	isA(t, err, sandbox.ErrNoSpace)
	h.hibernate(s.ID)
	if st, err := h.core.StoreStatus(t.Context()); err != nil || st.FreeBytes != free || st.BaseImages != 1 || st.Manifests < 2 {
		t.Errorf("status: %+v, %v", st, err)
	}
}

// TestHibernationThatFails runs on.
func TestHibernationThatFails(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		kind error
	}{
		"full disk": {&shim.Error{Code: shim.CodeNoSpace, Message: "pack"}, sandbox.ErrNoSpace},
		"system":    {fmt.Errorf("x: %w", syscall.ENOSPC), sandbox.ErrNoSpace},
		"guest":     {&shim.Error{Code: shim.CodeGuest, Message: "volume does not flush"}, sandbox.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			s := h.create()
			h.ask(s.ID, "set kept")
			h.hook.set(at("seal", false, func(context.Context) error { return tt.err }))
			_, err := h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
			isA(t, err, tt.kind)
			if s = h.get(s.ID); s.State != sandbox.StateRunning {
				t.Fatalf("it is %s", s.State)
			}
			if got := h.ask(s.ID, "get"); got != "kept" {
				t.Fatalf("it has %q", got)
			}
			h.hibernate(s.ID)
		})
	}
}

// TestLostAnswer: a snapshot that was sealed counts though the answer was lost.
func TestLostAnswer(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set kept")
	h.hook.set(at("seal", true, func(context.Context) error { return errInjected }))
	h.hibernate(s.ID)
	if got := h.ask(s.ID, "get"); got != "kept" {
		t.Fatalf("it has %q", got)
	}
}

func TestResumeThatFails(t *testing.T) {
	for name, tt := range map[string]struct {
		step string
		err  error
		want sandbox.State
		kind error
	}{
		"launch":   {"launch", errInjected, sandbox.StateStandby, sandbox.ErrUnavailable},
		"prepare":  {"prepare", &shim.Error{Code: shim.CodeNoSpace, Message: "x"}, sandbox.StateStandby, sandbox.ErrNoSpace},
		"guest":    {"resume", &shim.Error{Code: shim.CodeGuest, Message: "no answer"}, sandbox.StateStandby, sandbox.ErrUnavailable},
		"remote":   {"resume", &shim.Error{Code: shim.CodeUnavailable, Message: "the store does not answer"}, sandbox.StateStandby, sandbox.ErrUnavailable},
		"corrupt":  {"resume", &shim.Error{Code: shim.CodeCorrupt, Message: "pack p1 is damaged"}, sandbox.StateFailed, sandbox.ErrFailed},
		"mismatch": {"resume", &shim.Error{Code: shim.CodeMismatch, Message: "kernel differs"}, sandbox.StateFailed, sandbox.ErrFailed},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			s := h.create()
			h.ask(s.ID, "set kept")
			h.hibernate(s.ID)
			h.hook.set(at(tt.step, false, func(context.Context) error { return tt.err }))
			_, err := h.core.Resume(t.Context(), s.ID, sandbox.ResumeOptions{})
			isA(t, err, tt.kind)
			if s = h.get(s.ID); s.State != tt.want {
				t.Fatalf("it is %s", s.State)
			}
			if m := h.w.Machines(); len(m) != 0 {
				t.Fatalf("machines are left: %v", m)
			}
			if tt.want == sandbox.StateFailed {
				if e := tt.err.(*shim.Error); !strings.Contains(s.Reason, e.Message) {
					t.Errorf("reason %q does not say %q", s.Reason, e.Message)
				}
				_, err := h.core.Dial(t.Context(), s.ID, 80)
				isA(t, err, sandbox.ErrFailed)
				if hint := sandbox.Hint(err); !strings.Contains(hint, "hib resume "+s.ID) {
					t.Errorf("hint: %q", hint)
				}
			}
			h.resume(s.ID)
			if got := h.ask(s.ID, "get"); got != "kept" {
				t.Fatalf("it has %q", got)
			}
		})
	}
}

// TestMachineThatEnds: the sandbox fails, says why, and comes back from its last snapshot.
func TestMachineThatEnds(t *testing.T) {
	for want, end := range map[string]func(*host, string){
		"the guest powered off":                          func(h *host, id string) { h.w.Stop(id, vmm.Exit{Reason: vmm.ReasonShutdown}) },
		"the guest rebooted":                             func(h *host, id string) { h.w.Stop(id, vmm.Exit{Reason: vmm.ReasonReset}) },
		"guest kernel panic: oops":                       func(h *host, id string) { h.w.Stop(id, vmm.Exit{Reason: vmm.ReasonPanic, Detail: "oops"}) },
		"the VMM died: signal 9":                         func(h *host, id string) { h.w.Stop(id, vmm.Exit{Reason: vmm.ReasonCrashed, Detail: "signal 9"}) },
		"memory could not be served: pack p1 is damaged": func(h *host, id string) { h.w.FailMemory(id, "pack p1 is damaged", shim.CodeCorrupt) },
		"its shim ended (killed?)":                       func(h *host, id string) { h.w.KillShims(id) },
	} {
		t.Run(want, func(t *testing.T) {
			h := newHost(t)
			s := h.create()
			h.ask(s.ID, "set kept")
			h.hibernate(s.ID)
			h.ask(s.ID, "set lost")
			end(h, s.ID)
			s = h.waitState(s.ID, sandbox.StateFailed)
			if !strings.HasPrefix(s.Reason, want) {
				t.Errorf("reason: %q", s.Reason)
			}
			_, err := h.core.Dial(t.Context(), s.ID, 80)
			isA(t, err, sandbox.ErrFailed)
			_, err = h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
			isA(t, err, sandbox.ErrFailed)
			wait(t, "nothing of it runs", func() bool { return len(h.w.Machines()) == 0 })
			h.resume(s.ID)
			if got := h.ask(s.ID, "get"); got != "kept" {
				t.Fatalf("it has %q", got)
			}
		})
	}
}

// TestFailedBeforeFirstHibernation begins anew from the base snapshot.
func TestFailedBeforeFirstHibernation(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set lost")
	h.w.KillShims(s.ID)
	h.waitState(s.ID, sandbox.StateFailed)
	h.resume(s.ID)
	if got := h.ask(s.ID, "get"); got != "booted" {
		t.Fatalf("it has %q", got)
	}
	cold := h.create(sandbox.CreateOptions{ColdBoot: true})
	h.w.KillShims(cold.ID)
	h.waitState(cold.ID, sandbox.StateFailed)
	_, err := h.core.Resume(t.Context(), cold.ID, sandbox.ResumeOptions{})
	isA(t, err, sandbox.ErrFailed)
	if err := h.core.Delete(t.Context(), cold.ID); err != nil {
		t.Fatal(err)
	}
}

// TestFailedStaysFailed: a resume that fails in passing does not make a failed
// sandbox one that the next request rolls back.
func TestFailedStaysFailed(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.w.KillShims(s.ID)
	reason := h.waitState(s.ID, sandbox.StateFailed).Reason
	h.hook.set(at("launch", false, func(context.Context) error { return errInjected }))
	_, err := h.core.Resume(t.Context(), s.ID, sandbox.ResumeOptions{})
	isA(t, err, sandbox.ErrUnavailable)
	if s = h.get(s.ID); s.State != sandbox.StateFailed || s.Reason != reason {
		t.Fatalf("it is %s: %q", s.State, s.Reason)
	}
	h.resume(s.ID)
}

func TestMissingSnapshot(t *testing.T) {
	h := newHost(t)
	s := h.create()
	s = h.hibernate(s.ID)
	h.w.Lose(s.Snapshot.ID)
	_, err := h.core.Dial(t.Context(), s.ID, 80)
	isA(t, err, sandbox.ErrFailed)
	if s := h.get(s.ID); s.State != sandbox.StateFailed || !strings.Contains(s.Reason, string(s.Snapshot.ID)) {
		t.Fatalf("it is %s: %q", s.State, s.Reason)
	}
	if err := h.core.Delete(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
}

// TestCreationThatFails leaves nothing.
func TestCreationThatFails(t *testing.T) {
	for _, step := range []string{"put", "launch", "adopt", "prepare", "resume"} {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprint(step, after), func(t *testing.T) {
				h := newHost(t)
				h.hook.set(at(step, after, func(context.Context) error { return errInjected }))
				s, err := h.core.Create(t.Context(), sandbox.CreateOptions{Name: "anna"})
				if step == "put" && after {
					if err != nil { // the record is found to be there
						t.Fatal(err)
					}
					if err := h.core.Delete(t.Context(), s.ID); err != nil {
						t.Fatal(err)
					}
				} else if err == nil {
					t.Fatal("it succeeded")
				}
				if list, _ := h.core.List(t.Context()); len(list) != 0 || len(h.w.Machines()) != 0 {
					t.Fatalf("left: %v, %v", list, h.w.Machines())
				}
				h.create(sandbox.CreateOptions{Name: "anna"})
			})
		}
	}
}

// TestCreatorThatLeaves: nobody would know of the sandbox.
func TestCreatorThatLeaves(t *testing.T) {
	h := newHost(t)
	g := newGate()
	h.hook.set(at("prepare", false, g.wait))
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, err := h.core.Create(ctx, sandbox.CreateOptions{})
		failed <- err
	}()
	<-g.reached
	cancel()
	isA(t, <-failed, context.Canceled)
	if list, _ := h.core.List(t.Context()); len(list) != 0 || len(h.w.Machines()) != 0 {
		t.Fatalf("left: %v, %v", list, h.w.Machines())
	}
}

// TestCallerThatLeaves: a hibernation goes on without it.
func TestCallerThatLeaves(t *testing.T) {
	h := newHost(t)
	s := h.create()
	g := newGate()
	h.hook.set(at("seal", false, g.wait))
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error)
	go func() {
		_, err := h.core.Hibernate(ctx, s.ID, sandbox.HibernateOptions{})
		left <- err
	}()
	<-g.reached
	cancel()
	isA(t, <-left, context.Canceled)
	close(g.open)
	h.waitState(s.ID, sandbox.StateStandby)
}
