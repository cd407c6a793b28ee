package shim

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/pager"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/fake"
)

// sealed returns a store with the snapshot of a guest that holds something.
func sealed(t testing.TB) (store string, ref snapshot.Ref) {
	t.Helper()
	origin := newRig(t, rigOptions{})
	origin.boot()
	for page := 600; page < 640; page++ { // several frames of a pack
		origin.write(page, 1)
	}
	ref = origin.capture(1).Snapshot
	origin.end()
	return origin.cfg.Store, ref
}

func TestResume(t *testing.T) {
	store, ref := sealed(t)
	r := newRig(t, rigOptions{store: store})
	console := filepath.Join(tempDir(t), "console")
	r.prepare(false)
	if s := r.status(); s.Phase != PhasePrepared || s.VMMPID == 0 {
		t.Errorf("the status is %+v", s)
	}
	req := resumeRequest(ref)
	req.Attach.Console = console
	req.Init.Identity = &guestapi.Identity{ID: "sb2", ControlToken: "another secret"}
	report, err := r.client.Resume(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	for _, phase := range []string{"bind", "state", "unpause", "guest_init"} {
		if _, ok := report.Phases[phase]; !ok {
			t.Errorf("the report has no phase %s: %v", phase, report.Phases)
		}
	}
	if report.BytesRead == 0 || report.Faults == 0 {
		t.Errorf("the report is %+v", report)
	}
	env := r.env()
	now := time.Now()
	if clock := time.Unix(0, env.Init.UnixNano); clock.After(now) || clock.Before(now.Add(-patience)) {
		t.Errorf("the guest was told %v, it is %v", clock, now)
	}
	if env.Identity.ID != "sb2" || env.Init.SleptSeconds <= 0 {
		t.Errorf("the guest is %+v", env)
	}
	// The new control token is the one that freezes, and that the next snapshot holds.
	if m := r.capture(1).Metadata; m.ControlToken != "another secret" || m.Parent != ref.ID {
		t.Errorf("the metadata are %+v", m)
	}
	if _, err := os.Stat(console); err != nil {
		t.Error(err)
	}
}

// TestDamagedSnapshot: each object of a snapshot, damaged or missing, is named,
// and the machine never runs with wrong bytes.
func TestDamagedSnapshot(t *testing.T) {
	for _, folder := range []string{"manifests", "states", "packs"} {
		for name, damage := range map[string]func(path string) error{
			"missing": os.Remove,
			"empty":   func(path string) error { return os.Truncate(path, 0) },
			"cut off": func(path string) error {
				info, err := os.Stat(path)
				if err != nil {
					return err
				}
				return os.Truncate(path, info.Size()-7)
			},
			"changed": func(path string) error {
				b, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				for i := range 100 { // of a pack: in its first frame
					b[min(5000, len(b)/2)+i%10] ^= byte(i)
				}
				return os.WriteFile(path, b, 0o600)
			},
		} {
			t.Run(folder+" "+name, func(t *testing.T) {
				store, ref := sealed(t)
				key := folder + "/" + string(ref.ID)
				if err := damage(filepath.Join(store, key)); err != nil {
					t.Fatal(err)
				}
				r := newRig(t, rigOptions{store: store})
				r.prepare(false)
				_, err := r.client.Resume(context.Background(), resumeRequest(ref))
				wantCode(t, err, CodeCorrupt, key)
				s := r.waitPhase(PhaseStopped)
				if s.Exit == nil {
					t.Errorf("the status is %+v", s)
				}
				if served := folder == "packs" && name == "changed"; served != (s.Failure != "") {
					t.Errorf("the failure is %q", s.Failure)
				}
			})
		}
	}
}

func TestMismatch(t *testing.T) {
	store, ref := sealed(t)
	tests := []struct {
		name   string
		change func(*PrepareRequest, *ResumeRequest)
		code   string
		words  []string
	}{
		{"another kernel", func(_ *PrepareRequest, r *ResumeRequest) { r.Key = vmm.Key{"driver": "fake", "kernel": "k2"} },
			CodeMismatch, []string{string(ref.ID), "kernel", `"k1"`, `"k2"`}},
		{"no key", func(_ *PrepareRequest, r *ResumeRequest) { r.Key = nil }, CodeMismatch, []string{"kernel"}},
		{"more memory", func(p *PrepareRequest, _ *ResumeRequest) { p.Shape.MemoryMiB *= 2 },
			CodeMismatch, []string{"8388608", "16777216"}},
		{"another manifest", func(_ *PrepareRequest, r *ResumeRequest) { r.Snapshot.Manifest = "0123" },
			CodeCorrupt, []string{"manifests/" + string(ref.ID)}},
		{"no such snapshot", func(_ *PrepareRequest, r *ResumeRequest) { r.Snapshot.ID = snapshot.NewID() },
			CodeCorrupt, []string{"manifests/"}},
		{"no id", func(_ *PrepareRequest, r *ResumeRequest) { r.Snapshot.ID = "../../x" }, CodeFailed, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, rigOptions{store: store})
			prepare, resume := r.prepareRequest(false), resumeRequest(ref)
			tt.change(&prepare, &resume)
			if err := r.client.Prepare(context.Background(), prepare); err != nil {
				t.Fatal(err)
			}
			_, err := r.client.Resume(context.Background(), resume)
			wantCode(t, err, tt.code, tt.words...)
			if s := r.status(); s.Phase != PhaseStopped || s.Failure != "" || s.Exit == nil || s.Exit.Reason != vmm.ReasonClosed {
				t.Errorf("the status is %+v", s)
			}
		})
	}
}

