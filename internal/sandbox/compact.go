package sandbox

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Compaction replaces a sandbox's snapshot by one that holds the same in fewer
// or better filled packs. It runs in the background behind hibernations, one at
// a time, and holds nothing that a request could wait for: the copying needs no
// turn, and only the swap of the record takes one. A sandbox that is woken meanwhile
// resumes from the old snapshot, which its shim holds open; its record is
// swapped all the same, and its next capture is compared with the new one.

// compactor knows which sandboxes have a new snapshot, and which is compacted.
type compactor struct {
	kick chan struct{}

	mu      sync.Mutex
	queue   []*entry
	current *entry // whose snapshot is being compacted
	cancel  context.CancelCauseFunc

	unreadable map[snapshot.ID]struct{} // packs that a compaction could not read whole; its goroutine's own

	packsMu sync.Mutex
	packs   map[snapshot.ID][]snapshot.ID // of the snapshots that records name, as far as they were read
}

func (c *compactor) init() {
	c.kick = make(chan struct{}, 1)
	c.packs, c.unreadable = map[snapshot.ID][]snapshot.ID{}, map[snapshot.ID]struct{}{}
}

// add says that e has a new snapshot. A compaction of its last one is of no use any more.
func (c *compactor) add(e *entry) {
	c.stop(e, errSuperseded)
	c.mu.Lock()
	if !slices.Contains(c.queue, e) {
		c.queue = append(c.queue, e)
	}
	c.mu.Unlock()
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

// stop cancels a compaction of e's snapshot.
func (c *compactor) stop(e *entry, cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current == e {
		c.cancel(cause)
	}
}

// next returns the sandbox whose turn it is, nil if there is none.
func (c *compactor) next() *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		return nil
	}
	e := c.queue[0]
	c.queue = c.queue[1:]
	return e
}

// begin makes e the one that is compacted, until the returned function is called.
func (c *compactor) begin(ctx context.Context, e *entry) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	c.mu.Lock()
	c.current, c.cancel = e, cancel
	c.mu.Unlock()
	return ctx, func() {
		c.mu.Lock()
		c.current, c.cancel = nil, nil
		c.mu.Unlock()
		cancel(nil)
	}
}

// compactAll compacts what is added, until the core closes.
func (c *Core) compactAll() {
	ctx := c.untilClosed()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.compactor.kick:
		}
		for e := c.compactor.next(); e != nil && ctx.Err() == nil; e = c.compactor.next() {
			done, err := c.compact(ctx, e)
			if errors.Is(err, errSuperseded) || errors.Is(err, errDelete) || errors.Is(err, errClosing) {
				continue
			}
			if err != nil || done.WrittenBytes > 0 || len(done.Faults) > 0 {
				c.cfg.Events.compact(e.id, done, err)
			}
		}
	}
}

// compact compacts the sandbox's snapshot if that is worth it.
func (c *Core) compact(ctx context.Context, e *entry) (snapshot.Compacted, error) {
	ctx, end := c.compactor.begin(ctx, e)
	defer end()
	c.measureStored(ctx, e)
	ref, ok := e.compactable()
	if !ok {
		return snapshot.Compacted{}, nil
	}
	shared, worth, err := c.worthCompacting(ctx, e, ref)
	if err != nil || !worth {
		return snapshot.Compacted{}, causeOf(ctx, err)
	}
	id, err := c.mint.take(ctx)
	if err != nil {
		return snapshot.Compacted{}, err
	}
	defer c.mint.put(id)
	if err := failpoint.Hit(ctx, fpCompactBegun); err != nil {
		return snapshot.Compacted{}, err
	}
	now, meta, done, err := c.cfg.Snapshots.Compact(ctx, snapshot.CompactInput{Ref: ref, ID: id, Shared: shared, Pace: c.giveWay})
	if err != nil {
		return snapshot.Compacted{}, causeOf(ctx, err)
	}
	for pack := range done.Faults {
		c.compactor.unreadable[pack] = struct{}{}
	}
	if now == ref {
		return done, nil
	}
	if err := failpoint.Hit(ctx, fpCompactWritten); err != nil {
		c.trash.add(id)
		return snapshot.Compacted{}, err
	}
	if err := c.swapSnapshot(ctx, e, ref, now, meta); err != nil {
		return snapshot.Compacted{}, err
	}
	c.measureStored(ctx, e)
	return done, failpoint.Hit(ctx, fpCompactSwapped)
}

// compactable returns the snapshot of a sandbox that is its own, and not one
// of its checkpoints: that one stays as it is.
func (e *entry) compactable() (snapshot.Ref, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.unsettled || e.gone || e.doomed > 0 || e.rec.Fresh || e.rec.Snapshot == nil || e.rec.kept(e.rec.Snapshot.ID) ||
		e.rec.State != StateStandby && e.rec.State != StateRunning {
		return snapshot.Ref{}, false
	}
	return *e.rec.Snapshot, true
}

