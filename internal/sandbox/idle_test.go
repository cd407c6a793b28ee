package sandbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/shim"
)

const idleTimeout = 15 * time.Second

// bound is how much later than its idle timeout a sandbox may be in standby.
const bound = 2 * time.Second

// idling has sandboxes hibernate by themselves.
func idling(c *sandbox.Config) { c.NoIdle = false }

// changed returns options for a sandbox with the default policy, changed.
func changed(change func(*sandbox.Policy)) sandbox.CreateOptions {
	p := sandbox.DefaultPolicy()
	change(&p)
	return sandbox.CreateOptions{Policy: &p}
}

// bubble runs a test with the time of its own and a host whose sandboxes idle.
func bubble(t *testing.T, test func(t *testing.T, h *host)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, newHost(t, idling)) })
}

// after lets time pass and returns what became of the sandbox.
func (h *host) after(d time.Duration, id string) sandbox.Sandbox {
	h.t.Helper()
	time.Sleep(d)
	synctest.Wait()
	return h.get(id)
}

func (h *host) wantState(s sandbox.Sandbox, want sandbox.State, why string) {
	h.t.Helper()
	if s.State != want {
		h.t.Fatalf("%s: it is %s, want %s", why, s.State, want)
	}
}

func TestIdleSandboxHibernates(t *testing.T) {
	for name, timeout := range map[string]time.Duration{"default": idleTimeout, "shortest": time.Second, "long": 3 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host) {
				id := h.create(changed(func(p *sandbox.Policy) { p.IdleTimeout = timeout })).ID
				h.wantState(h.after(timeout-50*time.Millisecond, id), sandbox.StateRunning, "before the timeout")
				s := h.after(bound, id)
				h.wantState(s, sandbox.StateStandby, "after the timeout and what it may be late")
				r := s.LastHibernate
				if detect, ok := r.Phases["detect"]; r.Trigger != sandbox.TriggerIdle || !ok || detect < 0 || detect > 100 {
					t.Errorf("the report is %+v", r)
				}
				h.ask(id, "get")
				time.Sleep(timeout - 50*time.Millisecond)
				h.wantState(h.get(id), sandbox.StateRunning, "woken, before the timeout")
				h.wantState(h.after(bound, id), sandbox.StateStandby, "woken, after the timeout")
			})
		})
	}
}

func TestIdleNever(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create(changed(func(p *sandbox.Policy) { p.IdleTimeout = 0 })).ID
		h.wantState(h.after(24*time.Hour, id), sandbox.StateRunning, "a sandbox that never idles")
		update := func(d time.Duration) {
			t.Helper()
			if _, err := h.core.Update(t.Context(), id, func(s *sandbox.Settings) error { s.Policy.IdleTimeout = d; return nil }); err != nil {
				t.Fatal(err)
			}
		}
		update(time.Minute) // and it has been quiet for longer
		h.wantState(h.after(bound, id), sandbox.StateStandby, "with a timeout that has passed")
		h.resume(id)
		update(0)
		h.wantState(h.after(time.Hour, id), sandbox.StateRunning, "with none again")
	})
}

// What happens in the network counts, and the timeout begins anew behind it.
func TestTrafficKeepsAwake(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		for range 20 {
			h.wantState(h.after(idleTimeout-time.Second, id), sandbox.StateRunning, "with traffic before the timeout")
			h.w.Traffic(id)
		}
		h.wantState(h.after(idleTimeout-time.Second, id), sandbox.StateRunning, "before the timeout after the last")
		h.wantState(h.after(1*time.Second+bound, id), sandbox.StateStandby, "after it")
	})
}

// An open connection keeps awake until its end, or until it was silent for the cap.
func TestOpenConnectionKeepsAwake(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create(changed(func(p *sandbox.Policy) { p.ConnectionCap = 5 * time.Minute })).ID
		open := func() interface{ Close() error } {
			t.Helper()
			c, err := h.core.Dial(t.Context(), id, 80)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		c := open()
		h.wantState(h.after(4*time.Minute, id), sandbox.StateRunning, "with a connection")
		c.Close()
		h.wantState(h.after(idleTimeout-time.Second, id), sandbox.StateRunning, "before the timeout after its end")
		h.wantState(h.after(1*time.Second+bound, id), sandbox.StateStandby, "after it")

		open()
		h.wantState(h.after(5*time.Minute-time.Second, id), sandbox.StateRunning, "before the cap")
		s := h.after(1*time.Second+bound, id)
		h.wantState(s, sandbox.StateStandby, "with a connection that is silent for the cap")
		if detect := s.LastHibernate.Phases["detect"]; detect > 1000*bound.Seconds() {
			t.Errorf("detected %v ms late", detect)
		}
	})
}

