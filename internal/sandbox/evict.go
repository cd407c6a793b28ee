package sandbox

import (
	"context"
	"errors"

	"github.com/hibernacle/hibernacle/internal/tier"
)

// EvictOptions says which cached copies to let go of.
type EvictOptions struct {
	Parked    bool // the parked VMM
	PageCache bool // the host's page cache of the snapshot's files, file by file
	Local     bool // the local packs, which must be replicated
}

// Evicted says what an eviction let go of.
type Evicted struct {
	Packs int // local copies deleted
	Bytes int64
}

// Evict lets go of cached copies of what a sandbox in standby is resumed from.
// Nothing is lost by it. What other sandboxes have open stays, and so does the
// base image, which all of a template share.
func (c *Core) Evict(ctx context.Context, id string, o EvictOptions) (Evicted, error) {
	e, err := c.find(id)
	if err != nil {
		return Evicted{}, err
	}
	if o.Local && c.cfg.Tier == nil {
		return Evicted{}, noRemote("the local copies are the only ones")
	}
	var out Evicted
	err = c.run(ctx, e, opCheck, func(ctx context.Context, _ *operation) error {
		if e.rec.State != StateStandby {
			return conflict("hibernate it first", "sandbox %s is %s: only what a sandbox in standby is resumed from can be let go of", e.id, e.rec.State)
		}
		out, err = c.evict(ctx, e, o)
		return err
	})
	return out, err
}

// evict does what Evict is asked for; the caller has the turn.
func (c *Core) evict(ctx context.Context, e *entry, o EvictOptions) (out Evicted, err error) {
	if o.Parked && e.isParked() { // first, since it has the packs open
		if err := c.release(ctx, e); err != nil {
			return out, err
		}
	}
	ref := *e.rec.Snapshot
	if o.Local {
		out.Packs, out.Bytes, err = c.cfg.Tier.Evict(ctx, ref)
		if errors.Is(err, tier.ErrNotReplicated) {
			return out, &Error{Kind: ErrConflict, Message: "sandbox " + e.id, Cause: err, Hint: "wait until hib inspect says that it is replicated"}
		}
		if err != nil {
			return out, unavailable(err, "evict the packs of sandbox %s", e.id)
		}
	}
	if o.PageCache {
		if err := c.cfg.Snapshots.DropCache(ctx, ref); err != nil {
			return out, unavailable(err, "drop the page cache of sandbox %s", e.id)
		}
	}
	return out, nil
}
