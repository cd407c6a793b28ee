package tier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// fpCollect comes before each object that a collection deletes.
const fpCollect = "tier.collect.delete"

// Collected says what Collect did, or with a dry run would have done.
type Collected struct {
	Objects int
	Bytes   int64    // of them, as the remote store keeps them
	InUse   int      // objects that stay since somebody has them open
	Keys    []string // of a dry run: what would go
}

// Collect deletes what is in the remote store and not needed any more. Needed
// is what the records there name, what Replicate was given, and what belongs to
// roots and keep: the snapshots that records on this node name, and those that a capture
// may be making. A machine that runs holds nothing in the remote store, so the
// snapshot that it runs from, and one that is parked, must be among roots.
//
// It fails, and deletes nothing, if the store is another node's. If the manifest
// of a snapshot that a record or a root names cannot be read, nobody knows what is
// still needed: then nothing is deleted either, and the error says why.
func (t *Tier) Collect(ctx context.Context, roots, keep []snapshot.ID, dryRun bool) (Collected, error) {
	c := collection{
		tier: t, dryRun: dryRun, templates: make(map[string]bool),
		snapshots: make(map[snapshot.ID]bool), packs: make(map[snapshot.ID]bool), named: make(map[snapshot.ID]bool),
	}
	err := t.alone(ctx, func() error { return c.run(ctx, roots, keep) })
	if err != nil {
		err = fmt.Errorf("collect the remote store: %w", err)
	}
	return c.done, err
}

// collection is a Collect under way.
type collection struct {
	tier      *Tier
	dryRun    bool
	snapshots map[snapshot.ID]bool // whose manifest, state and working set are needed
	packs     map[snapshot.ID]bool // that are needed
	named     map[snapshot.ID]bool // whose manifest was read
	templates map[string]bool      // prefixes of keys that are needed
	done      Collected
}

// run finds out what is needed, and then deletes the rest: manifests before what
// they name, and lists before their files, so that whoever finds one finds it all.
func (c *collection) run(ctx context.Context, roots, keep []snapshot.ID) error {
	if err := c.tier.knowRecords(ctx); err != nil {
		return err
	}
	if err := c.fromRecords(ctx); err != nil {
		return err
	}
	if err := c.fromNode(ctx, roots, keep); err != nil {
		return err
	}
	needed := func(kind snapshot.Kind, ids map[snapshot.ID]bool) func(key string) bool {
		return func(key string) bool {
			id, ok := kind.Parse(key)
			return !ok || ids[id]
		}
	}
	for _, part := range []struct {
		prefix string
		needed func(key string) bool
	}{
		{snapshot.KindManifest.Prefix(), needed(snapshot.KindManifest, c.snapshots)},
		{snapshot.KindState.Prefix(), needed(snapshot.KindState, c.snapshots)},
		{snapshot.KindWorkingSet.Prefix(), needed(snapshot.KindWorkingSet, c.snapshots)},
		{snapshot.KindPack.Prefix(), needed(snapshot.KindPack, c.packs)},
		{templatePrefix, func(key string) bool { return !isListKey(key) || c.templateNeeded(key) }},
		{templatePrefix, func(key string) bool { return isListKey(key) || c.templateNeeded(key) }},
	} {
		if err := c.sweep(ctx, part.prefix, part.needed); err != nil {
			return err
		}
	}
	return nil
}

// fromRecords needs what the records in the remote store name.
func (c *collection) fromRecords(ctx context.Context) error {
	var refs []snapshot.Ref
	err := c.tier.readRecords(ctx, func(_ string, r record, err error) error {
		if err != nil {
			return err
		}
		if r.Template.List != "" {
			c.templates[r.Template.key()+"/"+r.Template.List+"/"] = true
		}
		refs = append(slices.Concat(refs, r.Template.Bases, r.Checkpoints), r.Snapshot)
		return nil
	})
	if err != nil {
		return err
	}
	for _, ref := range refs {
		if err := c.need(ctx, ref.ID); err != nil {
			return err
		}
	}
	return nil
}

