package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// reasonShimEnded is why a sandbox failed whose shim is dead.
const reasonShimEnded = "its shim ended (killed?)"

// watch follows the machine of a running or parked sandbox until it is detached. The
// caller has the turn.
func (c *Core) watch(e *entry, vm VM) {
	ctx, stop := context.WithCancel(context.Background())
	e.mu.Lock()
	before := e.unwatch
	e.unwatch = stop
	e.mu.Unlock()
	if before != nil { // of the run before it was parked
		before()
	}
	c.restDone.Go(func() {
		defer stop()
		for {
			err := vm.Watch(ctx, func(ev shim.Event) {
				switch {
				case ev.Denied != nil:
					c.denied(e, *ev.Denied)
				case ev.Status.Phase == shim.PhaseStopped:
					c.look(ctx, e, vm)
				}
			})
			if errors.Is(err, shim.ErrGone) {
				c.look(ctx, e, vm)
			}
			// The stream broke though the shim may live, or the end could not be
			// recorded: listen again, until somebody detaches the machine.
			select {
			case <-ctx.Done():
				return
			case <-time.After(c.cfg.RetryDelay):
			}
		}
	})
}

// look takes a turn to find out whether vm, the machine of a running or parked
// sandbox, has ended, and records it if so.
func (c *Core) look(ctx context.Context, e *entry, vm VM) {
	err := c.run(ctx, e, opCheck, func(ctx context.Context, _ *operation) error {
		switch {
		case e.vm != vm: // somebody saw to it
		case e.rec.State == StateRunning:
			return c.seeEnd(ctx, e)
		case e.isParked(): // nothing is lost with it
			return c.release(ctx, e)
		}
		return nil
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, errClosing) {
		c.log.Warn("the end of a machine is not recorded yet", keySandbox, e.id, keyError, err)
	}
}

// seeEnd finds out whether the machine of a running sandbox ended, and what is to
// become of the sandbox.
func (c *Core) seeEnd(ctx context.Context, e *entry) error {
	short, cancel := c.short(ctx)
	defer cancel()
	if st, err := e.vm.Status(short); err == nil && c.canGoBack(e, st) {
		return c.goBack(ctx, e, exitReason(st))
	}
	return c.failEnded(ctx, e)
}

// canGoBack reports whether a running sandbox, whose machine has that status,
// is to be resumed from its last snapshot without being asked: what served its memory
// broke, and neither the guest nor an object of the store is to blame. Once in a
// while that is the lesser evil; if it goes on, somebody must look.
func (c *Core) canGoBack(e *entry, st shim.Status) bool {
	if st.Phase != shim.PhaseStopped || e.rec.Snapshot == nil || time.Since(e.rec.WentBack) < c.cfg.RelapseTime {
		return false
	}
	return st.Code == shim.CodeFailed || st.Code == shim.CodeUnavailable
}

// goBack resumes a running sandbox, whose machine ended for that reason, from its
// last snapshot. Where that does not succeed it has failed, which is no error.
func (c *Core) goBack(ctx context.Context, e *entry, reason string) error {
	e.mu.Lock()
	if e.op != nil {
		e.op.kind = opStart // a deletion need not wait for it
	}
	e.mu.Unlock()
	err := c.change(ctx, e, func(r *record) { r.Reason, r.WentBack = reason, time.Now().UTC() })
	if err != nil {
		return err
	}
	err = c.resume(ctx, e, ResumeOptions{})
	if err == nil || e.unsettled || e.rec.State == StateResuming {
		return err
	}
	if e.rec.Reason == reason { // else the resume found another one
		reason += "; its last snapshot did not resume: " + err.Error()
	} else {
		reason = e.rec.Reason
	}
	return c.fail(ctx, e, reason)
}

// failEnded records why the machine of a running sandbox ended, if it did.
func (c *Core) failEnded(ctx context.Context, e *entry) error {
	ctx, cancel := c.short(ctx)
	defer cancel()
	st, err := e.vm.Status(ctx)
	switch {
	case errors.Is(err, shim.ErrGone):
		return c.fail(ctx, e, reasonShimEnded)
	case err != nil:
		return unavailable(err, "the machine of sandbox %s does not answer", e.id)
	case st.Phase == shim.PhaseStopped:
		return c.fail(ctx, e, exitReason(st))
	}
	return nil
}

// fail records that the sandbox has no machine any more and why, then ends
// what is left of it.
func (c *Core) fail(ctx context.Context, e *entry, reason string) error {
	err := c.change(ctx, e, func(r *record) {
		r.State, r.Reason, r.Pending = StateFailed, reason, ""
	})
	if err != nil {
		return err
	}
	if err := c.release(ctx, e); err != nil {
		c.log.Warn("ending a failed machine is put off", keySandbox, e.id, keyError, err)
	}
	return nil
}

// exitReason says in words how a machine ended.
func exitReason(st shim.Status) string {
	if st.Failure != "" {
		return "memory could not be served: " + st.Failure
	}
	if st.Exit == nil {
		return "its machine ended"
	}
	switch st.Exit.Reason {
	case vmm.ReasonShutdown:
		return "the guest powered off"
	case vmm.ReasonReset:
		return "the guest rebooted, which ends it"
	case vmm.ReasonPanic:
		return "guest kernel panic" + detail(st.Exit.Detail)
	case vmm.ReasonCrashed:
		return "the VMM died" + detail(st.Exit.Detail)
	}
	return "its machine ended" + detail(st.Exit.Detail)
}

// maxDetail bounds what a guest or its VMM can put into a reason.
const maxDetail = 1000

func detail(s string) string {
	if s == "" {
		return ""
	}
	if len(s) > maxDetail {
		s = s[:maxDetail] + "…"
	}
	return ": " + s
}
