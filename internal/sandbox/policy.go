package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// Policy says what a sandbox does by itself and who may reach what. It is part
// of its record and can be changed in every state. Its maps, lists and pointers
// are shared between copies: replace them, never write into them.
type Policy struct {
	IdleTimeout    time.Duration `json:"idle_timeout,omitempty"` // without traffic until it hibernates, 0: never
	Idle           IdleMode      `json:"idle,omitempty"`
	ConnectionCap  time.Duration `json:"connection_cap,omitempty"` // without a byte for so long an inbound connection does not count, 0: it always does
	OnSessionClose SessionAction `json:"on_session_close,omitempty"`

	TTL     Limit   `json:"ttl,omitzero"`      // since its creation; delete or notify
	TTLIdle Limit   `json:"ttl_idle,omitzero"` // since it went to standby; delete or notify
	Expires Expires `json:"expires,omitzero"`  // delete or notify
	Timeout Limit   `json:"timeout,omitzero"`  // of running time, which standby does not use up; hibernate or delete

	Public      []int    `json:"public,omitempty"` // ports that need no token, sorted
	Egress      Egress   `json:"egress,omitzero"`
	Hooks       []Hook   `json:"hooks,omitempty"`
	Checkpoints Schedule `json:"checkpoints,omitzero"`
}

// IdleMode says what keeps a sandbox from being idle beside traffic and leases.
type IdleMode string

// The idle modes.
const (
	IdleNetwork IdleMode = "network" // nothing else; the default
	IdleCPU     IdleMode = "cpu"     // processor time of the guest
)

// SessionAction says what the end of the last interactive session does.
type SessionAction string

// The session actions.
const (
	SessionNone      SessionAction = "none" // the default
	SessionHibernate SessionAction = "hibernate"
)

// Action is what happens at a limit.
type Action string

// The actions.
const (
	ActionDelete    Action = "delete"
	ActionNotify    Action = "notify"
	ActionHibernate Action = "hibernate"
)

// Limit is an end after a length of time; the zero Limit never comes.
type Limit struct {
	After  time.Duration `json:"after"`
	Action Action        `json:"action"`
}

// Expires is an end at an instant; the zero one never comes.
type Expires struct {
	At     time.Time `json:"at"`
	Action Action    `json:"action"`
}

// Schedule makes checkpoints while the sandbox runs and keeps the last Keep of
// them; the zero Schedule makes none.
type Schedule struct {
	Every time.Duration `json:"every"`
	Keep  int           `json:"keep"`
}

// The egress profiles: what is open before rules.
const (
	EgressInternet  = "internet"   // public addresses; the default
	EgressNone      = "none"       // nothing at all, whatever the rules
	EgressAllowList = "allow-list" // nothing but what Allow names
)

// Egress is what the sandbox may reach. The rules are of package vnet.
type Egress struct {
	Profile string   `json:"profile,omitempty"`
	Allow   []string `json:"allow,omitempty"`
	Deny    []string `json:"deny,omitempty"`
}

// The events of hooks.
const (
	HookPreHibernate = "pre-hibernate"
	HookPostResume   = "post-resume"
)

// Hook is a command that runs in the guest.
type Hook struct {
	Name       string            `json:"name"`
	Event      string            `json:"event"`
	Command    []string          `json:"command"`
	User       string            `json:"user,omitempty"`
	Timeout    time.Duration     `json:"timeout"`
	Env        map[string]string `json:"env,omitempty"`
	Background bool              `json:"background,omitempty"`
}

// DefaultPolicy returns the policy of a sandbox that asks for none.
func DefaultPolicy() Policy {
	return Policy{
		IdleTimeout: 15 * time.Second, Idle: IdleNetwork, ConnectionCap: 15 * time.Minute,
		OnSessionClose: SessionNone, Egress: Egress{Profile: EgressInternet},
	}
}

// Bounds of a policy.
const (
	minPeriod      = time.Second // of all that comes again and again
	maxHooks       = guestapi.MaxHooks
	maxHookTimeout = guestapi.MaxHookTimeout
	maxHookText    = 16 << 10
	maxHookList    = 256 << 10 // of JSON: it travels in each order and in one call of the agent
	maxKeep        = 100
	defaultKeep    = 6
	maxPublic      = 1024
)

