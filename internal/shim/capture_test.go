package shim

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/fake"
)

var noFaults fake.Faults

// hangingFreeze makes the agent hang when it is told to freeze, until its
// caller goes away.
func hangingFreeze() fake.Faults {
	return fake.Faults{Freeze: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
}

func TestCapture(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	req := captureRequest(7)
	report, err := r.client.Capture(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	for _, phase := range []string{"freeze", "pause", "state", "scan", "write"} {
		if _, ok := report.Phases[phase]; !ok {
			t.Errorf("the report has no phase %s: %v", phase, report.Phases)
		}
	}
	if report.PauseMS <= 0 || report.Snapshot.ID != req.ID {
		t.Errorf("the report is %+v", report)
	}
	if m := report.Metadata; m.Attempt != 7 || m.Generation != 1 || m.ControlToken != "secret" || testKey.Diff(m.Key) != "" || m.Parent != "" {
		t.Errorf("the metadata are %+v", m)
	}
	r.standsStill()
	s := r.status()
	if s.Phase != PhaseSealed || s.Attempt != 7 || s.Captured == nil || s.Captured.Snapshot != report.Snapshot {
		t.Errorf("the status is %+v", s)
	}

	again, err := r.client.Capture(context.Background(), captureRequest(7)) // another id: the first one counts
	if err != nil || again.Snapshot != report.Snapshot {
		t.Errorf("the same attempt again: %+v, %v, want the first report", again, err)
	}
	_, err = r.client.Capture(context.Background(), captureRequest(8))
	wantCode(t, err, CodeInvalid, "attempt 7 is sealed")
	r.standsStill()

	if _, err := r.repo().Open(context.Background(), report.Snapshot); err != nil {
		t.Error(err)
	}
	r.thaw(6) // an older attempt: nothing happens
	r.standsStill()
	r.thaw(7)
	r.thaw(7)
	r.goesOn()
	for attempt := uint64(1); attempt <= 7; attempt++ {
		r.refuses(attempt)
	}
	r.goesOn()
	if got := r.capture(8); got.Snapshot.ID == report.Snapshot.ID {
		t.Error("a new attempt got the old snapshot")
	}
}

// TestThawOfAnAttemptToCome: the thaw of a capture may overtake it.
func TestThawOfAnAttemptToCome(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	r.thaw(3)
	r.refuses(3)
	r.refuses(2)
	r.goesOn()
	r.capture(4)
}

// TestEverythingSinceTheParent: a capture that was thawed is no parent; the
// next one holds what changed since the machine was resumed.
func TestEverythingSinceTheParent(t *testing.T) {
	origin := newRig(t, rigOptions{})
	origin.boot()
	origin.write(600, 1)
	base := origin.capture(1).Snapshot

	r := newRig(t, rigOptions{store: origin.cfg.Store})
	r.resume(base)
	r.write(601, 2)
	r.write(602, 2)
	first := r.capture(1)
	r.thaw(1)
	if err := r.repo().Delete(context.Background(), first.Snapshot.ID); err != nil {
		t.Fatal(err)
	}
	r.write(602, 3)
	r.write(603, 4)
	r.write(600, 0)
	counter := r.env().Counter
	second := r.capture(2)
	for _, got := range []CaptureReport{first, second} {
		if got.Metadata.Parent != base.ID {
			t.Errorf("the parent is %q, want %q", got.Metadata.Parent, base.ID)
		}
	}
	r.end()

	last := newRig(t, rigOptions{store: origin.cfg.Store})
	last.resume(second.Snapshot)
	for page, want := range map[int]int{600: 0, 601: 2, 602: 3, 603: 4, 604: 0} {
		if got := last.read(page); got != want {
			t.Errorf("page %d holds %d, want %d", page, got, want)
		}
	}
	if got := last.env(); got.Counter < counter || got.Identity.ID != "sb1" || got.Init.Generation != 2 {
		t.Errorf("the guest is %+v, want one that goes on from %d", got, counter)
	}
}

// grown returns a descendant of base with a page of its own from each of eight
// generations, and what a compaction makes of it.
func grown(t *testing.T, repo *snapshot.Repository, base snapshot.Ref) (last, compacted snapshot.Ref) {
	t.Helper()
	ctx := context.Background()
	last = base
	for n := range 8 {
		parent, err := repo.Open(ctx, last)
		if err != nil {
			t.Fatal(err)
		}
		defer parent.Close()
		state, err := parent.State(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ram := make([]byte, parent.Metadata().MemoryBytes)
		if _, err := parent.ReadAt(ram, 0); err != nil {
			t.Fatal(err)
		}
		ram[(700+n)*page.Size] = byte(n + 1)
		last, _, err = repo.Capture(ctx, snapshot.CaptureInput{ID: snapshot.NewID(), Parent: parent, Metadata: parent.Metadata(), MemoryBytes: int64(len(ram)),
			State: state, RAM: bytes.NewReader(ram), Dirty: []page.Run{{First: uint64(700 + n), Count: 1}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	compacted, _, done, err := repo.Compact(ctx, snapshot.CompactInput{Ref: last, ID: snapshot.NewID()})
	if err != nil || compacted == last {
		t.Fatalf("Compact = %+v, %v", done, err)
	}
	return last, compacted
}

// TestCaptureUponACompactedParent: a capture builds upon the snapshot that
// replaced the one resumed from, if it holds the same, and else upon that one.
func TestCaptureUponACompactedParent(t *testing.T) {
	origin := newRig(t, rigOptions{})
	origin.boot()
	base := origin.capture(1).Snapshot
	last, compacted := grown(t, origin.repo(), base)

	r := newRig(t, rigOptions{store: origin.cfg.Store})
	r.resume(last)
	r.write(600, 9)
	var child snapshot.Ref
	for i, tt := range []struct{ parent, want snapshot.Ref }{
		{last, last}, {base, last}, {snapshot.Ref{ID: snapshot.NewID()}, last}, {compacted, compacted},
	} {
		req := captureRequest(uint64(i + 1))
		req.Parent = &tt.parent
		report, err := r.client.Capture(context.Background(), req)
		if err != nil {
			t.Fatal(err)
		}
		if child = report.Snapshot; report.Metadata.Parent != tt.want.ID {
			t.Errorf("parent %d is %q, want %q", i, report.Metadata.Parent, tt.want.ID)
		}
		if tt.want != compacted {
			r.thaw(uint64(i + 1))
		}
	}
	r.end()
	// The child needs nothing of the snapshot that its machine was resumed from.
	if _, err := origin.repo().Collect(context.Background(), []snapshot.ID{child.ID}, nil); err != nil {
		t.Fatal(err)
	}
	again := newRig(t, rigOptions{store: origin.cfg.Store})
	again.resume(child)
	for page, want := range map[int]int{600: 9, 700: 1, 707: 8, 708: 0} {
		if got := again.read(page); got != want {
			t.Errorf("page %d holds %d, want %d", page, got, want)
		}
	}
}

func TestFullCapture(t *testing.T) {
	origin := newRig(t, rigOptions{})
	origin.boot()
	origin.write(600, 1)
	base := origin.capture(1).Snapshot
	r := newRig(t, rigOptions{store: origin.cfg.Store})
	r.resume(base)
	req := captureRequest(1)
	req.Full = true
	report, err := r.client.Capture(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	if report.Metadata.DirtyBytes != testShape.MemoryBytes() {
		t.Errorf("%d bytes were looked at, want all %d", report.Metadata.DirtyBytes, testShape.MemoryBytes())
	}
	r.end()
	last := newRig(t, rigOptions{store: origin.cfg.Store})
	last.resume(report.Snapshot)
	if got := last.read(600); got != 1 {
		t.Errorf("page 600 holds %d", got)
	}
}

// TestFailedCapture: whatever fails before the seal, the guest goes on, the
// attempt is refused, nothing is left in the store and the next attempt succeeds.
func TestFailedCapture(t *testing.T) {
	broken := errors.New("broken on purpose")
	failAt := func(step string) func(*rig) {
		return func(r *rig) {
			r.driver.at(func(_ *machine, s string) error {
				if s == step {
					return broken
				}
				return nil
			})
		}
	}
	tests := []struct {
		name  string
		limit limits
		fault func(*rig)
		code  string
		words string
	}{
		{"the freeze fails", limits{}, func(r *rig) {
			r.driver.SetFaults(fake.Faults{Freeze: func(context.Context) error { return broken }})
		}, CodeGuest, "broken on purpose"},
		{"the freeze hangs", limits{freeze: time.Second}, func(r *rig) { r.driver.SetFaults(hangingFreeze()) }, CodeGuest, "freeze"},
		{"the pause fails", limits{}, failAt(stepPaused), CodeFailed, "broken on purpose"},
		{"the state cannot be saved", limits{}, func(r *rig) {
			r.driver.SetFaults(fake.Faults{SaveState: func(context.Context) error { return broken }})
		}, CodeFailed, "broken on purpose"},
		{"the scan fails", limits{}, failAt(stepScanned), CodeFailed, "broken on purpose"},
		{"memory cannot be read", limits{}, failAt(stepRAM), CodeFailed, "broken on purpose"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, rigOptions{limits: tt.limit})
			r.boot()
			tt.fault(r)
			_, err := r.client.Capture(context.Background(), captureRequest(1))
			wantCode(t, err, tt.code, tt.words)
			r.driver.at(nil)
			r.driver.SetFaults(noFaults)
			r.goesOn()
			r.refuses(1)
			holdsNoSnapshot(t, r.cfg.Store)
			r.capture(2)
		})
	}
}

// TestAgentThatHangs: an agent that answers nothing does not keep a capture
// for ever, and its guest runs on.
func TestAgentThatHangs(t *testing.T) {
	r := newRig(t, rigOptions{limits: limits{freeze: 50 * time.Millisecond}})
	r.boot()
	// The guest cannot be dialled: every call to it waits.
	ctx := context.Background()
	if err := r.driver.Machines()[0].Pause(ctx); err != nil {
		t.Fatal(err)
	}
	r.driver.at(func(_ *machine, step string) error {
		if step == stepRun {
			return errors.New("the VMM hangs")
		}
		return nil
	})
	_, err := r.client.Capture(ctx, captureRequest(1))
	wantCode(t, err, CodeGuest, "freeze", "the VMM hangs")
	// It did not go on, so a thaw must try again.
	if s := r.status(); s.Phase != PhaseCapturing {
		t.Errorf("the machine is %s", s.Phase)
	}
	if err := r.client.Thaw(ctx, ThawRequest{Attempt: 1}); err == nil {
		t.Error("a thaw that let nothing go on reports success")
	}
	r.driver.at(nil)
	r.thaw(1)
	r.goesOn()
}

func TestDeadline(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	r.driver.SetFaults(hangingFreeze())
	req := captureRequest(1)
	req.Deadline = 50 * time.Millisecond
	_, err := r.client.Capture(context.Background(), req)
	wantCode(t, err, CodeRefused, "attempt 1 was not sealed within 50ms")
	r.driver.SetFaults(noFaults)
	r.goesOn()
	r.refuses(1)
	holdsNoSnapshot(t, r.cfg.Store)
}

// TestCallerGoesAway: the end of the order's connection, as by a daemon that
// died, cancels it.
func TestCallerGoesAway(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	r.driver.SetFaults(hangingFreeze())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := r.client.Capture(ctx, captureRequest(1))
		done <- err
	}()
	r.waitPhase(PhaseCapturing)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("the caller got %v", err)
	}
	r.waitPhase(PhaseRunning)
	r.driver.SetFaults(noFaults)
	r.goesOn()
	r.refuses(1)
	holdsNoSnapshot(t, r.cfg.Store)
}

// smallStore mounts a store with room for size bytes.
func smallStore(t *testing.T, size string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to mount a small file system")
	}
	dir := tempDir(t)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "store")
}

func TestFullDisk(t *testing.T) {
	store := smallStore(t, "256k")
	r := newRig(t, rigOptions{store: store})
	r.boot()
	for page := 600; page < 680; page++ {
		r.write(page, 1)
	}
	_, err := r.client.Capture(context.Background(), captureRequest(1))
	wantCode(t, err, CodeNoSpace)
	r.goesOn()
	r.refuses(1)
	holdsNoSnapshot(t, store)
	// Once there is room it works.
	if err := unix.Mount("", filepath.Dir(store), "", unix.MS_REMOUNT, "size=4m"); err != nil {
		t.Fatal(err)
	}
	r.capture(2)
}

func TestReadOnlyStore(t *testing.T) {
	store := smallStore(t, "4m")
	r := newRig(t, rigOptions{store: store})
	r.boot()
	if err := unix.Mount("", filepath.Dir(store), "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	_, err := r.client.Capture(context.Background(), captureRequest(1))
	wantCode(t, err, CodeFailed, "read-only")
	r.goesOn()
	r.refuses(1)
	if err := unix.Mount("", filepath.Dir(store), "", unix.MS_REMOUNT, "size=4m"); err != nil {
		t.Fatal(err)
	}
	holdsNoSnapshot(t, store)
	r.capture(2)
}

// TestCrashDuringCapture: the machine dies at each step of a capture. The
// status tells why, and neither the capture nor a thaw hangs.
func TestCrashDuringCapture(t *testing.T) {
	for _, step := range []string{"freeze", stepPaused, stepState, stepScanned, stepRAM} {
		t.Run(step, func(t *testing.T) {
			r := newRig(t, rigOptions{})
			r.boot()
			r.driver.at(func(m *machine, s string) error {
				if s == step {
					m.Crash(vmm.ReasonCrashed)
				}
				return nil
			})
			if step == "freeze" {
				r.driver.SetFaults(fake.Faults{Freeze: func(ctx context.Context) error {
					r.driver.Machines()[0].Crash(vmm.ReasonPanic)
					return nil
				}})
			}
			_, err := r.client.Capture(context.Background(), captureRequest(1))
			wantCode(t, err, CodeStopped, "ended from outside")
			wantCode(t, r.client.Thaw(context.Background(), ThawRequest{Attempt: 1}), CodeStopped, "ended from outside")
			s := r.status()
			if s.Phase != PhaseStopped || s.Exit == nil || s.Exit.Reason == vmm.ReasonClosed || s.VMMPID != 0 {
				t.Errorf("the status is %+v", s)
			}
			holdsNoSnapshot(t, r.cfg.Store)
		})
	}
}

// TestCrashBeforeTheSeal: what was written of a guest that did not run on is
// left to whoever gave the order.
func TestCrashBeforeTheSeal(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	report := r.capture(1)
	h := &host{repo: r.repo(), phase: PhaseStopped, exit: &vmm.Exit{Reason: vmm.ReasonCrashed}, changed: make(chan struct{})}
	wantCode(t, h.markSealed(context.Background(), &report), CodeStopped, string(vmm.ReasonCrashed))
	if ref, err := h.repo.Find(context.Background(), report.Snapshot.ID); err != nil || ref != report.Snapshot {
		t.Errorf("the snapshot: %v, %v", ref, err)
	}
}

// TestCancelledAtTheSeal: the cancellation came when all was written.
func TestCancelledAtTheSeal(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	report := r.capture(1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	h := &host{repo: r.repo(), phase: PhaseCapturing, changed: make(chan struct{})}
	if err := h.markSealed(ctx, &report); !errors.Is(err, context.Canceled) || h.phase != PhaseCapturing {
		t.Errorf("%v, and the machine is %s", err, h.phase)
	}
	holdsNoSnapshot(t, r.cfg.Store)
}

func TestCrashWhileSealed(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	report := r.capture(1)
	r.driver.Machines()[0].Crash(vmm.ReasonCrashed)
	s := r.waitPhase(PhaseStopped)
	if s.Captured != nil || s.Exit.Reason != vmm.ReasonCrashed {
		t.Errorf("the status is %+v", s)
	}
	wantCode(t, r.client.Thaw(context.Background(), ThawRequest{Attempt: 1}), CodeStopped)
	if ref, err := r.repo().Find(context.Background(), report.Snapshot.ID); err != nil || ref != report.Snapshot {
		t.Errorf("the sealed snapshot: %v, %v", ref, err)
	}
}

// TestReleaseDuringCapture: a release does not wait for an order that hangs.
func TestReleaseDuringCapture(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	r.driver.SetFaults(hangingFreeze())
	done := make(chan error, 1)
	go func() {
		_, err := r.client.Capture(context.Background(), captureRequest(1))
		done <- err
	}()
	r.waitPhase(PhaseCapturing)
	r.end()
	if err := <-done; err == nil || !strings.Contains(err.Error(), "ended") && !strings.Contains(err.Error(), "ending") {
		t.Errorf("the capture got %v", err)
	}
	holdsNoSnapshot(t, r.cfg.Store)
}
