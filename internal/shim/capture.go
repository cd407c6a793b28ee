package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// The failpoints of a capture, in order.
const (
	failFrozen  = "shim.capture.frozen"
	failPaused  = "shim.capture.paused"
	failState   = "shim.capture.state"
	failScanned = "shim.capture.scanned"
	failWritten = "shim.capture.written"
	failSealed  = "shim.capture.sealed"
)

// Failpoints lists the names at which a shim can be made to die, see package
// failpoint.
var Failpoints = []string{
	failFrozen, failPaused, failState, failScanned, failWritten, failSealed,
	failBound, failLoaded, failUnpaused, failInit,
	failParked, failUnparked,
}

const defaultDeadline = 2 * time.Minute

// capture takes a snapshot and leaves the guest paused and sealed. If ctx ends
// or anything fails before the seal, the guest goes on and the attempt is
// refused from then on.
func (h *host) capture(ctx context.Context, req CaptureRequest) (CaptureReport, error) {
	end, err := h.begin(ctx, PhaseRunning, PhaseSealed)
	if err != nil {
		return CaptureReport{}, err
	}
	defer end()
	if req.Attempt == 0 {
		return CaptureReport{}, errorf(CodeInvalid, "attempts are counted from 1")
	}
	if _, err := snapshot.ParseID(string(req.ID)); err != nil {
		return CaptureReport{}, errorf(CodeInvalid, "%v", err)
	}
	if req.Deadline <= 0 {
		req.Deadline = defaultDeadline
	}
	ctx, cancel := context.WithTimeout(ctx, req.Deadline)
	defer cancel()
	sealed, err := h.admit(req, cancel)
	switch {
	case err != nil:
		return CaptureReport{}, err
	case sealed != nil:
		return *sealed, nil
	}
	report, err := h.seal(ctx, req)
	h.mu.Lock()
	h.cancel = nil
	h.mu.Unlock()
	if err != nil {
		return CaptureReport{}, h.giveUp(ctx, req, err)
	}
	return report, failpoint.Hit(ctx, failSealed)
}

// admit begins an attempt. One that is sealed already gets its report again.
func (h *host) admit(req CaptureRequest, cancel func()) (sealed *CaptureReport, err error) {
	h.update(func() {
		switch {
		case req.Attempt <= h.refused:
			err = errorf(CodeRefused, "attempt %d was given up before", req.Attempt)
		case h.phase == PhaseStopped:
			err = h.whyStopped()
		case h.phase == PhaseSealed && h.attempt == req.Attempt:
			sealed = h.report
		case h.phase == PhaseSealed:
			err = errorf(CodeInvalid, "attempt %d is sealed; thaw or release it before attempt %d", h.attempt, req.Attempt)
		default:
			h.phase, h.attempt, h.cancel = PhaseCapturing, req.Attempt, cancel
		}
	})
	return sealed, err
}

// giveUp lets the guest go on after a capture that failed with cause, and
// returns the error that says why.
func (h *host) giveUp(ctx context.Context, req CaptureRequest, cause error) error {
	h.refuse(req.Attempt)
	if h.hasExited() {
		return h.exitError()
	}
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		cause = errorf(CodeRefused, "attempt %d was not sealed within %s: %v", req.Attempt, req.Deadline, cause)
	case ctx.Err() != nil:
		cause = errorf(CodeRefused, "attempt %d was given up: %v", req.Attempt, cause)
	}
	if err := h.goOn(req.Attempt); err != nil {
		return fmt.Errorf("%w; and the guest did not go on: %v", cause, err)
	}
	return cause
}

func (h *host) refuse(attempt uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refused = max(h.refused, attempt)
}

