package sandbox

import (
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
	tierLocal  = "local"
	tierRemote = "remote"
	tierBoot   = "boot"
)

// ResumeOptions says what a resume shall do without, for measuring. The zero
// value is the usual way.
type ResumeOptions struct {
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
	err = c.run(ctx, e, opStart, func(ctx context.Context, op *operation) error {
		if e.rec.State == StateFailed {
			return c.resume(ctx, e)
		}
		return c.wake(ctx, e, op)
	})
	return c.view(e), err
}

// wake makes sure that the sandbox runs, without touching a failed one.
func (c *Core) wake(ctx context.Context, e *entry, _ *operation) error {
	switch e.rec.State {
	case StateRunning:
		return nil
	case StateStandby:
		return c.resume(ctx, e)
	case StateFailed:
		return failedError(&e.rec)
	}
	return conflict("", "sandbox %s is %s", e.id, e.rec.State)
}

// resume starts a machine from the sandbox's snapshot.
func (c *Core) resume(ctx context.Context, e *entry) error {
	if e.rec.Snapshot == nil {
		return failedError(&e.rec)
	}
	if err := c.release(ctx, e); err != nil {
		return err
	}
	if err := c.admit(e.id, "sandbox "+e.id, e.rec.Shape); err != nil {
		return err
	}
	begun := time.Now()
	err := c.change(ctx, e, func(r *record) {
		r.State = StateResuming
		r.Generation = nextGeneration(r)
	})
	if err != nil {
		return err
	}
	points := startPoints{fpResumeRecorded, fpResumeLaunched, fpResumeHandle, fpResumePrepared, fpResumeRunning}
	if err := c.start(ctx, e, points, begun, false); err != nil {
		err = c.retreat(ctx, e, err)
		c.cfg.Events.start(e.id, ResumeReport{Tier: tierLocal, TotalMS: since(begun)}, err)
		return err
	}
	c.cfg.Events.start(e.id, *e.rec.LastResume, nil)
	return nil
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

// start gives a sandbox that is recorded as creating or resuming a machine
// that runs its snapshot, or with boot a machine that boots, and records it as
// running. The request for it came at the time request. After an error the machine may be attached still.
func (c *Core) start(ctx context.Context, e *entry, points startPoints, request time.Time, boot bool) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.StartTimeout)
	defer cancel()
	begun := time.Now()
	if err := failpoint.Hit(ctx, points.recorded); err != nil {
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
	vm, rep, prepared, err := c.startGuest(ctx, e, points, art, boot)
	if checkErr := <-checked; checkErr != nil {
		return checkErr
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, points.running); err != nil {
		return err
	}
	report := ResumeReport{Tier: tierLocal, Phases: map[string]float64{}, BytesRead: rep.BytesRead, Faults: rep.Faults, PrefetchedBytes: rep.PrefetchedBytes, Warnings: rep.Warnings}
	switch {
	case boot:
		report.Tier = tierBoot
	case rep.Remote:
		report.Tier = tierRemote
	}
	for name, ms := range rep.Phases {
		report.Phases[name] = ms
	}
	report.Phases["record"] = ms(begun.Sub(request))
	report.Phases["vmm"] = ms(prepared.Sub(begun))
	report.TotalMS = since(request)
	err = c.change(ctx, e, func(r *record) {
		r.State, r.Reason, r.LastUsed, r.LastResume = StateRunning, "", time.Now().UTC(), &report
	})
	if err != nil {
		return err
	}
	if rep.Remote && c.cfg.Tier != nil {
		c.cfg.Tier.Promote(*e.rec.Snapshot)
	}
	c.watch(e, vm)
	return nil
}

// startGuest acquires a machine and lets it run; prepared is when the machine
// was ready for that.
func (c *Core) startGuest(ctx context.Context, e *entry, points startPoints, art template.Artifacts, boot bool) (vm VM, rep shim.StartReport, prepared time.Time, err error) {
	if vm, err = c.acquire(ctx, e, points, art, boot); err != nil {
		return
	}
	prepared = time.Now()
	rep, err = c.runGuest(ctx, e, vm, art, boot)
	return
}

// acquire gives the sandbox a machine that is prepared and waits for its
// snapshot or its boot. It is the one place that decides where a VMM comes
// from. The handle is recorded before the VMM starts; from there on the shim
// may outlive the daemon.
func (c *Core) acquire(ctx context.Context, e *entry, points startPoints, art template.Artifacts, boot bool) (VM, error) {
	vm, err := c.cfg.Launcher.Launch(ctx, LaunchSpec{VM: machineName(e.id)})
	if err != nil {
		return nil, fmt.Errorf("start a machine: %w", err)
	}
	e.attach(vm)
	if err := failpoint.Hit(ctx, points.launched); err != nil {
		return nil, err
	}
	h := vm.Handle()
	if err := c.change(ctx, e, func(r *record) { r.Handle = &h }); err != nil {
		return nil, err
	}
	if err := failpoint.Hit(ctx, points.handle); err != nil {
		return nil, err
	}
	if err := vm.Adopt(ctx); err != nil {
		return nil, fmt.Errorf("adopt machine %s: %w", h.VM, err)
	}
	if err := vm.Prepare(ctx, prepareRequest(e.rec.Shape, art, boot)); err != nil {
		return nil, fmt.Errorf("prepare machine %s: %w", h.VM, err)
	}
	return vm, failpoint.Hit(ctx, points.prepared)
}

func prepareRequest(shape vmm.Shape, art template.Artifacts, boot bool) shim.PrepareRequest {
	req := shim.PrepareRequest{Shape: shape, BaseImage: art.BaseImage}
	if boot {
		req.Boot = &vmm.Boot{Kernel: art.Kernel, Initrd: art.Initrd, Cmdline: art.Cmdline}
	}
	return req
}

// runGuest lets a prepared machine boot or resume.
func (c *Core) runGuest(ctx context.Context, e *entry, vm VM, art template.Artifacts, boot bool) (shim.StartReport, error) {
	req := guestapi.InitRequest{Reason: guestapi.ReasonResume, Generation: e.rec.Generation}
	if boot || e.rec.Fresh {
		id, err := identity(&e.rec)
		if err != nil {
			return shim.StartReport{}, err
		}
		req.Reason, req.Identity = guestapi.ReasonCreate, id
	}
	if boot {
		req.Reason = guestapi.ReasonBoot
		rep, err := vm.Boot(ctx, shim.BootRequest{Attach: c.attachment(&e.rec), Init: req})
		if err != nil {
			return rep, fmt.Errorf("boot: %w", err)
		}
		return rep, nil
	}
	key, err := c.key(ctx, e.rec.Shape, art)
	if err != nil {
		return shim.StartReport{}, err
	}
	req.Snapshot = string(e.rec.Snapshot.ID)
	rep, err := vm.Resume(ctx, shim.ResumeRequest{Attach: c.attachment(&e.rec), Snapshot: *e.rec.Snapshot, Key: key, Init: req})
	if err != nil {
		return rep, fmt.Errorf("resume snapshot %s: %w", e.rec.Snapshot.ID, err)
	}
	return rep, nil
}

// attachment returns what a machine gets when it becomes the sandbox's.
func (c *Core) attachment(r *record) shim.Attach {
	return shim.Attach{Console: c.cfg.Console(r.ID), Allow: r.Allow, Deny: r.Deny}
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
	} else if why := c.memoryFailure(ctx, e); why != "" {
		reason = why
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
		err.Hint = "hib store verify checks the store; " + err.Hint
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
	return c.change(ctx, e, func(r *record) { r.Handle = nil })
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
