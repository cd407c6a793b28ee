package sandbox

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"sync"
	"time"
)

// The limits of a policy, by the names that events and people see.
const (
	limitTTL     = "ttl"
	limitTTLIdle = "ttl_idle"
	limitExpires = "expires"
	limitTimeout = "timeout"
)

// Due says what a limit is going to do to a sandbox, and when.
type Due struct {
	Limit  string // "ttl", "ttl_idle", "expires" or "timeout"
	Action Action
	At     time.Time // of a timeout: if it runs on without a break
}

// A deletion is announced a tenth of its limit's time before, at most
// maxNotice, and never sooner after the announcement than minNotice, or that
// tenth where it is shorter: not even after a daemon was down when it was due.
const (
	maxNotice    = time.Hour
	minNotice    = time.Minute
	noticeShare  = 10
	limitRetry   = 5 * time.Second // after a limit's action failed or was cancelled
	limitWorkers = 8               // actions at a time
)

// told is what a sandbox's users were told of a limit.
type told struct {
	Due time.Time `json:"due"` // what the limit said then: where it says something else now, nothing was told
	At  time.Time `json:"at"`
}

// dues returns what the policy's limits are going to do to a sandbox in the
// state that rec has, in no order, with the length of time that each is of.
func (rec *record) dues(now time.Time) map[Due]time.Duration {
	list, p := map[Due]time.Duration{}, rec.Policy
	if rec.State == StateDeleting || rec.State == StateCreating {
		return list
	}
	if l := p.TTL; l.After > 0 {
		list[Due{limitTTL, l.Action, rec.CreatedAt.Add(l.After)}] = l.After
	}
	if l := p.TTLIdle; l.After > 0 && rec.State.asleep() && !rec.Since.IsZero() {
		list[Due{limitTTLIdle, l.Action, rec.Since.Add(l.After)}] = l.After
	}
	if x := p.Expires; !x.At.IsZero() {
		list[Due{limitExpires, x.Action, x.At}] = noticeShare * maxNotice
	}
	if l := p.Timeout; l.After > 0 && rec.State == StateRunning && !rec.Since.IsZero() {
		list[Due{limitTimeout, l.Action, rec.Since.Add(l.After + rec.TimeoutFrom - rec.Usage.Awake)}] = l.After
	}
	return list
}

// next returns the due that comes first and has not been dealt with; a
// notification that was given has.
func (rec *record) next(now time.Time) *Due {
	var first *Due
	for d := range rec.dues(now) {
		if d.Action == ActionNotify && rec.Told[d.Limit].Due.Equal(d.At) {
			continue
		}
		if first == nil || d.At.Before(first.At) || d.At.Equal(first.At) && d.Limit < first.Limit {
			first = &d
		}
	}
	return first
}

// step is something to do about a due, at an instant.
type step struct {
	due      Due
	at       time.Time
	announce bool // only tell of it
}

// step returns what is to be done next about the limits, nil if nothing is.
func (rec *record) step(now time.Time) *step {
	var first *step
	for d, after := range rec.dues(now) {
		notice := min(maxNotice, after/noticeShare)
		t, isTold := rec.Told[d.Limit]
		isTold = isTold && t.Due.Equal(d.At)
		s := step{due: d, at: d.At}
		switch {
		case d.Action == ActionNotify && isTold:
			continue
		case d.Action == ActionNotify:
			s.announce = true
		case d.Action == ActionDelete && !isTold:
			s.at, s.announce = d.At.Add(-notice), true
		case d.Action == ActionDelete:
			if soonest := t.At.Add(min(minNotice, notice)); soonest.After(s.at) {
				s.at = soonest
			}
		}
		if first == nil || cmp.Or(s.at.Compare(first.at), cmp.Compare(s.due.Limit, first.due.Limit)) < 0 {
			first = &s
		}
	}
	return first
}

// limits sees to the limits of all sandboxes: one timer, for whatever is to be
// done first. What has no limits costs nothing.
type limits struct {
	kick chan struct{}

	mu   sync.Mutex
	busy map[*entry]time.Time // being seen to, or to be left alone until then
}

func (l *limits) init() {
	l.kick, l.busy = make(chan struct{}, 1), map[*entry]time.Time{}
}

