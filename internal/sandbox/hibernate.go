package sandbox

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// captureGrace is how much longer than the shim's own deadline the core waits
// for the answer to a capture.
const captureGrace = 10 * time.Second

// Trigger says why a sandbox hibernated.
type Trigger string

// The triggers.
const (
	TriggerCall    Trigger = "call"    // somebody asked for it
	TriggerIdle    Trigger = "idle"    // nothing used it any more
	TriggerSession Trigger = "session" // its last interactive session ended
	TriggerTimeout Trigger = "timeout" // its running time is used up
	TriggerDrain   Trigger = "drain"   // everything hibernates
	TriggerRestore Trigger = "restore" // it is rolled back

	TriggerCheckpoint Trigger = "checkpoint" // no hibernation: it goes on
)

// spontaneous reports whether what nobody asked for gives way to leases.
func (t Trigger) spontaneous() bool { return t == TriggerIdle || t == TriggerSession }

// HibernateOptions says how to hibernate. The zero value is the usual way.
type HibernateOptions struct {
	NoPark  bool    // do not keep the paused VMM
	Trigger Trigger // "": TriggerCall

	// confirm is asked, at the sandbox's turn, whether it is to hibernate still, and
	// since when that could have been known. nil: yes, since just now.
	confirm  func(context.Context) (known time.Time, ok bool)
	repeated bool // it failed before, and nobody wants to hear that again
}

// Hibernate takes a running sandbox to standby; one that is there already is
// left alone. When it returns without error the snapshot is durable and the
// sandbox is in standby by its record. Its machine is parked or released behind that: what
// comes next to the sandbox waits for it, and the report tells of it afterwards.
// ErrConflict says that a request came in between and the sandbox runs on.
// Leases do not keep it from that: the report's warnings name them.
func (c *Core) Hibernate(ctx context.Context, id string, o HibernateOptions) (Sandbox, error) {
	e, err := c.find(id)
	if err != nil {
		return Sandbox{}, err
	}
	err = c.hibernateEntry(ctx, e, o)
	return c.view(e), err
}

func (c *Core) hibernateEntry(ctx context.Context, e *entry, o HibernateOptions) error {
	o.Trigger = cmp.Or(o.Trigger, TriggerCall)
	return c.run(ctx, e, opHibernate, func(ctx context.Context, op *operation) error {
		e.mu.Lock()
		op.spontaneous = o.Trigger.spontaneous()
		e.mu.Unlock()
		switch {
		case e.rec.State == StateStandby:
			return nil
		case e.rec.State == StateRunning:
		case o.Trigger.spontaneous():
			return nil
		case e.rec.State == StateFailed:
			return failedError(&e.rec)
		default:
			return conflict("", "sandbox %s is %s", e.id, e.rec.State)
		}
		e.hear(ctx)
		begin := beginning{trigger: o.Trigger, at: time.Now()}
		if o.confirm != nil {
			known, ok := o.confirm(ctx)
			if !ok {
				return nil
			}
			begin.at, begin.known = time.Now(), known
		}
		e.mu.Lock()
		begin.held = e.heldNow(begin.at)
		e.mu.Unlock()
		if o.Trigger == TriggerIdle && !o.repeated {
			c.emit(e, Event{Type: EventIdle})
		}
		report, err := c.suspend(ctx, e, op, capturing{beginning: begin, noPark: o.NoPark, answers: true})
		if err == nil {
			c.emit(e, Event{Type: EventHibernated, Hibernate: &report, Bytes: e.rec.Metadata.StoredBytes})
		} else if !o.repeated {
			c.emit(e, Event{Type: EventCancelled, Reason: err.Error()})
		}
		return err
	})
}

// beginning is what is known when a hibernation begins.
type beginning struct {
	trigger Trigger // "" for one that somebody else began
	at      time.Time
	known   time.Time // since when its reason could have been known; zero: just then
	held    []Lease   // that it goes ahead regardless of
}

// report makes a report of what began so and was sealed.
func (b beginning) report(sealed shim.CaptureReport) HibernateReport {
	r := HibernateReport{Trigger: b.trigger, PauseMS: sealed.PauseMS, Phases: sealed.Phases, WorkingSet: sealed.WorkingSet,
		Warnings: append(leaseWarnings(b.held), sealed.Warnings...)}
	if !b.known.IsZero() {
		r = r.with("detect", ms(max(0, b.at.Sub(b.known))))
	}
	return r
}

// capturing says what a running sandbox is captured for.
type capturing struct {
	beginning
	keep    *checkpoint // what the snapshot becomes beside the record's; nil: nothing
	goOn    bool        // the guest goes on behind the commit
	noPark  bool        // do not keep the paused VMM
	answers bool        // the caller is told of the commit, and does not wait for what comes behind it
}

// String says what a capture did not do that failed.
func (a capturing) String() string {
	if a.goOn {
		return "was not captured"
	}
	return "did not hibernate"
}

