package sandbox

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
)

// Drained says what a drain did.
type Drained struct {
	Hibernated []string          // ids of those that it brought to standby
	Failed     map[string]string // id → why it still runs, or may
}

// drainWorkers is how many sandboxes a drain hibernates at a time, and
// drainTries how often each: a request that came in before the drain may cancel one.
const (
	drainWorkers = 4
	drainTries   = 3
)

var errDraining = &Error{Kind: ErrUnavailable, Message: "this host is being drained and starts no sandboxes", Hint: "hib drain --undo ends that, and so does a restart of the daemon"}

// drained returns an ErrUnavailable while the host is to start nothing.
func (c *Core) drained() error {
	if c.draining.Load() {
		return errDraining
	}
	return nil
}

// Drain hibernates every sandbox that runs and lets nothing start from now on,
// until Undrain or the end of the daemon: for an upgrade or a restart of the
// host. A sandbox that could not be hibernated runs on and is told in the
// answer; a drain can be repeated. progress may be nil.
func (c *Core) Drain(ctx context.Context, progress func(done, total int64)) (Drained, error) {
	c.draining.Store(true)
	out := Drained{Failed: map[string]string{}}
	var list []*entry
	for _, e := range c.all() {
		e.mu.Lock()
		// What sleeps may be about to wake: what asks from now on whether it may is told no.
		starts := e.op != nil && (e.op.kind == opStart || e.op.kind == opCheckpoint)
		if (starts || !e.rec.State.asleep()) && !e.gone {
			list = append(list, e)
		}
		e.mu.Unlock()
	}
	var mu sync.Mutex
	var done atomic.Int64
	tell := func() {
		if progress != nil {
			progress(done.Load(), int64(len(list)))
		}
	}
	tell()
	var group errgroup.Group
	group.SetLimit(drainWorkers)
	for _, e := range list {
		group.Go(func() error {
			err := c.drain(ctx, e)
			done.Add(1)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				out.Hibernated = append(out.Hibernated, e.id)
			case !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrFailed):
				out.Failed[e.id] = err.Error()
			}
			tell()
			return nil
		})
	}
	_ = group.Wait() // its functions return nil
	slices.Sort(out.Hibernated)
	return out, context.Cause(ctx)
}

func (c *Core) drain(ctx context.Context, e *entry) (err error) {
	for range drainTries {
		if _, err = c.Hibernate(ctx, e.id, HibernateOptions{Trigger: TriggerDrain}); err == nil || !errors.Is(err, ErrConflict) {
			return err
		}
	}
	return err
}

// Undrain lets sandboxes start again.
func (c *Core) Undrain() { c.draining.Store(false) }
