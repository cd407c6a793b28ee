package sandbox_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// TestBadPolicies: a policy with nonsense in it is refused in words, at a
// creation and at an update, and nothing changes.
func TestBadPolicies(t *testing.T) {
	h := newHost(t)
	s := h.create()
	hook := sandbox.Hook{Name: "a", Event: sandbox.HookPostResume, Command: []string{"true"}}
	for name, tt := range map[string]struct {
		spoil func(p *sandbox.Policy)
		want  string
	}{
		"short timeout":  {func(p *sandbox.Policy) { p.IdleTimeout = time.Millisecond }, "idle_timeout is 1ms"},
		"negative":       {func(p *sandbox.Policy) { p.TTL.After = -time.Hour }, "ttl is -1h"},
		"idle":           {func(p *sandbox.Policy) { p.Idle = "moon" }, `idle is "moon": take network or cpu`},
		"session":        {func(p *sandbox.Policy) { p.OnSessionClose = "delete" }, "on_session_close"},
		"ttl action":     {func(p *sandbox.Policy) { p.TTL = sandbox.Limit{After: time.Hour, Action: "hibernate"} }, "take delete or notify"},
		"timeout action": {func(p *sandbox.Policy) { p.Timeout = sandbox.Limit{After: time.Hour, Action: "notify"} }, "take hibernate or delete"},
		"past":           {func(p *sandbox.Policy) { p.Expires.At = time.Now().Add(-time.Hour) }, "in the past"},
		"port":           {func(p *sandbox.Policy) { p.Public = []int{70000} }, "70000 is no TCP port"},
		"agent's port":   {func(p *sandbox.Policy) { p.Public = []int{49983} }, "the agent's"},
		"keep":           {func(p *sandbox.Policy) { p.Checkpoints = sandbox.Schedule{Every: time.Hour, Keep: 1000} }, "checkpoints.keep"},
		"profile":        {func(p *sandbox.Policy) { p.Egress.Profile = "open" }, "egress.profile"},
		"rules":          {func(p *sandbox.Policy) { p.Egress.Deny = make([]string, 10_000) }, "egress rules"},
		"hook event":     {func(p *sandbox.Policy) { h := hook; h.Event = "never"; p.Hooks = []sandbox.Hook{h} }, "pre-hibernate or post-resume"},
		"hook twice":     {func(p *sandbox.Policy) { p.Hooks = []sandbox.Hook{hook, hook} }, "twice"},
		"hook's command": {func(p *sandbox.Policy) { h := hook; h.Command = nil; p.Hooks = []sandbox.Hook{h} }, "no command"},
		"hook's time":    {func(p *sandbox.Policy) { h := hook; h.Timeout = time.Hour; p.Hooks = []sandbox.Hook{h} }, "at most 1m"},
		"hook's text": {func(p *sandbox.Policy) {
			h := hook
			h.Env = map[string]string{"A": strings.Repeat("x", 1<<20)}
			p.Hooks = []sandbox.Hook{h}
		}, "longer than"},
		"waits in vain": {func(p *sandbox.Policy) {
			h := hook
			h.Event, h.Background = sandbox.HookPreHibernate, true
			p.Hooks = []sandbox.Hook{h}
		}, "background"},
		"long hooks": {func(p *sandbox.Policy) {
			for i := range 30 {
				h := hook
				h.Name, h.Command = fmt.Sprint("h", i), []string{strings.Repeat("\"", 10<<10)}
				p.Hooks = append(p.Hooks, h)
			}
		}, "in all"},
		"too many hooks":  {func(p *sandbox.Policy) { p.Hooks = make([]sandbox.Hook, 100) }, "100 hooks"},
		"zero in command": {func(p *sandbox.Policy) { h := hook; h.Command = []string{"a\x00b"}; p.Hooks = []sandbox.Hook{h} }, "zero byte"},
	} {
		t.Run(name, func(t *testing.T) {
			p := sandbox.DefaultPolicy()
			tt.spoil(&p)
			_, err := h.core.Create(t.Context(), sandbox.CreateOptions{Policy: &p})
			isA(t, err, sandbox.ErrInvalid)
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("create says %q, want %q", err, tt.want)
			}
			_, err = h.core.Update(t.Context(), s.ID, func(now *sandbox.Settings) error { tt.spoil(&now.Policy); return nil })
			isA(t, err, sandbox.ErrInvalid)
		})
	}
	if got := h.get(s.ID).Policy; got.IdleTimeout != s.Policy.IdleTimeout || got.Idle != s.Policy.Idle || got.Hooks != nil {
		t.Errorf("the policy is %+v now", got)
	}
}

// TestUpdate: a policy is changed in every state, is completed, wakes nothing
// and outlives the daemon.
func TestUpdate(t *testing.T) {
	h := newHost(t)
	s := h.create()
	update := func(mutate func(*sandbox.Settings)) sandbox.Sandbox {
		t.Helper()
		out, err := h.core.Update(t.Context(), s.ID, func(now *sandbox.Settings) error { mutate(now); return nil })
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	update(func(now *sandbox.Settings) { now.Policy.TTL.After = 48 * time.Hour })
	h.hibernate(s.ID)
	out := update(func(now *sandbox.Settings) {
		now.Policy.Public = []int{90, 80, 90}
		now.Labels = map[string]string{"a": "b"}
	})
	if out.State != sandbox.StateStandby || out.Policy.TTL.Action != sandbox.ActionDelete || len(out.Policy.Public) != 2 || out.Policy.Public[0] != 80 {
		t.Errorf("it is %s with %+v", out.State, out.Policy)
	}
	if _, err := h.core.Update(t.Context(), s.ID, func(*sandbox.Settings) error { return errInjected }); !errors.Is(err, errInjected) {
		t.Errorf("the error is %v", err)
	}
	h.core.Close()
	h.boot()
	if now := h.get(s.ID); now.Labels["a"] != "b" || now.Policy.TTL.After != 48*time.Hour {
		t.Errorf("after a restart it has %+v", now)
	}
}

// TestRecordWithoutPolicy: a record of the first version is read; its egress
// rules are part of the default policy.
func TestRecordWithoutPolicy(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.hibernate(s.ID)
	h.core.Close()
	rec, err := h.w.Catalog.Get(t.Context(), "sandbox", s.ID)
	if err != nil {
		t.Fatal(err)
	}
	old := bytes.Replace(rec.Value, []byte(`"version":2`), []byte(`"version":1,"allow":["10.0.0.0/8"]`), 1)
	begin := bytes.Index(old, []byte(`"policy":{`))
	end := begin + bytes.Index(old[begin:], []byte(`"access_token"`))
	old = append(old[:begin:begin], old[end:]...)
	if _, err := h.w.Catalog.Put(t.Context(), "sandbox", s.ID, old, rec.Revision); err != nil {
		t.Fatal(err)
	}
	h.boot()
	got := h.get(s.ID).Policy
	if got.IdleTimeout != sandbox.DefaultPolicy().IdleTimeout || len(got.Egress.Allow) != 1 {
		t.Errorf("the policy is %+v", got)
	}
	h.resume(s.ID)
}
