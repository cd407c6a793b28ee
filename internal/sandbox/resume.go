package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/template"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// The tiers of a ResumeReport.
const (
	tierParked = "parked"
	tierLocal  = "local"
	tierRemote = "remote"
	tierBoot   = "boot"
)

// origin is where the machine of a start comes from.
type origin int

const (
	originFresh  origin = iota // started for it, waits for the sandbox's snapshot
	originBoot                 // started for it, boots
	originPool                 // started beforehand
	originParked               // the sandbox's own, paused since its hibernation
)

// ResumeOptions says who asks for a resume, and what it shall do without, for
// measuring. The zero value is the usual way.
type ResumeOptions struct {
	By         string        // see Core.Wake; "" is ByAPI
	NoParked   bool          // drop a parked VMM before
	NoPool     bool          // start a fresh VMM
	NoPrefetch bool          // leave all pages to faults
	StoreDelay time.Duration // added to each request to the remote store
}

// Resume brings a sandbox from standby, or a failed one from its last
// snapshot, to running. One that runs is left alone; one that hibernates is
// resumed afterwards. ErrFailed says that the snapshot cannot be resumed, any
// other error that the sandbox is as it was before.
func (c *Core) Resume(ctx context.Context, id string, o ResumeOptions) (Sandbox, error) {
	e, err := c.find(id)
	if err != nil {
		return Sandbox{}, err
	}
	o.By = cmp.Or(o.By, ByAPI)
	err = c.run(ctx, e, opStart, func(ctx context.Context, _ *operation) error {
		if err := c.drained(); err != nil && e.rec.State != StateRunning {
			return err
		}
		if e.rec.State == StateFailed {
			return c.resume(ctx, e, o)
		}
		return c.wake(ctx, e, o)
	})
	return c.view(e), err
}

// wake makes sure that the sandbox runs, without touching a failed one.
func (c *Core) wake(ctx context.Context, e *entry, o ResumeOptions) error {
	switch e.rec.State {
	case StateRunning:
		return nil
	case StateStandby:
		return c.resume(ctx, e, o)
	case StateFailed:
		return failedError(&e.rec)
	}
	return conflict("", "sandbox %s is %s", e.id, e.rec.State)
}

// resume lets the sandbox's parked machine go on, or has another one run its
// snapshot.
func (c *Core) resume(ctx context.Context, e *entry, o ResumeOptions) error {
	if e.rec.Snapshot == nil {
		return failedError(&e.rec)
	}
	defer c.pool.hold()()
	from := originParked
	if o.NoParked || !e.isParked() {
		if err := c.release(ctx, e); err != nil {
			return err
		}
		from = originFresh
	}
	if err := c.admit(ctx, e.id, "sandbox "+e.id, e.rec.Shape); err != nil {
		return err
	}
	begun := time.Now()
	if from == originFresh && !o.NoPool {
		if _, ok := c.takePooled(e); ok {
			from = originPool
		}
	}
	err := c.change(ctx, e, func(r *record) {
		r.State = StateResuming
		r.Generation = nextGeneration(r)
		if t := r.Policy.Timeout; t.After > 0 && r.Usage.Awake-r.TimeoutFrom >= t.After {
			r.TimeoutFrom = r.Usage.Awake // it is used up: whoever wakes it gets it anew
		}
		if from == originPool {
			r.bind(e.vm.Handle())
		}
	})
	if err != nil {
		if from == originPool {
			c.dropMachine(ctx, e)
		}
		return err
	}
	if o.By != "" && o.By != ByAPI {
		c.emit(e, Event{Type: EventWoken, By: o.By})
	}
	points := startPoints{fpResumeRecorded, fpResumeLaunched, fpResumeHandle, fpResumePrepared, fpResumeRunning}
	if err := c.start(ctx, e, startRequest{from, o, points, begun}); err != nil {
		err = c.retreat(ctx, e, err)
		return err
	}
	c.emit(e, Event{Type: EventResumed, Resume: e.rec.LastResume})
	return nil
}

// dropMachine ends a machine that is attached and was not recorded.
func (c *Core) dropMachine(ctx context.Context, e *entry) {
	if err := c.end(ctx, e); err != nil { // it is not adopted: it ends with the daemon
		c.log.Warn("a machine that was kept ready is left", keySandbox, e.id, keyError, err)
	}
}

// nextGeneration returns a generation that no machine of the sandbox ever had.
func nextGeneration(r *record) uint64 {
	n := r.Generation
	if r.Metadata != nil {
		n = max(n, r.Metadata.Generation)
	}
	return n + 1
}