func TestAwaitedReplyKeepsAwake(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		h.w.SetBusy(id, sandboxtest.Busy{Awaiting: time.Now()})
		h.wantState(h.after(5*time.Minute-time.Second, id), sandbox.StateRunning, "while it awaits a reply")
		if a := h.inspect(id).Activity; a == nil || a.Awaiting != 1 {
			t.Errorf("the activity is %+v", a)
		}
		h.wantState(h.after(1*time.Second+bound, id), sandbox.StateStandby, "when it has waited for too long")
	})
}

func (h *host) inspect(id string) sandbox.Sandbox {
	h.t.Helper()
	s, err := h.core.Inspect(h.t.Context(), id)
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

func TestKeepAwakeProcess(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		h.w.SetBusy(id, sandboxtest.Busy{KeepAwake: []shim.KeepAwake{{PID: 7, Command: "train"}}})
		h.wantState(h.after(time.Hour, id), sandbox.StateRunning, "with a process that keeps it awake")
		if a := h.inspect(id).Activity; a == nil || len(a.KeepAwake) != 1 || a.KeepAwake[0].Command != "train" {
			t.Errorf("the activity is %+v", a)
		}
		h.w.SetBusy(id, sandboxtest.Busy{})
		s := h.after(idleTimeout+bound, id)
		h.wantState(s, sandbox.StateStandby, "after its end")
		if detect := s.LastHibernate.Phases["detect"]; detect > 1000*(idleTimeout+bound).Seconds() {
			t.Errorf("detected after %v ms", detect)
		}
		h.resume(id)
		h.w.SetBusy(id, sandboxtest.Busy{AgentErr: "it hangs"})
		h.wantState(h.after(idleTimeout+bound, id), sandbox.StateStandby, "a guest that does not answer")
	})
}

func TestProcessorTime(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		network := h.create().ID
		cpu := h.create(changed(func(p *sandbox.Policy) { p.Idle = sandbox.IdleCPU })).ID
		calm := h.create(changed(func(p *sandbox.Policy) { p.Idle = sandbox.IdleCPU })).ID
		h.w.SetBusy(network, sandboxtest.Busy{CPU: 1})
		h.w.SetBusy(cpu, sandboxtest.Busy{CPU: 0.5})
		h.w.SetBusy(calm, sandboxtest.Busy{CPU: 0.02})
		h.wantState(h.after(idleTimeout+bound, network), sandbox.StateStandby, "processor time does not count")
		h.wantState(h.get(cpu), sandbox.StateRunning, "processor time counts")
		h.wantState(h.get(calm), sandbox.StateStandby, "a little of it does not")
		h.wantState(h.after(time.Hour, cpu), sandbox.StateRunning, "processor time counts on")
		h.w.SetBusy(cpu, sandboxtest.Busy{})
		h.wantState(h.after(idleTimeout-2*time.Second, cpu), sandbox.StateRunning, "before the timeout after the last of it")
		h.wantState(h.after(2*time.Second+bound, cpu), sandbox.StateStandby, "after it")
	})
}

func TestLeaseKeepsAwake(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		hold := func(l sandbox.Lease) func() {
			t.Helper()
			release, err := h.core.Hold(t.Context(), id, l)
			if err != nil {
				t.Fatal(err)
			}
			return release
		}
		one := hold(sandbox.Lease{Kind: sandbox.LeaseExec, Owner: strings.Repeat("ä", 1000)})
		two := hold(sandbox.Lease{Kind: sandbox.LeaseUpload, Owner: "b"})
		s := h.after(time.Hour, id)
		h.wantState(s, sandbox.StateRunning, "with two leases")
		if l := s.Leases; len(l) != 2 || len(l[0].Owner) > 256 || l[1].Kind != sandbox.LeaseUpload || time.Since(l[1].Since) != time.Hour {
			t.Errorf("the leases are %+v", l)
		}
		one()
		one()
		h.wantState(h.after(time.Hour, id), sandbox.StateRunning, "with one")
		two()
		h.wantState(h.after(idleTimeout-time.Second, id), sandbox.StateRunning, "before the timeout after its release")
		s = h.after(time.Second+bound, id)
		h.wantState(s, sandbox.StateStandby, "after it")
		if len(s.Leases) != 0 {
			t.Errorf("the leases are %+v", s.Leases)
		}

		release := hold(sandbox.Lease{Kind: "x", Until: time.Now().Add(time.Hour)})
		defer release()
		h.wantState(h.after(time.Minute, id), sandbox.StateStandby, "a lease wakes nobody")
		h.resume(id)
		h.wantState(h.after(58*time.Minute, id), sandbox.StateRunning, "but holds what was woken")
		h.wantState(h.after(time.Minute+bound, id), sandbox.StateStandby, "until its time")
	})
	t.Run("unknown", func(t *testing.T) {
		_, err := newHost(t).core.Hold(t.Context(), "nobody", sandbox.Lease{})
		isA(t, err, sandbox.ErrNotFound)
	})
}

