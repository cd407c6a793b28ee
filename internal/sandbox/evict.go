package sandbox

import (
	"context"
	"errors"
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
// Nothing is lost by it.
func (c *Core) Evict(ctx context.Context, id string, o EvictOptions) (Evicted, error) {
	e, err := c.find(id)
	if err != nil {
		return Evicted{}, err
	}
	if o.Parked {
		if err := c.evictParked(ctx, e); err != nil {
			return Evicted{}, err
		}
	}
	if !o.PageCache && !o.Local {
		return Evicted{}, nil
	}
	return Evicted{}, &Error{Kind: errors.ErrUnsupported, Message: "eviction"}
}
