package sandbox

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// A running sandbox that may hibernate by itself has one timer, and one in
// standby none: what detection costs grows with the sandboxes that are awake.
// At the timer's end the shim is asked how long nothing happened. Either that
// is long enough, or it says when it can be at the earliest, and the timer is
// set for then. Nothing tells the core of traffic as it happens.

const (
	minLook     = 100 * time.Millisecond // between two looks at a sandbox
	lookMargin  = 2 * time.Millisecond   // the shim's clock and ours are not read at once
	lookTimeout = 5 * time.Second        // for the answer to a look
	lookRetry   = 5 * time.Second        // after a look without an answer, at most

	cpuPeriod = time.Second // between looks at the processor time, at most
	busyShare = 0.05        // of one vCPU, that counts as activity under IdleCPU

	minBackoff = 10 * time.Second // after a hibernation that failed; doubles
	maxBackoff = 10 * time.Minute
)

// never is a length of time that no sandbox lives.
const never = time.Duration(math.MaxInt64)

// idleWatch is what the core knows of the idleness of a running sandbox. The
// entry's mu guards it.
type idleWatch struct {
	timer   *time.Timer
	run     uint64        // generation that it is about, 0: none
	since   time.Time     // when that began to run, was found running, or a lease was released: counts as activity
	held    time.Time     // when it was last known to be held awake
	holds   time.Duration // for so long from then, if nothing passes meanwhile
	looking bool
	looked  time.Time // when the last look began
	blind   bool      // its shim does not know the order

	cpu   time.Duration // at cpuAt
	cpuAt time.Time
	busy  time.Time // when the processor time was last found to be activity

	failures  int       // of its hibernations, in a row
	notBefore time.Time // of the next one
	silent    bool      // that the agent does not answer was reported
}

// Activity says what keeps a running sandbox awake besides leases.
type Activity struct {
	Open      int              // inbound connections that are not silent for too long
	Awaiting  int              // outbound connections that wait for a reply
	Idle      time.Duration    // since the last traffic
	KeepAwake []shim.KeepAwake // processes that were started to keep it awake
	AgentErr  string           // why the guest did not say which these are
}

// Inspect returns the sandbox with its activity, if it runs and its shim
// answers soon. It wakes nothing.
func (c *Core) Inspect(ctx context.Context, id string) (Sandbox, error) {
	e, err := c.find(id)
	if err != nil {
		return Sandbox{}, err
	}
	var activity *Activity
	if vm := e.ready(); vm != nil {
		e.mu.Lock()
		req := c.activityRequest(e.rec.Policy, 0)
		e.mu.Unlock()
		ctx, cancel := context.WithTimeout(ctx, lookTimeout)
		defer cancel()
		if a, err := vm.Activity(ctx, req); err == nil {
			e.usedCPU(vm, a.CPU)
			activity = &Activity{Open: a.Open, Awaiting: a.Awaiting, Idle: a.Idle, KeepAwake: a.KeepAwake, AgentErr: a.AgentErr}
		}
	}
	s := c.view(e)
	if s.State == StateRunning {
		s.Activity = activity
	}
	return s, nil
}

// activityRequest asks by the caps of a policy, and the guest itself only if its
// network was quiet for so long.
func (c *Core) activityRequest(p Policy, quiet time.Duration) shim.ActivityRequest {
	req := shim.ActivityRequest{InboundCap: p.ConnectionCap, AwaitCap: c.cfg.AwaitCap, IdleAfter: quiet}
	if req.InboundCap == 0 {
		req.InboundCap = never
	}
	return req
}

// watchIdle sets the timer of a sandbox that runs and may hibernate by itself,
// and stops that of any other. It is called behind every operation, and
// whenever what may keep it awake has changed.
func (c *Core) watchIdle(e *entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	w := &e.idle
	switch {
	case !e.runs():
		e.stopIdle()
		w.run = 0
		return
	case w.run != e.rec.Generation:
		e.stopIdle()
		now := time.Now()
		*w = idleWatch{run: e.rec.Generation, since: now, busy: now, looking: w.looking}
	}
	if c.idles(e) {
		c.setIdle(e, time.Now())
	} else {
		e.stopIdle()
	}
}

// runs reports whether the sandbox runs in a machine that is known; e.mu is held.
func (e *entry) runs() bool {
	return e.rec.State == StateRunning && e.vm != nil && !e.unsettled && !e.gone
}

// idles reports whether the sandbox runs and may hibernate by itself; e.mu is held.
func (c *Core) idles(e *entry) bool {
	return !c.cfg.NoIdle && e.runs() && e.rec.Policy.IdleTimeout > 0
}

// stopIdle stops the timer; e.mu is held.
func (e *entry) stopIdle() {
	if e.idle.timer != nil {
		e.idle.timer.Stop()
		e.idle.timer = nil
	}
}

// setIdle sets the timer for at, or for later if it cannot be idle by then.
// Where a lease holds the sandbox for who knows how long there is none: its
// release comes here again. e.mu is held.
func (c *Core) setIdle(e *entry, at time.Time) {
	w, p, now := &e.idle, e.rec.Policy, time.Now()
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
	if w.blind {
		return
	}
	at = latest(at, w.looked.Add(minLook), w.notBefore)
	if p.Idle != IdleCPU { // else it is looked at in between
		at = latest(at, w.since.Add(p.IdleTimeout))
	}
	for _, l := range e.heldNow(now) {
		if l.Until.IsZero() {
			return
		}
		at = latest(at, l.Until)
	}
	run := w.run
	w.timer = time.AfterFunc(at.Sub(now)+lookMargin, func() { c.background(func() { c.lookIdle(e, run) }) })
}

