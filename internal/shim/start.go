package shim

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// limits say how long a guest may take: bounds against hanging.
type limits struct{ boot, init, freeze, thaw, awake, hooks time.Duration }

// defaultLimits are generous enough for an emulated machine on a loaded host.
var defaultLimits = limits{
	boot: 5 * time.Minute, init: 60 * time.Second, freeze: 10 * time.Second, thaw: 30 * time.Second,
	awake: time.Second, hooks: guestapi.MaxHookTimeout,
}

// The failpoints of a resume, in order.
const (
	failBound    = "shim.resume.bound"
	failLoaded   = "shim.resume.loaded"
	failUnpaused = "shim.resume.unpaused"
	failInit     = "shim.resume.init"
)

// stopwatch measures phases that follow each other.
type stopwatch struct {
	last   time.Time
	phases map[string]float64
}

func newStopwatch() *stopwatch {
	return &stopwatch{last: time.Now(), phases: map[string]float64{}}
}

// lap ends the phase name.
func (s *stopwatch) lap(name string) {
	now := time.Now()
	s.phases[name] += float64(now.Sub(s.last).Microseconds()) / 1000
	s.last = now
}

// split makes a phase of its own of ms of another one, which the guest says it
// took: no more than that one has.
func (s *stopwatch) split(from, name string, ms float64) {
	if ms = min(ms, s.phases[from]); ms > 0 {
		s.phases[name] += ms
		s.phases[from] -= ms
	}
}

// attach gives the machine its console file and its egress policy.
func (h *host) attach(a Attach) error {
	policy, err := egressPolicy(EgressRequest{Profile: a.Profile, Allow: a.Allow, Deny: a.Deny})
	if err != nil {
		return err
	}
	h.net.SetPolicy(policy)
	return h.console.attach(a.Console)
}

// boot lets a cold machine start and waits until its agent has done its init.
func (h *host) boot(ctx context.Context, req BootRequest) (StartReport, error) {
	end, err := h.begin(ctx, PhasePrepared)
	if err != nil {
		return StartReport{}, err
	}
	defer end()
	if !h.cold {
		return StartReport{}, errorf(CodeInvalid, "the machine was prepared for a snapshot, not to boot")
	}
	if err := h.attach(req.Attach); err != nil {
		return StartReport{}, err
	}
	return h.start(func() (StartReport, error) {
		ctx, cancel := context.WithTimeout(ctx, h.limits.boot)
		defer cancel()
		watch := newStopwatch()
		if err := h.machine.Run(ctx); err != nil {
			return StartReport{}, err
		}
		watch.lap("unpause")
		return h.welcome(ctx, req.Init, watch)
	})
}

// start brings the machine up. One that did not come up as it should is ended:
// its guest must not run on without its init, and its VMM cannot be used again.
func (h *host) start(up func() (StartReport, error)) (StartReport, error) {
	if err := h.enter(PhaseStarting); err != nil {
		return StartReport{}, err
	}
	report, err := up()
	if err == nil {
		h.net.Touch() // what came before was not of this life
		err = h.enter(PhaseRunning)
	}
	if err == nil {
		return report, nil
	}
	if h.hasExited() {
		return StartReport{}, h.exitError()
	}
	h.endMachine()
	h.update(func() { h.exit = &vmm.Exit{Reason: vmm.ReasonClosed, Detail: "it did not start: " + err.Error()} })
	return StartReport{}, err
}

// resume binds a prepared machine to a snapshot, lets it run and waits until
// its agent has done its init.
func (h *host) resume(ctx context.Context, req ResumeRequest) (StartReport, error) {
	end, err := h.begin(ctx, PhasePrepared)
	if err != nil {
		return StartReport{}, err
	}
	defer end()
	if h.cold {
		return StartReport{}, errorf(CodeInvalid, "the machine was prepared to boot, not for a snapshot")
	}
	if req.Adopt {
		if err := h.adopt(); err != nil {
			return StartReport{}, err
		}
	}
	if err := h.attach(req.Attach); err != nil {
		return StartReport{}, err
	}
	return h.start(func() (StartReport, error) { return h.wake(ctx, req) })
}

