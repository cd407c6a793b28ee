package snapshot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// Collected says what Collect did, or would do.
type Collected struct {
	Manifests int      `json:"manifests"` // deleted
	States    int      `json:"states"`    // working sets go with them and are not counted
	Packs     int      `json:"packs"`
	Bytes     int64    `json:"bytes"`             // of all these
	InUse     int      `json:"in_use"`            // objects that stay until whoever has them open closes them
	Objects   []string `json:"objects,omitempty"` // keys, sorted, of what would go
}

// Collect deletes every snapshot but roots and keep, and then the state files and
// packs that no snapshot needs any more. roots are the snapshots that records
// name; keep are those that a capture may be making: whatever exists of them stays.
// A snapshot that is open stays as well.
//
// It may run beside captures and opening. But a capture that begins after the
// caller made up roots and keep is unknown to it: its id must be in keep from
// the start (choose it beforehand), or it must wait. Delete must not run at the same time.
//
// If a root is missing, or a manifest that remains cannot be read, nobody knows
// what is still needed: then no states and packs are deleted, and the error
// says why.
func (r *Repository) Collect(ctx context.Context, roots []ID, keep []ID) (Collected, error) {
	c := collection{repo: r, root: idSet(roots), keep: idSet(keep), remove: r.store.Delete}
	return c.run(ctx)
}

// Garbage finds out what Collect would delete if nobody had anything open, and
// touches nothing. Its errors are those of Collect.
func (r *Repository) Garbage(ctx context.Context, roots []ID, keep []ID) (Collected, error) {
	c := collection{repo: r, root: idSet(roots), keep: idSet(keep), gone: make(map[string]bool)}
	c.remove = func(_ context.Context, key string) error {
		c.gone[key] = true
		return nil
	}
	done, err := c.run(ctx)
	done.Objects = slices.Sorted(maps.Keys(c.gone))
	return done, err
}

func idSet(ids []ID) map[ID]bool {
	set := make(map[ID]bool, len(ids))
	for _, id := range ids {
		set[id] = true
	}
	return set
}

// collection is a Collect under way.
type collection struct {
	repo       *Repository
	root, keep map[ID]bool
	remove     func(ctx context.Context, key string) error
	gone       map[string]bool // what remove only marked
	done       Collected
}

func (c *collection) run(ctx context.Context) (Collected, error) {
	if err := c.collect(ctx); err != nil {
		return c.done, fmt.Errorf("collect snapshots: %w", err)
	}
	return c.done, nil
}

// collect keeps an order that makes it safe beside captures: it lists what there
// is, deletes manifests, and then reads those that remain. A capture holds its
// parent open until its own manifest is there, so at every moment what it needs
// of older packs is named by the one or by the other.
func (c *collection) collect(ctx context.Context) error {
	packs, err := c.repo.list(ctx, packPrefix)
	if err != nil {
		return err
	}
	states, err := c.repo.list(ctx, statePrefix)
	if err != nil {
		return err
	}
	worksets, err := c.repo.list(ctx, worksetPrefix)
	if err != nil {
		return err
	}
	manifests, err := c.repo.list(ctx, manifestPrefix)
	if err != nil {
		return err
	}
	for id, size := range manifests {
		if !c.root[id] && !c.keep[id] {
			if err := c.delete(ctx, manifestKey(id), size, &c.done.Manifests); err != nil {
				return err
			}
		}
	}
	remaining, needed, err := c.needed(ctx)
	if err != nil {
		return err
	}
	for id, size := range states {
		if !remaining[id] && !c.keep[id] {
			if err := c.delete(ctx, stateKey(id), size, &c.done.States); err != nil {
				return err
			}
		}
	}
	var uncounted int
	for id, size := range worksets {
		if !remaining[id] && !c.keep[id] {
			if err := c.delete(ctx, worksetKey(id), size, &uncounted); err != nil {
				return err
			}
		}
	}
	for id, size := range packs {
		if !needed[id] && !c.keep[id] {
			if err := c.delete(ctx, packKey(id), size, &c.done.Packs); err != nil {
				return err
			}
		}
	}
	return nil
}

// delete deletes an object and counts it.
func (c *collection) delete(ctx context.Context, key string, size int64, count *int) error {
	switch err := c.remove(ctx, key); {
	case errors.Is(err, blob.ErrInUse):
		c.done.InUse++
	case err != nil:
		return err
	default:
		*count++
		c.done.Bytes += size
	}
	return nil
}

// needed returns the snapshots that exist and the packs that they name. Its
// error names every manifest that cannot be read.
func (c *collection) needed(ctx context.Context) (remaining, packs map[ID]bool, err error) {
	manifests, err := c.repo.list(ctx, manifestPrefix)
	if err != nil {
		return nil, nil, err
	}
	remaining, packs = make(map[ID]bool), make(map[ID]bool)
	var errs []error
	for id := range c.root {
		if _, ok := manifests[id]; !ok {
			errs = append(errs, fmt.Errorf("%w %s, which a record names", ErrMissing, manifestKey(id)))
		}
	}
	for id := range manifests {
		if c.gone[manifestKey(id)] {
			continue
		}
		remaining[id] = true
		m, _, err := c.repo.load(ctx, id)
		if errors.Is(err, ErrMissing) && !c.root[id] {
			continue // deleted meanwhile
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, p := range m.packs {
			packs[p.id] = true
		}
	}
	return remaining, packs, errors.Join(errs...)
}

// list returns the IDs and sizes of the objects whose keys are prefix and an ID.
func (r *Repository) list(ctx context.Context, prefix string) (map[ID]int64, error) {
	out := make(map[ID]int64)
	for info, err := range r.store.List(ctx, prefix) {
		if err != nil {
			return nil, err
		}
		if id, err := ParseID(strings.TrimPrefix(info.Key, prefix)); err == nil {
			out[id] = info.Size
		}
	}
	return out, nil
}
