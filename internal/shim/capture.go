package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	if report, err := h.admit(req); report != nil || err != nil {
		return deref(report), err
	}
	if req.Deadline <= 0 {
		req.Deadline = defaultDeadline
	}
	ctx, cancel := context.WithTimeout(ctx, req.Deadline)
	defer cancel()
	h.update(func() { h.phase, h.attempt, h.cancel = PhaseCapturing, req.Attempt, cancel })
	defer h.update(func() { h.cancel = nil })

	report, err := h.seal(ctx, req)
	if err == nil {
		return report, nil
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = errorf(CodeRefused, "attempt %d was not sealed within %s", req.Attempt, req.Deadline)
	}
	h.refuse(req.Attempt)
	if thawErr := h.goOn(req.Attempt); thawErr != nil {
		return CaptureReport{}, fmt.Errorf("%w; and the guest did not go on: %v", err, thawErr)
	}
	return CaptureReport{}, err
}

func deref(r *CaptureReport) CaptureReport {
	if r == nil {
		return CaptureReport{}
	}
	return *r
}

// admit checks the attempt. An attempt that is sealed already gets its report again.
func (h *host) admit(req CaptureRequest) (*CaptureReport, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case req.Attempt <= h.refused:
		return nil, errorf(CodeRefused, "attempt %d was given up before", req.Attempt)
	case h.phase == PhaseSealed && h.attempt == req.Attempt:
		return h.report, nil
	case h.phase == PhaseSealed:
		return nil, errorf(CodeInvalid, "attempt %d is sealed; thaw or release it before attempt %d", h.attempt, req.Attempt)
	}
	return nil, nil
}

func (h *host) refuse(attempt uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refused = max(h.refused, attempt)
}

// seal freezes and pauses the guest, writes the snapshot and marks it sealed.
func (h *host) seal(ctx context.Context, req CaptureRequest) (CaptureReport, error) {
	watch := newStopwatch()
	warnings, err := h.freeze(ctx, req)
	if err != nil {
		return CaptureReport{}, err
	}
	watch.lap("freeze")
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
	dirty, err := h.dirtyPages(ctx, req.Full)
	if err != nil {
		return CaptureReport{}, err
	}
	watch.lap("scan")
	if err := failpoint.Hit(ctx, failScanned); err != nil {
		return CaptureReport{}, err
	}
	ref, meta, err := h.repo.Capture(ctx, snapshot.CaptureInput{
		ID: req.ID, Parent: h.parent, MemoryBytes: h.shape.MemoryBytes(),
		State: state.Bytes(), RAM: h.machine.RAM(), Dirty: dirty,
		Metadata: snapshot.Metadata{Attempt: req.Attempt, Generation: req.Generation, Key: req.Key, ControlToken: h.token},
	})
	if err != nil {
		return CaptureReport{}, err
	}
	watch.lap("write")
	if err := failpoint.Hit(ctx, failWritten); err != nil {
		return CaptureReport{}, h.discard(req.ID, err)
	}
	report := CaptureReport{
		Snapshot: ref, Metadata: meta, Phases: watch.phases, Warnings: warnings,
		PauseMS: float64(time.Since(paused).Microseconds()) / 1000,
	}
	if err := h.markSealed(ctx, &report); err != nil {
		return CaptureReport{}, h.discard(req.ID, err)
	}
	return report, failpoint.Hit(context.WithoutCancel(ctx), failSealed)
}

// markSealed is the point after which the guest runs again only by order.
func (h *host) markSealed(ctx context.Context, report *CaptureReport) error {
	var err error
	h.update(func() {
		switch {
		case h.phase == PhaseStopped:
			err = errorf(CodeStopped, "the machine ended during the capture: %s", describe(h.exit, h.failure))
		case ctx.Err() != nil: // cancelled while the last bytes were written
			err = ctx.Err()
		default:
			h.phase, h.report = PhaseSealed, report
		}
	})
	return err
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

// freeze stops the user's processes in the guest.
func (h *host) freeze(ctx context.Context, req CaptureRequest) (warnings []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	ctx, stop := h.whileRunning(ctx)
	defer stop()
	resp, err := h.agent.Freeze(ctx, h.token, guestapi.FreezeRequest{Attempt: req.Attempt, Deadline: req.Deadline})
	if err != nil {
		return nil, h.guestError("freeze", err)
	}
	return resp.Warnings, nil
}

// goOn lets the guest run after a capture that will not be.
func (h *host) goOn(attempt uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), thawTimeout)
	defer cancel()
	if err := h.machine.Run(ctx); err != nil {
		return err
	}
	running, stop := h.whileRunning(ctx)
	defer stop()
	err := h.agent.Thaw(running, h.token, guestapi.ThawRequest{Attempt: attempt, UnixNano: time.Now().UnixNano()})
	if err != nil {
		err = h.guestError("thaw", err)
	}
	h.update(func() {
		if h.phase != PhaseStopped {
			h.phase, h.report = PhaseRunning, nil
		}
	})
	return err
}

// thaw gives an attempt up: one under way is cancelled, a sealed one is opened.
func (h *host) thaw(ctx context.Context, req ThawRequest) error {
	h.refuse(req.Attempt)
	h.mu.Lock()
	if h.cancel != nil && h.attempt <= req.Attempt {
		h.cancel()
	}
	h.mu.Unlock()
	end, err := h.begin(ctx, PhaseRunning, PhaseSealed)
	if err != nil {
		return err
	}
	defer end()
	if s, _ := h.status(); s.Phase == PhaseSealed && s.Attempt <= req.Attempt {
		return h.goOn(req.Attempt)
	}
	return nil
}
