package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// entry is a sandbox in memory: its record as last read or written, and its
// machine.
type entry struct {
	id   string
	turn chan struct{} // holds a token while an operation has its turn

	// What mu guards is written only by the operation whose turn it is, but for
	// op.late, doomed, dials, leases, sessions and idle.
	mu        sync.Mutex
	rec       record
	rev       uint64 // of rec in the catalog, 0: not there yet
	vm        VM     // of the shim that rec.Handle names, nil if there is none or it is not connected
	unwatch   context.CancelFunc
	parked    *parked       // vm is parked; nil otherwise
	op        *operation    // the one whose turn it is
	doomed    int           // deletions that wait for their turn
	mute      int           // connections into the guest that it has not answered yet
	heard     chan struct{} // closed when there is one less of these, or of the leases; nil: nobody waits
	dials     int           // requests that want to connect: while there is one, no hibernation is committed
	slept     chan struct{} // closed when the guest of now no longer runs; nil: nobody asked
	measured  measured      // what the next change adds to the record's usage
	leases    map[*Lease]struct{}
	sessions  int
	idle      idleWatch
	schedule  schedule
	unsettled bool // rec may not be what the catalog has, or its state has no operation that goes on with it
	retrying  bool // somebody tries to settle it
	gone      bool

	footprints map[snapshot.ID]snapshot.Footprint // of the snapshots that were measured last; the compactor's own
}

// opKind tells operations apart where others may cancel them.
type opKind int

const (
	opCheck      opKind = iota // never cancelled
	opStart                    // creation, resume: cancelled by a deletion
	opHibernate                // cancelled by a request or a deletion, until it is late
	opCheckpoint               // cancelled by a deletion, until it is late; a request waits for it
	opDelete                   // never cancelled, runs without settling first
)

// operation is one turn at a sandbox.
type operation struct {
	kind   opKind
	cancel context.CancelCauseFunc
	late   bool          // behind the point up to which it may be cancelled
	done   chan error    // what its caller is told
	ended  chan struct{} // closed once the turn is given back

	spontaneous bool // a hibernation that nobody asked for: a lease cancels it
}

// answer tells the caller how the operation went. One that goes on without
// making its caller wait calls it before its end; only the first call counts.
func (op *operation) answer(err error) {
	select {
	case op.done <- err:
	default:
	}
}

func newEntry(rec record, rev uint64) *entry {
	return &entry{id: rec.ID, turn: make(chan struct{}, 1), rec: rec, rev: rev}
}

func (e *entry) view() Sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	rec := e.rec
	e.measured.addTo(&rec)
	s := rec.view()
	s.Parked = e.parked != nil
	s.Leases = e.heldNow(time.Now())
	s.Leases = s.Leases[:min(len(s.Leases), maxLeasesSeen)]
	return s
}

// ready returns the machine if requests may go to it now, else nil.
func (e *entry) ready() VM {
	e.mu.Lock()
	defer e.mu.Unlock()
	hibernates := e.op != nil && e.op.kind == opHibernate
	if e.rec.State != StateRunning || e.unsettled || e.gone || e.doomed > 0 || hibernates {
		return nil
	}
	return e.vm
}

// interrupt cancels the operation under way if cause may do that.
func (e *entry) interrupt(cause error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.op == nil || e.op.late {
		return
	}
	switch e.op.kind {
	case opStart, opCheckpoint:
		if cause != errRequest {
			e.op.cancel(cause)
		}
	case opHibernate:
		e.op.cancel(cause)
	}
}

// tooLate ends the time in which op may be cancelled; false: it was cancelled.
func (e *entry) tooLate(ctx context.Context, op *operation) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dials > 0 && op.kind == opHibernate {
		op.cancel(errRequest)
	}
	if ctx.Err() != nil {
		return false
	}
	op.late = true
	return true
}

// dial counts the requests that want to connect.
func (e *entry) dial(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dials += n
}

