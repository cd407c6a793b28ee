package sandbox_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// stopAt begins an operation and kills the daemon at a step of it.
func (h *host) stopAt(step string, after bool, op func() error) {
	h.t.Helper()
	h.hook.set(at(step, after, func(context.Context) error {
		h.d.Kill()
		return sandboxtest.ErrKilled
	}))
	if err := op(); err == nil {
		h.t.Fatal("the operation succeeded though the daemon was killed")
	}
}

// TestRecovery kills the daemon in every state, lets something happen, and
// looks where the next daemon takes the sandbox.
func TestRecovery(t *testing.T) {
	hibernate := func(h *host, id string) error {
		_, err := h.core.Hibernate(h.t.Context(), id, sandbox.HibernateOptions{})
		h.core.Rest(id)
		return err
	}
	resume := func(h *host, id string) error {
		_, err := h.core.Resume(h.t.Context(), id, sandbox.ResumeOptions{})
		return err
	}
	remove := func(h *host, id string) error { return h.core.Delete(h.t.Context(), id) }
	killShims := func(h *host, id string) { h.w.KillShims(id) }
	for name, tt := range map[string]struct {
		standby bool // it begins in standby
		op      func(h *host, id string) error
		step    string
		after   bool
		between func(h *host, id string)
		want    sandbox.State // StateGone: it is not there
		reason  string
		memory  string
	}{
		"running, shim lives":         {want: sandbox.StateRunning, memory: "new"},
		"running, shim dead":          {between: killShims, want: sandbox.StateFailed, reason: "its shim ended", memory: "old"},
		"running, host rebooted":      {between: func(h *host, _ string) { h.w.Reboot() }, want: sandbox.StateFailed, reason: "its shim ended", memory: "old"},
		"running, guest ended":        {between: func(h *host, id string) { h.w.Stop(id, vmm.Exit{Reason: vmm.ReasonPanic}) }, want: sandbox.StateFailed, reason: "guest kernel panic", memory: "old"},
		"running, pager ended":        {between: func(h *host, _ string) { h.w.EndPagers() }, want: sandbox.StateRunning, memory: "old"},
		"hibernating, pager ended":    {op: hibernate, step: "capture", between: func(h *host, _ string) { h.w.EndPagers() }, want: sandbox.StateFailed, reason: "memory could not be served", memory: "old"},
		"hibernating, unsealed":       {op: hibernate, step: "seal", want: sandbox.StateRunning, memory: "new"},
		"hibernating, not begun":      {op: hibernate, step: "capture", want: sandbox.StateRunning, memory: "new"},
		"hibernating, sealed":         {op: hibernate, step: "seal", after: true, want: sandbox.StateStandby, memory: "new"},
		"hibernating, sealed, dead":   {op: hibernate, step: "seal", after: true, between: killShims, want: sandbox.StateStandby, memory: "new"},
		"hibernating, unsealed, dead": {op: hibernate, step: "seal", between: killShims, want: sandbox.StateFailed, reason: "its shim ended", memory: "old"},
		"hibernating, guest ended":    {op: hibernate, step: "capture", between: func(h *host, id string) { h.w.Stop(id, vmm.Exit{Reason: vmm.ReasonShutdown}) }, want: sandbox.StateFailed, reason: "the guest powered off", memory: "old"},
		"standby":                     {standby: true, want: sandbox.StateStandby, memory: "new"},
		"standby, not released":       {op: func(h *host, id string) error { hibernate(h, id); return errInjected }, step: "release", want: sandbox.StateStandby, memory: "new"},
		"resuming, no shim":           {standby: true, op: resume, step: "launch", want: sandbox.StateStandby, memory: "new"},
		"resuming, shim":              {standby: true, op: resume, step: "prepare", after: true, want: sandbox.StateStandby, memory: "new"},
		"resuming, guest runs":        {standby: true, op: resume, step: "resume", after: true, want: sandbox.StateStandby, memory: "new"},
		"deleting":                    {op: remove, step: "release", want: sandbox.StateGone},
		"deleting, released":          {op: remove, step: "release", after: true, want: sandbox.StateGone},
		"deleting, record left":       {op: remove, step: "erase", want: sandbox.StateGone},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			s := h.create(sandbox.CreateOptions{Name: "anna"})
			h.ask(s.ID, "set old")
			h.hibernate(s.ID)
			h.ask(s.ID, "set new")
			if tt.standby {
				h.hibernate(s.ID)
			}
			if tt.op != nil {
				h.stopAt(tt.step, tt.after, func() error { return tt.op(h, s.ID) })
			}
			h.crash(func() {
				if tt.between != nil {
					tt.between(h, s.ID)
				}
			})
			got, err := h.core.Get(t.Context(), "anna")
			if tt.want == sandbox.StateGone {
				isA(t, err, sandbox.ErrNotFound)
				h.create(sandbox.CreateOptions{Name: "anna"})
				return
			}
			if err != nil || got.State != tt.want || !strings.Contains(got.Reason, tt.reason) {
				t.Fatalf("it is %s (%s), want %s (%s); %v", got.State, got.Reason, tt.want, tt.reason, err)
			}
			if running := got.State == sandbox.StateRunning; running != (len(h.w.Machines()) == 1) {
				t.Fatalf("%s, and the machines are %v", got.State, h.w.Machines())
			}
			if got.State == sandbox.StateFailed {
				h.resume(s.ID)
			}
			if memory := h.ask(s.ID, "get"); memory != tt.memory {
				t.Fatalf("it has %q, want %q", memory, tt.memory)
			}
			h.hibernate(s.ID)
		})
	}
}