// suspend takes and commits a snapshot of a running sandbox, behind which it
// sleeps or goes on, or leaves it running as it was.
func (c *Core) suspend(ctx context.Context, e *entry, op *operation, a capturing) (HibernateReport, error) {
	none := HibernateReport{}
	if op.kind == opHibernate && e.wanted() {
		return none, stepError(errRequest, "sandbox %s %s and runs on", e.id, a)
	}
	id, err := c.mint.take(ctx)
	if err != nil {
		return none, stepError(causeOf(ctx, err), "sandbox %s %s", e.id, a)
	}
	defer c.mint.put(id)
	err = c.change(ctx, e, func(r *record) {
		r.State, r.Pending, r.Keep, r.GoOn = StateHibernating, id, a.keep, a.goOn
		r.Attempt++
	})
	if err != nil {
		return none, err
	}
	sealed, err := c.capture(ctx, e)
	if err == nil && e.tooLate(ctx, op) {
		var report HibernateReport
		if report, err = c.commitAs(ctx, e, op, a, sealed); err == nil || e.rec.State != StateHibernating || e.unsettled {
			return report, err
		}
	}
	cancelled := err == nil || ctx.Err() != nil
	settled := c.conclude(ctx, e, cancelled)
	switch {
	case e.rec.Snapshot != nil && e.rec.Snapshot.ID == id: // the answer was lost, not the snapshot
		if a.goOn {
			return none, nil
		}
		return *e.rec.LastHibernate, nil
	case settled != nil:
		return none, settled
	case e.rec.State == StateFailed:
		return none, failedError(&e.rec)
	case cancelled:
		err = context.Cause(ctx)
	}
	return none, stepError(err, "sandbox %s %s and runs on", e.id, a)
}

// commitAs passes the commit point of what a sandbox was captured for, and does
// what comes behind it. Only a change that failed is an error.
func (c *Core) commitAs(ctx context.Context, e *entry, op *operation, a capturing, sealed shim.CaptureReport) (HibernateReport, error) {
	if a.goOn {
		return c.commitGoOn(ctx, e, sealed, a.beginning)
	}
	before, err := c.commit(ctx, e, sealed, a.beginning)
	if err != nil {
		return HibernateReport{}, err
	}
	if a.answers {
		op.answer(nil)
		c.hit(ctx, e, fpHibernateAnswered)
	}
	c.leave(ctx, e, a.noPark, before)
	return *e.rec.LastHibernate, nil
}

