package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Verify is what a verification of the store found.
type Verify struct {
	Objects int
	Bytes   int64
	Faults  []string // one line each, naming the object
}

// VerifyOptions says what to verify. The zero value is the usual way.
type VerifyOptions struct {
	Remote bool // read everything in the remote store, too
}

// StoreVerify reads everything that the store and the templates hold and
// checks its digests. progress (which may be nil) is told the bytes read of
// those to read, as far as that is known. Damage is no error of the verification: it is in Faults.
func (c *Core) StoreVerify(ctx context.Context, o VerifyOptions, progress func(done, total int64)) (Verify, error) {
	if progress == nil {
		progress = func(int64, int64) {}
	}
	if !o.Remote {
		return c.verifyLocal(ctx, progress)
	}
	if c.cfg.Tier == nil {
		return Verify{}, noRemote("there is nothing to verify")
	}
	var local int64 // bytes
	v, err := c.verifyLocal(ctx, func(done, total int64) {
		local = total
		progress(done, total)
	})
	if err != nil {
		return v, err
	}
	objects, size, faults, err := c.cfg.Tier.VerifyRemote(ctx, func(done, total int64) { progress(local+done, local+total) })
	if err != nil {
		return v, unavailable(err, "verify the store")
	}
	v.Objects += objects
	v.Bytes += size
	for _, f := range faults {
		v.Faults = append(v.Faults, f.Error())
	}
	return v, nil
}

// verifyLocal verifies the local disk.
func (c *Core) verifyLocal(ctx context.Context, progress func(done, total int64)) (Verify, error) {
	versions := c.versions()
	var extra int64
	for _, v := range versions {
		extra += v.BaseBytes
	}
	var last int64
	objects, size, faults, err := c.cfg.Snapshots.Verify(ctx, func(done, total int64) {
		last = total
		progress(done, total+extra)
	})
	if err != nil {
		return Verify{}, unavailable(err, "verify the store")
	}
	v := Verify{Objects: objects, Bytes: size}
	for _, f := range faults {
		v.Faults = append(v.Faults, f.Error())
	}
	lost, err := c.lostSnapshots(ctx)
	if err != nil {
		return v, unavailable(err, "verify the store")
	}
	v.Faults = append(v.Faults, lost...)
	for _, t := range versions {
		if err := ctx.Err(); err != nil {
			return v, unavailable(context.Cause(ctx), "verify the store")
		}
		v.Objects++
		v.Bytes += t.BaseBytes
		last += t.BaseBytes
		if err := c.verifyTemplate(t); err != nil {
			v.Faults = append(v.Faults, err.Error())
		}
		progress(last, last)
	}
	return v, nil
}

// lostSnapshots tells which snapshots the records name and the store has not:
// nothing in the store itself shows that.
func (c *Core) lostSnapshots(ctx context.Context) (faults []string, err error) {
	needed, _ := c.roots()
	for _, id := range slices.Sorted(maps.Keys(needed)) {
		_, err := c.cfg.Snapshots.Find(ctx, id)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if still, _ := c.roots(); errors.Is(err, snapshot.ErrMissing) && has(still, id) {
			faults = append(faults, fmt.Sprintf("snapshot %s, which a record names: %v", id, err))
		}
	}
	return faults, nil
}

func has(set map[snapshot.ID]struct{}, id snapshot.ID) bool {
	_, ok := set[id]
	return ok
}

func (c *Core) verifyTemplate(v namedVersion) error {
	art, err := c.cfg.Builder.Load(c.templateDir(v.name, v.Number))
	if err == nil {
		err = c.cfg.Builder.Verify(art)
	}
	if err == nil && (art.BaseDigest != v.BaseDigest || art.KernelDigest != v.KernelDigest) {
		err = fmt.Errorf("the base image or kernel is not the one that was built")
	}
	if err != nil {
		return fmt.Errorf("template %s version %d: %w", v.name, v.Number, err)
	}
	return nil
}

// Deleting a snapshot and collecting take turns: a collection that saw neither
// a snapshot just deleted nor its successor just made would take the packs
// that both use for garbage.

// CollectOptions says how to collect. The zero value is the usual way.
type CollectOptions struct {
	DryRun bool // delete nothing, only find out what would go
}

// Collected says what a collection deleted, or would delete.
type Collected struct {
	DryRun  bool
	Tiers   []CollectedTier // the local one first
	Objects []string        // keys, of a dry run
}

// CollectedTier is what went from one tier.
type CollectedTier struct {
	Tier    string
	Objects int
	Bytes   int64
	InUse   int    // left, since somebody has them open
	Error   string // why this tier was not collected, "" if it was; another collection will
}

// Collect deletes what no record needs any more and nobody has open, from the
// local disk and then from the remote store. It does nothing, and says so,
// while a sandbox is not settled. That the remote store cannot be reached is
// in the result, and no error.
func (c *Core) Collect(ctx context.Context, o CollectOptions) (Collected, error) {
	c.storeTurn.Lock()
	defer c.storeTurn.Unlock()
	keep := c.mint.hold()
	defer c.mint.release()
	if n := c.unsettled(); n > 0 {
		return Collected{}, unavailable(nil, "%d sandboxes are not settled, nothing is collected until they are", n)
	}
	needed, announced := c.roots()
	keep = slices.AppendSeq(keep, maps.Keys(announced))
	roots := slices.Collect(maps.Keys(needed))
	local, err := c.collectLocal(ctx, roots, keep, o.DryRun)
	if err != nil {
		return Collected{}, err
	}
	out := Collected{DryRun: o.DryRun, Objects: local.Objects, Tiers: []CollectedTier{{
		Tier: tierNameLocal, Objects: local.Manifests + local.States + local.Packs, Bytes: local.Bytes, InUse: local.InUse}}}
	if c.cfg.Tier != nil {
		remote, err := c.cfg.Tier.Collect(ctx, roots, keep, o.DryRun)
		t := CollectedTier{Tier: tierRemote, Objects: remote.Objects, Bytes: remote.Bytes, InUse: remote.InUse}
		if err != nil {
			t.Error = err.Error()
		}
		out.Tiers, out.Objects = append(out.Tiers, t), append(out.Objects, remote.Keys...)
	}
	return out, nil
}

