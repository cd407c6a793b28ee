package sandbox

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// parked says that the machine of a sandbox in standby is kept, paused: a
// cache of the committed snapshot that may be lost at any time.
type parked struct {
	bytes int64     // of memory that ending it gives back
	since time.Time // when its snapshot was taken
}

// park keeps the machine of a sandbox whose snapshot is committed, if that is
// exactly what it is sealed as and if there is room for it. Otherwise the
// machine is as it was, and to be ended.
func (c *Core) park(ctx context.Context, e *entry) bool {
	if c.cfg.ParkedMemory <= 0 || e.vm == nil || c.cfg.LowMemory != nil && c.cfg.LowMemory() {
		return false
	}
	if e.vm.Handle().Protocol < shim.ProtocolVersion {
		return false // it may not understand the egress policy that it would go on under
	}
	ctx, cancel := c.short(ctx)
	defer cancel()
	report, err := e.vm.Park(ctx, shim.ParkRequest{Attempt: e.rec.Metadata.Attempt})
	if err != nil {
		c.log.Debug("a machine is not parked", keySandbox, e.id, keyError, err)
		return false
	}
	if report.MemoryBytes > c.cfg.ParkedMemory {
		return false
	}
	e.mu.Lock()
	e.parked = &parked{bytes: report.MemoryBytes, since: e.rec.Metadata.CreatedAt}
	e.mu.Unlock()
	c.shrinkLater(c.cfg.ParkedMemory)
	return true
}

// recoverStandby keeps the machine of a sandbox in standby if it may be
// parked, and ends it otherwise.
func (c *Core) recoverStandby(ctx context.Context, e *entry) error {
	if e.rec.Handle != nil && c.cfg.ParkedMemory > 0 {
		short, cancel := c.short(ctx)
		dead, err := c.adopt(short, e)
		cancel()
		if err == nil && !dead && c.park(ctx, e) {
			c.watch(e, e.vm)
			return nil
		}
	}
	return c.release(ctx, e)
}

// isParked reports whether the sandbox's machine is parked.
func (e *entry) isParked() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.parked != nil
}

// evictParked ends the parked machine of a sandbox, if there is one.
func (c *Core) evictParked(ctx context.Context, e *entry) error {
	return c.run(ctx, e, opCheck, func(ctx context.Context, _ *operation) error {
		if !e.isParked() {
			return nil
		}
		return c.release(ctx, e)
	})
}

// parkedMachines returns the sandboxes whose machines are parked, those that
// sleep longest first, and the memory that these take up.
func (c *Core) parkedMachines() (list []*entry, bytes int64) {
	since := map[*entry]time.Time{}
	for _, e := range c.all() {
		e.mu.Lock()
		if p := e.parked; p != nil {
			list, bytes, since[e] = append(list, e), bytes+p.bytes, p.since
		}
		e.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b *entry) int {
		return cmp.Or(since[a].Compare(since[b]), cmp.Compare(a.id, b.id))
	})
	return list, bytes
}

// shrinkLater has the parked machines take up no more than limit bytes, in the
// background: each ends in a turn at its sandbox, and the caller has one. It is
// called by operations.
func (c *Core) shrinkLater(limit int64) {
	if _, bytes := c.parkedMachines(); bytes > limit {
		c.restDone.Go(func() { c.shrink(context.Background(), limit) })
	}
}

// shrink ends parked machines until they take up no more than limit bytes.
func (c *Core) shrink(ctx context.Context, limit int64) {
	c.shrinking.Lock()
	defer c.shrinking.Unlock()
	for failed := 0; ; {
		list, bytes := c.parkedMachines()
		if bytes <= limit || failed == len(list) {
			return
		}
		e := list[failed]
		if err := c.evictParked(ctx, e); err != nil {
			failed++
			c.log.Debug("a parked machine is not ended", keySandbox, e.id, keyError, err)
		}
	}
}

// reclaim makes what is cached in memory shrink to room bytes: the parked
// machines first, then the pool. It is called by operations.
func (c *Core) reclaim(room int64) {
	pool := c.pool.bytes()
	c.shrinkLater(max(0, room-pool))
	if pool > room {
		c.pool.reclaim()
	}
}

// watchPressure gives memory back whenever the host is short of it: half of
// what the parked machines take up at a time, and the pool when there are none.
func (c *Core) watchPressure(ctx context.Context) {
	err := c.cfg.Pressure(ctx, func() {
		list, bytes := c.parkedMachines()
		if len(list) == 0 {
			c.log.Info("the host is short of memory, the pool ends")
			c.pool.reclaim()
			return
		}
		c.log.Info("the host is short of memory, half of the parked machines end", "machines", len(list), "bytes", bytes)
		c.shrink(ctx, bytes/2)
	})
	if err != nil && ctx.Err() == nil {
		c.log.Warn("the host's memory pressure is not watched any more", keyError, err)
	}
}
