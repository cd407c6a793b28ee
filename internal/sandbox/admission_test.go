package sandbox_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
)

// roomForTwo is memory for two guests of the default shape and not for three.
func roomForTwo(c *sandbox.Config) { c.GuestMemory = 5 << 30 }

func (h *host) guests() int {
	h.t.Helper()
	now, err := h.core.Host(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	return now.Guests
}

// TestMemoryIsNotPromisedTwice: what the host cannot carry is refused with the
// reason, and nothing changes by it.
func TestMemoryIsNotPromisedTwice(t *testing.T) {
	h := newHost(t, roomForTwo)
	a, b := h.create(), h.create()
	_, err := h.core.Create(t.Context(), sandbox.CreateOptions{})
	isA(t, err, sandbox.ErrUnavailable)
	for _, part := range []string{"a new sandbox", "2176 MiB", "promised to 2 guests", "5120 MiB"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the refusal %q does not say %q", err, part)
		}
	}
	if hint := sandbox.Hint(err); !strings.Contains(hint, "hibernate") || !strings.Contains(hint, "--guest-memory") {
		t.Errorf("hint: %q", hint)
	}
	if list, err := h.core.List(t.Context()); err != nil || len(list) != 2 {
		t.Fatalf("%d sandboxes, %v", len(list), err)
	}

	h.hibernate(a.ID)
	c := h.create()
	_, err = h.core.Resume(t.Context(), a.ID, sandbox.ResumeOptions{})
	isA(t, err, sandbox.ErrUnavailable)
	if !strings.Contains(err.Error(), a.ID) {
		t.Errorf("the refusal %q does not name the sandbox", err)
	}
	_, err = h.core.Dial(t.Context(), a.ID, 80)
	isA(t, err, sandbox.ErrUnavailable)
	if s := h.get(a.ID); s.State != sandbox.StateStandby {
		t.Fatalf("after the refusal it is %s", s.State)
	}

	if err := h.core.Delete(t.Context(), c.ID); err != nil {
		t.Fatal(err)
	}
	h.resume(a.ID)
	h.w.KillShims(b.ID)
	h.waitState(b.ID, sandbox.StateFailed)
	wait(t, "the memory of a failed guest is given back", func() bool { return h.guests() == 1 })
	h.create()
}

// TestBaseMachineCounts: the machine that a base snapshot is taken of needs
// memory as any other, and gives it back.
func TestBaseMachineCounts(t *testing.T) {
	h := newHost(t, roomForTwo)
	a := h.create()
	_, err := h.core.Create(t.Context(), sandbox.CreateOptions{MemoryMiB: 4096})
	isA(t, err, sandbox.ErrUnavailable)
	if !strings.Contains(err.Error(), "base machine of template base") {
		t.Errorf("refused with %q", err)
	}
	if err := h.core.Delete(t.Context(), a.ID); err != nil {
		t.Fatal(err)
	}
	h.create(sandbox.CreateOptions{MemoryMiB: 4096})
	if n := h.guests(); n != 1 {
		t.Errorf("%d guests", n)
	}
}

// TestDiskIsKeptForHibernations of the guests that run.
func TestDiskIsKeptForHibernations(t *testing.T) {
	var free atomic.Int64
	free.Store(1 << 40)
	h := newHost(t, func(c *sandbox.Config) {
		c.FreeBytes = func() (int64, error) { return free.Load(), nil }
		c.Reserve, c.HibernateShare = 100<<20, 25
	})
	a, b := h.create(), h.create()
	h.hibernate(b.ID)
	// One guest runs: another one needs twice a quarter of 2 GiB, and the reserve.
	free.Store(1<<30 + 100<<20 - 1)
	_, err := h.core.Create(t.Context(), sandbox.CreateOptions{})
	isA(t, err, sandbox.ErrNoSpace)
	_, err = h.core.Resume(t.Context(), b.ID, sandbox.ResumeOptions{})
	isA(t, err, sandbox.ErrNoSpace)
	if !strings.Contains(err.Error(), b.ID) || !strings.Contains(err.Error(), "1123 MiB") {
		t.Errorf("refused with %q", err)
	}
	_, err = h.core.Dial(t.Context(), b.ID, 80)
	isA(t, err, sandbox.ErrUnavailable)
	if now, err := h.core.Host(t.Context()); err != nil || now.DiskReserve != 512<<20+100<<20 || now.FreeBytes != free.Load() {
		t.Errorf("host: %+v, %v", now, err)
	}
	free.Add(1)
	h.resume(b.ID)
	// What runs may hibernate whatever is left.
	free.Store(0)
	_, err = h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{Name: "new"}, nil)
	isA(t, err, sandbox.ErrNoSpace)
	h.hibernate(a.ID)
	h.hibernate(b.ID)
}

// TestPromisesFollowTheMachines whatever happens to them: under random orders,
// failures and restarts at no moment more machines are alive than there is
// memory for, and in the end none is promised.
func TestPromisesFollowTheMachines(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	const limit = 4
	h := newHost(t)
	options := func(c *sandbox.Config) { c.GuestMemory = limit * (2048 + 128) << 20 }
	random := rand.New(rand.NewPCG(seed, 0))
	for range 4 {
		h.d.Kill()
		h.core.Close()
		h.boot(options)
		var mu sync.Mutex
		faults := rand.New(rand.NewPCG(random.Uint64(), 1))
		h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
			if n := len(h.w.Machines()); n > limit {
				t.Errorf("%d machines at step %s", n, s.Name)
			}
			mu.Lock()
			defer mu.Unlock()
			if faults.IntN(20) == 0 {
				return errInjected
			}
			return nil
		})
		var wg sync.WaitGroup
		for range 12 {
			r := rand.New(rand.NewPCG(random.Uint64(), 2))
			wg.Go(func() { h.disturb(r) })
		}
		wg.Wait()
	}
	h.hook.set(nil)
	for _, s := range h.list() {
		err := h.core.Delete(t.Context(), s.ID)
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) { // what began goes on without its caller
			t.Fatal(err)
		}
	}
	wait(t, "no memory is promised", func() bool { return h.guests() == 0 })
}

// disturb gives random orders to random sandboxes; each may fail.
func (h *host) disturb(r *rand.Rand) {
	for range 15 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.IntN(50))*time.Millisecond)
		list := h.list()
		if len(list) == 0 || r.IntN(4) == 0 {
			_, _ = h.core.Create(ctx, sandbox.CreateOptions{})
			cancel()
			continue
		}
		id := list[r.IntN(len(list))].ID
		switch r.IntN(5) {
		case 0:
			_, _ = h.core.Hibernate(ctx, id, sandbox.HibernateOptions{})
		case 1, 2:
			_, _ = h.core.Resume(ctx, id, sandbox.ResumeOptions{})
		case 3:
			_ = h.core.Delete(ctx, id)
		case 4:
			h.w.KillShims(id)
		}
		cancel()
	}
}
