package sandbox_test

import (
	"context"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
)

// parking has a core keep so many machines parked.
func parking(n int64) func(*sandbox.Config) {
	return func(c *sandbox.Config) { c.ParkedMemory = n * sandboxtest.ParkedBytes }
}

// park makes a sandbox that is parked with a word.
func (h *host) park(word string) sandbox.Sandbox {
	h.t.Helper()
	s := h.create()
	h.ask(s.ID, "set "+word)
	if s = h.hibernate(s.ID); !s.Parked || !h.w.Parked(s.ID) {
		h.t.Fatalf("it is not parked: %+v", s)
	}
	return s
}

// wakesFrom checks from which tier a sandbox resumes and with which word.
func (h *host) wakesFrom(id, tier, word string) {
	h.t.Helper()
	s := h.resume(id)
	if s.LastResume.Tier != tier || s.Parked {
		h.t.Errorf("it was resumed from %s, want %s; parked: %v", s.LastResume.Tier, tier, s.Parked)
	}
	if got := h.ask(id, "get"); got != word {
		h.t.Errorf("it has %q, want %q", got, word)
	}
}

func TestParkedMachineGoesOn(t *testing.T) {
	h := newHost(t, parking(4))
	s := h.park("one")
	if len(h.w.Machines()) != 1 {
		t.Errorf("machines: %v", h.w.Machines())
	}
	h.wakesFrom(s.ID, "parked", "one")
	h.ask(s.ID, "set two")
	h.hibernate(s.ID)
	if got := h.ask(s.ID, "get"); got != "two" { // a request wakes it, too
		t.Errorf("it has %q", got)
	}
	if tier := h.get(s.ID).LastResume.Tier; tier != "parked" {
		t.Errorf("woken from %s", tier)
	}
	h.hibernate(s.ID)
	h.w.KillShims(s.ID)
	h.wakesFrom(s.ID, "local", "two") // the snapshot holds what the machine did
}

// TestParkedOrNot: who asked for no parked machine does not get one.
func TestParkedOrNot(t *testing.T) {
	h := newHost(t, parking(4))
	s := h.park("one")
	first, err := h.core.Resume(t.Context(), s.ID, sandbox.ResumeOptions{NoParked: true})
	if err != nil || first.LastResume.Tier != "local" {
		t.Errorf("resumed without the parked machine: %+v, %v", first.LastResume, err)
	}
	if second := h.hibernate(s.ID, sandbox.HibernateOptions{NoPark: true}); second.Parked || len(h.w.Machines()) != 0 {
		t.Errorf("hibernated without parking: %v, machines %v", second.Parked, h.w.Machines())
	}
	h.resume(s.ID)
	h.hibernate(s.ID)
	if _, err := h.core.Evict(t.Context(), s.ID, sandbox.EvictOptions{Parked: true}); err != nil {
		t.Fatal(err)
	}
	if h.get(s.ID).Parked || len(h.w.Machines()) != 0 {
		t.Errorf("evicted, and the machines are %v", h.w.Machines())
	}
	h.wakesFrom(s.ID, "local", "one")
}

// TestParkedBudget: those that sleep longest make room.
func TestParkedBudget(t *testing.T) {
	h := newHost(t, parking(2))
	a, b := h.park("a"), h.park("b")
	c := h.park("c")
	wait(t, "the first makes room", func() bool { return !h.get(a.ID).Parked })
	if !h.get(b.ID).Parked || !h.get(c.ID).Parked || len(h.w.Machines()) != 2 {
		t.Errorf("the machines are %v", h.w.Machines())
	}
	h.wakesFrom(a.ID, "local", "a")
	h.wakesFrom(b.ID, "parked", "b")
	small := newHost(t, func(c *sandbox.Config) { c.ParkedMemory = sandboxtest.ParkedBytes - 1 })
	s := small.create()
	if s = small.hibernate(s.ID); s.Parked || len(small.w.Machines()) != 0 {
		t.Errorf("parked beyond the budget: %v", small.w.Machines())
	}
}

// TestParkedMachineEnds: nothing is lost with it, and it is noticed.
func TestParkedMachineEnds(t *testing.T) {
	h := newHost(t, parking(4))
	s := h.park("one")
	h.w.KillShims(s.ID)
	wait(t, "the end is noticed", func() bool { return !h.get(s.ID).Parked })
	if got := h.get(s.ID).State; got != sandbox.StateStandby {
		t.Errorf("it is %s", got)
	}
	h.wakesFrom(s.ID, "local", "one")
}

// TestParkedMachineFails when it is needed: the snapshot takes its place.
func TestParkedMachineFails(t *testing.T) {
	for name, fault := range map[string]func(h *host) error{
		"error":  func(*host) error { return errInjected },
		"killed": func(h *host) error { h.w.KillShims(""); return nil },
	} {
		for _, after := range []bool{false, true} {
			if after && name == "killed" {
				continue // it runs by then
			}
			t.Run(name, func(t *testing.T) {
				h := newHost(t, parking(4))
				s := h.park("one")
				h.hook.set(at("unpark", after, func(context.Context) error { return fault(h) }))
				h.wakesFrom(s.ID, "local", "one")
			})
		}
	}
}