// fromNode needs what this node names.
func (c *collection) fromNode(ctx context.Context, roots, keep []snapshot.ID) error {
	t := c.tier
	replicas := t.replicas()
	for _, r := range replicas {
		// What such an upload has sent so far. One whose list is not known here sends again.
		t.mu.Lock()
		l, ok := t.lists[r.Template.Dir]
		t.mu.Unlock()
		if ok {
			rec := templateRecord{Name: r.Template.Name, Version: r.Template.Version, List: l.hash}
			c.templates[rec.key()+"/"+rec.List+"/"] = true
		}
		keep = append(keep[:len(keep):len(keep)], r.Snapshot.ID)
		for _, ref := range slices.Concat(r.Template.Bases, r.Checkpoints) {
			keep = append(keep, ref.ID)
		}
	}
	for _, id := range roots {
		if err := c.need(ctx, id); err != nil {
			return err
		}
	}
	for _, id := range keep {
		c.snapshots[id], c.packs[id] = true, true
		if err := c.need(ctx, id); err != nil && !errors.Is(err, snapshot.ErrMissing) {
			return err
		}
	}
	return nil
}

// need needs a snapshot with all that its manifest names. The manifest is read
// locally, or from the remote store if it is only there.
func (c *collection) need(ctx context.Context, id snapshot.ID) error {
	if c.named[id] {
		return nil
	}
	t := c.tier
	ref, err := t.local.Find(ctx, id)
	repo := t.local
	if errors.Is(err, snapshot.ErrMissing) {
		repo = t.far()
		ref, err = repo.Find(ctx, id)
	}
	if err != nil {
		return err
	}
	packs, err := repo.Packs(ctx, ref)
	if err != nil {
		return err
	}
	c.named[id], c.snapshots[id] = true, true
	for _, p := range packs {
		c.packs[p.ID] = true
	}
	return nil
}

// templateNeeded tells whether an object of a template is needed.
func (c *collection) templateNeeded(key string) bool {
	parts := strings.SplitAfterN(key, "/", 5)
	return len(parts) == 5 && c.templates[strings.Join(parts[:4], "")]
}

// sweep deletes what begins with prefix and is not needed.
func (c *collection) sweep(ctx context.Context, prefix string, needed func(key string) bool) error {
	for info, err := range c.tier.cfg.Remote.List(ctx, prefix) {
		if err != nil {
			return err
		}
		if needed(info.Key) {
			continue
		}
		if c.dryRun {
			c.done.Keys = append(c.done.Keys, info.Key)
		} else if err := failpoint.Hit(ctx, fpCollect); err != nil {
			return err
		} else if err := c.tier.cfg.Remote.Delete(ctx, info.Key); errors.Is(err, blob.ErrInUse) {
			c.done.InUse++
			continue
		} else if err != nil {
			return err
		}
		c.done.Objects++
		c.done.Bytes += info.Size
	}
	return nil
}

// decodedStore shows the content of the remote store's encoded objects.
type decodedStore struct {
	blob.Store
	tier *Tier
}

// Open implements blob.Store. Packs are read as they are.
func (s *decodedStore) Open(ctx context.Context, key string) (blob.Object, error) {
	if _, isPack := snapshot.KindPack.Parse(key); isPack {
		return s.Store.Open(ctx, key)
	}
	b, err := s.tier.fetch(ctx, key, maxObject)
	if err != nil {
		return nil, err
	}
	return memory{strings.NewReader(string(b))}, nil
}

// far returns what is in the remote store.
func (t *Tier) far() *snapshot.Repository {
	return snapshot.NewRepository(&decodedStore{Store: t.cfg.Remote, tier: t})
}

// memory is an object in memory.
type memory struct{ *strings.Reader }

func (memory) Close() error { return nil }