// hangingAgent is a driver whose guests take connections to the agent and
// never answer.
func hangingAgent(met chan<- struct{}) *driver {
	d := newDriver()
	d.ports = map[int]func(net.Conn){guestapi.Port: func(c net.Conn) {
		met <- struct{}{}
		for b := make([]byte, 512); ; {
			if _, err := c.Read(b); err != nil {
				return
			}
		}
	}}
	return d
}

// TestFailedStart: a machine that does not come up is ended, the reason told.
func TestFailedStart(t *testing.T) {
	broken := errors.New("broken on purpose")
	store, ref := sealed(t)
	met := make(chan struct{}, 100)
	crash := func(m *machine, step string) error {
		if step == stepRun {
			m.Crash(vmm.ReasonPanic)
		}
		return nil
	}
	tests := []struct {
		name  string
		opts  rigOptions
		fault func(*rig)
		code  string
		words string
		exit  vmm.Reason
	}{
		{"the state cannot be loaded", rigOptions{}, func(r *rig) {
			r.driver.SetFaults(fake.Faults{LoadState: func(context.Context) error { return broken }})
		}, CodeFailed, "broken on purpose", vmm.ReasonClosed},
		{"the machine crashes when it shall run", rigOptions{}, func(r *rig) { r.driver.at(crash) }, CodeStopped, "panic", vmm.ReasonPanic},
		{"the vCPUs cannot run", rigOptions{}, func(r *rig) {
			r.driver.at(func(*machine, string) error { return broken })
		}, CodeFailed, "broken on purpose", vmm.ReasonClosed},
		{"init does not answer", rigOptions{driver: hangingAgent(met), limits: limits{init: 100 * time.Millisecond, boot: 100 * time.Millisecond}},
			func(*rig) {}, CodeGuest, "init", vmm.ReasonClosed},
		{"the machine crashes during init", rigOptions{driver: hangingAgent(met)}, func(r *rig) {
			go func() {
				<-met
				for _, m := range r.driver.Machines() {
					m.Crash(vmm.ReasonReset)
				}
			}()
		}, CodeStopped, "reset", vmm.ReasonReset},
	}
	for _, tt := range tests {
		for _, kind := range []string{"resume", "boot"} {
			if kind == "boot" && tt.name == "the state cannot be loaded" {
				continue
			}
			t.Run(tt.name+", "+kind, func(t *testing.T) {
				for len(met) > 0 {
					<-met
				}
				opts := tt.opts
				opts.store = store
				r := newRig(t, opts)
				r.prepare(kind == "boot")
				tt.fault(r)
				var err error
				if kind == "boot" {
					_, err = r.client.Boot(context.Background(), bootRequest())
				} else {
					_, err = r.client.Resume(context.Background(), resumeRequest(ref))
				}
				wantCode(t, err, tt.code, tt.words)
				s := r.waitPhase(PhaseStopped)
				if s.Exit == nil || s.Exit.Reason != tt.exit || s.Failure != "" {
					t.Errorf("the status is %+v, exit %+v", s, s.Exit)
				}
				if left := r.driver.Machines(); len(left) > 0 {
					t.Error("the machine lives on")
				}
				if opts.driver == nil {
					r.driver.at(nil)
					r.driver.SetFaults(noFaults)
				}
				r.end()
			})
		}
	}
	// The snapshot is as good as before.
	r := newRig(t, rigOptions{store: store})
	r.resume(ref)
	r.goesOn()
}

