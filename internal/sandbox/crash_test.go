package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
)

// faults are what can happen at a step. dies says that the daemon does not
// live through it, guestDies that what was not hibernated may be lost, goesBack
// that the sandbox may run all the same.
var faults = map[string]struct {
	dies, guestDies, goesBack bool
	do                        func(h *host) error
}{
	"error":           {do: func(*host) error { return errInjected }},
	"crash":           {dies: true, do: func(h *host) error { h.d.Kill(); return sandboxtest.ErrKilled }},
	"power cut":       {dies: true, guestDies: true, do: func(h *host) error { h.d.Kill(); h.w.Reboot(); return sandboxtest.ErrKilled }},
	"pagers ended":    {guestDies: true, goesBack: true, do: func(h *host) error { h.w.EndPagers(); return nil }},
	"shims killed":    {guestDies: true, do: func(h *host) error { h.w.KillShims(""); return nil }},
	"crash and shims": {dies: true, guestDies: true, do: func(h *host) error { h.d.Kill(); h.w.KillShims(""); return sandboxtest.ErrKilled }},
}

// operations are what a fault interrupts. Each begins with a sandbox that was
// hibernated with "old" and, but for resume, runs with "new".
var operations = map[string]func(h *host, id string) error{
	"hibernate": func(h *host, id string) error {
		_, err := h.core.Hibernate(h.t.Context(), id, sandbox.HibernateOptions{})
		h.core.Rest(id) // the steps behind the answer count, too
		return err
	},
	"resume": func(h *host, id string) error {
		_, err := h.core.Resume(h.t.Context(), id, sandbox.ResumeOptions{})
		return err
	},
	"resume not parked": func(h *host, id string) error {
		_, err := h.core.Resume(h.t.Context(), id, sandbox.ResumeOptions{NoParked: true})
		return err
	},
	"delete": func(h *host, id string) error { return h.core.Delete(h.t.Context(), id) },
	"create": func(h *host, _ string) error {
		_, err := h.core.Create(h.t.Context(), sandbox.CreateOptions{Name: "other"})
		return err
	},
	"create in a new shape": func(h *host, _ string) error {
		_, err := h.core.Create(h.t.Context(), sandbox.CreateOptions{Name: "other", MemoryMiB: 512})
		return err
	},
	"build": func(h *host, _ string) error {
		_, err := h.core.BuildTemplate(h.t.Context(), sandbox.BuildOptions{}, nil)
		return err
	},
}

// TestEveryStep does every operation with every fault at every step of it,
// before and after the effect, and looks at what is left.
func TestEveryStep(t *testing.T) {
	for variant, options := range variants {
		for opName := range operations {
			for faultName := range faults {
				t.Run(variant+"/"+opName+"/"+faultName, func(t *testing.T) {
					for n := 1; ; n++ {
						if n > 200 {
							t.Fatal("the operation has no end")
						}
						if !faultAtStep(t, options, opName, faultName, n) {
							t.Logf("%d steps", n-1)
							return
						}
					}
				})
			}
		}
	}
}

// faultAtStep returns false if the operation has fewer than n steps.
func faultAtStep(t *testing.T, options []func(*sandbox.Config), opName, faultName string, n int) (reached bool) {
	fault := faults[faultName]
	ok := t.Run(fmt.Sprint(n), func(t *testing.T) {
		h := newHost(t, options...)
		s := h.create(sandbox.CreateOptions{Name: "anna"})
		h.ask(s.ID, "set old")
		h.hibernate(s.ID)
		memory := "old"
		if !strings.HasPrefix(opName, "resume") {
			h.ask(s.ID, "set new")
			memory = "new"
		}
		h.filled()
		var steps atomic.Int64
		h.hook.set(func(_ context.Context, step sandboxtest.Step) error {
			if step.Name == "delete" || step.Name == "collect" || ofThePool(step) {
				return nil // of the background
			}
			if steps.Add(1) != int64(n) {
				return nil
			}
			return fault.do(h)
		})
		err := operations[opName](h, s.ID)
		h.hook.set(nil)
		reached = steps.Load() >= int64(n)
		if fault.dies && reached {
			h.crash()
		} else if reached {
			settled(h)
		}
		expectAfter(h, s.ID, opName, memory, err, reached && fault.guestDies, fault.goesBack)
		checkAll(h)
	})
	return reached && ok
}

// settled waits until the core has settled everything by itself.
func settled(h *host) {
	h.t.Helper()
	var why string
	defer func() {
		if h.t.Failed() {
			h.t.Log("not settled: ", why)
		}
	}()
	wait(h.t, "all is settled", func() bool {
		list, err := h.core.List(h.t.Context())
		if err != nil {
			return false
		}
		for _, s := range list {
			switch s.State {
			case sandbox.StateRunning:
				if !h.w.Runs(s.ID) {
					why = fmt.Sprintf("%s runs by its record and its machine is gone", s.ID)
					return false
				}
			case sandbox.StateStandby, sandbox.StateFailed:
			default:
				why = fmt.Sprintf("%s is %s", s.ID, s.State)
				return false
			}
		}
		_, err = h.core.Collect(h.t.Context(), sandbox.CollectOptions{})
		why = fmt.Sprint(err)
		return err == nil
	})
}