// collectLocal collects the local disk, or only finds out what would go.
func (c *Core) collectLocal(ctx context.Context, roots, keep []snapshot.ID, dryRun bool) (snapshot.Collected, error) {
	if dryRun {
		garbage, err := c.cfg.Snapshots.Garbage(ctx, roots, keep)
		if err != nil {
			err = unavailable(err, "look for garbage")
		}
		return garbage, err
	}
	deleted, err := c.cfg.Snapshots.Collect(ctx, roots, keep)
	if err != nil {
		err = unavailable(err, "collect garbage")
	}
	c.cfg.Events.collect(deleted, err)
	return deleted, err
}

// unsettled counts the sandboxes whose records may not be what memory says.
func (c *Core) unsettled() int {
	n := 0
	for _, e := range c.all() {
		e.mu.Lock()
		if e.unsettled {
			n++
		}
		e.mu.Unlock()
	}
	return n
}

// mint gives out the ids of snapshots. A collection must not take a snapshot
// that is being made for garbage, so it keeps every id that is in use, and
// those that will be given out while it runs: they are fixed beforehand.
type mint struct {
	mu      sync.Mutex
	used    map[snapshot.ID]struct{}
	reserve []snapshot.ID // while a collection runs: what is left to give out
	held    chan struct{} // while a collection runs; closed at its end
}

// mintReserve is how many captures may begin while one collection runs.
const mintReserve = 1024

func (m *mint) init() { m.used = map[snapshot.ID]struct{}{} }

// take returns a fresh id, which no collection touches until put.
func (m *mint) take(ctx context.Context) (snapshot.ID, error) {
	for {
		m.mu.Lock()
		held := m.held
		var id snapshot.ID
		switch n := len(m.reserve); {
		case held == nil:
			id = snapshot.NewID()
		case n > 0:
			id, m.reserve = m.reserve[n-1], m.reserve[:n-1]
		}
		if id != "" {
			m.used[id] = struct{}{}
			m.mu.Unlock()
			return id, nil
		}
		m.mu.Unlock()
		select {
		case <-held:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

// put says that a record names the id or that nobody will write to it any more.
func (m *mint) put(id snapshot.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.used, id)
}

// hold begins a collection and returns the ids that it must keep. One
// collection runs at a time.
func (m *mint) hold() []snapshot.ID {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held = make(chan struct{})
	var keep []snapshot.ID
	for id := range m.used {
		keep = append(keep, id)
	}
	for range mintReserve {
		m.reserve = append(m.reserve, snapshot.NewID())
	}
	return append(keep, m.reserve...)
}

// release ends a collection.
func (m *mint) release() {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.held)
	m.held, m.reserve = nil, nil
}

// trash holds snapshots that a record no longer names.
type trash struct {
	mu   sync.Mutex
	ids  []snapshot.ID
	kick chan struct{}
}

// add throws snapshots away; "" is none.
func (t *trash) add(ids ...snapshot.ID) {
	t.mu.Lock()
	t.ids = append(t.ids, slices.DeleteFunc(ids, func(id snapshot.ID) bool { return id == "" })...)
	t.mu.Unlock()
	t.wake()
}

func (t *trash) wake() {
	select {
	case t.kick <- struct{}{}:
	default:
	}
}

func (t *trash) take() []snapshot.ID {
	t.mu.Lock()
	defer t.mu.Unlock()
	ids := t.ids
	t.ids = nil
	return ids
}

// emptyTrash deletes, one after the other, what was thrown away, and collects
// some time after the last deletion. It begins with a collection of what a
// daemon that died has left.
func (c *Core) emptyTrash() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-c.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	timer := time.NewTimer(c.cfg.CollectDelay)
	defer timer.Stop()
	armed := true
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.trash.kick:
			c.dropTrash(ctx)
			if !armed {
				timer.Reset(c.cfg.CollectDelay)
				armed = true
			}
		case <-timer.C:
			armed = false
			if _, err := c.Collect(ctx, CollectOptions{}); err != nil && ctx.Err() == nil {
				c.log.Debug("collection put off", keyError, err)
				timer.Reset(c.cfg.CollectDelay)
				armed = true
			}
		}
	}
}

// dropTrash deletes the snapshots that were thrown away unless a record names
// one of them after all.
func (c *Core) dropTrash(ctx context.Context) {
	ids := c.trash.take()
	if len(ids) == 0 {
		return
	}
	c.storeTurn.Lock()
	defer c.storeTurn.Unlock()
	needed, announced := c.roots()
	for _, id := range ids {
		_, isNeeded := needed[id]
		_, isAnnounced := announced[id]
		if isNeeded || isAnnounced {
			continue
		}
		if err := c.cfg.Snapshots.Delete(ctx, id); err != nil {
			c.log.Debug("a snapshot is left for the collection", keySnapshot, id, keyError, err)
		}
	}
}

// removeAll removes a folder that no record names.
func (c *Core) removeAll(dir string) {
	if err := os.RemoveAll(dir); err != nil {
		c.log.Warn("a folder is left", "folder", dir, keyError, err)
	}
}