// startPoints names the failpoints of a start.
type startPoints struct{ recorded, launched, handle, prepared, running string }

// startRequest says how a sandbox is to be started.
type startRequest struct {
	from    origin
	options ResumeOptions
	points  startPoints
	at      time.Time // when it was asked for
}

// start gives a sandbox that is recorded as creating or resuming a machine
// that runs its snapshot, or boots, and records it as running. A machine of
// the pool or a parked one is attached already. After an error the machine may
// be attached still.
func (c *Core) start(ctx context.Context, e *entry, req startRequest) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.StartTimeout)
	defer cancel()
	begun := time.Now()
	if err := failpoint.Hit(ctx, req.points.recorded); err != nil {
		return err
	}
	art, err := c.artifacts(e.rec.Template, e.rec.TemplateVersion)
	if err != nil {
		return err
	}
	// Reading the base image takes a while after it was touched, and goes on
	// beside the start: what ran on a damaged one is never let out.
	checked := make(chan error, 1)
	go func() { checked <- c.cfg.Builder.Check(art) }()
	report, err := c.startGuest(ctx, e, req, art)
	ready := time.Now()
	if checkErr := <-checked; checkErr != nil {
		return checkErr
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, req.points.running); err != nil {
		return err
	}
	report.Phases["record"] = ms(begun.Sub(req.at))
	if waited := since(ready); waited >= 1 { // only where the base image was touched
		report.Phases["base_image"] = waited
	}
	report.TotalMS, report.By = since(req.at), req.options.By
	if e.rec.Reason != "" {
		report.Warnings = append(report.Warnings, "it goes on from its last snapshot: "+e.rec.Reason)
	}
	err = c.change(ctx, e, func(r *record) {
		r.State, r.Reason, r.LastUsed, r.LastResume = StateRunning, "", time.Now().UTC(), &report
	})
	if err != nil {
		return err
	}
	if req.from != originParked && report.Tier == tierRemote && c.cfg.Tier != nil {
		c.cfg.Tier.Promote(*e.rec.Snapshot)
	}
	c.watch(e, e.vm)
	return nil
}

// startGuest lets the machine that is attached run, or a fresh one if there is
// none. Machines of the pool and parked ones are caches: where one fails, a
// fresh one takes its place.
func (c *Core) startGuest(ctx context.Context, e *entry, req startRequest, art template.Artifacts) (ResumeReport, error) {
	begun := time.Now()
	if req.from == originPool || req.from == originParked {
		rep, err := c.runGuest(ctx, e, req, art)
		if err == nil || !replaceable(ctx, req.from, err) {
			return resumeReport(req.from, rep, 0), err
		}
		c.log.Warn("a machine that was kept ready did not start", keySandbox, e.id, keyError, err)
		if err := c.replace(ctx, e); err != nil {
			return ResumeReport{}, err
		}
		req.from = originFresh
	}
	if err := c.acquire(ctx, e, req, art); err != nil {
		return ResumeReport{}, err
	}
	prepared := time.Since(begun)
	rep, err := c.runGuest(ctx, e, req, art)
	return resumeReport(req.from, rep, prepared), err
}

// replaceable reports whether a fresh machine may do better than one of the
// pool, or a parked one, that failed with err.
func replaceable(ctx context.Context, from origin, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	return from == originParked || !fatal(err) && shimCode(err) != shim.CodeGuest
}

// replace makes room for a fresh machine: the failed one is ended and the
// generation that its guest may have seen is never used again.
func (c *Core) replace(ctx context.Context, e *entry) error {
	if err := c.end(ctx, e); err != nil {
		return err
	}
	return c.change(ctx, e, func(r *record) {
		r.unbind()
		r.Generation = nextGeneration(r)
	})
}

// resumeReport makes a report of a start, which waited so long for its VMM.
func resumeReport(from origin, rep shim.StartReport, vmm time.Duration) ResumeReport {
	r := ResumeReport{
		Tier: tierLocal, Phases: map[string]float64{"vmm": ms(vmm)}, Pooled: from == originPool, Warnings: rep.Warnings,
		BytesRead: rep.BytesRead, Faults: rep.Faults, PrefetchedBytes: rep.PrefetchedBytes,
		DemandPages: rep.DemandPages, WorkingSetBytes: rep.WorkingSetBytes, BytesFetched: rep.BytesFetched,
	}
	switch {
	case from == originParked:
		r.Tier = tierParked
	case from == originBoot:
		r.Tier = tierBoot
	case rep.Remote:
		r.Tier = tierRemote
	}
	for name, ms := range rep.Phases {
		r.Phases[name] = ms
	}
	return r
}