// capture orders the snapshot that the record names as pending.
func (c *Core) capture(ctx context.Context, e *entry) (shim.CaptureReport, error) {
	if err := failpoint.Hit(ctx, fpHibernateRecorded); err != nil {
		return shim.CaptureReport{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.CaptureTimeout+captureGrace)
	defer cancel()
	art, err := c.artifacts(e.rec.Template, e.rec.TemplateVersion)
	if err != nil {
		return shim.CaptureReport{}, err
	}
	key, err := c.key(ctx, e.rec.Shape, art)
	if err != nil {
		return shim.CaptureReport{}, err
	}
	report, err := e.vm.Capture(ctx, shim.CaptureRequest{
		Attempt: e.rec.Attempt, ID: e.rec.Pending, Deadline: c.cfg.CaptureTimeout,
		Generation: e.rec.Generation, Key: key, Full: e.rec.Snapshot == nil, Parent: e.rec.Snapshot,
		Hooks: guestHooks(e.rec.Policy.Hooks), Unfrozen: true,
	})
	if err != nil {
		return report, err
	}
	c.logHooks(e, report.Hooks)
	return report, failpoint.Hit(ctx, fpHibernateSealed)
}

// commit passes the commit point of a hibernation whose snapshot is sealed, and
// returns the record that the sandbox had before. Only a change that
// failed is an error. The machine is to leave then.
func (c *Core) commit(ctx context.Context, e *entry, sealed shim.CaptureReport, begun beginning) (before record, err error) {
	before = e.rec
	report := begun.report(sealed)
	committing := time.Now()
	e.usedCPU(e.vm, sealed.CPU)
	err = c.change(ctx, e, func(r *record) {
		r.State = StateStandby
		r.Usage.StoredBytes += sealed.Metadata.StoredBytes // until it is measured
		r.commit(sealed.Snapshot, sealed.Metadata)
		r.LastUsed, r.LastHibernate = time.Now().UTC(), &report
	})
	if err != nil {
		return before, err
	}
	// What the commit took is known behind it. The next change records it.
	done := report.with("commit", since(committing))
	done.TotalMS = since(begun.at)
	e.mu.Lock()
	e.rec.LastHibernate = &done
	e.mu.Unlock()
	c.hit(ctx, e, fpHibernateCommitted)
	return before, nil
}

// leave parks or ends the machine of a sandbox whose hibernation is committed,
// and lets go of the snapshots that only the record before needed. What fails is put
// off: the shim is ended at the next resume.
func (c *Core) leave(ctx context.Context, e *entry, noPark bool, before record) {
	leaving, step := time.Now(), "park"
	bound, ended := e.rec.Bound, false
	var err error
	if noPark || !c.park(ctx, e) {
		step, err = "release", c.end(ctx, e)
		ended = err == nil
	}
	done := e.rec.LastHibernate.with(step, since(leaving))
	if recErr := c.change(ctx, e, func(r *record) {
		r.LastHibernate = &done
		if ended {
			r.unbind()
		}
	}); err == nil {
		err = recErr
	}
	if err != nil {
		c.log.Warn("clearing up after a hibernation is put off", keySandbox, e.id, keyError, err)
	}
	if before.Snapshot != nil {
		c.trash.add(before.Snapshot.ID, bound)
	}
	c.trash.add(before.dropped(&e.rec)...)
	c.compactor.add(e)
	c.hit(ctx, e, fpHibernateReleased)
}

// hit is a failpoint where nothing can fail any more.
func (c *Core) hit(ctx context.Context, e *entry, name string) {
	if err := failpoint.Hit(ctx, name); err != nil {
		c.log.Warn("failpoint", keySandbox, e.id, keyError, err)
	}
}

// commitLate commits a snapshot that was found to be sealed after all. Its guest
// goes on if that is what it was taken for and the machine is alive; else what
// is left of the machine leaves.
func (c *Core) commitLate(ctx context.Context, e *entry, sealed shim.CaptureReport, alive bool) error {
	sealed = lateReport(sealed)
	if e.rec.GoOn && alive {
		_, err := c.commitGoOn(ctx, e, sealed, beginning{at: time.Now()})
		return err
	}
	before, err := c.commit(ctx, e, sealed, beginning{at: time.Now()})
	if err == nil {
		c.leave(ctx, e, false, before)
	}
	return err
}

// with returns a copy of the report with one more phase.
func (r HibernateReport) with(phase string, ms float64) HibernateReport {
	phases := map[string]float64{phase: ms}
	for name, ms := range r.Phases {
		phases[name] = ms
	}
	r.Phases = phases
	return r
}

// conclude ends a capture that did not come to its commit: it finds out
// where the machine is and brings the sandbox to standby, running or failed.
// cancelled says that a sealed guest is to go on as if nothing had been; otherwise
// what is sealed is committed. On error the sandbox is unsettled.
func (c *Core) conclude(ctx context.Context, e *entry, cancelled bool) error {
	ctx, cancel := c.short(ctx)
	defer cancel()
	st, err := e.vm.Status(ctx)
	switch {
	case ended(err):
		return c.concludeDead(ctx, e, reasonShimEnded)
	case err != nil:
		return unavailable(err, "the machine of sandbox %s does not answer", e.id)
	case st.Phase == shim.PhaseStopped:
		return c.concludeDead(ctx, e, exitReason(st))
	case st.Phase == shim.PhaseSealed && st.Attempt == e.rec.Attempt && st.Captured != nil && st.Captured.Snapshot.ID == e.rec.Pending && !cancelled:
		return c.commitLate(ctx, e, *st.Captured, true)
	}
	pending, attempt := e.rec.Pending, e.rec.Attempt
	// Running is recorded before the guest runs: once it has run, the snapshot
	// that it is ahead of must not be committed by anybody.
	err = c.change(ctx, e, func(r *record) {
		r.State = StateRunning
		r.endCapture()
	})
	if err != nil {
		return err
	}
	if err := c.thaw(ctx, e, shim.ThawRequest{Attempt: attempt}); err != nil {
		return err
	}
	c.keptHooks(ctx, e)
	c.trash.add(pending)
	return nil
}

// concludeDead ends a capture whose machine is no more: it ran no further
// than its snapshot, so that one counts if it is whole, and the sandbox sleeps.
func (c *Core) concludeDead(ctx context.Context, e *entry, reason string) error {
	ref, err := c.cfg.Snapshots.Find(ctx, e.rec.Pending)
	if err == nil {
		var meta snapshot.Metadata
		if meta, err = c.cfg.Snapshots.Metadata(ctx, ref); err == nil {
			return c.commitLate(ctx, e, shim.CaptureReport{Snapshot: ref, Metadata: meta}, false)
		}
	}
	if !errors.Is(err, snapshot.ErrMissing) && !errors.Is(err, snapshot.ErrCorrupt) {
		return unavailable(err, "look for the snapshot of sandbox %s", e.id)
	}
	pending := e.rec.Pending
	if err := c.fail(ctx, e, reason+" while it was hibernated"); err != nil {
		return err
	}
	c.trash.add(pending)
	return nil
}

// lateReport marks a report whose time from the beginning nobody measured.
func lateReport(r shim.CaptureReport) shim.CaptureReport {
	r.Warnings = append(r.Warnings[:len(r.Warnings):len(r.Warnings)],
		"the snapshot was found and committed afterwards: durations are incomplete")
	return r
}

// thaw lets the guest of a sandbox that is recorded as running go on.
func (c *Core) thaw(ctx context.Context, e *entry, req shim.ThawRequest) error {
	ctx, cancel := c.short(ctx)
	defer cancel()
	err := e.vm.Thaw(ctx, req)
	switch {
	case err == nil:
		return nil
	case ended(err):
		return c.failEnded(ctx, e)
	}
	e.mu.Lock()
	e.unsettled = true
	e.mu.Unlock()
	return unavailable(err, "thaw sandbox %s", e.id)
}
