package sandbox_test

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/shim"
)

// pooled has a core keep two machines ready.
func pooled(c *sandbox.Config) { c.Pool = 2 }

// TestPoolServesStarts: creations and resumes take a machine that is ready,
// and another takes its place.
func TestPoolServesStarts(t *testing.T) {
	h := newHost(t, pooled)
	h.filled() // for the template that was built
	s := h.create()
	if !s.LastResume.Pooled {
		t.Error("a creation did not take a machine of the pool")
	}
	h.filled()
	h.ask(s.ID, "set kept")
	h.hibernate(s.ID)
	if s = h.resume(s.ID); !s.LastResume.Pooled || s.LastResume.Tier != "local" {
		t.Errorf("a resume did not take a machine of the pool: %+v", s.LastResume)
	}
	if got := h.ask(s.ID, "get"); got != "kept" {
		t.Errorf("it has %q", got)
	}
	h.filled()
	h.hibernate(s.ID)
	s, err := h.core.Resume(t.Context(), s.ID, sandbox.ResumeOptions{NoPool: true})
	if err != nil || s.LastResume.Pooled {
		t.Errorf("without the pool: %+v, %v", s.LastResume, err)
	}
	if h.w.Waiting() != 2 {
		t.Error("a start that was to do without the pool took from it")
	}
}

// TestPoolFollowsDemand: it holds machines of the shapes that were started last.
func TestPoolFollowsDemand(t *testing.T) {
	h := newHost(t, pooled)
	h.filled()
	usual, small := sandbox.DefaultShape.MemoryMiB, 512
	if s := h.create(sandbox.CreateOptions{MemoryMiB: small}); s.LastResume.Pooled {
		t.Error("a machine of another shape was taken")
	}
	for _, step := range []struct{ create, wantUsual, wantSmall int }{
		{0, 1, 1}, {small, 0, 2}, {usual, 1, 1}, {small, 1, 1}, {usual, 1, 1}, {usual, 2, 0},
	} {
		if step.create != 0 {
			h.create(sandbox.CreateOptions{MemoryMiB: step.create})
		}
		wait(t, fmt.Sprint("it follows to ", step), func() bool {
			return maps.Equal(h.w.WaitingShapes(), counts(map[int]int{usual: step.wantUsual, small: step.wantSmall}))
		})
	}
}

// counts returns m without zeros.
func counts(m map[int]int) map[int]int {
	maps.DeleteFunc(m, func(_, n int) bool { return n == 0 })
	return m
}

// TestPoolBeginsWithTheLastUsed: after a restart, machines of the sandbox that
// was used last are ready.
func TestPoolBeginsWithTheLastUsed(t *testing.T) {
	h := newHost(t, pooled)
	h.create()
	s := h.create(sandbox.CreateOptions{MemoryMiB: 512})
	h.hibernate(s.ID)
	h.crash()
	h.filled()
	if s = h.resume(s.ID); !s.LastResume.Pooled {
		t.Error("no machine of its shape was ready")
	}
}

// TestPooledMachineEnds while it waits: it is replaced.
func TestPooledMachineEnds(t *testing.T) {
	for name, end := range map[string]func(w *sandboxtest.World){
		"killed":            func(w *sandboxtest.World) { w.KillShims("") },
		"read before bound": func(w *sandboxtest.World) { w.FailMemory("", "slot is not bound", shim.CodeFailed) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, pooled)
			h.filled()
			before := h.w.Machines()
			end(h.w)
			wait(t, "others take their place", func() bool {
				return h.w.Waiting() == 2 && !strings.Contains(strings.Join(h.w.Machines(), " "), before[0])
			})
			if s := h.create(); !s.LastResume.Pooled {
				t.Error("no machine was ready")
			}
		})
	}
}

// TestPooledMachineFails when it is needed: a fresh one takes its place, once.
func TestPooledMachineFails(t *testing.T) {
	for name, fault := range map[string]func(h *host) error{
		"error":  func(*host) error { return errInjected },
		"killed": func(h *host) error { h.w.KillShims(""); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, pooled)
			s := h.create()
			h.ask(s.ID, "set kept")
			h.hibernate(s.ID)
			h.filled()
			h.hook.set(at("resume", false, func(context.Context) error { return fault(h) }))
			if s = h.resume(s.ID); s.LastResume.Pooled {
				t.Error("a machine that failed is said to have served")
			}
			if got := h.ask(s.ID, "get"); got != "kept" {
				t.Errorf("it has %q", got)
			}
			h.hibernate(s.ID)
			h.filled()
			h.hook.set(func(_ context.Context, step sandboxtest.Step) error {
				if step.Name == "resume" {
					return errInjected
				}
				return nil
			})
			_, err := h.core.Resume(t.Context(), s.ID, sandbox.ResumeOptions{})
			isA(t, err, sandbox.ErrUnavailable)
			if got := h.get(s.ID).State; got != sandbox.StateStandby {
				t.Errorf("it is %s", got)
			}
		})
	}
}

// TestPoolWaitsForTheGuest: nothing is started beside a guest that wakes.
func TestPoolWaitsForTheGuest(t *testing.T) {
	h := newHost(t, pooled)
	s := h.create()
	h.hibernate(s.ID)
	h.filled()
	g := newGate()
	started := make(chan string, 10)
	var first atomic.Bool
	h.hook.set(func(ctx context.Context, step sandboxtest.Step) error {
		if step.Name == "launch" {
			started <- step.VM
		}
		if step.Name == "resume" && first.CompareAndSwap(false, true) {
			return g.wait(ctx)
		}
		return nil
	})
	done := make(chan error)
	go func() {
		_, err := h.core.Resume(context.Background(), s.ID, sandbox.ResumeOptions{})
		done <- err
	}()
	<-g.reached
	other := h.create() // takes the other one and ends; the first still wakes
	if !other.LastResume.Pooled || h.w.Waiting() > 1 {
		t.Errorf("the second start: %+v, %d machines wait", other.LastResume, h.w.Waiting())
	}
	select {
	case vm := <-started:
		t.Errorf("%s was started beside a guest that wakes", vm)
	default:
	}
	close(g.open)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	h.filled()
}

// TestPoolEnds with the template that it is for, and with the daemon.
func TestPoolEnds(t *testing.T) {
	h := newHost(t, pooled)
	h.filled()
	if err := h.core.RemoveTemplate(t.Context(), "base"); err != nil {
		t.Fatal(err)
	}
	wait(t, "no machine is left", func() bool { return len(h.w.Machines()) == 0 })
	if _, err := h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	h.filled()
	h.core.Close()
	if m := h.w.Machines(); len(m) != 0 {
		t.Errorf("the daemon has ended, and left %v", m)
	}
	h.boot(h.options...)
	h.filled()
	h.d.Kill()
	if m := h.w.Machines(); len(m) != 0 {
		t.Errorf("the daemon was killed, and left %v", m)
	}
}

// TestPoolThatCannotFill gives up until somebody asks again.
func TestPoolThatCannotFill(t *testing.T) {
	h := newHost(t, pooled)
	h.filled()
	tried := make(chan struct{}, 100)
	h.hook.set(func(_ context.Context, step sandboxtest.Step) error {
		if step.Name == "prepare" && ofThePool(step) && !step.After {
			tried <- struct{}{}
			return errInjected
		}
		return nil
	})
	h.create()
	<-tried
	if s := h.create(sandbox.CreateOptions{MemoryMiB: 512}); s.LastResume.Pooled {
		t.Error("it was filled after all")
	}
	h.hook.set(nil)
	h.create()
	h.filled()
}