// seal freezes and pauses the guest, writes the snapshot and marks it sealed.
func (h *host) seal(ctx context.Context, req CaptureRequest) (CaptureReport, error) {
	watch := newStopwatch()
	parent, done := h.captureParent(ctx, req.Parent)
	defer done()
	frozen, err := h.freeze(ctx, req)
	if err != nil {
		return CaptureReport{}, err
	}
	watch.lap("freeze")
	watch.split("freeze", "hooks", frozen.Steps["hooks"])
	if err := failpoint.Hit(ctx, failFrozen); err != nil {
		return CaptureReport{}, err
	}
	paused := time.Now()
	if err := h.machine.Pause(ctx); err != nil {
		return CaptureReport{}, err
	}
	watch.lap("pause")
	if err := failpoint.Hit(ctx, failPaused); err != nil {
		return CaptureReport{}, err
	}
	var state bytes.Buffer
	if err := h.machine.SaveState(ctx, &state); err != nil {
		return CaptureReport{}, err
	}
	watch.lap("state")
	if err := failpoint.Hit(ctx, failState); err != nil {
		return CaptureReport{}, err
	}
	h.workset.learn(ctx)
	dirty, err := h.dirtyPages(ctx, req.Full)
	if err != nil {
		return CaptureReport{}, err
	}
	watch.lap("scan")
	if err := failpoint.Hit(ctx, failScanned); err != nil {
		return CaptureReport{}, err
	}
	ref, meta, err := h.repo.Capture(ctx, snapshot.CaptureInput{
		ID: req.ID, Parent: parent, MemoryBytes: h.shape.MemoryBytes(),
		State: state.Bytes(), RAM: h.machine.RAM(), Dirty: dirty, WorkingSet: h.workset.get(),
		Metadata: snapshot.Metadata{Attempt: req.Attempt, Generation: req.Generation, Key: req.Key, ControlToken: h.token},
	})
	if err != nil {
		return CaptureReport{}, err
	}
	watch.lap("write")
	if err := failpoint.Hit(ctx, failWritten); err != nil {
		return CaptureReport{}, h.discard(req.ID, err)
	}
	cpu, _ := cpuTime(h.machine.PID()) // 0 where it cannot be told
	report := CaptureReport{
		Snapshot: ref, Metadata: meta, Phases: watch.phases, Warnings: frozen.Warnings, Hooks: frozen.Hooks,
		PauseMS:    float64(time.Since(paused).Microseconds()) / 1000,
		WorkingSet: h.workset.report(ctx, h.parent),
		CPU:        cpu,
	}
	if report.WorkingSet != nil && h.remote != nil {
		report.WorkingSet.BytesFetched = h.remote.fetched.Load()
	}
	return report, h.markSealed(ctx, &report)
}

// captureParent returns the snapshot that a capture builds upon: the one that
// the machine was resumed from, or ref if it holds the same and can be opened.
// What the first names is still there, since it is open, so it will always do.
func (h *host) captureParent(ctx context.Context, ref *snapshot.Ref) (parent *snapshot.Snapshot, done func()) {
	if h.parent == nil || ref == nil || *ref == h.parent.Ref() {
		return h.parent, func() {}
	}
	s, err := h.repo.Open(ctx, *ref)
	if err != nil {
		return h.parent, func() {}
	}
	if s.Metadata().Content() != h.parent.Metadata().Content() {
		_ = s.Close() // read only
		return h.parent, func() {}
	}
	return s, func() { _ = s.Close() }
}

// markSealed is the point after which the guest runs again only by order. A
// machine that ended before it leaves a snapshot that is whole: its guest did
// not run on, so whoever gave the order may find and keep it.
func (h *host) markSealed(ctx context.Context, report *CaptureReport) error {
	var stopped, cancelled error
	h.update(func() {
		if h.phase == PhaseStopped {
			stopped = h.whyStopped()
		} else if cancelled = ctx.Err(); cancelled == nil {
			h.phase, h.report = PhaseSealed, report
		}
	})
	if cancelled != nil {
		return h.discard(report.Snapshot.ID, cancelled)
	}
	return stopped
}

// discard removes a snapshot that was written whole but will not be sealed.
func (h *host) discard(id snapshot.ID, cause error) error {
	if err := h.repo.Delete(context.Background(), id); err != nil {
		return fmt.Errorf("%w; and its snapshot could not be removed: %v", cause, err)
	}
	return cause
}

// dirtyPages finds what may differ from the parent. Without a parent the
// machine was booted over zeros, and what is not dirty is zero.
func (h *host) dirtyPages(ctx context.Context, full bool) ([]page.Run, error) {
	if full || h.cfg.FullCapture {
		return []page.Run{{First: 0, Count: uint64(h.shape.MemoryBytes() / page.Size)}}, nil
	}
	return h.machine.DirtyPages(ctx)
}