// acquire gives the sandbox a fresh machine that is prepared and waits for its
// snapshot or its boot. The handle is recorded before the shim may outlive the
// daemon.
func (c *Core) acquire(ctx context.Context, e *entry, req startRequest, art template.Artifacts) error {
	vm, err := c.cfg.Launcher.Launch(ctx, LaunchSpec{VM: machineName(e.id)})
	if err != nil {
		return fmt.Errorf("start a machine: %w", err)
	}
	e.attach(vm)
	if err := failpoint.Hit(ctx, req.points.launched); err != nil {
		return err
	}
	h := vm.Handle()
	if err := c.change(ctx, e, func(r *record) { r.bind(h) }); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, req.points.handle); err != nil {
		return err
	}
	if err := vm.Adopt(ctx); err != nil {
		return fmt.Errorf("adopt machine %s: %w", h.VM, err)
	}
	if err := vm.Prepare(ctx, prepareRequest(e.rec.Shape, art, req.from == originBoot)); err != nil {
		return fmt.Errorf("prepare machine %s: %w", h.VM, err)
	}
	return failpoint.Hit(ctx, req.points.prepared)
}

func prepareRequest(shape vmm.Shape, art template.Artifacts, boot bool) shim.PrepareRequest {
	req := shim.PrepareRequest{Shape: shape, BaseImage: art.BaseImage}
	if boot {
		req.Boot = &vmm.Boot{Kernel: art.Kernel, Initrd: art.Initrd, Cmdline: art.Cmdline}
	}
	return req
}

// runGuest lets the machine that is attached boot, resume or go on.
func (c *Core) runGuest(ctx context.Context, e *entry, req startRequest, art template.Artifacts) (shim.StartReport, error) {
	attach, init := c.attachment(&e.rec), guestapi.InitRequest{Reason: e.rec.wakeReason(), Generation: e.rec.Generation, Hooks: guestHooks(e.rec.Policy.Hooks)}
	if req.from == originBoot {
		init.Reason = guestapi.ReasonBoot
	}
	if isBecoming(init.Reason) {
		id, err := identity(&e.rec)
		if err != nil {
			return shim.StartReport{}, err
		}
		init.Identity = id
	}
	if req.from == originBoot {
		rep, err := e.vm.Boot(ctx, shim.BootRequest{Attach: attach, Init: init})
		if err != nil {
			return rep, fmt.Errorf("boot: %w", err)
		}
		return rep, nil
	}
	ref := *e.rec.Snapshot
	init.Snapshot = string(ref.ID)
	rep, err := c.runSnapshot(ctx, e, req, art, attach, init)
	if err != nil {
		return rep, fmt.Errorf("resume snapshot %s: %w", ref.ID, err)
	}
	c.logHooks(e, rep.Hooks)
	return rep, nil
}

// wakeReason returns why the record's snapshot is resumed, as the guest is told.
func (rec *record) wakeReason() string {
	switch {
	case rec.WakeAs != "":
		return rec.WakeAs
	case rec.Fresh:
		return guestapi.ReasonCreate
	}
	return guestapi.ReasonResume
}

// isBecoming reports whether the guest becomes a sandbox that it was not before,
// and so needs an identity. Until its first own snapshot it does so at every resume.
func isBecoming(reason string) bool {
	return reason == guestapi.ReasonBoot || reason == guestapi.ReasonCreate || reason == guestapi.ReasonFork
}

func (c *Core) runSnapshot(ctx context.Context, e *entry, req startRequest, art template.Artifacts, attach shim.Attach, init guestapi.InitRequest) (shim.StartReport, error) {
	if req.from == originParked {
		e.mu.Lock()
		e.parked = nil
		e.mu.Unlock()
		return e.vm.Unpark(ctx, shim.UnparkRequest{Attempt: e.rec.Metadata.Attempt, Attach: attach, Snapshot: *e.rec.Snapshot, Init: init})
	}
	key, err := c.key(ctx, e.rec.Shape, art)
	if err != nil {
		return shim.StartReport{}, err
	}
	return e.vm.Resume(ctx, shim.ResumeRequest{Attach: attach, Snapshot: *e.rec.Snapshot, Key: key, Init: init, Adopt: true,
		NoPrefetch: req.options.NoPrefetch, StoreDelay: req.options.StoreDelay})
}

// attachment returns what a machine gets when it becomes the sandbox's.
func (c *Core) attachment(r *record) shim.Attach {
	g := r.Policy.Egress
	return shim.Attach{Console: c.cfg.Console(r.ID), Profile: g.Profile, Allow: g.Allow, Deny: g.Deny}
}

