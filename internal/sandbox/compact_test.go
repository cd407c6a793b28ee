package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// worthIt is how many hibernations of a sandbox make a compaction worth it.
const worthIt = 8

// compactions collects what Events tell of compactions.
type compactions struct {
	mu   sync.Mutex
	done []snapshot.Compacted
	errs []error
}

func (c *compactions) watch(cfg *sandbox.Config) {
	cfg.Events.OnCompact = func(_ string, done snapshot.Compacted, err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.done, c.errs = append(c.done, done), append(c.errs, err)
	}
}

func (c *compactions) all() ([]snapshot.Compacted, []error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.done), slices.Clone(c.errs)
}

// grow hibernates a new sandbox until one more time makes a compaction worth it.
func grow(h *host) (id string) {
	h.t.Helper()
	id = h.create().ID
	for n := range worthIt - 1 {
		h.ask(id, fmt.Sprint("set ", n))
		h.hibernate(id)
	}
	h.ask(id, "set last")
	return id
}

// waitCompacted waits until the sandbox's snapshot has the base's pack and packs
// of its own.
func waitCompacted(h *host, id string, packs int) sandbox.Sandbox {
	h.t.Helper()
	wait(h.t, "the snapshot is a compacted one", func() bool { return h.w.Packs(h.get(id).Snapshot.ID) == 1+packs })
	return h.get(id)
}

func TestCompactionReplacesTheSnapshot(t *testing.T) {
	var seen compactions
	h := newHost(t, seen.watch)
	id := grow(h)
	g := newGate()
	h.hook.set(at("compact", false, g.wait))
	s := h.hibernate(id)
	close(g.open)
	now := waitCompacted(h, id, 1)
	if now.State != sandbox.StateStandby || now.Snapshot.Parent != s.Snapshot.Parent || !now.Snapshot.CreatedAt.Equal(s.Snapshot.CreatedAt) {
		t.Errorf("after the compaction: %+v, before %+v", now.Snapshot, s.Snapshot)
	}
	wait(t, "the event", func() bool { done, _ := seen.all(); return len(done) > 0 })
	if done, errs := seen.all(); len(done) != 1 || errs[0] != nil || done[0].Packs != worthIt+1 || done[0].PacksLeft != 2 {
		t.Errorf("events: %+v, %v", done, errs)
	}
	wait(t, "only the base and the new snapshot are left", func() bool { return h.w.Snapshots() == 2 })
	h.crash()
	if got := h.ask(id, "get"); got != "last" {
		t.Errorf("it has %q", got)
	}
	if next := h.hibernate(id); next.Snapshot.Parent != now.Snapshot.ID {
		t.Errorf("the next snapshot's parent is %s, not %s", next.Snapshot.Parent, now.Snapshot.ID)
	}
}