// complete fills in what was left to a default.
func (p *Policy) complete() {
	d := DefaultPolicy()
	p.Idle = cmp.Or(p.Idle, d.Idle)
	p.OnSessionClose = cmp.Or(p.OnSessionClose, d.OnSessionClose)
	p.Egress.Profile = cmp.Or(p.Egress.Profile, d.Egress.Profile)
	p.TTL.complete(ActionDelete)
	p.TTLIdle.complete(ActionDelete)
	p.Timeout.complete(ActionHibernate)
	switch {
	case p.Expires.At.IsZero():
		p.Expires = Expires{}
	default:
		p.Expires.Action = cmp.Or(p.Expires.Action, ActionDelete)
	}
	switch {
	case p.Checkpoints.Every == 0:
		p.Checkpoints = Schedule{}
	default:
		p.Checkpoints.Keep = cmp.Or(p.Checkpoints.Keep, defaultKeep)
	}
	p.Public = slices.Compact(slices.Sorted(slices.Values(p.Public)))
	p.Hooks = slices.Clone(p.Hooks)
	for i := range p.Hooks {
		if p.Hooks[i].Background {
			p.Hooks[i].Timeout = cmp.Or(p.Hooks[i].Timeout, guestapi.BackgroundHookTimeout)
		}
		p.Hooks[i].Timeout = cmp.Or(p.Hooks[i].Timeout, guestapi.DefaultHookTimeout)
	}
}

func (l *Limit) complete(action Action) {
	if l.After == 0 {
		*l = Limit{}
		return
	}
	l.Action = cmp.Or(l.Action, action)
}

// check returns an ErrInvalid that says what is wrong with a completed policy.
func (p Policy) check() error {
	for what, d := range map[string]time.Duration{
		"idle_timeout": p.IdleTimeout, "connection_cap": p.ConnectionCap, "ttl": p.TTL.After, "ttl_idle": p.TTLIdle.After,
		"timeout": p.Timeout.After, "checkpoints.every": p.Checkpoints.Every,
	} {
		if d != 0 && d < minPeriod {
			return invalid("%s is %v: take %v or more, or never", what, d, minPeriod)
		}
	}
	if err := oneOf("idle", p.Idle, IdleNetwork, IdleCPU); err != nil {
		return err
	}
	if err := oneOf("on_session_close", p.OnSessionClose, SessionNone, SessionHibernate); err != nil {
		return err
	}
	if err := oneOf("egress.profile", p.Egress.Profile, EgressInternet, EgressNone, EgressAllowList); err != nil {
		return err
	}
	for what, a := range map[string]Action{"ttl": p.TTL.Action, "ttl_idle": p.TTLIdle.Action, "expires": p.Expires.Action} {
		if err := oneOf(what+".action", a, "", ActionDelete, ActionNotify); err != nil {
			return err
		}
	}
	if err := oneOf("timeout.action", p.Timeout.Action, "", ActionHibernate, ActionDelete); err != nil {
		return err
	}
	if p.Checkpoints.Keep < 0 || p.Checkpoints.Keep > maxKeep {
		return invalid("checkpoints.keep is %d: take 1 to %d", p.Checkpoints.Keep, maxKeep)
	}
	if len(p.Public) > maxPublic {
		return invalid("%d ports are public, more than %d", len(p.Public), maxPublic)
	}
	for _, port := range p.Public {
		if port < 1 || port > 65535 {
			return invalid("%d is no TCP port", port)
		}
		if port == guestapi.Port || port == guestapi.CallPort {
			return invalid("port %d is the agent's and cannot be public", port)
		}
	}
	if len(p.Egress.Allow)+len(p.Egress.Deny) > maxRules {
		return invalid("more than %d egress rules", maxRules)
	}
	return checkHooks(p.Hooks)
}

// oneOf checks a word of a policy.
func oneOf[T ~string](what string, got T, words ...T) error {
	if slices.Contains(words, got) {
		return nil
	}
	var known []string
	for _, w := range words {
		if w != "" {
			known = append(known, string(w))
		}
	}
	return invalid("%s is %q: take %s", what, clip(string(got)), strings.Join(known, " or "))
}

