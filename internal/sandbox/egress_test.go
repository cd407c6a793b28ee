package sandbox_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/shim"
)

// inForce returns the egress policy that rules the sandbox's machine, as text.
func (h *host) inForce(id string) string {
	r := h.w.Egress(id)
	return strings.TrimSpace(r.Profile + " " + strings.Join(append(r.Allow, r.Deny...), " "))
}

// setEgress changes a sandbox's egress policy.
func (h *host) setEgress(id, profile string, allow ...string) error {
	_, err := h.core.Update(h.t.Context(), id, func(s *sandbox.Settings) error {
		s.Policy.Egress = sandbox.Egress{Profile: profile, Allow: allow}
		return nil
	})
	return err
}

// TestEgress: a policy holds from the first instruction, is changed while the
// guest runs, and outlives every kind of sleep.
func TestEgress(t *testing.T) {
	each(t, func(h *host) {
		o := sandbox.CreateOptions{Policy: &sandbox.Policy{Egress: sandbox.Egress{Allow: []string{"a.test"}, Deny: []string{"b.test"}}}}
		s := h.create(o)
		steps := []struct {
			what string
			do   func() error
			want string
		}{
			{"creation", func() error { return nil }, "internet a.test b.test"},
			{"update", func() error { return h.setEgress(s.ID, "allow-list", "c.test") }, "allow-list c.test"},
			{"hibernation", func() error { h.hibernate(s.ID); h.resume(s.ID); return nil }, "allow-list c.test"},
			{"update in standby", func() error { h.hibernate(s.ID); err := h.setEgress(s.ID, "none"); h.resume(s.ID); return err }, "none"},
			{"crash", func() error { h.crash(); return nil }, "none"},
		}
		for _, step := range steps {
			if err := step.do(); err != nil {
				t.Fatalf("%s: %v", step.what, err)
			}
			if got := h.inForce(s.ID); got != step.want {
				t.Errorf("after the %s %q is in force, want %q", step.what, got, step.want)
			}
		}
	})
}

// TestEgressNotInForce: a policy that could not be put in force is recorded, the
// caller is told, and it is tried until it is.
func TestEgressNotInForce(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.hook.set(at("egress", false, func(context.Context) error { return errInjected }))
	isA(t, h.setEgress(s.ID, "none"), sandbox.ErrUnavailable)
	if got := h.get(s.ID).Policy.Egress.Profile; got != "none" {
		t.Errorf("recorded is %q", got)
	}
	wait(t, "the policy is in force", func() bool { return h.inForce(s.ID) == "none" })
}

// TestEgressThatNoMachineReads closes everything.
func TestEgressThatNoMachineReads(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.hook.set(at("egress", false, func(context.Context) error { return &shim.Error{Code: shim.CodeInvalid, Message: "no such rule"} }))
	err := h.setEgress(s.ID, "allow-list", "new-kind-of-rule")
	isA(t, err, sandbox.ErrConflict)
	if got := h.inForce(s.ID); got != "none" || !strings.Contains(err.Error(), "everything is closed") {
		t.Errorf("%q is in force after %v", got, err)
	}
}

// TestEgressCrash: a daemon that dies between recording a policy and putting it
// in force leaves that to the next.
func TestEgressCrash(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.hook.set(at("egress", false, func(context.Context) error {
		h.d.Kill()
		return sandboxtest.ErrKilled
	}))
	if err := h.setEgress(s.ID, "none"); err == nil {
		t.Fatal("no error from a daemon that was killed")
	}
	h.crash()
	if got := h.inForce(s.ID); got != "none" {
		t.Errorf("%q is in force", got)
	}
}

// TestEgressOfAnOldShim: a shim that cannot change its policy keeps it, which
// the caller is told, and its machine is not unparked under a policy that it does
// not know.
func TestEgressOfAnOldShim(t *testing.T) {
	h := newEmptyHost(t, nil, fast)
	h.build()
	h.w.Old = true
	h.crash() // the pool, too
	s := h.create()
	h.crash(func() { h.w.Old = false })
	err := h.setEgress(s.ID, "none")
	isA(t, err, shim.ErrUnknown)
	if hint := sandbox.Hint(err); !strings.Contains(hint, "hib hibernate "+s.ID) {
		t.Errorf("the hint is %q", hint)
	}
	h.hibernate(s.ID)
	if h.w.Parked(s.ID) {
		t.Error("the machine of an old shim is kept")
	}
	h.resume(s.ID)
	if got := h.inForce(s.ID); got != "none" {
		t.Errorf("%q is in force", got)
	}
}

// TestDenied: what a machine denied its guest is an event.
func TestDenied(t *testing.T) {
	var mu sync.Mutex
	var told []sandbox.Event
	h := newHost(t, func(c *sandbox.Config) {
		c.Events.OnEvent = func(ev sandbox.Event) {
			mu.Lock()
			defer mu.Unlock()
			if ev.Type == sandbox.EventDenied {
				told = append(told, ev)
			}
		}
	})
	s := h.create(sandbox.CreateOptions{Name: "curious"})
	h.w.Deny(s.ID, shim.Denied{Proto: "tcp", Addr: "10.0.0.1", Port: 22, Name: "a.test", Count: 3})
	wait(t, "the event", func() bool { mu.Lock(); defer mu.Unlock(); return len(told) == 1 })
	got := told[0]
	if got.Sandbox != s.ID || got.Name != "curious" || got.At.IsZero() || *got.Denied != (sandbox.Denied{Proto: "tcp", Addr: "10.0.0.1", Port: 22, Name: "a.test", Count: 3}) {
		t.Errorf("got %+v, %+v", got, got.Denied)
	}
	if h.get(s.ID).State != sandbox.StateRunning {
		t.Error("it does not run any more")
	}
}