// TestNobodyWaitsForACompaction: while one hangs the sandbox wakes, hibernates
// and is deleted.
func TestNobodyWaitsForACompaction(t *testing.T) {
	hang := func(t *testing.T) (h *host, id string, g *gate) {
		h = newHost(t)
		id = grow(h)
		g = newGate()
		h.hook.set(at("compact", false, g.wait))
		h.hibernate(id)
		<-g.reached
		return h, id, g
	}
	t.Run("resume", func(t *testing.T) {
		h, id, g := hang(t)
		h.resume(id)
		close(g.open)
		// The guest that runs is as good a witness of the old snapshot as none.
		now := waitCompacted(h, id, 1)
		if now.State != sandbox.StateRunning {
			t.Errorf("it is %s", now.State)
		}
		if got := h.ask(id, "get"); got != "last" {
			t.Errorf("it has %q", got)
		}
		h.ask(id, "set more")
		if next := h.hibernate(id); next.Snapshot.Parent != now.Snapshot.ID {
			t.Errorf("the next snapshot's parent is %s, not %s", next.Snapshot.Parent, now.Snapshot.ID)
		}
		if got := h.ask(id, "get"); got != "more" {
			t.Errorf("it has %q", got)
		}
	})
	t.Run("resume and failure", func(t *testing.T) {
		h, id, g := hang(t)
		h.resume(id)
		close(g.open)
		waitCompacted(h, id, 1)
		h.w.KillShims(id)
		h.waitState(id, sandbox.StateFailed)
		h.resume(id)
		if got := h.ask(id, "get"); got != "last" {
			t.Errorf("it has %q", got)
		}
	})
	t.Run("hibernate", func(t *testing.T) {
		h, id, _ := hang(t) // the gate opens when the compaction is cancelled
		h.ask(id, "set more")
		h.hibernate(id)
		// What is worth it now is a compaction of the new one.
		waitCompacted(h, id, 1)
		wait(t, "only the base and the new snapshot are left", func() bool { return h.w.Snapshots() == 2 })
		if got := h.ask(id, "get"); got != "more" {
			t.Errorf("it has %q", got)
		}
	})
	t.Run("delete", func(t *testing.T) {
		h, id, _ := hang(t)
		if err := h.core.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		wait(t, "only the base is left", func() bool { return h.w.Snapshots() == 1 })
	})
	t.Run("close", func(t *testing.T) {
		h, id, _ := hang(t)
		h.core.Close()
		h.hook.set(nil)
		h.boot()
		if got := h.ask(id, "get"); got != "last" {
			t.Errorf("it has %q", got)
		}
	})
	t.Run("another sandbox", func(t *testing.T) {
		h, _, g := hang(t)
		other := h.create()
		h.hibernate(other.ID)
		h.resume(other.ID)
		close(g.open)
	})
}

// TestCollectSparesACompaction: what it writes is nobody's until the swap.
func TestCollectSparesACompaction(t *testing.T) {
	h := newHost(t)
	id := grow(h)
	g := newGate()
	h.hook.set(at("compact", true, g.wait))
	s := h.hibernate(id)
	<-g.reached
	wait(t, "the base, what the record names and what is written are left", func() bool { return h.w.Snapshots() == 3 })
	before := h.w.Snapshots()
	dry, err := h.core.Collect(t.Context(), sandbox.CollectOptions{DryRun: true})
	if err != nil || slices.Contains(dry.Objects, string(s.Snapshot.ID)) {
		t.Errorf("dry run: %+v, %v", dry, err)
	}
	if _, err := h.core.Collect(t.Context(), sandbox.CollectOptions{}); err != nil {
		t.Fatal(err)
	}
	if now := h.w.Snapshots(); now != before-len(dry.Objects) || now < 3 {
		t.Errorf("of %d snapshots %d are left; the dry run named %v", before, now, dry.Objects)
	}
	close(g.open)
	waitCompacted(h, id, 1)
	if got := h.ask(id, "get"); got != "last" {
		t.Errorf("it has %q", got)
	}
}

// TestSupersededBeforeTheSwap: the sandbox hibernates again between the end of
// the copying and the swap, which must not take place.
func TestSupersededBeforeTheSwap(t *testing.T) {
	h := newHost(t)
	id := grow(h)
	g := newGate()
	h.hook.set(at("compact", true, func(context.Context) error {
		close(g.reached)
		<-g.open // whatever is cancelled
		return nil
	}))
	h.hibernate(id)
	<-g.reached
	h.ask(id, "set more")
	h.hibernate(id)
	close(g.open)
	waitCompacted(h, id, 1) // by the compaction of the new one
	if got := h.ask(id, "get"); got != "more" {
		t.Errorf("it has %q", got)
	}
	h.hibernate(id)
	settled(h)
	checkAll(h)
}

func TestDamagedPacksAreTriedOnce(t *testing.T) {
	var seen compactions
	h := newHost(t, seen.watch)
	id := grow(h)
	bad := h.get(id).Snapshot.ID // the seventh's own pack
	h.w.Damage(bad)
	faults := func() (n int) {
		done, errs := seen.all()
		for i, d := range done {
			if errs[i] != nil {
				t.Fatal(errs[i])
			}
			n += len(d.Faults)
		}
		return n
	}
	h.hibernate(id)
	waitCompacted(h, id, 2)
	wait(t, "the event", func() bool { return faults() == 1 })
	for range 2 * worthIt {
		h.ask(id, "set more")
		h.hibernate(id)
	}
	wait(t, "another compaction", func() bool { done, _ := seen.all(); return len(done) > 1 })
	if faults() != 1 {
		t.Errorf("the damaged pack was told of %d times", faults())
	}
}