// changed says that the limits of a sandbox, or its state, changed.
func (l *limits) changed() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// limited reports whether the policy has limits.
func (p *Policy) limited() bool {
	return p.TTL.After > 0 || p.TTLIdle.After > 0 || p.Timeout.After > 0 || !p.Expires.At.IsZero()
}

// keepLimits does what limits say, until the core closes.
func (c *Core) keepLimits() {
	ctx := c.untilClosed()
	slots := make(chan struct{}, limitWorkers)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.limits.kick:
		case <-timer.C:
		}
		now, wait := time.Now(), time.Duration(-1)
		for _, e := range c.all() {
			due, in := c.dueStep(e, now)
			if !due {
				if in >= 0 && (wait < 0 || in < wait) {
					wait = in
				}
				continue
			}
			c.restDone.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				c.meetLimit(ctx, e)
			})
		}
		timer.Stop()
		if wait >= 0 {
			timer.Reset(wait)
		}
	}
}

// dueStep reports whether something is to be done about e now, which the caller
// must do then, or else in how long; negative: nothing is to be expected.
func (c *Core) dueStep(e *entry, now time.Time) (due bool, in time.Duration) {
	e.mu.Lock()
	limited := e.rec.Policy.limited() && !e.gone
	var s *step
	if limited {
		s = e.rec.step(now)
	}
	e.mu.Unlock()
	if s == nil {
		return false, -1
	}
	c.limits.mu.Lock()
	defer c.limits.mu.Unlock()
	until, busy := c.limits.busy[e]
	switch {
	case busy && until.IsZero():
		return false, -1 // it kicks at its end
	case busy && now.Before(until):
		return false, max(until.Sub(now), s.at.Sub(now))
	case now.Before(s.at):
		return false, s.at.Sub(now)
	}
	c.limits.busy[e] = time.Time{}
	return true, 0
}

// meetLimit does what is due to be done about e.
func (c *Core) meetLimit(ctx context.Context, e *entry) {
	err := c.takeStep(ctx, e)
	c.limits.mu.Lock()
	delete(c.limits.busy, e)
	e.mu.Lock()
	gone := e.gone
	e.mu.Unlock()
	if err != nil && !gone && !errors.Is(err, ErrNotFound) {
		c.limits.busy[e] = time.Now().Add(limitRetry)
	}
	c.limits.mu.Unlock()
	c.limits.changed()
	if err != nil && ctx.Err() == nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, errClosing) {
		c.log.Warn("what a limit of a sandbox says could not be done and is tried again", keySandbox, e.id, keyError, err)
	}
}

// deleteDue deletes a sandbox at a limit, unless that was changed meanwhile:
// whoever was told that it is kept can rely on it.
func (c *Core) deleteDue(ctx context.Context, e *entry, limit string) error {
	return c.delete(ctx, e, limit, func() bool {
		now := time.Now()
		s := e.rec.step(now)
		return s != nil && s.due.Limit == limit && s.due.Action == ActionDelete && !s.announce && !now.Before(s.at)
	})
}

func (c *Core) takeStep(ctx context.Context, e *entry) error {
	var do *step
	err := c.run(ctx, e, opCheck, func(ctx context.Context, _ *operation) error {
		now := time.Now().UTC()
		s := e.rec.step(now)
		if s == nil || now.Before(s.at) {
			return nil // it was changed meanwhile
		}
		if !s.announce {
			do = s
			return nil
		}
		news := maps.Clone(e.rec.Told)
		if news == nil {
			news = map[string]told{}
		}
		news[s.due.Limit] = told{Due: s.due.At, At: now}
		if err := c.change(ctx, e, func(r *record) { r.Told = news }); err != nil {
			return err
		}
		c.emit(e, Event{Type: EventExpiring, Reason: s.due.Limit, Due: s.due.At, Action: s.due.Action})
		return nil
	})
	if err != nil || do == nil {
		return err
	}
	if do.due.Action == ActionDelete {
		return c.deleteDue(ctx, e, do.due.Limit)
	}
	_, err = c.Hibernate(ctx, e.id, HibernateOptions{Trigger: TriggerTimeout})
	return err
}