// freeze has the pre-hibernate hooks run and stops the user's processes in the
// guest. Hooks may take half of the time that the capture has.
func (h *host) freeze(ctx context.Context, req CaptureRequest) (guestapi.FreezeResponse, error) {
	running, stop := h.whileRunning(ctx)
	defer stop()
	limited, cancel := context.WithTimeoutCause(running, 2*h.limits.freeze+min(req.Deadline/2, h.limits.hooks), errNoAnswer)
	defer cancel()
	resp, err := h.callFreeze(limited, guestapi.FreezeRequest{
		Attempt: req.Attempt, Deadline: req.Deadline, Reason: req.Reason, Snapshot: string(req.ID), Generation: req.Generation, Hooks: req.Hooks,
	})
	switch {
	case err == nil:
		if h.plain && len(req.Hooks) > 0 {
			resp.Warnings = append(resp.Warnings, noHooks)
		}
		resp.Hooks = append(h.takeHooks(), resp.Hooks...)
		return resp, nil
	case req.Unfrozen && running.Err() == nil && (errors.Is(err, errNoAnswer) || context.Cause(limited) == errNoAnswer):
		return guestapi.FreezeResponse{Warnings: []string{
			"the guest's agent did not answer: hooks were not run, and the snapshot was taken without freezing processes. " +
				"Its resume needs the agent; programs in the guest may have cut it off from its network"}}, nil
	}
	return resp, h.guestError("freeze", err)
}

// callFreeze makes the call as the best that the agent knows.
func (h *host) callFreeze(ctx context.Context, req guestapi.FreezeRequest) (guestapi.FreezeResponse, error) {
	return agentCall(h, ctx, h.limits.freeze,
		func(ctx context.Context, c net.Conn) (guestapi.FreezeResponse, error) {
			return guestapi.FreezeOver(ctx, c, h.token, req)
		},
		func(ctx context.Context, c net.Conn) (guestapi.FreezeResponse, error) {
			return guestapi.FreezeWithoutHooks(ctx, c, h.token, req)
		},
		func(ctx context.Context, c *guestapi.Client) (guestapi.FreezeResponse, error) {
			return c.Freeze(ctx, h.token, req)
		})
}

// goOn lets the guest run after a capture that will not be. If the VMM did not
// let it, the phase stays PhaseCapturing and a thaw tries again. An agent that
// does not answer thaws by itself after its deadline.
func (h *host) goOn(attempt uint64) error {
	// Nobody may take the guest for sealed once it has run on.
	if err := h.enter(PhaseCapturing); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), h.limits.thaw)
	defer cancel()
	if err := h.machine.Run(ctx); err != nil {
		if h.hasExited() {
			return h.exitError()
		}
		return err
	}
	running, stop := h.whileRunning(ctx)
	defer stop()
	resp, err := h.agent.Thaw(running, h.token, guestapi.ThawRequest{Attempt: attempt, UnixNano: failpoint.Now().UnixNano()})
	h.keepHooks(resp.Hooks)
	if err != nil {
		err = h.guestError("thaw", err)
	}
	return errors.Join(err, h.enter(PhaseRunning))
}

// thaw gives an attempt up: one under way is cancelled, a sealed one is opened.
func (h *host) thaw(ctx context.Context, req ThawRequest) error {
	h.refuse(req.Attempt)
	h.mu.Lock()
	if h.cancel != nil && h.attempt <= req.Attempt {
		h.cancel()
	}
	h.mu.Unlock()
	end, err := h.begin(ctx, PhaseRunning, PhaseCapturing, PhaseSealed)
	if err != nil {
		return err
	}
	defer end()
	s, _ := h.status()
	if s.Phase == PhaseRunning || s.Attempt > req.Attempt {
		return nil
	}
	err = h.goOn(req.Attempt)
	if req.Committed && s.Captured != nil && s.Attempt == req.Attempt {
		h.buildUpon(ctx, s.Captured.Snapshot)
	}
	return err
}

// buildUpon makes a committed snapshot of this guest what its next capture is
// compared with: pages that are not dirty against the bound one are the same in
// both, and all others are compared. Where it cannot be opened the one before will do.
func (h *host) buildUpon(ctx context.Context, ref snapshot.Ref) {
	snap, err := h.repo.Open(ctx, ref)
	if err != nil {
		h.log.Warn("the next capture is compared with an older snapshot", "snapshot", ref.ID, "error", err)
		return
	}
	h.adoptParent(snap)
}
