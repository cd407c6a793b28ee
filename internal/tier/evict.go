package tier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// The failpoints of an eviction.
const (
	fpProven  = "tier.evict.proven"  // before the local pack goes
	fpEvicted = "tier.evict.evicted" // after that
)

// Local returns how many bytes of the packs that a snapshot names are on the
// local disk.
func (t *Tier) Local(ctx context.Context, ref snapshot.Ref) (bytes int64, err error) {
	packs, err := t.local.Packs(ctx, ref)
	if err != nil {
		return 0, err
	}
	for _, p := range packs {
		info, err := t.cfg.Local.Stat(ctx, p.Key())
		if err != nil && !errors.Is(err, blob.ErrNotExist) {
			return 0, err
		}
		bytes += info.Size
	}
	return bytes, nil
}

// Evict deletes the local packs that a snapshot names and returns how many
// these were and their bytes. Those that anybody has open stay. Unless every
// one of the snapshot's packs is in the remote store at this moment nothing
// goes, and the error wraps ErrNotReplicated.
func (t *Tier) Evict(ctx context.Context, ref snapshot.Ref) (packs int, bytes int64, err error) {
	err = t.shared(ctx, func() error {
		named, err := t.local.Packs(ctx, ref)
		if err != nil {
			return err
		}
		if err := t.own(ctx); err != nil {
			return err
		}
		for _, p := range named {
			if there, err := t.isRemote(ctx, p.Key()); err != nil {
				return err
			} else if !there {
				return fmt.Errorf("%s: %w", p.Key(), ErrNotReplicated)
			}
		}
		for _, p := range named {
			n, err := t.evictPack(ctx, p.Key())
			if err != nil {
				return err
			}
			if n > 0 {
				packs, bytes = packs+1, bytes+n
			}
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("evict snapshot %s: %w", ref.ID, err)
	}
	return packs, bytes, err
}

// evictPack deletes a local pack that is proven to be in the remote store and
// returns its bytes, 0 if it is not there or somebody has it open.
func (t *Tier) evictPack(ctx context.Context, key string) (int64, error) {
	info, err := t.cfg.Local.Stat(ctx, key)
	if errors.Is(err, blob.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	if err := failpoint.Hit(ctx, fpProven); err != nil {
		return 0, err
	}
	if err := t.cfg.Local.Delete(ctx, key); errors.Is(err, blob.ErrInUse) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	return info.Size, failpoint.Hit(ctx, fpEvicted)
}

// keepBudget evicts packs until the budget is kept, as far as that is possible.
func (t *Tier) keepBudget() {
	err := t.makeRoom(t.ctx, 0, nil)
	switch {
	case err == nil || t.ctx.Err() != nil:
	case unusable(err):
		t.failed(&attempts{}, err)
		t.mu.Lock()
		t.evictDue = true // when the store can be used again
		t.mu.Unlock()
	default:
		t.cfg.Log.Error("the budget of the local disk is not kept", "error", err)
	}
}

// localPack is a pack on the local disk.
type localPack struct {
	key      string
	size     int64
	base     bool // of a template: the last to go
	lastUsed time.Time
}

// makeRoom evicts packs until there is room within the budget for bytes more.
// What was not used for longest goes first, templates' base packs last, those in
// keep never.
func (t *Tier) makeRoom(ctx context.Context, bytes int64, keep map[string]bool) error {
	if t.cfg.Budget <= 0 {
		return nil
	}
	packs, total, err := t.localPacks(ctx)
	if err != nil || total+bytes <= t.cfg.Budget {
		return err
	}
	if err := t.rank(ctx, packs); err != nil {
		return err
	}
	return t.shared(ctx, func() error {
		if err := t.own(ctx); err != nil {
			return err
		}
		for _, p := range packs {
			if total+bytes <= t.cfg.Budget {
				return nil
			}
			if keep[p.key] {
				continue
			}
			there, err := t.isRemote(ctx, p.key)
			if err != nil {
				return err
			}
			if !there {
				continue
			}
			n, err := t.evictPack(ctx, p.key)
			if err != nil {
				return err
			}
			total -= n
		}
		return nil
	})
}

// localPacks lists the packs on the local disk and counts their bytes.
func (t *Tier) localPacks(ctx context.Context) (packs []localPack, total int64, err error) {
	for info, err := range t.cfg.Local.List(ctx, snapshot.KindPack.Prefix()) {
		if err != nil {
			return nil, 0, err
		}
		// One that no replica names was used when it was written, as far as is known here.
		packs = append(packs, localPack{key: info.Key, size: info.Size, lastUsed: info.ModTime})
		total += info.Size
	}
	return packs, total, nil
}

// rank finds out what the packs are used for, and sorts them so that the first
// is the first to go.
func (t *Tier) rank(ctx context.Context, packs []localPack) error {
	used, base := make(map[string]time.Time), make(map[string]bool)
	read := make(map[snapshot.Ref][]string)
	for _, r := range t.replicas() {
		keys, err := t.packsOf(ctx, r.Snapshot, read)
		if err != nil {
			return err
		}
		for _, key := range keys {
			if r.LastUsed.After(used[key]) {
				used[key] = r.LastUsed
			}
		}
		for _, ref := range r.Template.Bases {
			keys, err := t.packsOf(ctx, ref, read)
			if err != nil {
				return err
			}
			for _, key := range keys {
				base[key] = true
			}
		}
	}
	t.mu.Lock()
	t.packs = read
	t.mu.Unlock()
	for i := range packs {
		p := &packs[i]
		if at, ok := used[p.key]; ok {
			p.lastUsed = at
		}
		p.base = base[p.key]
	}
	slices.SortFunc(packs, func(a, b localPack) int {
		if a.base != b.base {
			if a.base {
				return 1
			}
			return -1
		}
		return cmp.Or(a.lastUsed.Compare(b.lastUsed), cmp.Compare(a.key, b.key))
	})
	return nil
}

// packsOf returns the keys of the packs that a snapshot names, none if another
// took its place just now. What was read before, now or for the last ranking, is
// not read again: a manifest does not change.
func (t *Tier) packsOf(ctx context.Context, ref snapshot.Ref, read map[snapshot.Ref][]string) ([]string, error) {
	if keys, ok := read[ref]; ok {
		return keys, nil
	}
	t.mu.Lock()
	keys, ok := t.packs[ref]
	t.mu.Unlock()
	if !ok {
		packs, err := t.local.Packs(ctx, ref)
		if err != nil && !errors.Is(err, snapshot.ErrMissing) {
			return nil, err
		}
		for _, p := range packs {
			keys = append(keys, p.Key())
		}
	}
	read[ref] = keys
	return keys, nil
}

// replicas returns what Replicate was given and is still in force.
func (t *Tier) replicas() []Replica {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Replica, 0, len(t.entries))
	for _, e := range t.entries {
		out = append(out, e.replica)
	}
	return out
}
