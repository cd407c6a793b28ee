package sandbox_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// told collects the events of a host's cores.
type told struct {
	mu   sync.Mutex
	list []sandbox.Event
}

func (l *told) watch(c *sandbox.Config) {
	c.Events.OnEvent = func(ev sandbox.Event) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.list = append(l.list, ev)
	}
}

// of returns the events of some types that a sandbox had, in their order.
func (l *told) of(id string, types ...sandbox.EventType) (list []sandbox.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ev := range l.list {
		if ev.Sandbox == id && slices.Contains(types, ev.Type) {
			list = append(list, ev)
		}
	}
	return list
}

func withPolicy(change func(*sandbox.Policy)) sandbox.CreateOptions {
	p := sandbox.DefaultPolicy()
	p.IdleTimeout = 0
	change(&p)
	return sandbox.CreateOptions{Policy: &p}
}

// TestLimits: a deletion is announced and then done, a notification is given
// once, a timeout hibernates and begins anew with the next resume. All of it
// holds over a restart.
func TestLimits(t *testing.T) {
	events := new(told)
	h := newHost(t, events.watch)
	dies := h.create(withPolicy(func(p *sandbox.Policy) { p.TTL.After = time.Second }))
	kept := h.create(withPolicy(func(p *sandbox.Policy) { p.TTL = sandbox.Limit{After: time.Second, Action: sandbox.ActionNotify} }))
	rests := h.create(withPolicy(func(p *sandbox.Policy) { p.Timeout.After = time.Second }))
	ends := h.create(withPolicy(func(p *sandbox.Policy) { p.TTLIdle.After = time.Second }))
	if n := h.get(dies.ID).Next; n == nil || n.Action != sandbox.ActionDelete || n.Limit != "ttl" {
		t.Errorf("next is %+v", n)
	}
	h.hibernate(ends.ID)
	for _, id := range []string{dies.ID, ends.ID} {
		wait(t, "it is deleted", func() bool { return len(events.of(id, sandbox.EventDeleted)) == 1 })
		list := events.of(id, sandbox.EventExpiring, sandbox.EventDeleted)
		if len(list) != 2 || list[0].Type != sandbox.EventExpiring || list[0].Action != sandbox.ActionDelete || list[0].Due.IsZero() || list[1].Reason != list[0].Reason || list[1].At.Before(list[0].Due) {
			t.Errorf("told was %+v", list)
		}
		_, err := h.core.Get(t.Context(), id)
		isA(t, err, sandbox.ErrNotFound)
	}
	wait(t, "it is told", func() bool { return len(events.of(kept.ID, sandbox.EventExpiring)) == 1 })
	if n := h.get(kept.ID).Next; n != nil {
		t.Errorf("next is %+v", n)
	}
	h.waitState(rests.ID, sandbox.StateStandby)
	if n := h.get(rests.ID).Next; n != nil {
		t.Errorf("next is %+v in standby", n)
	}
	h.crash()
	h.resume(rests.ID)
	if n := h.get(rests.ID).Next; n == nil || n.Action != sandbox.ActionHibernate || time.Until(n.At) < 0 {
		t.Errorf("next is %+v after a resume", n)
	}
	h.waitState(rests.ID, sandbox.StateStandby)
	if n := len(events.of(kept.ID, sandbox.EventExpiring)); n != 1 {
		t.Errorf("it was told %d times", n)
	}
}

// TestTimeoutIsRestarted by an update that names it again.
func TestTimeoutIsRestarted(t *testing.T) {
	h := newHost(t)
	s := h.create(withPolicy(func(p *sandbox.Policy) { p.Timeout.After = time.Hour }))
	first := h.get(s.ID).Next.At
	if _, err := h.core.Update(t.Context(), s.ID, func(now *sandbox.Settings) error { now.Policy.Public = []int{80}; return nil }); err != nil {
		t.Fatal(err)
	}
	if at := h.get(s.ID).Next.At; !at.Equal(first) {
		t.Errorf("another update moved it from %v to %v", first, at)
	}
	if _, err := h.core.Update(t.Context(), s.ID, func(now *sandbox.Settings) error { now.RestartTimeout = true; return nil }); err != nil {
		t.Fatal(err)
	}
	if at := h.get(s.ID).Next.At; !at.After(first) {
		t.Errorf("it is at %v still", at)
	}
}

