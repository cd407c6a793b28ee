package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// tierNameLocal is the name of the local tier.
const tierNameLocal = "local"

// StoreStatus says what the store holds. The counts are of the local disk.
type StoreStatus struct {
	Packs         int
	PackBytes     int64
	Manifests     int
	ManifestBytes int64
	States        int
	StateBytes    int64
	BaseImages    int
	BaseBytes     int64
	FreeBytes     int64 // on the store's file system, 0 if it is not watched

	Tiers     []TierStatus   // the local one first
	Sandboxes []StoreSandbox // the largest first
}

// TierStatus says what one tier holds.
type TierStatus struct {
	Tier    string // "local" or "remote"
	Where   string // folder or URL
	Objects int
	Bytes   int64
	Budget  int64  // bytes, 0: none
	Pending int    // snapshots that wait for their upload
	Error   string // why the tier cannot be looked at, "" if it can
}

// StoreSandbox says what a sandbox takes up in the store.
type StoreSandbox struct {
	ID          string
	Name        string
	Packs       int    // that its manifest names
	LiveBytes   int64  // pages of its memory image in packs that no template shares
	StoredBytes int64  // those packs with their dead pages, state and manifest
	LocalBytes  int64  // of all its packs, shared ones too, what is on the local disk
	Replication string // state of a Replication, "" without a remote store
	Error       string // why it could not be measured, "" if it was
}

// StoreStatus looks through the store. It reads the manifest of every
// sandbox's snapshot.
func (c *Core) StoreStatus(ctx context.Context) (StoreStatus, error) {
	st, err := c.cfg.Snapshots.Status(ctx)
	if err != nil {
		return StoreStatus{}, unavailable(err, "look through the store")
	}
	s := StoreStatus{
		Packs: st.Packs.Objects, PackBytes: st.Packs.Bytes, Manifests: st.Manifests.Objects, ManifestBytes: st.Manifests.Bytes,
		States: st.States.Objects, StateBytes: st.States.Bytes,
	}
	for _, v := range c.versions() {
		s.BaseImages++
		s.BaseBytes += v.BaseBytes
	}
	if c.cfg.FreeBytes != nil {
		if s.FreeBytes, err = c.cfg.FreeBytes(); err != nil {
			return StoreStatus{}, unavailable(err, "look at the free space of the data folder")
		}
	}
	if s.Tiers, err = c.tiers(ctx, st); err != nil {
		return StoreStatus{}, unavailable(err, "look through the store")
	}
	if s.Sandboxes, err = c.measure(ctx); err != nil {
		return StoreStatus{}, unavailable(err, "measure the sandboxes")
	}
	return s, nil
}

// Tiers returns what each tier of the store holds. It lists the objects of
// each, those of a remote store as well.
func (c *Core) Tiers(ctx context.Context) ([]TierStatus, error) {
	var st snapshot.Status
	var err error
	if c.cfg.Tier == nil {
		if st, err = c.cfg.Snapshots.Status(ctx); err != nil {
			return nil, unavailable(err, "look through the store")
		}
	}
	list, err := c.tiers(ctx, st)
	if err != nil {
		return nil, unavailable(err, "look through the store")
	}
	return list, nil
}

// tiers returns what each tier holds; st is what the local one does.
func (c *Core) tiers(ctx context.Context, st snapshot.Status) ([]TierStatus, error) {
	if c.cfg.Tier == nil {
		local := TierStatus{Tier: tierNameLocal, Where: c.cfg.StoreDir}
		for _, u := range []snapshot.Usage{st.Packs, st.Manifests, st.States, st.Worksets} {
			local.Objects += u.Objects
			local.Bytes += u.Bytes
		}
		return []TierStatus{local}, nil
	}
	usage, err := c.cfg.Tier.Usage(ctx)
	if err != nil {
		return nil, err
	}
	var list []TierStatus
	for _, u := range usage {
		t := TierStatus{Tier: u.Tier, Where: u.Where, Objects: u.Objects, Bytes: u.Bytes, Budget: u.Budget, Pending: u.Pending}
		if t.Tier == tierNameLocal {
			t.Where = c.cfg.StoreDir
		}
		if u.Err != nil {
			t.Error = u.Err.Error()
		}
		list = append(list, t)
	}
	return list, nil
}

// measure returns what each sandbox takes up, the largest first.
func (c *Core) measure(ctx context.Context) ([]StoreSandbox, error) {
	shared, err := c.sharedPacks(ctx)
	if err != nil {
		return nil, err
	}
	entries := c.all()
	list := make([]StoreSandbox, len(entries))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(c.cfg.Parallel)
	for i, e := range entries {
		group.Go(func() error {
			list[i] = c.measureOne(ctx, e, shared)
			return ctx.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	slices.SortFunc(list, func(a, b StoreSandbox) int {
		return cmp.Or(cmp.Compare(b.StoredBytes, a.StoredBytes), strings.Compare(a.ID, b.ID))
	})
	return list, nil
}

// sharedPacks returns the packs that base snapshots of templates name.
func (c *Core) sharedPacks(ctx context.Context) (map[snapshot.ID]struct{}, error) {
	shared := map[snapshot.ID]struct{}{}
	for _, v := range c.versions() {
		for _, b := range v.finished().Bases {
			packs, err := c.cfg.Snapshots.Packs(ctx, *b.Snapshot)
			if err != nil {
				return nil, fmt.Errorf("template %s version %d: %w", v.name, v.Number, err)
			}
			for _, p := range packs {
				shared[p.ID] = struct{}{}
			}
		}
	}
	return shared, nil
}

// measureOne returns what a sandbox takes up. One whose snapshot is its
// template's takes up nothing of its own.
func (c *Core) measureOne(ctx context.Context, e *entry, shared map[snapshot.ID]struct{}) StoreSandbox {
	view := c.view(e)
	s := StoreSandbox{ID: view.ID, Name: view.Name}
	if view.Replication != nil {
		s.Replication = view.Replication.State
	}
	e.mu.Lock()
	ref, own := e.rec.Snapshot, e.rec.replicable()
	e.mu.Unlock()
	if !own {
		return s
	}
	f, err := c.cfg.Snapshots.Footprint(ctx, *ref, func(id snapshot.ID) bool { return has(shared, id) })
	if err == nil {
		s.Packs, s.LiveBytes, s.StoredBytes = len(f.Packs), f.LiveBytes, f.StoredBytes()
		s.LocalBytes, err = c.localBytes(ctx, *ref, f)
	}
	if err != nil && !c.superseded(e, *ref, err) {
		s.Error = err.Error()
	}
	return s
}

// localBytes returns how much of a snapshot's packs is on the local disk.
func (c *Core) localBytes(ctx context.Context, ref snapshot.Ref, f snapshot.Footprint) (n int64, err error) {
	if c.cfg.Tier != nil {
		return c.cfg.Tier.Local(ctx, ref)
	}
	for _, p := range f.Packs {
		n += p.Bytes
	}
	return n, nil
}

// superseded reports whether err is that a snapshot is missing that the
// sandbox does not need any more.
func (c *Core) superseded(e *entry, ref snapshot.Ref, err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Is(err, snapshot.ErrMissing) && (e.gone || e.rec.Snapshot == nil || *e.rec.Snapshot != ref)
}
