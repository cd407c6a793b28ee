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

// transitions collects what a host's core tells, from now on.
type transitions struct {
	mu   sync.Mutex
	list []sandbox.Event
}

func (l *transitions) add(t sandbox.Event) {
	if t.Type != sandbox.EventState {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, t)
}

// told returns why the sandbox went from one state to the other, most recently.
func (l *transitions) told(from, to sandbox.State) (reason string, count int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.list {
		if t.From == from && t.To == to {
			reason = t.Reason
			count++
		}
	}
	return reason, count
}

const pagerEnded = "memory could not be served: the pager's mount has ended"

// newWatchedHost returns a host, a sandbox that was hibernated with "kept" and
// runs with "lost", and what is told of it.
func newWatchedHost(t *testing.T, options ...func(*sandbox.Config)) (*host, string, *transitions) {
	told := new(transitions)
	h := newHost(t, append(options, func(c *sandbox.Config) { c.Events.OnEvent = told.add })...)
	s := h.create()
	h.ask(s.ID, "set kept")
	h.hibernate(s.ID)
	h.ask(s.ID, "set lost")
	return h, s.ID, told
}

// TestPagerEnds: a guest whose pager ends goes on from its last snapshot by
// itself, which is told; if that happens again soon, the sandbox has failed.
func TestPagerEnds(t *testing.T) {
	for variant, options := range variants {
		for _, code := range []string{shim.CodeFailed, shim.CodeUnavailable} {
			t.Run(variant+"/"+code, func(t *testing.T) {
				h, id, told := newWatchedHost(t, options...)
				h.w.FailMemory(id, "the pager's mount has ended", code)
				wait(t, "it goes back", func() bool { _, n := told.told(sandbox.StateRunning, sandbox.StateResuming); return n == 1 })
				if got := h.ask(id, "get"); got != "kept" {
					t.Fatalf("it has %q", got)
				}
				if reason, _ := told.told(sandbox.StateRunning, sandbox.StateResuming); reason != pagerEnded {
					t.Errorf("told was %q", reason)
				}
				s := h.get(id)
				if w := s.LastResume.Warnings; s.State != sandbox.StateRunning || len(w) != 1 || !strings.HasSuffix(w[0], pagerEnded) {
					t.Errorf("it is %s, the warnings are %q", s.State, w)
				}
				h.w.FailMemory(id, "the pager's mount has ended", code)
				if s = h.waitState(id, sandbox.StateFailed); s.Reason != pagerEnded {
					t.Errorf("reason: %q", s.Reason)
				}
				if h.resume(id); h.ask(id, "get") != "kept" {
					t.Error("it does not come back")
				}
				h.hibernate(id)
			})
		}
	}
}

// TestPagerEndsNowAndThen: what happens rarely is no reason to fail.
func TestPagerEndsNowAndThen(t *testing.T) {
	h, id, told := newWatchedHost(t, func(c *sandbox.Config) { c.RelapseTime = 1 })
	for n := 1; n <= 3; n++ {
		h.w.EndPagers()
		wait(t, "it goes back", func() bool { _, got := told.told(sandbox.StateRunning, sandbox.StateResuming); return got == n })
		h.waitState(id, sandbox.StateRunning)
	}
	if got := h.ask(id, "get"); got != "kept" {
		t.Fatalf("it has %q", got)
	}
}

// TestPagerEndsForGood: where going back does not succeed, the sandbox has
// failed with both reasons; a deletion does not wait for the try.
func TestPagerEndsForGood(t *testing.T) {
	t.Run("no machine", func(t *testing.T) {
		h, id, _ := newWatchedHost(t)
		h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
			if s.Name == "launch" {
				return errInjected
			}
			return nil
		})
		h.w.EndPagers()
		s := h.waitState(id, sandbox.StateFailed)
		if !strings.HasPrefix(s.Reason, pagerEnded) || !strings.Contains(s.Reason, errInjected.Error()) {
			t.Errorf("reason: %q", s.Reason)
		}
		h.hook.set(nil)
		if h.resume(id); h.ask(id, "get") != "kept" {
			t.Error("it does not come back")
		}
	})
	t.Run("no snapshot", func(t *testing.T) {
		h, id, _ := newWatchedHost(t)
		snap := h.get(id).Snapshot.ID
		h.w.Lose(snap)
		h.w.EndPagers()
		if s := h.waitState(id, sandbox.StateFailed); !strings.Contains(s.Reason, string(snap)) {
			t.Errorf("reason: %q", s.Reason)
		}
	})
	t.Run("never hibernated", func(t *testing.T) {
		h := newHost(t)
		s := h.create(sandbox.CreateOptions{ColdBoot: true})
		h.w.EndPagers()
		if s := h.waitState(s.ID, sandbox.StateFailed); s.Reason != pagerEnded {
			t.Errorf("reason: %q", s.Reason)
		}
	})
	t.Run("deleted meanwhile", func(t *testing.T) {
		h, id, _ := newWatchedHost(t)
		g := newGate()
		h.hook.set(at("launch", false, g.wait))
		h.w.EndPagers()
		<-g.reached
		if err := h.core.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		h.noneLeft()
	})
}

// TestCrashWhileGoingBack kills the daemon at each step of going back: the
// sandbox runs, or has failed, and comes back with its last snapshot.
func TestCrashWhileGoingBack(t *testing.T) {
	for n := 1; ; n++ {
		h, id, told := newWatchedHost(t)
		steps := 0
		var mu sync.Mutex
		dead := make(chan struct{})
		h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
			if s.Name == "delete" || s.Name == "collect" {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			if steps++; steps == n {
				h.d.Kill()
				close(dead)
				return sandboxtest.ErrKilled
			}
			return nil
		})
		h.w.EndPagers()
		back := func() bool {
			_, count := told.told(sandbox.StateResuming, sandbox.StateRunning)
			return count == 2 // of the resume before, and of going back
		}
		killed := false
		wait(t, "it went back, or the daemon was killed", func() bool {
			select {
			case <-dead:
				killed = true
			default:
			}
			return killed || back()
		})
		if !killed {
			t.Logf("%d steps", n-1)
			if n < 10 {
				t.Error("so few steps cannot be all")
			}
			return
		}
		h.hook.set(nil)
		h.crash()
		settled(h)
		if s := h.get(id); s.State == sandbox.StateFailed {
			if s.Reason == "" {
				t.Errorf("step %d: failed without a reason", n)
			}
			h.resume(id)
		}
		if got := h.ask(id, "get"); got != "kept" {
			t.Fatalf("step %d: it has %q", n, got)
		}
		h.hibernate(id)
	}
}
