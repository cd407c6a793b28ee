package sandbox_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// TestHooks: a sandbox's hooks come to its guest, and what they did is kept and
// told of until the sandbox is deleted.
func TestHooks(t *testing.T) {
	var mu sync.Mutex
	var told []string
	h := newHost(t, func(c *sandbox.Config) {
		c.Events.OnEvent = func(ev sandbox.Event) {
			if ev.Type == sandbox.EventHook {
				mu.Lock()
				defer mu.Unlock()
				told = append(told, ev.Hook.Name+" "+ev.Hook.Reason+" "+ev.Reason+ev.Hook.Output)
			}
		}
	})
	p := sandbox.DefaultPolicy()
	p.Hooks = []sandbox.Hook{
		{Name: "before", Event: sandbox.HookPreHibernate, Command: []string{"true"}},
		{Name: "after", Event: sandbox.HookPostResume, Command: []string{"true"}},
		{Name: "slow", Event: sandbox.HookPostResume, Command: []string{"true"}, Background: true},
	}
	s := h.create(sandbox.CreateOptions{Policy: &p})
	if hooks := s.Policy.Hooks; hooks[0].Timeout != 5*time.Second || hooks[2].Timeout != time.Minute {
		t.Errorf("default timeouts: %+v", hooks)
	}
	h.hibernate(s.ID)
	h.resume(s.ID)
	runs, err := h.core.HookRuns(t.Context(), s.ID)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range runs {
		got = append(got, r.Name+" "+r.Reason+" "+strings.TrimSpace(r.Output))
	}
	want := "after create after ran, slow create slow ran, before hibernate before ran, after resume after ran, slow resume slow ran"
	if strings.Join(got, ", ") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, ", "), want)
	}
	mu.Lock()
	if len(told) != len(runs) || told[2] != "before hibernate exit code 0" {
		t.Errorf("events: %q", told)
	}
	mu.Unlock()
	if err := h.core.Delete(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(h.w.Dir, s.ID+".hooks*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestTheLogOfHooksIsBounded: it is begun anew when it is long, and a broken line
// hides no other.
func TestTheLogOfHooksIsBounded(t *testing.T) {
	h := newHost(t)
	p := sandbox.DefaultPolicy()
	p.Hooks = []sandbox.Hook{{Name: "before", Event: sandbox.HookPreHibernate, Command: []string{"true"}}}
	s := h.create(sandbox.CreateOptions{Policy: &p})
	path := filepath.Join(h.w.Dir, s.ID+".hooks")
	if err := os.WriteFile(path, []byte(strings.Repeat("{no json\n", 1<<18)), 0o600); err != nil {
		t.Fatal(err)
	}
	h.hibernate(s.ID)
	info, err := os.Stat(path)
	if err != nil || info.Size() > 1<<10 {
		t.Errorf("the log has %d bytes: %v", info.Size(), err)
	}
	runs, err := h.core.HookRuns(t.Context(), s.ID)
	if err != nil || len(runs) != 1 || runs[0].Name != "before" {
		t.Errorf("%+v, %v", runs, err)
	}
}