// TestNoRoomForACompaction: what is reserved for hibernations stays free.
func TestNoRoomForACompaction(t *testing.T) {
	var asked atomic.Bool
	h := newHost(t, func(cfg *sandbox.Config) {
		cfg.FreeBytes = func() (int64, error) { asked.Store(true); return cfg.Reserve + 1, nil }
		cfg.Reserve = 1 << 20
	})
	id := grow(h)
	asked.Store(false)
	h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
		if s.Name == "compact" {
			t.Error("a compaction began")
		}
		return nil
	})
	h.hibernate(id)
	wait(t, "the room is looked at", asked.Load)
}

// TestCompactionWithFaults lets everything happen at every step of a
// compaction, before and after its effect.
func TestCompactionWithFaults(t *testing.T) {
	for faultName, fault := range faults {
		for _, step := range []string{"compact", "put"} {
			for _, after := range []bool{false, true} {
				t.Run(fmt.Sprint(faultName, "/", step, "/", after), func(t *testing.T) {
					h := newHost(t)
					id := grow(h)
					var compacts, faulty atomic.Bool
					reached := make(chan struct{})
					h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
						if s.Name == "compact" {
							compacts.Store(true)
						}
						if s.Name != step || s.After != after || !compacts.Load() || faulty.Swap(true) {
							return nil
						}
						defer close(reached)
						return fault.do(h)
					})
					h.hibernate(id)
					<-reached
					h.hook.set(nil)
					if fault.dies {
						h.crash()
					}
					settled(h)
					if got := h.ask(id, "get"); got != "last" {
						t.Fatalf("it has %q", got)
					}
					checkAll(h)
				})
			}
		}
	}
}

// TestCompactionRaces lets sandboxes hibernate and wake for long, with
// compactions, collections and at the end deletions in between.
func TestCompactionRaces(t *testing.T) {
	var seen compactions
	h := newHost(t, seen.watch)
	ctx := t.Context()
	cycles := 6 * worthIt
	if testing.Short() {
		cycles = 2 * worthIt
	}
	var wg sync.WaitGroup
	ids := make([]string, 6)
	for i := range ids {
		wg.Go(func() {
			s, err := h.core.Create(ctx, sandbox.CreateOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = s.ID
			for cycle := range cycles {
				want := fmt.Sprint(i, "-", cycle)
				if _, err := sandboxtest.Ask(ctx, h.core, s.ID, "set "+want); err != nil {
					t.Error(err)
				}
				if _, err := h.core.Hibernate(ctx, s.ID, sandbox.HibernateOptions{}); err != nil {
					t.Error(err)
				}
				if cycle%3 == 0 {
					continue
				}
				if got, err := sandboxtest.Ask(ctx, h.core, s.ID, "get"); err != nil || got != want {
					t.Errorf("%d: %q, %v", i, got, err)
				}
			}
		})
	}
	stop, stopped := context.WithCancel(ctx)
	var collector sync.WaitGroup
	collector.Go(func() {
		for stop.Err() == nil {
			if _, err := h.core.Collect(ctx, sandbox.CollectOptions{}); err != nil && !errors.Is(err, sandbox.ErrUnavailable) {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	for _, id := range ids {
		h.hibernate(id)
		wait(t, "nothing is left to be compacted", func() bool { return h.w.Packs(h.get(id).Snapshot.ID) <= worthIt })
		if err := h.core.Delete(ctx, id); err != nil {
			t.Error(err)
		}
	}
	stopped()
	collector.Wait()
	done, errs := seen.all()
	if len(done) == 0 || slices.ContainsFunc(errs, func(err error) bool { return err != nil }) {
		t.Errorf("%d compactions, errors %v", len(done), errs)
	}
	wait(t, "only the base is left", func() bool { return h.w.Snapshots() == 1 })
}