// An explicit hold outlives the daemon.
func TestExplicitHold(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		for _, d := range []time.Duration{-time.Hour, 0, time.Millisecond, 31 * 24 * time.Hour} {
			_, err := h.core.SetHold(t.Context(), id, time.Now().Add(d), "")
			isA(t, err, sandbox.ErrInvalid)
		}
		s, err := h.core.SetHold(t.Context(), id, time.Now().Add(30*time.Minute), "a demo")
		if err != nil || len(s.Leases) != 1 || s.Leases[0].Kind != sandbox.LeaseHold || s.Leases[0].Owner != "a demo" {
			t.Fatalf("%+v, %v", s.Leases, err)
		}
		time.Sleep(10 * time.Minute)
		h.crash()
		h.wantState(h.after(19*time.Minute, id), sandbox.StateRunning, "held")
		s = h.after(time.Minute+bound, id)
		h.wantState(s, sandbox.StateStandby, "after the hold")
		if detect := s.LastHibernate.Phases["detect"]; detect > 1000*bound.Seconds() {
			t.Errorf("detected %v ms late", detect)
		}
		if len(s.Leases) != 0 {
			t.Errorf("the leases are %+v", s.Leases)
		}

		h.resume(id)
		if _, err := h.core.SetHold(t.Context(), id, time.Now().Add(30*time.Minute), ""); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		s, err = h.core.ReleaseHold(t.Context(), id)
		if err != nil || len(s.Leases) != 0 {
			t.Fatalf("%+v, %v", s.Leases, err)
		}
		h.wantState(h.after(bound, id), sandbox.StateStandby, "when it is released behind the timeout")
	})
}

// Somebody who asks for a hibernation gets it, and is told what was held.
func TestCallGoesAheadOfLeases(t *testing.T) {
	h := newHost(t)
	id := h.create().ID
	release, err := h.core.Hold(t.Context(), id, sandbox.Lease{Kind: sandbox.LeaseExec, Owner: "python3 train.py"})
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	s := h.hibernate(id)
	if r := s.LastHibernate; r.Trigger != sandbox.TriggerCall || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "train.py") {
		t.Errorf("the report is %+v", r)
	}
}

// A lease that comes while an idle sandbox hibernates cancels that, but not a
// hibernation that was asked for.
func TestLeaseMeetsHibernation(t *testing.T) {
	for _, spontaneous := range []bool{true, false} {
		t.Run(map[bool]string{true: "idle", false: "call"}[spontaneous], func(t *testing.T) {
			h := newHost(t)
			if spontaneous {
				h = newHost(t, idling)
			}
			id := h.create(changed(func(p *sandbox.Policy) { p.IdleTimeout = time.Second })).ID
			g := newGate()
			h.hook.set(at("seal", false, g.wait))
			done := make(chan error, 1)
			go func() {
				if !spontaneous {
					_, err := h.core.Hibernate(context.Background(), id, sandbox.HibernateOptions{})
					done <- err
				}
			}()
			<-g.reached
			release, err := h.core.Hold(t.Context(), id, sandbox.Lease{Kind: sandbox.LeaseExec})
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			close(g.open)
			if spontaneous {
				h.waitState(id, sandbox.StateRunning)
				return
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestEndOfTheLastSession(t *testing.T) {
	session := func(t *testing.T, h *host, id string) func() {
		t.Helper()
		end, err := h.core.Session(id, sandbox.SessionPTY)
		if err != nil {
			t.Fatal(err)
		}
		return end
	}
	closing := changed(func(p *sandbox.Policy) { p.IdleTimeout, p.OnSessionClose = 0, sandbox.SessionHibernate })
	bubble(t, func(t *testing.T, h *host) {
		id := h.create(closing).ID
		one, two := session(t, h, id), session(t, h, id)
		one()
		h.wantState(h.after(time.Minute, id), sandbox.StateRunning, "with another session")
		two()
		s := h.after(time.Second, id)
		h.wantState(s, sandbox.StateStandby, "without a session")
		if r := s.LastHibernate; r.Trigger != sandbox.TriggerSession {
			t.Errorf("the report is %+v", r)
		}
	})
	bubble(t, func(t *testing.T, h *host) {
		id := h.create(closing).ID
		end := session(t, h, id)
		release, err := h.core.Hold(t.Context(), id, sandbox.Lease{Kind: sandbox.LeaseExec})
		if err != nil {
			t.Fatal(err)
		}
		end()
		h.wantState(h.after(time.Minute, id), sandbox.StateRunning, "with a lease")
		release()
		h.wantState(h.after(time.Minute, id), sandbox.StateRunning, "whose release is not the end of a session")
	})
	bubble(t, func(t *testing.T, h *host) {
		id := h.create(changed(func(p *sandbox.Policy) { p.IdleTimeout = 0 })).ID
		session(t, h, id)()
		h.wantState(h.after(time.Minute, id), sandbox.StateRunning, "without that policy")
	})
}

// A daemon that starts goes on watching, and gives clients a whole timeout to
// come back.
func TestIdleAfterRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		time.Sleep(10 * time.Second)
		h.crash(func() { time.Sleep(time.Hour) })
		h.wantState(h.after(idleTimeout-time.Second, id), sandbox.StateRunning, "before the timeout after the start")
		h.wantState(h.after(time.Second+bound, id), sandbox.StateStandby, "after it")
	})
}

// Sandboxes in standby cost nothing at all: no timer, no call.
func TestStandbyCostsNothing(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		for range 100 {
			h.create()
		}
		time.Sleep(idleTimeout + bound)
		synctest.Wait()
		for _, s := range h.list() {
			h.wantState(s, sandbox.StateStandby, "idle")
		}
		time.Sleep(time.Minute) // what follows a hibernation is done
		var steps atomic.Int64
		h.hook.set(func(context.Context, sandboxtest.Step) error { steps.Add(1); return nil })
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := steps.Load(); n > 0 {
			t.Errorf("%d calls in an hour", n)
		}
	})
}