// TestCancelledStart: the end of the order's connection ends the machine too.
func TestCancelledStart(t *testing.T) {
	met := make(chan struct{}, 1)
	store, ref := sealed(t)
	r := newRig(t, rigOptions{store: store, driver: hangingAgent(met)})
	r.prepare(false)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-met
		cancel()
	}()
	if _, err := r.client.Resume(ctx, resumeRequest(ref)); !errors.Is(err, context.Canceled) {
		t.Errorf("the caller got %v", err)
	}
	if s := r.waitPhase(PhaseStopped); s.Exit.Reason != vmm.ReasonClosed {
		t.Errorf("the status is %+v", s)
	}
}

// TestReleaseDuringOrders: a release ends orders that hang: a start of the VMM,
// a resume, and what waits behind them.
func TestReleaseDuringOrders(t *testing.T) {
	store, ref := sealed(t)
	hang := func(met chan struct{}) func(context.Context) error {
		return func(ctx context.Context) error { close(met); <-ctx.Done(); return ctx.Err() }
	}
	tests := map[string]func(r *rig, met chan struct{}) error{
		"prepare": func(r *rig, met chan struct{}) error {
			r.driver.SetFaults(fake.Faults{Start: hang(met)})
			return r.client.Prepare(context.Background(), r.prepareRequest(false))
		},
		"resume": func(r *rig, met chan struct{}) error {
			r.prepare(false)
			r.driver.SetFaults(fake.Faults{LoadState: hang(met)})
			_, err := r.client.Resume(context.Background(), resumeRequest(ref))
			return err
		},
	}
	for name, give := range tests {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, rigOptions{store: store})
			met := make(chan struct{})
			results := make(chan error, 2)
			go func() { results <- give(r, met) }()
			<-met
			go func() { results <- r.client.Thaw(context.Background(), ThawRequest{Attempt: 1}) }()
			r.end()
			for range 2 {
				if err := <-results; err == nil {
					t.Error("an order that hung reports success")
				}
			}
			if left := r.driver.Machines(); len(left) > 0 {
				t.Error("the machine lives on")
			}
		})
	}
}

// TestUnservedMemory: a page that cannot be served later, while the guest
// runs, ends the machine with that reason.
func TestUnservedMemory(t *testing.T) {
	store, ref := sealed(t)
	r := newRig(t, rigOptions{store: store})
	r.resume(ref)
	key := "packs/" + string(ref.ID)
	path := filepath.Join(store, key)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	// The shim has it open: what is lost is the content.
	if err := os.WriteFile(path, make([]byte, info.Size()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.ask(context.Background(), "GET", "/memory?page=639", nil); err == nil {
		t.Fatal("a lost page was read")
	}
	s := r.waitPhase(PhaseStopped)
	if s.Failure == "" || s.Code != CodeCorrupt || s.Exit == nil {
		t.Errorf("the status is %+v", s)
	}
	_, err = r.client.Capture(context.Background(), captureRequest(1))
	wantCode(t, err, CodeStopped, key)
	_, err = r.client.Dial(context.Background(), fake.UserPort)
	wantCode(t, err, CodeStopped, key)
}

// TestPagerEnds: a machine whose pager is unmounted under it ends with that
// reason, and no object is to blame.
func TestPagerEnds(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to unmount")
	}
	store, ref := sealed(t)
	r := newRig(t, rigOptions{store: store})
	r.resume(ref)
	if err := unix.Unmount(memDir(r.cfg.Dir), unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	s := r.waitPhase(PhaseStopped)
	if s.Code != CodeFailed || !strings.Contains(s.Failure, pager.ErrEnded.Error()) || s.Exit == nil {
		t.Errorf("the status is %+v", s)
	}
}
