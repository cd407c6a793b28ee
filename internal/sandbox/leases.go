package sandbox

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"
)

// The kinds of leases.
const (
	LeaseExec     = "exec"     // a command or a stream of a process that somebody follows
	LeaseUpload   = "upload"   // a file on its way into the sandbox
	LeaseDownload = "download" // and one out of it
	LeaseHold     = "hold"     // an explicit hold, recorded
)

// The kinds of sessions.
const (
	SessionPTY     = "pty"
	SessionSSH     = "ssh"
	SessionPreview = "preview" // a WebSocket through the proxy
)

// Lease keeps a sandbox from hibernating by itself. It wakes nobody: on a
// sandbox in standby it counts from the next wake on. An explicit hibernation,
// a timeout and a drain go ahead regardless.
type Lease struct {
	Kind  string    `json:"kind"`
	Owner string    `json:"owner"`          // who holds it and what for, for people
	Since time.Time `json:"since"`          // set by the core
	Until time.Time `json:"until,omitzero"` // when it ends by itself; zero: when it is released
}

// Bounds of leases.
const (
	maxOwner      = 256                 // bytes
	maxHold       = 30 * 24 * time.Hour // of an explicit hold
	maxLeasesSeen = 100                 // that a Sandbox lists
)

// Hold takes a lease on a sandbox for as long as the daemon lives, until
// release is called or its Until comes. The caller must call release; it may be
// called again. ErrNotFound says that there is no such sandbox.
func (c *Core) Hold(_ context.Context, id string, l Lease) (release func(), err error) {
	e, err := c.find(id)
	if err != nil {
		return nil, err
	}
	l.Owner, l.Since = clipTo(l.Owner, maxOwner), time.Now().UTC()
	lease := &l
	e.mu.Lock()
	if e.leases == nil {
		e.leases = map[*Lease]struct{}{}
	}
	e.leases[lease] = struct{}{}
	e.mu.Unlock()
	e.keepAwake()
	return func() {
		e.mu.Lock()
		_, held := e.leases[lease]
		delete(e.leases, lease)
		if held { // what it was for was activity
			e.idle.since = time.Now()
			e.tellHeard()
		}
		e.mu.Unlock()
		if held {
			c.watchIdle(e)
		}
	}, nil
}

// SetHold keeps a sandbox from hibernating by itself until that time, also over
// restarts of the daemon. It takes the place of an earlier hold. reason is for
// people.
func (c *Core) SetHold(ctx context.Context, id string, until time.Time, reason string) (Sandbox, error) {
	now := time.Now()
	if until.Sub(now) < minPeriod || until.Sub(now) > maxHold {
		return Sandbox{}, invalid("a hold lasts %v to %d days", minPeriod, int(maxHold/(24*time.Hour)))
	}
	if err := checkText("hold", map[string]string{"reason": reason}); err != nil {
		return Sandbox{}, err
	}
	l := &Lease{Kind: LeaseHold, Owner: clipTo(reason, maxOwner), Since: now.UTC(), Until: until.UTC()}
	return c.recordHold(ctx, id, l)
}

// ReleaseHold ends the hold that SetHold set. That there is none is no error.
func (c *Core) ReleaseHold(ctx context.Context, id string) (Sandbox, error) {
	return c.recordHold(ctx, id, nil)
}

func (c *Core) recordHold(ctx context.Context, id string, l *Lease) (Sandbox, error) {
	e, err := c.find(id)
	if err != nil {
		return Sandbox{}, err
	}
	if l != nil {
		e.keepAwake()
	}
	err = c.run(ctx, e, opCheck, func(ctx context.Context, _ *operation) error {
		if l == nil && e.rec.Hold == nil {
			return nil
		}
		if err := c.change(ctx, e, func(r *record) { r.Hold = l }); err != nil {
			return err
		}
		e.mu.Lock()
		e.idle.held, e.idle.holds = time.Now(), 0
		e.mu.Unlock()
		return nil
	})
	return c.view(e), err
}

// keepAwake cancels a hibernation that began because nothing used the sandbox.
func (e *entry) keepAwake() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.op != nil && e.op.kind == opHibernate && e.op.spontaneous && !e.op.late {
		e.op.cancel(errHeld)
	}
}

// heldNow returns the leases that count then, the oldest first; e.mu is held.
func (e *entry) heldNow(now time.Time) []Lease {
	var list []Lease
	for l := range e.leases {
		if l.Until.IsZero() || now.Before(l.Until) {
			list = append(list, *l)
		}
	}
	if h := e.rec.Hold; h != nil && now.Before(h.Until) {
		list = append(list, *h)
	}
	slices.SortFunc(list, func(a, b Lease) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Owner, b.Owner))
	})
	return list
}

// leaseWarnings says in words what a hibernation goes ahead regardless of.
func leaseWarnings(held []Lease) []string {
	var list []string
	for _, l := range held[:min(len(held), 10)] {
		text := "it was held awake: " + l.Kind
		if l.Owner != "" {
			text += ": " + l.Owner
		}
		list = append(list, text)
	}
	return list
}

// Session notes that an interactive session of a sandbox begins; kind is one of
// the Session constants. The caller calls end once when it ends, after its
// lease. When the last one ends and the policy says so, the sandbox hibernates,
// unless a lease holds it.
func (c *Core) Session(id, kind string) (end func(), err error) {
	e, err := c.find(id)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.sessions++
	e.mu.Unlock()
	return func() {
		e.mu.Lock()
		e.sessions--
		last := e.sessions == 0 && e.rec.Policy.OnSessionClose == SessionHibernate
		e.mu.Unlock()
		if last {
			c.background(func() { c.endSession(e, kind) })
		}
	}, nil
}

// endSession hibernates a sandbox whose last session ended.
func (c *Core) endSession(e *entry, kind string) {
	known := time.Now()
	o := HibernateOptions{Trigger: TriggerSession, confirm: func(context.Context) (time.Time, bool) {
		e.mu.Lock()
		defer e.mu.Unlock()
		return known, e.sessions == 0 && len(e.heldNow(time.Now())) == 0 && e.rec.Policy.OnSessionClose == SessionHibernate
	}}
	err := c.hibernateEntry(context.Background(), e, o)
	if err != nil && !errors.Is(err, ErrConflict) && !errors.Is(err, ErrNotFound) && !errors.Is(err, errClosing) {
		c.log.Warn("a sandbox did not hibernate at the end of its last session", keySandbox, e.id, "session", kind, keyError, err)
	}
}

// background runs fn as a part of the core, unless that is closing.
func (c *Core) background(fn func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.restDone.Go(fn)
	}
}

// clipTo cuts a text for people to n bytes of valid UTF-8.
func clipTo(s string, n int) string {
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n-len("…")], "") + "…"
	}
	return s
}
