package guest

import (
	"context"
	"sync"
	"time"
)

// gate keeps processes from being started while the user's cgroup is frozen. A
// child that is born frozen would never execute its program, and the thread
// that starts it would hold up the agent's whole runtime.
type gate struct {
	mu      sync.Mutex
	closed  bool
	inside  int
	changed chan struct{} // closed and replaced with every change
}

func newGate() *gate { return &gate{changed: make(chan struct{})} }

func (g *gate) announce() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// enter waits until the gate is open. exit must follow.
func (g *gate) enter(ctx context.Context) error {
	return g.when(ctx, func() bool { return !g.closed }, func() { g.inside++ })
}

func (g *gate) exit() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	g.announce()
}

// shut closes the gate and waits up to d for those inside. False: someone is
// still inside, and the gate stays open.
func (g *gate) shut(d time.Duration) bool {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	if g.when(ctx, func() bool { return g.inside == 0 }, func() {}) != nil {
		g.open()
		return false
	}
	return true
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = false
	g.announce()
}

// when waits for a condition and acts on it under the lock.
func (g *gate) when(ctx context.Context, condition func() bool, act func()) error {
	for {
		g.mu.Lock()
		if condition() {
			act()
			g.mu.Unlock()
			return nil
		}
		changed := g.changed
		g.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