// wake is resume, once it is settled that this machine shall be that guest's.
func (h *host) wake(ctx context.Context, req ResumeRequest) (StartReport, error) {
	watch := newStopwatch()
	state, err := h.bind(ctx, req)
	if err != nil {
		return StartReport{}, err
	}
	watch.lap("bind")
	if err := failpoint.Hit(ctx, failBound); err != nil {
		return StartReport{}, err
	}
	if err := h.machine.LoadState(ctx, bytes.NewReader(state)); err != nil {
		return StartReport{}, fmt.Errorf("load state of snapshot %s: %w", req.Snapshot.ID, err)
	}
	watch.lap("state")
	h.workset.loaded()
	if err := failpoint.Hit(ctx, failLoaded); err != nil {
		return StartReport{}, err
	}
	if err := h.machine.Run(ctx); err != nil {
		return StartReport{}, err
	}
	watch.lap("unpause")
	h.workset.runs()
	if err := failpoint.Hit(ctx, failUnpaused); err != nil {
		return StartReport{}, err
	}
	req.Init.SleptSeconds = slept(h.parent.Metadata())
	ctx, cancel := context.WithTimeout(ctx, h.limits.init+h.limits.hooks)
	defer cancel()
	return h.welcome(ctx, req.Init, watch)
}

// slept returns the seconds since a snapshot was made, 0 where the host's clock
// was set back meanwhile.
func slept(meta snapshot.Metadata) float64 {
	return max(0, failpoint.Now().Sub(meta.CreatedAt).Seconds())
}

// bind opens the snapshot, checks that this machine can load it and gives its
// memory to the pager. It returns the device state.
func (h *host) bind(ctx context.Context, req ResumeRequest) ([]byte, error) {
	snap, err := h.repository(req.StoreDelay).Open(ctx, req.Snapshot)
	if err != nil {
		return nil, err
	}
	meta := snap.Metadata()
	state, err := snap.State(ctx)
	switch {
	case err != nil:
	case meta.MemoryBytes != h.shape.MemoryBytes():
		err = errorf(CodeMismatch, "snapshot %s holds %d bytes of memory, this machine has %d", meta.ID, meta.MemoryBytes, h.shape.MemoryBytes())
	default:
		if diff := req.Key.Diff(vmm.Key(meta.Key)); diff != "" {
			err = errorf(CodeMismatch, "snapshot %s fits another machine: %s", meta.ID, diff)
		} else {
			var memory io.ReaderAt = snap
			if req.NoPrefetch {
				memory = struct{ io.ReaderAt }{snap} // nothing else of it: no page comes unasked
			}
			err = h.slot.Bind(memory)
		}
	}
	if err != nil {
		_ = snap.Close()
		return nil, err
	}
	h.bound, h.parent, h.token = snap, snap, meta.ControlToken
	h.advice = h.workset.start(h.repo, snap, h.slot, h.machine, !req.NoPrefetch)
	return state, nil
}

// welcome makes the guest ready for its first request.
func (h *host) welcome(ctx context.Context, init guestapi.InitRequest, watch *stopwatch) (StartReport, error) {
	resp, err := h.initGuest(ctx, init)
	if err != nil {
		return StartReport{}, err
	}
	watch.lap("guest_init")
	watch.split("guest_init", "hooks", resp.Steps["hooks"])
	if err := failpoint.Hit(ctx, failInit); err != nil {
		return StartReport{}, err
	}
	for step, ms := range resp.Steps {
		if step != "hooks" {
			watch.phases["guest_init."+step] = ms
		}
	}
	report := h.counters()
	report.Phases, report.Warnings, report.Hooks = watch.phases, resp.Warnings, resp.Hooks
	if h.advice != "" {
		report.Warnings = append(report.Warnings, h.advice)
	}
	return report, nil
}

