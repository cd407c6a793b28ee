package api

import "time"

// Policy says what a sandbox does by itself and who may reach what. Each part
// can be changed while the sandbox lives.
type Policy struct {
	IdleTimeout    Duration `json:"idle_timeout"`     // without traffic until it hibernates; default 15s
	Idle           string   `json:"idle"`             // IdleNetwork or IdleCPU
	ConnectionCap  Duration `json:"connection_cap"`   // after so long without a byte an inbound connection does not count as traffic; default 15m
	OnSessionClose string   `json:"on_session_close"` // SessionNone or SessionHibernate: at the end of the last interactive session

	TTL     *Limit   `json:"ttl"`      // since its creation
	TTLIdle *Limit   `json:"ttl_idle"` // since it went to standby
	Expires *Expires `json:"expires"`  // at an instant
	Timeout *Limit   `json:"timeout"`  // of running time, which standby does not use up

	Ports       map[string]string `json:"ports"` // port → PortPublic; others are private
	Egress      Egress            `json:"egress"`
	Hooks       []Hook            `json:"hooks"`
	Checkpoints *Schedule         `json:"checkpoints"`
}

// Values of Policy's words.
const (
	IdleNetwork = "network" // only traffic keeps it awake
	IdleCPU     = "cpu"     // processor time does, too

	SessionNone      = "none"
	SessionHibernate = "hibernate"

	ActionDelete    = "delete"
	ActionNotify    = "notify"    // only an event tells
	ActionHibernate = "hibernate" // for Timeout alone

	PortPublic  = "public"
	PortPrivate = "private" // needs the sandbox's token or the API key

	EgressInternet  = "internet"   // public addresses
	EgressNone      = "none"       // nothing at all
	EgressAllowList = "allow-list" // what Allow names
)

// Limit is an end after a length of time; "never" takes it away.
type Limit struct {
	After  Duration `json:"after"`
	Action string   `json:"action,omitempty"` // ActionDelete (default), ActionNotify; of Timeout ActionHibernate (default), ActionDelete
}

// Expires is an end at an instant; the zero time takes it away.
type Expires struct {
	At     time.Time `json:"at"`
	Action string    `json:"action,omitempty"` // ActionDelete (default) or ActionNotify
}

// Schedule makes checkpoints while the sandbox runs.
type Schedule struct {
	Every Duration `json:"every"` // "never" takes it away
	Keep  int      `json:"keep"`  // so many of the schedule's own are kept, default 6
}

// Egress is what a sandbox may reach. Without rules it may reach public
// addresses, and neither the host nor private ranges nor other sandboxes. A rule
// is "CIDR[:PORT]" or "DOMAIN[:PORT]", where a domain is "example.com" alone,
// "*.example.com" for every name below, or "*" for everything. docs/network.md
// says how rules are weighed.
type Egress struct {
	Profile string `json:"profile,omitempty"` // EgressInternet (default), EgressNone or EgressAllowList
	// Allow opens what is closed otherwise. It takes "host:PORT", too, for a port of
	// the host's own loopback, reached in the guest as host.hib.internal.
	Allow []string `json:"allow,omitempty"`
	// Deny closes what is open otherwise. It wins over rules of Allow that are not
	// more specific.
	Deny []string `json:"deny,omitempty"`
}

// Hook is a command that runs in the guest before a hibernation or after a
// resume, beside those that the image holds.
type Hook struct {
	Name       string            `json:"name"`  // unique in the sandbox
	Event      string            `json:"event"` // HookPreHibernate or HookPostResume
	Command    []string          `json:"command"`
	User       string            `json:"user,omitempty"`    // default root
	Timeout    Duration          `json:"timeout,omitempty"` // default 5s, at most 1m
	Env        map[string]string `json:"env,omitempty"`
	Background bool              `json:"background,omitempty"` // requests do not wait for it; for HookPostResume alone
}

// HookRun is how a hook ran. All but its event comes from the guest.
type HookRun struct {
	Name         string    `json:"name"`
	Event        string    `json:"event"`
	Reason       string    `json:"reason"`              // HIB_REASON of the run
	ExitCode     int       `json:"exit_code"`           // -1: it did not exit by itself
	Signal       string    `json:"signal,omitempty"`    // that ended it
	TimedOut     bool      `json:"timed_out,omitempty"` // it was killed at its timeout
	Error        string    `json:"error,omitempty"`     // why it did not run, or not to its end
	DurationMS   float64   `json:"duration_ms"`
	Output       string    `json:"output,omitempty"`        // stdout and stderr: the beginning and the end of them
	DroppedBytes int64     `json:"dropped_bytes,omitempty"` // of output that is not kept
	Background   bool      `json:"background,omitempty"`
	StartedAt    time.Time `json:"started_at"` // by the guest's clock
}

// The events of hooks.
const (
	HookPreHibernate = "pre-hibernate"
	HookPostResume   = "post-resume"
)

// PolicyPatch changes parts of a policy; what is nil stays. Lists are replaced
// as a whole, Ports entry by entry.
type PolicyPatch struct {
	IdleTimeout    *Duration         `json:"idle_timeout,omitempty"`
	Idle           *string           `json:"idle,omitempty"`
	ConnectionCap  *Duration         `json:"connection_cap,omitempty"`
	OnSessionClose *string           `json:"on_session_close,omitempty"`
	TTL            *Limit            `json:"ttl,omitempty"`
	TTLIdle        *Limit            `json:"ttl_idle,omitempty"`
	Expires        *Expires          `json:"expires,omitempty"`
	Timeout        *Limit            `json:"timeout,omitempty"`
	Ports          map[string]string `json:"ports,omitempty"`
	Egress         *Egress           `json:"egress,omitempty"`
	Hooks          *[]Hook           `json:"hooks,omitempty"`
	Checkpoints    *Schedule         `json:"checkpoints,omitempty"`
}

// UpdateRequest changes a sandbox that is there, in whatever state; it wakes
// nothing.
type UpdateRequest struct {
	Policy *PolicyPatch       `json:"policy,omitempty"`
	Labels map[string]*string `json:"labels,omitempty"` // label → value, null removes it
}
