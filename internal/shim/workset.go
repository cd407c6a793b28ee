package shim

import (
	"context"
	"errors"
	"slices"
	"sync"
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
	background sync.WaitGroup

	awake chan struct{} // closed when the guest runs

	mu      sync.Mutex
	source  *resumed // nil before start and after stop
	cancel  context.CancelFunc
	learned bool
	loading uint64 // pages demanded before the guest ran
	set     snapshot.WorkingSet
}

// resumed is a machine and the snapshot that it was resumed from.
type resumed struct {
	repo    *snapshot.Repository
	id      snapshot.ID
	slot    *pager.Slot
	machine vmm.Machine
	carried snapshot.WorkingSet // of the snapshot
	members []page.Run          // of it
	missing bool                // it has none yet
	since   time.Time
}

// leadPages is how much is pushed before the guest runs: the pages that the load of
// the device state reads, and those that the guest was seen to wait for. More would
// take processors from the load, whose end the guest waits for anyway.
const leadPages = 128

// heldPages is how many pages at the begin of a set keep their place: those that
// the load reads are among them.
const heldPages = 64

// headPages is how much is pushed next, on its own because the order within a
// prefetch is a rough one: pages that the guest was seen to wait for.
const headPages = 256

// start begins the prefetch, unless it is not wanted, and the learning. It
// returns a warning if the snapshot's working set is damaged.
func (w *workset) start(repo *snapshot.Repository, snap *snapshot.Snapshot, slot *pager.Slot, machine vmm.Machine, prefetch bool) (warning string) {
	ctx, cancel := context.WithCancel(context.Background())
	src := &resumed{repo: repo, id: snap.Metadata().ID, slot: slot, machine: machine, since: time.Now()}
	var err error
	src.carried, err = snap.WorkingSet(ctx)
	if src.missing = errors.Is(err, snapshot.ErrMissing); err != nil && !src.missing {
		warning = "nothing was prefetched: " + err.Error()
	}
	src.members = src.carried.Members()
	slot.Expect(src.members)
	w.mu.Lock()
	w.source, w.cancel = src, cancel
	w.mu.Unlock()
	w.awake = make(chan struct{})
	if prefetch && len(src.members) > 0 {
		w.background.Go(func() { w.prefetch(ctx, src, snap.Remote()) })
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

// prefetch pushes the working set: all of it at once where it comes from another
// machine, whose answers take longer than the start.
func (w *workset) prefetch(ctx context.Context, src *resumed, remote bool) {
	lead, rest := src.members, []page.Run(nil)
	if !remote {
		lead, rest = page.Split(src.members, leadPages)
	}
	_, _ = src.slot.Prefetch(ctx, lead) // a page that can't be read fails where it is needed
	select {
	case <-w.awake:
		head, rest := page.Split(rest, headPages)
		_, _ = src.slot.Prefetch(ctx, head)
		_, _ = src.slot.Prefetch(ctx, rest)
	case <-ctx.Done():
	}
}

// loaded says that the device state is loaded into the machine of start: what is
// read from now on its guest reads.
func (w *workset) loaded() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.source != nil {
		w.loading = page.Total(w.source.slot.Touched())
	}
}

// runs says that the guest of start runs.
func (w *workset) runs() { close(w.awake) }

// learn settles, once, what the working set is. A snapshot that had none gets
// this one.
func (w *workset) learn(ctx context.Context) {
	src, set := w.settle(ctx)
	if src != nil && src.missing && len(set) > 0 {
		_ = src.repo.SaveWorkingSet(ctx, src.id, set)
	}
}

// settle returns the working set and whose it is, to the first who asks.
func (w *workset) settle(ctx context.Context) (*resumed, snapshot.WorkingSet) {
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
	w.learned, w.set = true, evolve(src.carried, src.slot.Touched(), w.loading, present, time.Since(src.since) >= learnFor)
	return src, w.set
}

// get returns the working set, nil while it is not learned.
func (w *workset) get() snapshot.WorkingSet {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.set
}

// report compares what was prefetched with what the guest touched since it was
// resumed from parent. Of a machine that booted, or was parked since, there is
// nothing to say.
func (w *workset) report(ctx context.Context, parent *snapshot.Snapshot) *WorkingSetReport {
	w.mu.Lock()
	src := w.source
	w.mu.Unlock()
	if src == nil || parent == nil || src.id != parent.Ref().ID {
		return nil
	}
	present, err := src.machine.PresentPages(ctx)
	if err != nil {
		return nil // the capture fails anyway
	}
	stats := src.slot.Stats()
	return &WorkingSetReport{
		Pages: int64(page.Total(src.members)), Prefetched: stats.PushedPages,
		Late: stats.LatePages, Missed: stats.DemandPages - stats.LatePages,
		Mispredicted: stats.PushedPages - int64(common(src.slot.Pushed(), present)),
	}
}

// carriedBytes returns the size of the working set that the machine's snapshot carries.
func (w *workset) carriedBytes() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.source == nil {
		return 0
	}
	return int64(page.Total(w.source.members)) * page.Size
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

// maxIdle is for how many whole lives in a row a guest may leave a member of its
// working set alone before the page falls out.
const maxIdle = 3

// evolve returns the working set after a life: carried is the one that it began
// with, demanded are the pages that were read without having been pushed, in that
// order, present those that the guest touched, or their neighbours.
//
// A member stays unless it was left alone too often. What is new becomes a
// candidate, and a member when it is demanded again in the next life: most pages
// that are touched once are never touched again. Members that were needed before
// they were pushed go to the front, but behind the first heldPages: those stay, and
// become the first loading pages of demanded, which were read for the device state,
// before the guest ran. A short life, which did not last and touched
// less than half of the set, takes nothing away.
func evolve(carried snapshot.WorkingSet, demanded []page.Run, loading uint64, present []page.Run, lasted bool) snapshot.WorkingSet {
	type member struct {
		page uint64
		idle uint8
	}
	known := idleTimes(carried)
	first := len(known) == 0
	var lead, late, kept, promoted, candidates []member
	var seen uint64
	for _, r := range demanded {
		for p := r.First; p < r.End(); p++ {
			seen++
			if !contains(present, p) {
				continue // readahead that nobody used
			}
			idle, old := known[p]
			delete(known, p)
			switch {
			case seen <= loading:
				lead = append(lead, member{p, 0})
			case !old && !first:
				candidates = append(candidates, member{p, snapshot.Candidate})
			case old && idle == snapshot.Candidate:
				promoted = append(promoted, member{p, 0})
			default:
				late = append(late, member{p, 0})
			}
		}
	}
	whole := lasted || 2*common(carried.Members(), present) >= page.Total(carried.Members())
	seen = 0
	for _, t := range carried {
		for p := t.First; p < t.End(); p++ {
			seen++
			if _, left := known[p]; !left {
				continue
			}
			delete(known, p)
			idle := t.Idle
			switch {
			case idle == snapshot.Candidate:
				if !whole {
					candidates = append(candidates, member{p, idle})
				}
				continue
			case contains(present, p):
				idle = 0
			case whole:
				if idle++; idle == maxIdle {
					continue
				}
			}
			if seen <= heldPages {
				lead = append(lead, member{p, idle})
			} else {
				kept = append(kept, member{p, idle})
			}
		}
	}
	var next snapshot.WorkingSet
	for _, m := range slices.Concat(lead, late, kept, promoted, candidates) {
		next = next.Append(m.page, m.idle)
	}
	return next
}

// idleTimes returns the pages of a set and their Idle.
func idleTimes(set snapshot.WorkingSet) map[uint64]uint8 {
	known := map[uint64]uint8{}
	for _, t := range set {
		for p := t.First; p < t.End(); p++ {
			known[p] = t.Idle
		}
	}
	return known
}

// common counts the pages of runs that are in sorted as well.
func common(runs, sorted []page.Run) (n uint64) {
	for _, r := range runs {
		for p := r.First; p < r.End(); p++ {
			if contains(sorted, p) {
				n++
			}
		}
	}
	return n
}

// contains tells whether a page is in runs, which are sorted and joined.
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