// counters returns what a report counts, as it is now.
func (h *host) counters() StartReport {
	stats := h.slot.Stats()
	r := StartReport{
		BytesRead: stats.BytesRead, Faults: stats.Reads, DemandPages: stats.DemandPages,
		PrefetchedBytes: stats.PushedPages * page.Size, WorkingSetBytes: h.workset.carriedBytes(),
	}
	if h.remote != nil {
		r.BytesFetched, r.Remote = h.remote.fetched.Load(), h.remote.opened.Load() > 0
	}
	return r
}

// initGuest calls the agent's init until it is there to answer. The clock that
// it is told is read when the connection stands, so waiting does not age it.
func (h *host) initGuest(ctx context.Context, req guestapi.InitRequest) (guestapi.InitResponse, error) {
	ctx, cancel := h.whileRunning(ctx)
	defer cancel()
	req.Entropy = make([]byte, 64)
	rand.Read(req.Entropy)
	var sent time.Time
	now := func() guestapi.InitRequest {
		sent = time.Now()
		req.UnixNano = failpoint.Now().UnixNano()
		return req
	}
	resp, err := agentCall(h, ctx, h.limits.init,
		func(ctx context.Context, c net.Conn) (guestapi.InitResponse, error) {
			return guestapi.InitOver(ctx, c, h.token, now())
		},
		func(ctx context.Context, c net.Conn) (guestapi.InitResponse, error) {
			return guestapi.InitWithoutHooks(ctx, c, h.token, now())
		},
		func(ctx context.Context, c *guestapi.Client) (guestapi.InitResponse, error) {
			return c.Init(ctx, h.token, now())
		})
	if err != nil {
		return guestapi.InitResponse{}, h.guestError("init", err)
	}
	if h.plain && len(req.Hooks) > 0 {
		resp.Warnings = append(resp.Warnings, noHooks)
	}
	if req.Identity != nil {
		h.token = req.Identity.ControlToken
	}
	// How late the call may have reached the agent: what it did there counts not.
	late := time.Since(sent)
	for _, ms := range resp.Steps {
		late -= time.Duration(ms * float64(time.Millisecond))
	}
	return resp, h.syncClock(ctx, late)
}

// clockTolerance is how wrong a guest's clock may be left: half of the second
// that is promised.
const clockTolerance = 500 * time.Millisecond

// syncClock sets the guest's clock again until the call that did so was quick
// enough: on a loaded host an init may have been under way for seconds.
func (h *host) syncClock(ctx context.Context, late time.Duration) error {
	for try := 0; late > clockTolerance && try < 20; try++ {
		conn, _, err := h.dialAgent(ctx, guestapi.Port)
		if err != nil {
			return h.guestError("reach the agent", err)
		}
		once := guestapi.NewClient(func(context.Context) (net.Conn, error) { return conn, nil })
		sent := time.Now()
		err = once.Clock(ctx, h.token, guestapi.ClockRequest{UnixNano: failpoint.Now().UnixNano()})
		late = time.Since(sent)
		once.Close()
		_ = conn.Close()
		if err != nil {
			return h.guestError("set the clock", err)
		}
	}
	return nil
}

// dialAgent connects to the first of the agent's ports that takes it, again and
// again until one does, and returns which.
func (h *host) dialAgent(ctx context.Context, ports ...uint16) (net.Conn, uint16, error) {
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		var last error
		for _, port := range ports {
			attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
			conn, err := h.dialGuest(attempt, port, true)
			cancel()
			if err == nil {
				return conn, port, nil
			}
			last = err
		}
		select {
		case <-ctx.Done():
			return nil, 0, fmt.Errorf("%w (last: %v)", ctx.Err(), last)
		case <-time.After(pause):
		}
	}
}

// whileRunning ends the context when the machine does.
func (h *host) whileRunning(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := make(chan struct{})
	go func() {
		select {
		case <-h.machine.Exited():
			cancel()
		case <-stop:
		}
	}()
	return ctx, func() { close(stop); cancel() }
}

// guestError says why a call to the agent failed: that the machine ended, if it did.
func (h *host) guestError(what string, err error) error {
	if h.hasExited() {
		return h.exitError()
	}
	return errorf(CodeGuest, "%s: %v", what, err)
}