// wanted reports whether a request wants to connect.
func (e *entry) wanted() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.dials > 0
}

// sleep returns what is closed when the guest that runs now no longer does.
func (e *entry) sleep() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.slept == nil {
		e.slept = make(chan struct{})
	}
	return e.slept
}

// attach makes vm the entry's machine.
func (e *entry) attach(vm VM) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.vm = vm
	e.measured.cpu = 0 // of the machine before
}

// detach lets go of the machine without ending it and returns it, nil if there is none.
func (e *entry) detach() VM {
	e.mu.Lock()
	vm, unwatch := e.vm, e.unwatch
	e.vm, e.unwatch, e.parked = nil, nil, nil
	e.mu.Unlock()
	if unwatch != nil {
		unwatch()
	}
	if vm != nil {
		vm.Close()
	}
	return vm
}

// run waits for the sandbox's turn, settles it if need be, and lets fn change
// it. It returns with fn, or when fn answers. ctx bounds the waiting: fn goes on
// without the caller, under a context that ends when the operation is cancelled
// or the core closes.
func (c *Core) run(ctx context.Context, e *entry, kind opKind, fn func(context.Context, *operation) error) error {
	select {
	case e.turn <- struct{}{}:
	case <-ctx.Done():
		return c.left(ctx, e)
	case <-c.closing:
		return unavailable(errClosing, "sandbox %s", e.id)
	}
	op, err := c.begin(ctx, e, kind, fn)
	if err != nil {
		return err
	}
	select {
	case err := <-op.done:
		return err
	case <-ctx.Done():
		return c.left(ctx, e)
	}
}

// left is the error of a caller that did not wait for the end.
func (c *Core) left(ctx context.Context, e *entry) error {
	return unavailable(context.Cause(ctx), "waiting for sandbox %s", e.id)
}

// begin starts an operation on an entry whose turn the caller has taken, and
// gives the turn back when it ends.
func (c *Core) begin(ctx context.Context, e *entry, kind opKind, fn func(context.Context, *operation) error) (*operation, error) {
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	op := &operation{kind: kind, cancel: cancel, done: make(chan error, 1), ended: make(chan struct{})}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		cancel(errClosing)
		<-e.turn
		return nil, unavailable(errClosing, "sandbox %s", e.id)
	}
	c.ops[op] = struct{}{}
	c.opsDone.Add(1)
	c.mu.Unlock()
	e.mu.Lock()
	e.op = op
	e.mu.Unlock()

	go func() {
		err := c.perform(work, e, op, fn)
		c.finish(e, op)
		cancel(nil)
		op.answer(err)
	}()
	return op, nil
}

// perform runs fn on a settled sandbox that is still there.
func (c *Core) perform(ctx context.Context, e *entry, op *operation, fn func(context.Context, *operation) error) error {
	if e.gone {
		if op.kind == opDelete {
			return nil // somebody else was quicker
		}
		return notFound("sandbox", e.id)
	}
	if op.kind != opDelete {
		if e.unsettled {
			if err := c.recoverSandbox(ctx, e); err != nil {
				return err
			}
			if e.gone {
				return notFound("sandbox", e.id)
			}
		}
		e.mu.Lock()
		doomed := e.doomed > 0
		e.mu.Unlock()
		if doomed {
			return conflict("", "sandbox %s is being deleted", e.id)
		}
	}
	return fn(ctx, op)
}

// finish gives the turn back. A sandbox that an operation leaves halfway is
// unsettled, and somebody must see to it even if nobody asks for it again.
func (c *Core) finish(e *entry, op *operation) {
	c.settleClaim(e) // before the operation is seen to be over
	e.mu.Lock()
	e.op = nil
	switch e.rec.State {
	case StateCreating, StateHibernating, StateResuming, StateDeleting:
		e.unsettled = !e.gone
	}
	retry := e.unsettled && !e.retrying && !e.gone
	if retry {
		e.retrying = true
		c.restDone.Add(1)
	}
	c.arrange(e)
	e.mu.Unlock()
	c.watchIdle(e)
	<-e.turn
	close(op.ended)
	if retry {
		go c.retry(e)
	}
	c.mu.Lock()
	delete(c.ops, op)
	c.mu.Unlock()
	c.opsDone.Done()
}