func TestRecoveryDiscardsCreation(t *testing.T) {
	for _, step := range []string{"launch", "adopt", "prepare", "resume"} {
		h := newHost(t)
		h.stopAt(step, true, func() error {
			_, err := h.core.Create(t.Context(), sandbox.CreateOptions{Name: "anna"})
			return err
		})
		h.crash()
		if list, _ := h.core.List(t.Context()); len(list) != 0 || len(h.w.Machines()) != 0 {
			t.Fatalf("%s: left: %v, %v", step, list, h.w.Machines())
		}
		h.create(sandbox.CreateOptions{Name: "anna"})
	}
}

// TestRecoveryWatches: a machine that ends after the restart is noticed.
func TestRecoveryWatches(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.crash()
	h.w.KillShims(s.ID)
	h.waitState(s.ID, sandbox.StateFailed)
}

// TestThawLeftOver: a hibernation was taken back in the record, not in the shim.
func TestThawLeftOver(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set kept")
	g := newGate()
	cancelled := at("seal", true, g.wait)
	kill := at("thaw", false, func(context.Context) error { h.d.Kill(); return sandboxtest.ErrKilled })
	h.hook.set(func(ctx context.Context, step sandboxtest.Step) error {
		if err := cancelled(ctx, step); err != nil {
			return err
		}
		return kill(ctx, step)
	})
	done := make(chan error)
	go func() {
		_, err := h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
		done <- err
	}()
	<-g.reached
	if _, err := sandboxtest.Ask(t.Context(), h.core, s.ID, "get"); err == nil {
		t.Fatal("a dead daemon answered")
	}
	<-done
	h.crash()
	if got := h.ask(s.ID, "get"); got != "kept" {
		t.Fatalf("it has %q", got)
	}
	if h.get(s.ID).LastHibernate != nil {
		t.Error("it hibernated after all")
	}
}

// TestShimThatDoesNotAnswer is not taken for dead.
func TestShimThatDoesNotAnswer(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set kept")
	h.d.Kill()
	h.core.Close()
	h.d, h.hook = h.w.Daemon(), new(hook)
	h.d.Hook = h.hook.call
	h.hook.set(func(_ context.Context, step sandboxtest.Step) error {
		if step.Name == "connect" {
			return errInjected
		}
		return nil
	})
	core, err := sandbox.New(t.Context(), h.d.Config())
	if err != nil {
		t.Fatal(err)
	}
	h.core = core
	_, err = h.core.Dial(t.Context(), s.ID, 80)
	isA(t, err, sandbox.ErrUnavailable)
	_, err = h.core.Collect(t.Context(), sandbox.CollectOptions{})
	isA(t, err, sandbox.ErrUnavailable)
	if len(h.w.Machines()) != 1 {
		t.Fatalf("machines: %v", h.w.Machines())
	}
	h.hook.set(nil)
	if got := h.ask(s.ID, "get"); got != "kept" {
		t.Fatalf("it has %q", got)
	}
}

// TestShimOfAnotherProtocol can be deleted and nothing else.
func TestShimOfAnotherProtocol(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.d.Kill()
	h.core.Close()
	h.boot(func(c *sandbox.Config) { c.Launcher = newerShims{c.Launcher} })
	_, err := h.core.Dial(t.Context(), s.ID, 80)
	isA(t, err, shim.ErrProtocol)
	if hint := sandbox.Hint(err); hint == "" {
		t.Error("no hint")
	}
	if err := h.core.Delete(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if len(h.w.Machines()) != 0 {
		t.Fatalf("machines: %v", h.w.Machines())
	}
}

type newerShims struct{ sandbox.Launcher }

func (newerShims) Adopt(context.Context, shim.Handle) (sandbox.VM, error) {
	return nil, fmt.Errorf("version 7: %w", shim.ErrProtocol)
}

// TestNewCatalogWithOldStore must not turn every snapshot into garbage.
func TestNewCatalogWithOldStore(t *testing.T) {
	h := newHost(t)
	cfg := h.d.Config()
	cfg.Catalog = sandboxtest.NewWorld(t).Daemon().Config().Catalog
	_, err := sandbox.New(t.Context(), cfg)
	isA(t, err, sandbox.ErrInvalid)
}

// TestRecordOfAnotherVersion stops the start: its snapshots are unknown.
func TestRecordOfAnotherVersion(t *testing.T) {
	h := newHost(t)
	if _, err := h.w.Catalog.Put(t.Context(), "sandbox", "x", []byte(`{"version":99,"id":"x","state":"standby"}`), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := sandbox.New(t.Context(), h.d.Config()); err == nil || !strings.Contains(err.Error(), "newer") {
		t.Fatalf("got %v", err)
	}
}

// TestCloseLeavesGuestsRunning and takes back what is under way.
func TestCloseLeavesGuestsRunning(t *testing.T) {
	h := newHost(t)
	a, b := h.create(), h.create()
	h.ask(a.ID, "set kept")
	h.ask(b.ID, "set kept")
	g := newGate()
	h.hook.set(at("seal", false, g.wait))
	done := make(chan error)
	go func() {
		_, err := h.core.Hibernate(t.Context(), a.ID, sandbox.HibernateOptions{})
		done <- err
	}()
	<-g.reached
	h.core.Close()
	isA(t, <-done, sandbox.ErrUnavailable)
	if len(h.w.Machines()) != 2 {
		t.Fatalf("machines: %v", h.w.Machines())
	}
	_, err := h.core.Dial(t.Context(), a.ID, 80)
	if err == nil {
		_, err = h.core.Hibernate(t.Context(), a.ID, sandbox.HibernateOptions{})
	}
	isA(t, err, sandbox.ErrUnavailable)
	h.boot()
	for _, id := range []string{a.ID, b.ID} {
		if got := h.ask(id, "get"); got != "kept" {
			t.Fatalf("it has %q", got)
		}
	}
}
