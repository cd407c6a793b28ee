package sandboxtest

import (
	"context"
	"net"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// Busy is what the guest of a sandbox does besides answering.
type Busy struct {
	Awaiting  time.Time        // a question to others has been unanswered since; zero: there is none
	KeepAwake []shim.KeepAwake // processes that are to keep it awake
	CPU       float64          // share of one processor that it takes
	AgentErr  string           // why the agent does not answer
	Err       error            // the order fails
}

// SetBusy has the guest of a sandbox do that from now on, over all its machines.
func (w *World) SetBusy(sandbox string, b Busy) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.busy[sandbox] = b
}

// Traffic is a payload of the guest's own connections to others.
func (w *World) Traffic(sandbox string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.machines {
		if m.sandbox == sandbox {
			m.last = time.Now()
		}
	}
}

func (v *vm) Activity(ctx context.Context, req shim.ActivityRequest) (a shim.Activity, err error) {
	err = v.order(ctx, "activity", func() error {
		if err := v.m.check("activity", shim.PhaseRunning); err != nil {
			return err
		}
		busy := v.m.w.busy[v.m.sandbox]
		a = v.m.activity(req, busy)
		return busy.Err
	})
	return a, err
}

func (m *machine) activity(req shim.ActivityRequest, busy Busy) shim.Activity {
	now := time.Now()
	a := shim.Activity{Idle: now.Sub(m.last), CPU: time.Duration(busy.CPU * float64(now.Sub(m.began)))}
	for c := range m.open {
		if left := req.InboundCap - now.Sub(c.last); left > 0 {
			a.Open++
			a.Held = max(a.Held, left)
		}
	}
	if left := req.AwaitCap - now.Sub(busy.Awaiting); left > 0 && !busy.Awaiting.IsZero() {
		a.Awaiting++
		a.Held = max(a.Held, left)
	}
	if req.IdleAfter == 0 || a.Quiet(req.IdleAfter) {
		a.Asked, a.KeepAwake, a.AgentErr = true, busy.KeepAwake, busy.AgentErr
	}
	return a
}

// conn is the host's side of a connection into a guest.
type conn struct {
	net.Conn
	m    *machine
	last time.Time
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.pass(n)
	return n, err
}

func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.pass(n)
	return n, err
}

func (c *conn) pass(n int) {
	c.m.w.mu.Lock()
	defer c.m.w.mu.Unlock()
	if _, open := c.m.open[c]; open && n > 0 {
		c.last, c.m.last = time.Now(), time.Now()
	}
}

func (c *conn) Close() error {
	c.m.w.mu.Lock()
	if _, open := c.m.open[c]; open {
		delete(c.m.open, c)
		c.m.last = time.Now()
	}
	c.m.w.mu.Unlock()
	return c.Conn.Close()
}