// TestDrain: everything that runs goes to standby, nothing starts until the
// drain is undone or another daemon is there.
func TestDrain(t *testing.T) {
	h := newHost(t)
	a, b, asleep := h.create(), h.create(), h.create()
	h.hibernate(asleep.ID)
	h.ask(a.ID, "set kept")
	var last int64
	got, err := h.core.Drain(t.Context(), func(done, total int64) {
		if total != 2 {
			t.Errorf("%d are to be drained", total)
		}
		last = done
	})
	if err != nil || len(got.Hibernated) != 2 || len(got.Failed) != 0 || last != 2 {
		t.Fatalf("drained %+v, %v", got, err)
	}
	for _, id := range []string{a.ID, b.ID, asleep.ID} {
		if s := h.get(id); s.State != sandbox.StateStandby {
			t.Errorf("%s is %s", id, s.State)
		}
		_, err = h.core.Dial(t.Context(), id, 80)
		isA(t, err, sandbox.ErrUnavailable)
	}
	_, err = h.core.Resume(t.Context(), a.ID, sandbox.ResumeOptions{})
	isA(t, err, sandbox.ErrUnavailable)
	_, err = h.core.Create(t.Context(), sandbox.CreateOptions{})
	isA(t, err, sandbox.ErrUnavailable)
	h.core.Undrain()
	if got := h.ask(a.ID, "get"); got != "kept" {
		t.Errorf("it has %q", got)
	}
	if _, err := h.core.Drain(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	h.crash()
	if got := h.ask(a.ID, "get"); got != "kept" {
		t.Errorf("it has %q", got)
	}
}

// TestDrainCatchesWhatStarts: what was about to run when the drain began is
// hibernated, too, and nothing else comes to run.
func TestDrainCatchesWhatStarts(t *testing.T) {
	h := newHost(t)
	waking, runs := h.create(), h.create()
	h.hibernate(waking.ID)
	h.checkpoint(runs.ID, "a")
	g := newGate()
	h.hook.set(at("resume", false, g.wait))
	resumed := make(chan error, 1)
	go func() {
		_, err := h.core.Resume(t.Context(), waking.ID, sandbox.ResumeOptions{})
		resumed <- err
	}()
	<-g.reached
	var once sync.Once
	got, err := h.core.Drain(t.Context(), func(int64, int64) { once.Do(func() { close(g.open) }) })
	if err != nil || len(got.Hibernated) != 2 || len(got.Failed) != 0 {
		t.Errorf("drained %+v, %v", got, err)
	}
	if err := <-resumed; err != nil {
		t.Error(err)
	}
	_, err = h.core.Fork(t.Context(), runs.ID, sandbox.ForkOptions{Checkpoint: "a"})
	isA(t, err, sandbox.ErrUnavailable)
	if list := h.fork(runs.ID, sandbox.ForkOptions{Standby: true}); len(list) != 1 {
		t.Errorf("%d copies that sleep", len(list))
	}
	for _, s := range h.list() {
		if s.State != sandbox.StateStandby {
			t.Errorf("%s is %s", s.ID, s.State)
		}
	}
	h.noneLeft()
}

// TestChangedLimitKeeps: a deletion that was due does not take a sandbox whose
// limit was changed before its turn came.
func TestChangedLimitKeeps(t *testing.T) {
	h := newHost(t)
	s := h.create(withPolicy(func(p *sandbox.Policy) { p.TTL.After = time.Hour }))
	for _, limit := range []string{"ttl", "ttl_idle"} {
		if err := h.core.DeleteDue(t.Context(), s.ID, limit); err != nil {
			t.Fatal(err)
		}
	}
	if got := h.get(s.ID).State; got != sandbox.StateRunning {
		t.Errorf("it is %s", got)
	}
	h.ask(s.ID, "set kept")
}
