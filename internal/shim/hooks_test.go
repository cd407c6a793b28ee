package shim

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

func aHook(event, command string) guestapi.Hook {
	return guestapi.Hook{Name: command, Event: event, Command: []string{command}}
}

// TestHooksPassThrough: hooks come to the guest and their results back, and one
// that fails is a warning.
func TestHooksPassThrough(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	req := captureRequest(1)
	req.Hooks = []guestapi.Hook{aHook(guestapi.EventPreHibernate, "false"), aHook(guestapi.EventPostResume, "true")}
	report, err := r.client.Capture(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Hooks) != 1 || report.Hooks[0].Name != "false" || len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], "hook false: exit code 1") {
		t.Errorf("hooks %+v, warnings %q", report.Hooks, report.Warnings)
	}
}

// TestUnfrozenCapture: where nobody in the guest answers, a capture that may do
// so goes on, and says so.
func TestUnfrozenCapture(t *testing.T) {
	r := newRig(t, rigOptions{limits: limits{freeze: 50 * time.Millisecond}})
	r.boot()
	r.driver.SetFaults(hangingFreeze())
	req := captureRequest(1)
	req.Unfrozen = true
	report, err := r.client.Capture(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], "did not answer") {
		t.Errorf("warnings %q", report.Warnings)
	}
	if s := r.status(); s.Phase != PhaseSealed {
		t.Errorf("the machine is %s", s.Phase)
	}
}

// TestKeptHooks: the shim keeps a bounded number of results, each once.
func TestKeptHooks(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	ctx := context.Background()
	report, err := r.client.Hooks(ctx, HooksRequest{KeptOnly: true})
	if err != nil || len(report.Hooks) != 0 {
		t.Errorf("%+v, %v", report, err)
	}
	h := &host{}
	for range 100 {
		h.keepHooks(make([]guestapi.HookResult, guestapi.MaxHooks))
	}
	if n := len(h.takeHooks()); n != maxPending*guestapi.MaxHooks || len(h.takeHooks()) != 0 {
		t.Errorf("%d are kept", n)
	}
}

// TestPhaseOfHooks: what a guest says that hooks took is a phase of its own, and
// never more than what was measured.
func TestPhaseOfHooks(t *testing.T) {
	for _, c := range []struct{ said, hooks, freeze float64 }{{0, 0, 10}, {4, 4, 6}, {1e12, 10, 0}, {-3, 0, 10}} {
		s := newStopwatch()
		s.phases["freeze"] = 10
		s.split("freeze", "hooks", c.said)
		if s.phases["hooks"] != c.hooks || s.phases["freeze"] != c.freeze {
			t.Errorf("%v: %v", c.said, s.phases)
		}
	}
}