// key returns the compatibility key of a machine of a template.
func (c *Core) key(ctx context.Context, shape vmm.Shape, art template.Artifacts) (vmm.Key, error) {
	driver, err := c.cfg.Keys.Key(ctx, shape)
	if err != nil {
		return nil, fmt.Errorf("find the compatibility key of this host: %w", err)
	}
	key := vmm.Key{"base_image": art.BaseDigest, "kernel": art.KernelDigest}
	for name, v := range driver {
		key[name] = v
	}
	return key, nil
}

// identity returns what makes a machine the sandbox, with a fresh control
// token, which only the shim and the snapshots to come will know.
func identity(r *record) (*guestapi.Identity, error) {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, err
	}
	host := r.Name
	if host == "" {
		host = r.ID
	}
	return &guestapi.Identity{ID: r.ID, Hostname: host, MachineID: hex.EncodeToString(id[:]),
		ControlToken: newToken(), AccessToken: r.AccessToken, Env: r.Env}, nil
}

// retreat takes back a resume that failed with cause and returns the error for
// the caller. The sandbox goes to standby if another try may succeed, or back
// to failed if it was that before or the snapshot is no good.
func (c *Core) retreat(ctx context.Context, e *entry, cause error) error {
	cause = causeOf(ctx, cause)
	if e.unsettled {
		return cause
	}
	reason := ""
	if fatal(cause) {
		reason = cause.Error()
	} else if shimCode(cause) != shim.CodeUnavailable { // that store may answer the next time
		reason = c.memoryFailure(ctx, e)
	}
	if err := c.release(ctx, e); err != nil {
		return err // the shim may live: resuming, and unsettled
	}
	err := c.change(ctx, e, func(r *record) {
		switch {
		case reason != "":
			r.State, r.Reason = StateFailed, reason
		case r.Reason != "":
			r.State = StateFailed
		default:
			r.State = StateStandby
		}
	})
	if err != nil {
		return err
	}
	if reason != "" {
		err := failedError(&e.rec).(*Error)
		err.Hint = fatalHint(cause) + "; " + err.Hint
		err.Cause = nil
		return err
	}
	return stepError(cause, "sandbox %s did not resume", e.id)
}

// memoryFailure returns why the machine that is attached ended, if the reason
// was that its memory could not be served.
func (c *Core) memoryFailure(ctx context.Context, e *entry) string {
	if e.vm == nil {
		return ""
	}
	ctx, cancel := c.short(ctx)
	defer cancel()
	st, err := e.vm.Status(ctx)
	if err != nil || st.Phase != shim.PhaseStopped || st.Failure == "" {
		return ""
	}
	return exitReason(st)
}

// release ends the sandbox's shim, if there may be one, and takes its handle
// out of the record. On error the handle stays: nothing else of the sandbox
// may run before that shim is proven dead.
func (c *Core) release(ctx context.Context, e *entry) error {
	if err := c.end(ctx, e); err != nil {
		return err
	}
	if e.rec.Handle == nil {
		return nil
	}
	bound := e.rec.Bound
	if err := c.change(ctx, e, (*record).unbind); err != nil {
		return err
	}
	c.trash.add(bound)
	return nil
}

// end ends the sandbox's shim and leaves the record alone.
func (c *Core) end(ctx context.Context, e *entry) error {
	ctx, cancel := c.short(ctx)
	defer cancel()
	e.mu.Lock()
	vm, unwatch := e.vm, e.unwatch
	e.unwatch = nil
	e.mu.Unlock()
	if unwatch != nil {
		unwatch()
	}
	var err error
	switch {
	case vm != nil:
		err = c.endMachine(ctx, vm)
	case e.rec.Handle != nil:
		err = c.cfg.Launcher.Kill(ctx, *e.rec.Handle)
	}
	if err != nil {
		return unavailable(err, "the machine of sandbox %s could not be ended", e.id)
	}
	e.detach()
	return nil
}

// endMachine ends a shim, by force if it does not do so by order.
func (c *Core) endMachine(ctx context.Context, vm VM) error {
	if err := vm.Release(ctx); err == nil {
		return nil
	}
	return c.cfg.Launcher.Kill(ctx, vm.Handle())
}

// machineName returns a name that no machine had before.
func machineName(prefix string) string {
	return prefix + "-" + strings.ToLower(rand.Text()[:8])
}

// newToken returns 130 random bits as text.
func newToken() string { return strings.ToLower(rand.Text()) }

func ms(d time.Duration) float64    { return float64(d.Microseconds()) / 1000 }
func since(begun time.Time) float64 { return ms(time.Since(begun)) }
