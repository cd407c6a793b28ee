package shim

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/pager"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// learnFor is how long after a resume what the guest touches still counts as
// its working set.
const learnFor = 3 * time.Second

// workset prefetches the working set of the snapshot that a machine resumes
// from, and learns the one of its next resume. What goes wrong with either
// only costs time later. The zero value, of a machine that booted, does nothing.
type workset struct {
	prefetched atomic.Int64 // bytes
	background sync.WaitGroup

	mu      sync.Mutex
	source  *resumed // nil before start and after stop
	cancel  context.CancelFunc
	learned bool
	runs    []page.Run
}

// resumed is a machine and the snapshot that it was resumed from.
type resumed struct {
	repo    *snapshot.Repository
	id      snapshot.ID
	slot    *pager.Slot
	machine vmm.Machine
	carried []page.Run // working set of the snapshot
	missing bool       // it has none yet
}

// start begins the prefetch and the learning. It returns a warning if the
// snapshot's working set is damaged.
func (w *workset) start(repo *snapshot.Repository, snap *snapshot.Snapshot, slot *pager.Slot, machine vmm.Machine) (warning string) {
	ctx, cancel := context.WithCancel(context.Background())
	src := &resumed{repo: repo, id: snap.Metadata().ID, slot: slot, machine: machine}
	var err error
	src.carried, err = snap.WorkingSet(ctx)
	if src.missing = errors.Is(err, snapshot.ErrMissing); err != nil && !src.missing {
		warning = "nothing was prefetched: " + err.Error()
	}
	w.mu.Lock()
	w.source, w.cancel = src, cancel
	w.mu.Unlock()
	if len(src.carried) > 0 {
		w.background.Go(func() {
			n, _ := slot.Prefetch(ctx, src.carried) // a page that can't be read fails where it is needed
			w.prefetched.Store(n)
		})
	}
	w.background.Go(func() {
		select {
		case <-time.After(learnFor):
			w.learn(ctx)
		case <-ctx.Done():
		}
	})
	return warning
}

// learn settles, once, what the working set is: what was prefetched and what
// was read besides, as far as the guest touched it or its neighbourhood. A
// snapshot that had none gets this one.
func (w *workset) learn(ctx context.Context) {
	src, runs := w.settle(ctx)
	if src != nil && src.missing && len(runs) > 0 {
		_ = src.repo.SaveWorkingSet(ctx, src.id, runs)
	}
}

// settle returns the working set and whose it is, to the first who asks.
func (w *workset) settle(ctx context.Context) (*resumed, []page.Run) {
	w.mu.Lock()
	defer w.mu.Unlock()
	src := w.source
	if w.learned || src == nil {
		return nil, nil
	}
	present, err := src.machine.PresentPages(ctx)
	if err != nil {
		return nil, nil // it has ended
	}
	w.learned, w.runs = true, intersect(append(slices.Clone(src.carried), src.slot.Touched()...), present)
	return src, w.runs
}

// get returns the working set, nil while it is not learned.
func (w *workset) get() []page.Run {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.runs
}

// stop makes what start began end soon.
func (w *workset) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cancel != nil {
		w.cancel()
	}
	w.source = nil
}

// close ends what start began. A push under way ends with the pager, at the latest.
func (w *workset) close() {
	w.stop()
	w.background.Wait()
}

// intersect returns the pages of ordered that are in sorted as well, each once,
// in the order of the first.
func intersect(ordered, sorted []page.Run) []page.Run {
	var out []page.Run
	seen := map[uint64]struct{}{}
	for _, r := range ordered {
		for p := r.First; p < r.End(); p++ {
			if _, twice := seen[p]; twice || !contains(sorted, p) {
				continue
			}
			seen[p] = struct{}{}
			out = page.Append(out, p)
		}
	}
	return out
}

func contains(sorted []page.Run, p uint64) bool {
	_, found := slices.BinarySearchFunc(sorted, p, func(r page.Run, p uint64) int {
		switch {
		case r.End() <= p:
			return -1
		case r.First > p:
			return 1
		}
		return 0
	})
	return found
}