// retry settles e, however often it takes.
func (c *Core) retry(e *entry) {
	defer c.restDone.Done()
	for {
		select {
		case <-time.After(c.cfg.RetryDelay):
		case <-c.closing:
			return
		}
		err := c.run(context.Background(), e, opCheck, func(context.Context, *operation) error { return nil })
		e.mu.Lock()
		settled := e.gone || !e.unsettled
		e.retrying = !settled
		e.mu.Unlock()
		if settled {
			return
		}
		if err != nil {
			c.log.Warn("sandbox is not settled yet", keySandbox, e.id, keyError, err)
		}
	}
}

// change records what mutate makes of the entry's record. It refuses a move
// that the table does not have. After an error the entry is unsettled unless
// the catalog proves that nothing was written.
func (c *Core) change(ctx context.Context, e *entry, mutate func(*record)) error {
	next := e.rec
	mutate(&next)
	c.account(e, &next)
	from := e.rec.State
	if !allowed(from, next.State) {
		return conflict("", "sandbox %s cannot go from %s to %s", e.id, from, next.State)
	}
	value, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("encode the record of sandbox %s: %w", e.id, err)
	}
	ctx, cancel := c.short(ctx)
	defer cancel()
	rev, err := swap(ctx, c.cfg.Catalog, kindSandbox, e.id, value, e.rev)
	if err != nil {
		e.mu.Lock()
		e.unsettled = e.unsettled || !isUnwritten(err)
		e.mu.Unlock()
		return stepError(err, "record sandbox %s as %s", e.id, next.State)
	}
	isNew := e.rev == 0
	portable := next.Snapshot != e.rec.Snapshot || !next.LastUsed.Equal(e.rec.LastUsed) || next.Name != e.rec.Name ||
		!slices.EqualFunc(next.Checkpoints, e.rec.Checkpoints, checkpoint.same)
	e.mu.Lock()
	e.rec, e.rev = next, rev
	if e.slept != nil && next.State != StateRunning && next.State != StateHibernating {
		close(e.slept)
		e.slept = nil
	}
	e.mu.Unlock()
	if portable {
		c.replicate(e)
	}
	if next.Policy.limited() {
		c.limits.changed()
	}
	if isNew {
		from = ""
	}
	if from != next.State {
		c.emit(e, Event{Type: EventState, From: from, To: next.State, Reason: next.Reason})
		if next.State == StateFailed {
			c.emit(e, Event{Type: EventFailed, Reason: next.Reason})
		}
	}
	return nil
}

// unwritten is the error of a write that is known not to have taken effect.
type unwritten struct{ error }

func (u unwritten) Unwrap() error { return u.error }

func isUnwritten(err error) bool {
	_, ok := asUnwritten(err)
	return ok
}

// swap is a catalog's Put that finds out what became of a write that failed:
// it returns success if the value is there, an unwritten error if the old
// revision still is, and otherwise what Put returned.
func swap(ctx context.Context, cat Catalog, kind, key string, value []byte, rev uint64) (uint64, error) {
	now, err := cat.Put(ctx, kind, key, value, rev)
	if err == nil {
		return now, nil
	}
	rec, getErr := cat.Get(ctx, kind, key)
	switch {
	case getErr == nil && rec.Revision == rev, isNotFound(getErr) && rev == 0:
		return 0, unwritten{err}
	case getErr == nil && bytes.Equal(rec.Value, value):
		return rec.Revision, nil
	}
	return 0, err
}