// swapSnapshot swaps the snapshot that the sandbox's record names for one that holds
// the same. What the record does not name then is thrown away.
func (c *Core) swapSnapshot(ctx context.Context, e *entry, old, now snapshot.Ref, meta snapshot.Metadata) error {
	// What has begun goes on without its caller, who must know how it ended.
	err := c.run(context.WithoutCancel(ctx), e, opCheck, func(ctx context.Context, _ *operation) error {
		if ref, ok := e.compactable(); !ok || ref != old {
			return errSuperseded
		}
		return c.change(ctx, e, func(r *record) { r.swap(now, meta) })
	})
	switch {
	case err == nil:
		c.trash.add(old.ID)
	case errors.Is(err, errSuperseded), errors.Is(err, ErrNotFound), errors.Is(err, ErrConflict):
		c.trash.add(now.ID)
		return errSuperseded
	case isUnwritten(err):
		c.trash.add(now.ID)
	default: // nobody knows which one the record names: that is for the collection
	}
	return err
}

// worthCompacting reports whether a compaction of the snapshot is worth it and
// there is room for it; shared says which packs it must leave alone.
func (c *Core) worthCompacting(ctx context.Context, e *entry, ref snapshot.Ref) (shared func(snapshot.ID) bool, worth bool, err error) {
	// Most sandboxes share packs with their template only, so most often this settles it.
	bases := c.basePacks()
	shared = func(pack snapshot.ID) bool { return has(bases, pack) || has(c.compactor.unreadable, pack) }
	f, err := c.cfg.Snapshots.Footprint(ctx, ref, shared)
	if err != nil {
		return nil, false, err
	}
	if f.Rewrite() == 0 {
		return nil, false, nil
	}
	users := c.packUsers(ctx)
	shared = func(pack snapshot.ID) bool { return users[pack] > 1 || has(c.compactor.unreadable, pack) }
	if f, err = c.cfg.Snapshots.Footprint(ctx, ref, shared); err != nil || f.Rewrite() == 0 {
		return nil, false, err
	}
	if c.cfg.FreeBytes != nil {
		free, err := c.cfg.FreeBytes()
		if err != nil {
			return nil, false, unavailable(err, "look at the free space of the data folder")
		}
		if free < c.cfg.Reserve+f.Rewrite()+f.RecordBytes {
			c.log.Debug("no room for a compaction", keySandbox, e.id, "bytes", f.Rewrite())
			return nil, false, nil
		}
	}
	return shared, true, nil
}

// basePacks returns the packs that templates brought.
func (c *Core) basePacks() map[snapshot.ID]struct{} {
	bases := map[snapshot.ID]struct{}{}
	for _, v := range c.versions() {
		v.roots(bases, bases)
	}
	return bases
}

// packUsers returns, for each pack that a record's snapshot or checkpoint uses,
// how many of these there are. It reads each manifest once.
func (c *Core) packUsers(ctx context.Context) map[snapshot.ID]int {
	names := map[snapshot.Ref]int{}
	for _, e := range c.all() {
		e.mu.Lock()
		if s := e.rec.Snapshot; s != nil {
			names[*s]++
		}
		for _, c := range e.rec.Checkpoints {
			names[c.Snapshot]++
		}
		e.mu.Unlock()
	}
	for _, v := range c.versions() {
		for _, b := range v.Bases {
			if b.Snapshot != nil {
				names[*b.Snapshot]++
			}
		}
	}
	c.compactor.packsMu.Lock()
	defer c.compactor.packsMu.Unlock()
	known, users := c.compactor.packs, map[snapshot.ID]int{}
	c.compactor.packs = make(map[snapshot.ID][]snapshot.ID, len(names))
	for ref, n := range names {
		packs, ok := known[ref.ID]
		if !ok {
			named, err := c.cfg.Snapshots.Packs(ctx, ref)
			if err != nil {
				// Its sandbox has another one by now, or will tell what is wrong.
				// What a collection deletes does not depend on this.
				c.log.Debug("the packs of a snapshot are not known", keySnapshot, ref.ID, keyError, err)
				continue
			}
			for _, p := range named {
				packs = append(packs, p.ID)
			}
		}
		c.compactor.packs[ref.ID] = packs
		for _, pack := range packs {
			users[pack] += n
		}
	}
	return users
}

// giveWayDelay is how long a compaction waits before each MiB while sandboxes
// start or hibernate.
const giveWayDelay = 20 * time.Millisecond

// giveWay holds a compaction up while the host has something better to do. It
// does not stop it: on a host that is never idle compaction is needed most.
func (c *Core) giveWay(ctx context.Context) error {
	if err := failpoint.Hit(ctx, fpCompactCopying); err != nil {
		return err
	}
	c.mu.Lock()
	busy := len(c.ops) > 0
	c.mu.Unlock()
	if !busy {
		return nil
	}
	select {
	case <-time.After(giveWayDelay):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
