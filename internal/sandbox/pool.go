package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// pooledBytes is about what a machine of the pool takes up: its shim and a VMM
// whose guest has not run (docs/decisions/0077).
const pooledBytes = 16 << 20

// poolKey is what is settled about a machine before it is known whose it will be.
type poolKey struct {
	template string
	version  int
	digest   string // of the base image
	shape    vmm.Shape
}

// pool keeps machines that were started before anybody needs them: shims whose
// VMM waits for a snapshot. They are not adopted, so they end with the daemon,
// and no record names one until take has given it away.
//
// What it holds follows the demand: one machine for each of the last starts,
// as many as the pool is large. It fills up in the background, only while no
// start is under way and the last one is some time ago, so that it takes
// nothing from a guest that wakes.
type pool struct {
	size  int
	calm  time.Duration // from the last start to a refill
	start func(ctx context.Context, key poolKey) (VM, error)
	end   func(vm VM)
	log   *slog.Logger

	kick chan struct{}
	work sync.WaitGroup
	stop context.CancelFunc

	mu     sync.Mutex
	demand []poolKey // of the last starts, the latest first, at most size
	idle   []*pooled
	starts int       // under way
	next   time.Time // no refill before
	closed bool
}

// pooled is a machine that waits.
type pooled struct {
	key     poolKey
	vm      VM
	unwatch context.CancelFunc
}

// newPool returns an empty pool. start makes a machine, end ends one.
func newPool(size int, calm time.Duration, log *slog.Logger, start func(context.Context, poolKey) (VM, error), end func(VM)) *pool {
	ctx, stop := context.WithCancel(context.Background())
	p := &pool{size: size, calm: calm, start: start, end: end, log: log, kick: make(chan struct{}, 1), stop: stop}
	if size > 0 {
		p.work.Go(func() { p.run(ctx) })
	}
	return p
}

// take gives away a machine of the key, if there is one, and notes the demand.
func (p *pool) take(key poolKey) (VM, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.size == 0 || p.closed {
		return nil, false
	}
	p.demand = slices.Insert(p.demand, 0, key)
	p.demand = p.demand[:min(len(p.demand), p.size)]
	i := slices.IndexFunc(p.idle, func(m *pooled) bool { return m.key == key })
	if i < 0 {
		return nil, false
	}
	m := p.idle[i]
	p.idle = slices.Delete(p.idle, i, i+1)
	m.unwatch()
	return m.vm, true
}

// suggest makes key the demand where there was none.
func (p *pool) suggest(key poolKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.demand) == 0 {
		p.demand = slices.Repeat([]poolKey{key}, p.size)
		p.wake()
	}
}

// hold keeps the pool from filling up until done is called, and some time longer.
func (p *pool) hold() (done func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starts++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.starts--
		p.delay(p.calm)
		p.wake()
	}
}

// drop ends the machines of keys that old names, and keeps no more of them.
func (p *pool) drop(old func(poolKey) bool) {
	p.mu.Lock()
	p.demand = slices.DeleteFunc(p.demand, old)
	ended := p.surplus()
	p.mu.Unlock()
	p.discard(ended)
}

// reclaim gives the memory of the machines back. The pool fills up again with
// the next starts.
func (p *pool) reclaim() { p.drop(func(poolKey) bool { return true }) }

// bytes returns about how much memory the machines take up.
func (p *pool) bytes() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int64(len(p.idle)) * pooledBytes
}

// close ends all machines and returns when the pool does nothing any more.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.stop()
	p.reclaim()
	p.work.Wait()
}

// wake has run look at what is missing.
func (p *pool) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// delay puts a refill off. mu is held.
func (p *pool) delay(d time.Duration) {
	if next := time.Now().Add(d); next.After(p.next) {
		p.next = next
	}
}

// run fills the pool whenever something is missing.
func (p *pool) run(ctx context.Context) {
	for {
		select {
		case <-p.kick:
		case <-ctx.Done():
			return
		}
		for p.waitCalm(ctx) && p.refill(ctx) {
		}
	}
}