func latest(a time.Time, more ...time.Time) time.Time {
	for _, b := range more {
		if b.After(a) {
			a = b
		}
	}
	return a
}

// lookIdle finds out whether a sandbox that runs at a generation is idle. If so
// it hibernates, else the timer is set for when it may be.
func (c *Core) lookIdle(e *entry, run uint64) {
	e.mu.Lock()
	w := &e.idle
	if w.looking || w.run != run || !c.idles(e) {
		e.mu.Unlock()
		return
	}
	w.looking, w.looked = true, time.Now()
	vm, policy := e.vm, e.rec.Policy
	e.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	a, err := vm.Activity(ctx, c.activityRequest(policy, policy.IdleTimeout))
	cancel()
	e.usedCPU(vm, a.CPU)
	e.mu.Lock()
	known, next := c.judge(e, a, err)
	e.mu.Unlock()
	if err == nil && next.IsZero() {
		next = c.hibernateIdle(e, known)
	}

	e.mu.Lock()
	defer e.mu.Unlock()
	w.looking = false
	if c.idles(e) && w.run == e.rec.Generation {
		c.setIdle(e, next)
	}
}

// judge says from an answer of the shim when the sandbox is to be looked at
// again, or, with a zero time, that it is idle and since when that could be
// known. e.mu is held.
func (c *Core) judge(e *entry, a shim.Activity, err error) (known, next time.Time) {
	w, p, now := &e.idle, e.rec.Policy, time.Now()
	switch {
	case errors.Is(err, shim.ErrUnknown):
		w.blind = true
		c.log.Info("a sandbox is held by a shim of an older version and will not hibernate by itself before its next resume", keySandbox, e.id)
		return known, now.Add(never)
	case err != nil: // it ends, or hibernates: whoever does that comes back to it
		return known, now.Add(min(p.IdleTimeout, lookRetry))
	}
	if a.AgentErr != "" && !w.silent {
		w.silent = true
		c.log.Warn("a guest does not tell which processes are to keep it awake: none does", keySandbox, e.id, keyError, a.AgentErr)
	}
	quiet := latest(now.Add(-a.Idle), w.since)
	again := never
	if p.Idle == IdleCPU {
		quiet = latest(quiet, w.lookAtCPU(a.CPU, now))
		again = min(cpuPeriod, p.IdleTimeout/2)
	}
	left := p.IdleTimeout - now.Sub(quiet)
	switch {
	case a.Open+a.Awaiting > 0:
		// Their end is activity, so it cannot be idle earlier than a whole
		// time-out from now, unless they cease to count.
		w.held, w.holds = now, a.Held
		return known, now.Add(min(max(a.Held, left), p.IdleTimeout, again))
	case left > 0:
		return known, now.Add(min(left, again))
	case len(a.KeepAwake) > 0:
		w.held, w.holds = now, 0
		return known, now.Add(min(p.IdleTimeout, again))
	}
	known = quiet.Add(p.IdleTimeout)
	if !quiet.After(w.held) {
		known = latest(known, w.held.Add(w.holds))
	}
	if h := e.rec.Hold; h != nil && !quiet.After(h.Until) {
		known = latest(known, h.Until)
	}
	if known.After(now) {
		known = now
	}
	return known, time.Time{}
}

// lookAtCPU takes the VMM's processor time and returns when it was last
// activity.
func (w *idleWatch) lookAtCPU(cpu time.Duration, now time.Time) time.Time {
	if passed := now.Sub(w.cpuAt); w.cpuAt.IsZero() || float64(cpu-w.cpu) > busyShare*float64(passed) {
		w.busy = now
	}
	w.cpu, w.cpuAt = cpu, now
	return w.busy
}

// hibernateIdle hibernates a sandbox that nothing uses, which could be known at
// that time. It returns when to look again if it runs on.
func (c *Core) hibernateIdle(e *entry, known time.Time) (next time.Time) {
	select { // that many at once only make each other late
	case c.idleTurns <- struct{}{}:
		defer func() { <-c.idleTurns }()
	case <-c.closing:
		return time.Now()
	}
	e.mu.Lock()
	quiet := e.idle.failures > 0
	e.mu.Unlock()
	confirm := func(ctx context.Context) (time.Time, bool) { return known, c.stillIdle(ctx, e) }
	err := c.hibernateEntry(context.Background(), e, HibernateOptions{Trigger: TriggerIdle, confirm: confirm, repeated: quiet})
	e.mu.Lock()
	defer e.mu.Unlock()
	w := &e.idle
	switch {
	case err == nil, errors.Is(err, ErrConflict), errors.Is(err, ErrNotFound), errors.Is(err, ErrFailed), errors.Is(err, errClosing):
		w.failures = 0
	default:
		backoff := min(minBackoff<<min(w.failures, 10), maxBackoff)
		if w.failures++; w.failures == 1 {
			c.log.Warn("an idle sandbox did not hibernate and is tried again later", keySandbox, e.id, keyError, err)
		}
		w.notBefore = time.Now().Add(backoff)
	}
	return time.Now()
}

// stillIdle looks once more, at the sandbox's turn, whether nothing uses it.
func (c *Core) stillIdle(ctx context.Context, e *entry) bool {
	e.mu.Lock()
	p, vm, free := e.rec.Policy, e.vm, c.idles(e) && len(e.heldNow(time.Now())) == 0 && e.dials == 0
	e.mu.Unlock()
	if !free {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	a, err := vm.Activity(ctx, c.activityRequest(p, never))
	return err == nil && a.Quiet(p.IdleTimeout)
}
