package shim

import (
	"context"
	"sync/atomic"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/s3"
	"github.com/hibernacle/hibernacle/internal/blob/wrap"
)

// remote is the remote store, which packs of this machine's snapshot may be read
// from.
type remote struct {
	blob.Store
	opened  atomic.Int64 // objects
	fetched atomic.Int64 // bytes
}

// openRemote opens the store that cfg names and asks it nothing.
func openRemote(cfg s3.Config) (*remote, error) {
	store, err := s3.Open(context.Background(), cfg)
	if err != nil {
		return nil, err
	}
	return newRemote(store, wrap.Policy{}), nil
}

func newRemote(store blob.Store, retries wrap.Policy) *remote {
	r := &remote{}
	r.Store = wrap.Retry(wrap.Meter(store, func(c wrap.Call) {
		r.fetched.Add(c.Bytes)
		if c.Op == wrap.OpOpen && c.Err == nil {
			r.opened.Add(1)
		}
	}), retries)
	return r
}