// waitCalm waits until it is time to refill; false: not now, a start is under way.
func (p *pool) waitCalm(ctx context.Context) bool {
	for {
		p.mu.Lock()
		wait, starts := time.Until(p.next), p.starts
		p.mu.Unlock()
		switch {
		case starts > 0 || ctx.Err() != nil:
			return false
		case wait <= 0:
			return true
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// refill ends what nobody wants any more and starts one machine that is
// missing; false if none is.
func (p *pool) refill(ctx context.Context) bool {
	p.mu.Lock()
	ended := p.surplus()
	key, missing := p.missing()
	p.mu.Unlock()
	p.discard(ended)
	if !missing {
		return false
	}
	vm, err := p.start(ctx, key)
	if err != nil {
		if ctx.Err() == nil {
			p.log.Warn("no machine is kept ready", "key", key.String(), keyError, err)
		}
		p.drop(func(k poolKey) bool { return k == key }) // until somebody asks again
		return ctx.Err() == nil
	}
	p.add(key, vm)
	return true
}

// add takes a machine in, if it is still wanted.
func (p *pool) add(key poolKey, vm VM) {
	ctx, unwatch := context.WithCancel(context.Background())
	m := &pooled{key: key, vm: vm, unwatch: unwatch}
	p.mu.Lock()
	p.idle = append(p.idle, m)
	ended := p.surplus()
	if !slices.Contains(ended, m) {
		p.work.Go(func() { p.watch(ctx, m) })
	}
	p.mu.Unlock()
	p.discard(ended)
}

// watch replaces a machine that ends while it waits.
func (p *pool) watch(ctx context.Context, m *pooled) {
	_ = m.vm.Watch(ctx, func(ev shim.Event) {
		if ev.Status.Phase == shim.PhaseStopped {
			p.lose(m)
		}
	})
	if ctx.Err() == nil { // it is gone, or cannot be watched
		p.lose(m)
	}
}

// lose ends a machine that is good for nothing, unless it was given away.
func (p *pool) lose(m *pooled) {
	p.mu.Lock()
	i := slices.Index(p.idle, m)
	if i >= 0 {
		p.idle = slices.Delete(p.idle, i, i+1)
		p.delay(p.calm)
	}
	p.mu.Unlock()
	if i >= 0 {
		p.log.Warn("a machine that was kept ready has ended", "machine", m.vm.Handle().VM)
		p.discard([]*pooled{m})
		p.wake()
	}
}

// wanted returns the keys of the machines that there should be. Where there
// were few starts so far, the latest stands for the rest. mu is held.
func (p *pool) wanted() []poolKey {
	if len(p.demand) == 0 || p.closed {
		return nil
	}
	return append(slices.Clone(p.demand), slices.Repeat(p.demand[:1], p.size-len(p.demand))...)
}

// surplus takes the machines out that nobody wants. mu is held.
func (p *pool) surplus() (ended []*pooled) {
	left := p.wanted()
	p.idle = slices.DeleteFunc(p.idle, func(m *pooled) bool {
		i := slices.Index(left, m.key)
		if i >= 0 {
			left = slices.Delete(left, i, i+1)
			return false
		}
		ended = append(ended, m)
		return true
	})
	return ended
}

// missing returns the key of a machine that there should be. mu is held.
func (p *pool) missing() (poolKey, bool) {
	left := p.wanted()
	for _, m := range p.idle {
		if i := slices.Index(left, m.key); i >= 0 {
			left = slices.Delete(left, i, i+1)
		}
	}
	if len(left) == 0 {
		return poolKey{}, false
	}
	return left[0], true
}

// discard ends machines that were taken out.
func (p *pool) discard(list []*pooled) {
	for _, m := range list {
		m.unwatch()
		p.end(m.vm)
	}
}

// String returns the key as it is logged.
func (k poolKey) String() string {
	return fmt.Sprintf("%s/v%d/%s", k.template, k.version, k.shape)
}

// startPooled starts a machine of the pool.
func (c *Core) startPooled(ctx context.Context, key poolKey) (VM, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.StartTimeout)
	defer cancel()
	art, err := c.artifacts(key.template, key.version)
	if err != nil {
		return nil, err
	}
	if art.BaseDigest != key.digest {
		return nil, fmt.Errorf("template %s version %d is another one by now", key.template, key.version)
	}
	vm, err := c.cfg.Launcher.Launch(ctx, LaunchSpec{VM: machineName("pool")})
	if err != nil {
		return nil, err
	}
	if err := vm.Prepare(ctx, prepareRequest(key.shape, art, false)); err != nil {
		c.endPooled(vm)
		return nil, err
	}
	return vm, nil
}

// endPooled ends a machine of the pool. One that could not be ended is not
// adopted: it ends with the daemon.
func (c *Core) endPooled(vm VM) {
	ctx, cancel := c.short(context.Background())
	defer cancel()
	if err := c.endMachine(ctx, vm); err != nil {
		c.log.Warn("a machine that was kept ready is left", "machine", vm.Handle().VM, keyError, err)
	}
	vm.Close()
}

// poolKey returns the key of the machines that suit a sandbox.
func (c *Core) poolKey(r *record) (poolKey, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.templates[r.Template]
	if t == nil {
		return poolKey{}, false
	}
	v, ok := t.rec.find(r.TemplateVersion)
	return poolKey{r.Template, r.TemplateVersion, v.BaseDigest, r.Shape}, ok
}

// takePooled gives the sandbox a machine of the pool, if there is one. Its
// handle is not recorded yet.
func (c *Core) takePooled(e *entry) (VM, bool) {
	key, ok := c.poolKey(&e.rec)
	if !ok {
		return nil, false
	}
	vm, ok := c.pool.take(key)
	if ok {
		e.attach(vm)
	}
	return vm, ok
}

// seedPool has the pool begin with machines for the sandbox that was used last,
// or for a new one of the default template.
func (c *Core) seedPool() {
	next := record{Template: DefaultTemplate}
	var used time.Time
	for _, e := range c.all() {
		e.mu.Lock()
		at := e.rec.CreatedAt
		if m := e.rec.Metadata; m != nil && m.CreatedAt.After(at) {
			at = m.CreatedAt
		}
		if at.After(used) {
			next, used = e.rec, at
		}
		e.mu.Unlock()
	}
	if used.IsZero() {
		c.mu.Lock()
		if t := c.templates[next.Template]; t != nil {
			v, _ := t.rec.find(t.rec.Current)
			next.TemplateVersion, next.Shape = v.Number, v.Shape
		}
		c.mu.Unlock()
	}
	if key, ok := c.poolKey(&next); ok {
		c.pool.suggest(key)
	}
}