// expectAfter checks the sandbox that the operation found, and what the
// operation was to make or remove.
func expectAfter(h *host, id, opName, memory string, err error, guestDied, goesBack bool) {
	h.t.Helper()
	s, getErr := h.core.Get(h.t.Context(), id)
	if opName == "delete" && (err == nil || errors.Is(getErr, sandbox.ErrNotFound)) {
		if getErr == nil {
			h.t.Fatalf("deleted, and it is %s", s.State)
		}
		return
	}
	if getErr != nil {
		h.t.Fatalf("the sandbox is lost: %v", getErr)
	}
	if opName == "hibernate" && err == nil {
		guestDied = false // acknowledged
		if got, _ := h.w.Memory(s.Snapshot.ID); got != memory {
			h.t.Fatalf("acknowledged with %q, the record names a snapshot of %q", memory, got)
		}
	}
	allowed := []string{memory}
	if guestDied {
		allowed = append(allowed, "old")
	}
	if guestDied && !goesBack && s.State == sandbox.StateRunning {
		if got, err := sandboxtest.Ask(h.t.Context(), h.core, id, "get"); err == nil && got != memory {
			h.t.Fatalf("it runs with %q", got)
		}
	}
	if h.get(id).State == sandbox.StateFailed {
		if !guestDied {
			h.t.Fatalf("it failed: %s", h.get(id).Reason)
		}
		h.resume(id)
	}
	got := h.ask(id, "get")
	for _, want := range allowed {
		if got == want {
			return
		}
	}
	h.t.Fatalf("it has %q, not one of %q", got, allowed)
}

// checkAll uses everything once more and looks for what is left behind.
func checkAll(h *host) {
	h.t.Helper()
	ctx := h.t.Context()
	list, err := h.core.List(ctx)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, s := range list {
		if s.State == sandbox.StateFailed {
			h.resume(s.ID)
		}
		h.ask(s.ID, "set more")
		h.hibernate(s.ID)
		if got := h.ask(s.ID, "get"); got != "more" {
			h.t.Fatalf("%s has %q", s.ID, got)
		}
		if err := h.core.Delete(ctx, s.ID); err != nil {
			h.t.Fatal(err)
		}
	}
	for _, name := range []string{"anna", "other"} {
		h.create(sandbox.CreateOptions{Name: name})
		if err := h.core.Delete(ctx, name); err != nil {
			h.t.Fatal(err)
		}
	}
	h.noneLeft()
	if err := h.core.RemoveTemplate(ctx, "base"); err != nil {
		h.t.Fatal(err)
	}
	wait(h.t, "no machine is left", func() bool { return len(h.w.Machines()) == 0 })
	if _, err := h.core.Collect(ctx, sandbox.CollectOptions{}); err != nil {
		h.t.Fatal(err)
	}
	if n := h.w.Snapshots(); n != 0 {
		h.t.Fatalf("%d snapshots are left", n)
	}
}

// TestCrashUnderLoad kills the daemon, or cuts the power, while many sandboxes
// hibernate and wake: what was acknowledged is there, to the word.
func TestCrashUnderLoad(t *testing.T) {
	each(t, crashUnderLoad)
}

func crashUnderLoad(h *host) {
	t := h.t
	const sandboxes, rounds = 8, 30
	known := make([]modelled, sandboxes)
	ids := make([]string, sandboxes)
	for i := range ids {
		ids[i] = h.create().ID
		known[i] = modelled{memory: set{"booted": true}, saved: set{"booted": true}}
	}
	for round := range rounds {
		powerCut := round%2 == 1
		var steps atomic.Int64
		h.hook.set(func(context.Context, sandboxtest.Step) error {
			if steps.Add(1) == int64(50+13*round) {
				h.d.Kill()
				if powerCut {
					h.w.Reboot()
				}
			}
			return nil
		})
		var wg sync.WaitGroup
		for i := range ids {
			wg.Go(func() { work(h, ids[i], &known[i], round) })
		}
		wg.Wait()
		h.hook.set(nil)
		h.crash()
		for i, id := range ids {
			if powerCut {
				known[i].memory = known[i].memory.plus(known[i].saved)
			}
			if h.get(id).State == sandbox.StateFailed {
				if !powerCut {
					t.Fatalf("round %d: %s failed: %s", round, id, h.get(id).Reason)
				}
				h.resume(id)
			}
			got := h.ask(id, "get")
			if !known[i].memory[got] {
				t.Fatalf("round %d: %s has %q, not one of %v", round, id, got, known[i].memory)
			}
			known[i].memory = set{got: true}
		}
	}
}

// work sets and hibernates until the daemon is dead, and notes what is known.
func work(h *host, id string, known *modelled, round int) {
	for n := 0; ; n++ {
		word := fmt.Sprintf("%d-%d", round, n)
		if _, err := sandboxtest.Ask(context.Background(), h.core, id, "set "+word); err != nil {
			known.memory = known.memory.plus(set{word: true})
			return
		}
		known.memory = set{word: true}
		if _, err := h.core.Hibernate(context.Background(), id, sandbox.HibernateOptions{}); err != nil {
			known.saved = known.saved.plus(known.memory)
			return
		}
		known.saved = known.memory
	}
}
