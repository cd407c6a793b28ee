package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// fpPromoted follows each pack that was fetched.
const fpPromoted = "tier.promote.pack"

// promotion is a snapshot whose packs are to be fetched.
type promotion struct {
	ref snapshot.Ref
	due time.Time
}

// Promote makes the packs of a snapshot local, in the background and as far as
// the budget has room when what was not used for longer has gone. It is to be called
// after a resume that read from the remote store, and waits a while, so that it
// does not compete with that guest. It is tried once: what stays remote can be
// read from there.
func (t *Tier) Promote(ref snapshot.Ref) {
	t.mu.Lock()
	waiting := slices.ContainsFunc(t.promotes, func(p promotion) bool { return p.ref == ref })
	if !waiting {
		t.promotes = append(t.promotes, promotion{ref, time.Now().Add(t.pause.promote)})
	}
	for _, e := range t.entries {
		if e.replica.Snapshot == ref {
			e.replica.LastUsed = time.Now()
		}
	}
	t.mu.Unlock()
	select {
	case t.promoting <- struct{}{}:
	default:
	}
}

// fetchPromoted fetches what Promote was given, one after the other.
func (t *Tier) fetchPromoted() {
	for t.ctx.Err() == nil {
		t.mu.Lock()
		var timer <-chan time.Time
		var ref snapshot.Ref
		ready := false
		if len(t.promotes) > 0 { // in the order in which they are due
			if wait := time.Until(t.promotes[0].due); wait > 0 {
				timer = time.After(wait)
			} else {
				ref, ready = t.promotes[0].ref, true
			}
		}
		t.mu.Unlock()
		if ready {
			if err := t.promote(t.ctx, ref); err != nil && t.ctx.Err() == nil {
				t.cfg.Log.Warn("a snapshot stays remote", "error", err)
			}
			t.mu.Lock()
			t.promotes = t.promotes[1:]
			t.mu.Unlock()
			continue
		}
		select {
		case <-t.promoting:
		case <-timer:
		case <-t.ctx.Done():
		}
	}
}

// promote fetches the packs of a snapshot that are not local, each verified and
// as it is stored locally.
func (t *Tier) promote(ctx context.Context, ref snapshot.Ref) error {
	packs, err := t.local.Packs(ctx, ref)
	if err != nil {
		if errors.Is(err, snapshot.ErrMissing) {
			return nil // another snapshot has taken its place
		}
		return err
	}
	keep := make(map[string]bool)
	for _, p := range packs {
		keep[p.Key()] = true
	}
	for _, p := range packs {
		if fits, err := t.promotePack(ctx, p, keep); err != nil {
			return fmt.Errorf("promote snapshot %s: %w", ref.ID, err)
		} else if !fits {
			return nil
		}
	}
	return nil
}

// promotePack fetches a pack unless it is local. It tells whether the budget had room.
func (t *Tier) promotePack(ctx context.Context, p snapshot.Pack, keep map[string]bool) (fits bool, err error) {
	if _, err := t.cfg.Local.Stat(ctx, p.Key()); !errors.Is(err, blob.ErrNotExist) {
		return true, err
	}
	if fits, err := t.fits(ctx, p, keep); err != nil || !fits {
		return false, err
	}
	o, err := t.store.Open(ctx, p.Key())
	if err != nil {
		return false, err
	}
	defer o.Close()
	_, err = t.cfg.Local.Put(ctx, p.Key(), func(w io.Writer) error { return recodePack(ctx, w, o, p, pack.Raw) })
	if err != nil && !errors.Is(err, blob.ErrExist) {
		return false, err
	}
	return true, failpoint.Hit(ctx, fpPromoted)
}

// fits makes room for a pack and tells whether there is.
func (t *Tier) fits(ctx context.Context, p snapshot.Pack, keep map[string]bool) (bool, error) {
	if t.cfg.Budget <= 0 {
		return true, nil
	}
	pages := p.Summary.Pages * page.Size
	size := pages + pages/100 + 2*page.Size // header and index take less than that
	if err := t.makeRoom(ctx, size, keep); err != nil {
		return false, err
	}
	_, total, err := t.localPacks(ctx)
	return total+size <= t.cfg.Budget, err
}
