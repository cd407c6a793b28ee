package shim

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// TestKilledDuringAnOrder: whoever waits for an answer learns that there will be none.
func TestKilledDuringAnOrder(t *testing.T) {
	t.Setenv(failpoint.Env, failPaused+"=kill")
	l := newLauncher(t)
	g := launch(t, l, "vm1")
	g.boot()
	if _, err := g.client.Capture(context.Background(), captureRequest(1)); !errors.Is(err, ErrGone) {
		t.Errorf("Capture returned %v, want ErrGone", err)
	}
	holdsNoSnapshot(t, l.Store)
}

// reached tells when a child's capture has come to a failpoint.
var reached = []struct {
	point string
	when  func(l *Launcher, g *guest, req CaptureRequest) bool
}{
	{failFrozen, func(_ *Launcher, g *guest, _ CaptureRequest) bool { return g.env().Frozen }},
	{failPaused, func(_ *Launcher, g *guest, _ CaptureRequest) bool { return passed(g.client, stepPaused) }},
	{failState, func(_ *Launcher, g *guest, _ CaptureRequest) bool { return passed(g.client, stepState) }},
	{failScanned, func(_ *Launcher, g *guest, _ CaptureRequest) bool { return passed(g.client, stepScanned) }},
	{failWritten, func(l *Launcher, g *guest, req CaptureRequest) bool {
		return slices.Contains(objects(g.t, l.Store, "manifests/"), "manifests/"+string(req.ID))
	}},
}

// TestCancelledCapture: a capture that its caller gives up at any point before
// the seal leaves a guest that goes on, and nothing in the store.
func TestCancelledCapture(t *testing.T) {
	for _, at := range reached {
		for _, how := range []string{"the caller goes away", "the deadline passes", "a thaw", "a crash"} {
			t.Run(at.point+", "+how, func(t *testing.T) {
				t.Setenv(failpoint.Env, at.point+"=hang")
				l := newLauncher(t)
				g := launch(t, l, "vm1")
				g.boot()
				before := g.env().Counter
				req := captureRequest(3)
				if how == "the deadline passes" {
					req.Deadline /= 100
				}
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				done := make(chan error, 1)
				go func() {
					_, err := g.client.Capture(ctx, req)
					done <- err
				}()
				if how != "the deadline passes" {
					eventually(t, "the capture reaches "+at.point, func() bool { return at.when(l, g, req) })
				}
				switch how {
				case "the caller goes away":
					cancel()
					if err := <-done; !errors.Is(err, context.Canceled) {
						t.Errorf("the caller got %v", err)
					}
				case "the deadline passes":
					wantCode(t, <-done, CodeRefused, "was not sealed within")
				case "a thaw":
					g.thaw(3)
					wantCode(t, <-done, CodeRefused, "attempt 3")
				case "a crash":
					if err := syscall.Kill(g.client.handle.PID, syscall.SIGUSR1); err != nil {
						t.Fatal(err)
					}
					s := g.waitPhase(PhaseStopped)
					if s.Exit == nil || s.Exit.Reason != vmm.ReasonCrashed {
						t.Errorf("the status is %+v", s)
					}
					cancel()
					<-done
					wantCode(t, g.client.Thaw(context.Background(), ThawRequest{Attempt: 3}), CodeStopped)
					holdsNoSnapshot(t, l.Store)
					return
				}
				g.waitPhase(PhaseRunning)
				g.goesOn()
				if now := g.env().Counter; now <= before {
					t.Errorf("the counter went from %d to %d", before, now)
				}
				g.refuses(3)
				holdsNoSnapshot(t, l.Store)
			})
		}
	}
}

// TestAnswerLostAfterTheSeal: who gives up behind the seal finds the guest
// sealed, and gets the report by asking again.
func TestAnswerLostAfterTheSeal(t *testing.T) {
	t.Setenv(failpoint.Env, failSealed+"=hang")
	l := newLauncher(t)
	g := launch(t, l, "vm1")
	g.boot()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	req := captureRequest(1)
	go func() {
		_, err := g.client.Capture(ctx, req)
		done <- err
	}()
	g.waitPhase(PhaseSealed)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("the caller got %v", err)
	}
	again, err := g.client.Capture(context.Background(), req)
	if err != nil || again.Snapshot.ID != req.ID {
		t.Errorf("asked again: %+v, %v", again, err)
	}
	if s := g.status(); s.Phase != PhaseSealed || s.Captured.Snapshot != again.Snapshot {
		t.Errorf("the status is %+v", s)
	}
	g.thaw(1)
	g.goesOn()
	g.refuses(1)
}
