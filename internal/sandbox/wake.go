package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// ByAPI is who wakes a sandbox by an explicit order to resume it.
const ByAPI = "api"

// Woken says what a call of Core.Wake found.
type Woken struct {
	ID      string        // of the sandbox, where a name was given
	Resumed bool          // the call waited for a resume, its own or another's
	Report  *ResumeReport // of that resume; nil if there was none
}

// String tells in the form of a header field how a sandbox was resumed:
// "tier=local; ms=41". It is "" if it was not.
func (w Woken) String() string {
	if !w.Resumed || w.Report == nil {
		return ""
	}
	return fmt.Sprintf("tier=%s; ms=%.0f", w.Report.Tier, w.Report.TotalMS)
}

// Wake makes sure that a sandbox runs and takes requests, and says whether it
// had to wait for a resume. Calls at the same time share one resume. by names
// who asks, such as "http 8000" or "exec"; the resume that it causes reports
// it. A hibernation that is not committed is cancelled, a failed sandbox is not
// touched (ErrFailed).
func (c *Core) Wake(ctx context.Context, id, by string) (Woken, error) {
	e, err := c.find(id)
	if err != nil {
		return Woken{}, err
	}
	woken := Woken{ID: e.id}
	if e.ready() != nil {
		return woken, nil
	}
	// Until it is awake no hibernation is committed behind the request's back.
	e.dial(+1)
	defer e.dial(-1)
	before := e.start()
	if _, err := c.awake(ctx, e, by); err != nil {
		return woken, err
	}
	after := e.start()
	if before.under || after.generation != before.generation {
		woken.Resumed, woken.Report = true, after.report
	}
	return woken, nil
}

// lastStart is which start of a sandbox was the last one.
type lastStart struct {
	generation uint64
	under      bool // it is not over yet
	report     *ResumeReport
}

// start returns the last start of the entry.
func (e *entry) start() lastStart {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := lastStart{generation: e.rec.Generation, under: e.rec.State == StateResuming || e.rec.State == StateCreating}
	if r := e.rec.LastResume; r != nil {
		report := *r
		report.Phases, report.Warnings = maps.Clone(r.Phases), slices.Clone(r.Warnings)
		s.report = &report
	}
	return s
}

// dialFailed is the error of a connection to a port of a guest that runs.
func dialFailed(cause error, id string, port int) error {
	if !errors.Is(cause, shim.ErrRefused) {
		return unavailable(cause, "connect to port %d of sandbox %s", port, id)
	}
	return &Error{Kind: ErrRefused, Message: fmt.Sprintf("nothing answers at port %d of sandbox %s", port, id),
		Hint: "start a server there that listens at 0.0.0.0; one that listens at 127.0.0.1 in the sandbox is not reached from outside"}
}

// guestConn is a connection into a guest.
type guestConn struct {
	net.Conn
	slept    <-chan struct{}
	answered func() // idempotent
}

// Read reads from the guest.
func (c guestConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 || err != nil {
		c.answered()
	}
	return n, err
}

// Close ends the connection.
func (c guestConn) Close() error {
	c.answered()
	return c.Conn.Close()
}

// answerTime is how long a guest has to begin the answer to a new connection, and
// a request that holds a lease to come to its end, before a hibernation that
// somebody asks for breaks it off.
const answerTime = time.Second

// unanswered counts a connection into the guest to which it has not said
// anything, until the returned function is called or answerTime is over.
func (e *entry) unanswered() (answered func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mute++
	done := sync.OnceFunc(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.mute--
		e.tellHeard()
	})
	timer := time.AfterFunc(answerTime, done)
	return func() { timer.Stop(); done() }
}

// tellHeard wakes a hibernation that hears requests out; e.mu is held.
func (e *entry) tellHeard() {
	if e.heard != nil {
		close(e.heard)
		e.heard = nil
	}
}

// hear waits until the guest has begun to answer the connections that reached
// it, and requests of the last moment are over: those that hold a lease for less
// than answerTime. No new ones reach it while a hibernation has its turn.
func (e *entry) hear(ctx context.Context) {
	for {
		e.mu.Lock()
		var young time.Duration // until the last of these leases is older
		for l := range e.leases {
			young = max(young, answerTime-time.Since(l.Since))
		}
		if e.mute == 0 && young <= 0 {
			e.mu.Unlock()
			return
		}
		if e.heard == nil {
			e.heard = make(chan struct{})
		}
		heard := e.heard
		e.mu.Unlock()
		var older <-chan time.Time
		if young > 0 {
			older = time.After(young)
		}
		select {
		case <-heard:
		case <-older:
		case <-ctx.Done():
			return
		}
	}
}

// Asleep returns what is closed once the guest does not run any more.
func (c guestConn) Asleep() <-chan struct{} { return c.slept }

// CloseWrite ends the sending direction, or the whole of a connection that
// knows no half.
func (c guestConn) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Conn.Close()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// sleepGrace is how long what a guest sent before it went to sleep may take to
// reach a client, who may not read.
const sleepGrace = 2 * time.Second

// sleeper is a connection that tells when its guest went to sleep.
type sleeper interface{ Asleep() <-chan struct{} }

// IsAsleep reports whether the guest of a connection of Core.Dial does not run
// any more.
func IsAsleep(conn net.Conn) bool {
	s, ok := conn.(sleeper)
	return ok && isClosed(s.Asleep())
}

// AfterSleep calls cut a moment after the guest of conn, a connection of
// Core.Dial, went to sleep, unless ctx has ended or stop was called by then.
// After stop has returned cut is not running. A copy that waits for a client who
// does not read never sees the end of the guest's side: cut is to break it off.
func AfterSleep(ctx context.Context, conn net.Conn, cut func()) (stop func()) {
	s, ok := conn.(sleeper)
	if !ok {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		select {
		case <-ctx.Done():
			return
		case <-s.Asleep():
		}
		t := time.NewTimer(sleepGrace)
		defer t.Stop()
		select {
		case <-ctx.Done():
		case <-t.C:
			cut()
		}
	}()
	return func() { cancel(); <-over }
}