// TestParkedOutlivesTheDaemon, if the next one may park.
func TestParkedOutlivesTheDaemon(t *testing.T) {
	h := newHost(t, parking(4))
	s := h.park("one")
	h.crash()
	if !h.get(s.ID).Parked {
		t.Error("the next daemon does not know of it")
	}
	h.wakesFrom(s.ID, "parked", "one")
	h.hibernate(s.ID)
	h.core.Close()
	if !h.w.Parked(s.ID) {
		t.Error("the parked machine ended with the daemon")
	}
	h.boot(h.options...)
	h.wakesFrom(s.ID, "parked", "one")
	h.hibernate(s.ID)
	h.options = nil
	h.crash()
	if h.get(s.ID).Parked || len(h.w.Machines()) != 0 {
		t.Errorf("a daemon that parks none has %v", h.w.Machines())
	}
	h.wakesFrom(s.ID, "local", "one")
}

// TestSealedIsParkedAfterACrash: the daemon died between the commit and the order.
func TestSealedIsParkedAfterACrash(t *testing.T) {
	h := newHost(t, parking(4))
	s := h.create()
	h.ask(s.ID, "set one")
	h.hook.set(at("park", false, func(context.Context) error { h.d.Kill(); return sandboxtest.ErrKilled }))
	h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
	h.core.Rest(s.ID)
	h.crash()
	if got := h.get(s.ID); got.State != sandbox.StateStandby || !got.Parked {
		t.Errorf("it is %s, parked: %v", got.State, got.Parked)
	}
	h.wakesFrom(s.ID, "parked", "one")
}

// TestParkedEndsWithItsSandbox and nothing is left of either.
func TestParkedEndsWithItsSandbox(t *testing.T) {
	h := newHost(t, parking(4))
	s := h.park("one")
	if err := h.core.Delete(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if m := h.w.Machines(); len(m) != 0 {
		t.Errorf("machines are left: %v", m)
	}
	wait(t, "only the base is left", func() bool { return h.w.Snapshots() == 1 })
}

// TestParkedKeepsWhatItReads: the snapshot that the machine was started from
// stays as long as it lives, and no longer.
func TestParkedKeepsWhatItReads(t *testing.T) {
	h := newHost(t, parking(4))
	s := h.create()
	h.hibernate(s.ID)
	h.wakesLocal(s.ID)
	for range 5 {
		h.hibernate(s.ID)
		h.resume(s.ID)
	}
	s = h.hibernate(s.ID)
	wait(t, "the base, what it reads, and what it is", func() bool { return h.w.Snapshots() == 3 })
	if _, err := h.core.Evict(t.Context(), s.ID, sandbox.EvictOptions{Parked: true}); err != nil {
		t.Fatal(err)
	}
	wait(t, "the base and what it is", func() bool { return h.w.Snapshots() == 2 })
}

// wakesLocal resumes a sandbox from its snapshot.
func (h *host) wakesLocal(id string) {
	h.t.Helper()
	if _, err := h.core.Resume(h.t.Context(), id, sandbox.ResumeOptions{NoParked: true}); err != nil {
		h.t.Fatal(err)
	}
}

// TestMemoryPressure: parked machines go first, then those of the pool; the
// guests that run are left alone.
func TestMemoryPressure(t *testing.T) {
	short := make(chan struct{})
	h := newHost(t, fast, func(c *sandbox.Config) {
		c.Pressure = func(ctx context.Context, notify func()) error {
			for {
				select {
				case <-short:
					notify()
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}
	})
	runs := h.create()
	a, b := h.park("a"), h.park("b")
	h.filled()
	short <- struct{}{}
	wait(t, "half of the parked ones end", func() bool { return !h.get(a.ID).Parked })
	if !h.get(b.ID).Parked || h.w.Waiting() != 2 {
		t.Errorf("the machines are %v", h.w.Machines())
	}
	short <- struct{}{}
	wait(t, "the other one ends", func() bool { return !h.get(b.ID).Parked })
	short <- struct{}{}
	wait(t, "the pool ends", func() bool { return len(h.w.Machines()) == 1 })
	if got := h.get(runs.ID).State; got != sandbox.StateRunning {
		t.Errorf("the guest that ran is %s", got)
	}
	h.wakesFrom(a.ID, "local", "a")
	h.filled() // it fills up again with the next start
}

// TestLowMemory: where the host is short of memory, nothing is parked.
func TestLowMemory(t *testing.T) {
	h := newHost(t, parking(4), func(c *sandbox.Config) { c.LowMemory = func() bool { return true } })
	s := h.create()
	if s = h.hibernate(s.ID); s.Parked || len(h.w.Machines()) != 0 {
		t.Errorf("parked: %v", h.w.Machines())
	}
}

// TestGuestsComeFirst: what is promised to guests that run is taken from what
// is parked.
func TestGuestsComeFirst(t *testing.T) {
	const guest = (2048 + 128) << 20 // with what its machine takes up beside it
	h := newHost(t, parking(4), func(c *sandbox.Config) { c.GuestMemory = 2*guest + sandboxtest.ParkedBytes/2 })
	s := h.park("one")
	h.create()
	if !h.get(s.ID).Parked {
		t.Error("it made room though there was enough")
	}
	h.create()
	wait(t, "it makes room", func() bool { return !h.get(s.ID).Parked })
	if got := h.get(s.ID).State; got != sandbox.StateStandby {
		t.Errorf("it is %s", got)
	}
}
