package shim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// The failpoints of a parking and of its end, in order.
const (
	failParked   = "shim.park.parked"
	failUnparked = "shim.unpark.unpaused"
)

// park keeps a sealed machine whose snapshot is committed: its guest stays
// paused and loses every connection. Idempotent.
func (h *host) park(ctx context.Context, req ParkRequest) (ParkReport, error) {
	end, err := h.begin(ctx, PhaseSealed, PhaseParked)
	if err != nil {
		return ParkReport{}, err
	}
	defer end()
	if err := h.checkAttempt(req.Attempt); err != nil {
		return ParkReport{}, err
	}
	if err := h.enter(PhaseParked); err != nil { // from here on nobody dials
		return ParkReport{}, err
	}
	h.cutStreams()
	h.net.Suspend()
	debug.FreeOSMemory()
	used, err := privateMemory(os.Getpid(), h.machine.PID())
	if err != nil {
		return ParkReport{}, fmt.Errorf("measure the parked machine: %w", err)
	}
	return ParkReport{MemoryBytes: used}, failpoint.Hit(ctx, failParked)
}

// unpark lets a parked machine run on as if it had been resumed: the guest is
// told a fresh time, randomness and generation before anybody reaches it.
func (h *host) unpark(ctx context.Context, req UnparkRequest) (StartReport, error) {
	end, err := h.begin(ctx, PhaseParked)
	if err != nil {
		return StartReport{}, err
	}
	defer end()
	if err := h.checkAttempt(req.Attempt); err != nil {
		return StartReport{}, err
	}
	if err := h.attach(req.Attach); err != nil {
		return StartReport{}, err
	}
	h.refuse(req.Attempt)
	return h.start(func() (StartReport, error) { return h.wakeParked(ctx, req) })
}

// wakeParked is unpark, once it is settled that the guest shall run on.
func (h *host) wakeParked(ctx context.Context, req UnparkRequest) (StartReport, error) {
	opened := make(chan error, 1)
	var parent *snapshot.Snapshot
	go func() (err error) { // the guest does not wait for a file that only the next capture needs
		defer func() { opened <- err }()
		parent, err = h.openParent(ctx, req)
		return err
	}()
	report, err := h.runParked(ctx, req)
	if openErr := <-opened; openErr != nil {
		return StartReport{}, openErr
	}
	h.adoptParent(parent)
	return report, err
}

func (h *host) runParked(ctx context.Context, req UnparkRequest) (StartReport, error) {
	before, watch := h.counters(), newStopwatch()
	h.advice = ""
	h.net.Continue()
	if err := h.machine.Run(ctx); err != nil {
		return StartReport{}, err
	}
	watch.lap("unpause")
	if err := failpoint.Hit(ctx, failUnparked); err != nil {
		return StartReport{}, err
	}
	req.Init.SleptSeconds = slept(h.report.Metadata)
	ctx, cancel := context.WithTimeout(ctx, h.limits.init+h.limits.hooks)
	defer cancel()
	report, err := h.welcome(ctx, req.Init, watch)
	report.subtract(before)
	return report, err
}

// openParent opens the snapshot that an unparked machine goes on from and
// checks that it holds what was sealed.
func (h *host) openParent(ctx context.Context, req UnparkRequest) (*snapshot.Snapshot, error) {
	snap, err := h.repo.Open(ctx, req.Snapshot)
	if err != nil {
		return nil, err
	}
	if holds, sealed := snap.Metadata().Content(), h.report.Metadata.Content(); holds != sealed {
		_ = snap.Close()
		return nil, errorf(CodeMismatch, "snapshot %s holds what snapshot %s does, and parked is snapshot %s", req.Snapshot.ID, holds, sealed)
	}
	return snap, nil
}

// adoptParent makes snap what the next capture is compared with. The pager
// goes on reading the one that the machine was bound to.
func (h *host) adoptParent(snap *snapshot.Snapshot) {
	if h.parent != nil && h.parent != h.bound {
		_ = h.parent.Close()
	}
	h.parent = snap
}

// checkAttempt checks that attempt is the one that is sealed or parked.
func (h *host) checkAttempt(attempt uint64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if attempt != h.attempt {
		return errorf(CodeInvalid, "attempt %d is %s, not attempt %d", h.attempt, h.phase, attempt)
	}
	return nil
}

// cutStreams ends the streams into the guest.
func (h *host) cutStreams() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.cut)
	h.cut = make(chan struct{})
}

// subtract takes off what was counted before.
func (r *StartReport) subtract(before StartReport) {
	r.BytesRead -= before.BytesRead
	r.Faults -= before.Faults
	r.DemandPages -= before.DemandPages
	r.PrefetchedBytes -= before.PrefetchedBytes
	r.BytesFetched -= before.BytesFetched
	r.WorkingSetBytes = 0 // it is the one of the resume before
}

// privateMemory returns the bytes of memory that only these processes use:
// what their end would give back.
func privateMemory(pids ...int) (int64, error) {
	var sum int64
	for _, pid := range pids {
		n, err := privateMemoryOf(pid)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func privateMemoryOf(pid int) (sum int64, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	found := false
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		switch name {
		case "Private_Clean", "Private_Dirty", "Private_Hugetlb", "SwapPss":
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: %q: %w", f.Name(), lines.Text(), err)
			}
			sum, found = sum+kib<<10, true
		}
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	if !found {
		return 0, errors.New(f.Name() + " tells nothing of private memory")
	}
	return sum, nil
}