func checkHooks(hooks []Hook) error {
	if len(hooks) > maxHooks {
		return invalid("%d hooks, more than %d", len(hooks), maxHooks)
	}
	names := map[string]bool{}
	for _, h := range hooks {
		if !namePattern.MatchString(h.Name) || names[h.Name] {
			return invalid("the hook name %q is taken twice or not usable: take 1 to 63 of a-z, 0-9 and '-'", clip(h.Name))
		}
		names[h.Name] = true
		what := fmt.Sprintf("hook %s", h.Name)
		if err := oneOf(what+": event", h.Event, HookPreHibernate, HookPostResume); err != nil {
			return err
		}
		if h.Timeout < time.Millisecond || h.Timeout > maxHookTimeout {
			return invalid("%s: the timeout is %v, take at most %v", what, h.Timeout, maxHookTimeout)
		}
		if h.Background && h.Event != HookPostResume {
			return invalid("%s: only a %s hook can be in the background", what, HookPostResume)
		}
		if len(h.Command) == 0 || h.Command[0] == "" {
			return invalid("%s has no command", what)
		}
		size := len(h.User)
		for _, arg := range h.Command {
			size += len(arg)
		}
		for k, v := range h.Env {
			if k == "" || strings.ContainsAny(k, "=\x00") {
				return invalid("%s: %q is no name of an environment variable", what, clip(k))
			}
			size += len(k) + len(v)
		}
		if size > maxHookText || strings.ContainsRune(h.User+strings.Join(h.Command, "")+strings.Join(slices.Collect(maps.Values(h.Env)), ""), 0) {
			return invalid("%s: its text has a zero byte or is longer than %d bytes", what, maxHookText)
		}
	}
	if text, err := json.Marshal(hooks); err != nil || len(text) > maxHookList {
		return invalid("the hooks are longer than %d bytes in all: put scripts into files of the sandbox", maxHookList)
	}
	return nil
}

// checkPolicy completes and checks a policy that a user asks for.
func (c *Core) checkPolicy(p *Policy) error {
	p.complete()
	if err := p.check(); err != nil {
		return err
	}
	if c.cfg.CheckEgress != nil {
		if err := c.cfg.CheckEgress(p.Egress); err != nil {
			return &Error{Kind: ErrInvalid, Message: "egress rules", Cause: err}
		}
	}
	return nil
}

// Settings is what of a sandbox can be changed while it lives.
type Settings struct {
	Policy Policy
	Labels map[string]string

	// RestartTimeout lets the policy's timeout count anew from now, even if it
	// stays as it is.
	RestartTimeout bool
}

// Update changes a sandbox's settings: mutate gets a copy of the present ones
// and makes the new ones of it, replacing maps and lists, or returns an error,
// which is Update's then. It wakes nothing. When it returns without error, the
// new policy is recorded and rules what runs.
func (c *Core) Update(ctx context.Context, id string, mutate func(*Settings) error) (Sandbox, error) {
	e, err := c.find(id)
	if err != nil {
		return Sandbox{}, err
	}
	err = c.run(ctx, e, opCheck, func(ctx context.Context, _ *operation) error {
		old := e.rec.Policy
		next := Settings{Policy: old, Labels: e.rec.Labels}
		if err := mutate(&next); err != nil {
			return err
		}
		if err := c.checkPolicy(&next.Policy); err != nil {
			return err
		}
		if err := checkText("labels", next.Labels); err != nil {
			return err
		}
		if reflect.DeepEqual(old, next.Policy) && maps.Equal(e.rec.Labels, next.Labels) && !next.RestartTimeout {
			return nil
		}
		if err := checkExpiry(old, next.Policy); err != nil {
			return err
		}
		if err := c.change(ctx, e, func(r *record) {
			if next.RestartTimeout || old.Timeout != next.Policy.Timeout {
				r.TimeoutFrom = r.usedAt(time.Now()).Awake
			}
			r.Policy, r.Labels = next.Policy, next.Labels
		}); err != nil {
			return err
		}
		c.emit(e, Event{Type: EventUpdated})
		return c.applyPolicy(ctx, e, old)
	})
	return c.view(e), err
}

// checkExpiry refuses an end that is set to lie in the past.
func checkExpiry(old, next Policy) error {
	if !next.Expires.At.IsZero() && !next.Expires.At.Equal(old.Expires.At) && next.Expires.At.Before(time.Now()) {
		return invalid("expires is %s, which is in the past", next.Expires.At.Format(time.RFC3339))
	}
	return nil
}

// applyPolicy lets the policy that is recorded rule what runs. old is the one
// before.
func (c *Core) applyPolicy(ctx context.Context, e *entry, old Policy) error {
	if e.rec.State == StateRunning && !reflect.DeepEqual(old.Egress, e.rec.Policy.Egress) {
		return c.changeEgress(ctx, e)
	}
	return nil
}