// A sandbox that is awake is looked at about once in its timeout.
func TestLooksAreFew(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		c, err := h.core.Dial(t.Context(), id, 80)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var looks atomic.Int64
		h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
			if s.Name == "activity" && !s.After {
				looks.Add(1)
			}
			return nil
		})
		time.Sleep(10 * time.Minute)
		if n, most := looks.Load(), int64(10*time.Minute/idleTimeout)+1; n == 0 || n > most {
			t.Errorf("%d looks in ten minutes, at most %d are needed", n, most)
		}
	})
}

// A hibernation that fails is tried again after longer and longer, and told once.
func TestIdleHibernationThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []sandbox.EventType
		h := newHost(t, idling, func(c *sandbox.Config) {
			c.Events.OnEvent = func(ev sandbox.Event) {
				if ev.Type == sandbox.EventIdle || ev.Type == sandbox.EventCancelled || ev.Type == sandbox.EventHibernated {
					told = append(told, ev.Type)
				}
			}
		})
		id := h.create().ID
		var tries atomic.Int64
		h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
			if s.Name == "capture" && !s.After {
				tries.Add(1)
				return &shim.Error{Code: shim.CodeNoSpace, Message: "the disk is full"}
			}
			return nil
		})
		h.wantState(h.after(time.Hour, id), sandbox.StateRunning, "without room")
		if n := tries.Load(); n < 6 || n > 15 {
			t.Errorf("%d tries in an hour", n)
		}
		h.hook.set(nil)
		h.wantState(h.after(10*time.Minute+bound, id), sandbox.StateStandby, "with room")
		if want := []sandbox.EventType{sandbox.EventIdle, sandbox.EventCancelled, sandbox.EventHibernated}; !slices.Equal(told, want) {
			t.Errorf("told were %v, want %v", told, want)
		}
	})
}

// A shim of an older version cannot tell: its sandbox stays awake.
func TestIdleUnderAnOldShim(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		h.w.SetBusy(id, sandboxtest.Busy{Err: shim.ErrUnknown})
		h.wantState(h.after(time.Hour, id), sandbox.StateRunning, "nobody knows")
		h.w.SetBusy(id, sandboxtest.Busy{})
		h.hibernate(id)
		h.resume(id)
		h.wantState(h.after(idleTimeout+bound, id), sandbox.StateStandby, "with a new one")
	})
}

// A shim that does not answer for a while does not end the watch.
func TestIdleWithAShimThatFails(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		id := h.create().ID
		h.w.SetBusy(id, sandboxtest.Busy{Err: errors.New("busy")})
		h.wantState(h.after(time.Hour, id), sandbox.StateRunning, "nobody knows")
		h.w.SetBusy(id, sandboxtest.Busy{})
		h.wantState(h.after(idleTimeout+bound, id), sandbox.StateStandby, "when it answers again")
	})
}
