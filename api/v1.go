// Package api owns the wire types of the native REST interface under /v1 and
// its OpenAPI document. The server and the Go client both use them; the core
// does not.
package api

import (
	"encoding/json"
	"time"
)

// State is where a sandbox is in its lifecycle.
type State string

// The states of a sandbox.
const (
	StateCreating    State = "creating"
	StateRunning     State = "running"
	StateHibernating State = "hibernating"
	StateStandby     State = "standby"
	StateResuming    State = "resuming"
	StateFailed      State = "failed"
	StateDeleting    State = "deleting"
)

// Sandbox is a sandbox as it is shown to users.
type Sandbox struct {
	ID            string            `json:"id"`
	Name          string            `json:"name"`
	Template      string            `json:"template"`
	State         State             `json:"state"`
	Reason        string            `json:"reason"` // why it failed, "" otherwise
	CreatedAt     time.Time         `json:"created_at"`
	MemoryMiB     int               `json:"memory_mib"`
	CPUs          int               `json:"cpus"`
	Labels        map[string]string `json:"labels"`
	Snapshot      *Snapshot         `json:"snapshot"`       // the last committed one
	LastHibernate *HibernateReport  `json:"last_hibernate"` // null before the first
	LastResume    *ResumeReport     `json:"last_resume"`    // null before the first; creation counts as one
	Replication   *Replication      `json:"replication"`    // of Snapshot to the remote store; null without one
	Parked        bool              `json:"parked"`         // in standby, its paused VMM is kept as a cache
	Policy        Policy            `json:"policy"`
	ForkedFrom    string            `json:"forked_from,omitempty"` // id of the sandbox that it began as a copy of
	Checkpoints   int               `json:"checkpoints"`           // how many it has
	PortURL       string            `json:"port_url"`              // URL of a port, with {port} for its number; "": there is none
	TrafficToken  string            `json:"traffic_token"`         // opens ports that are private, see docs/ports.md: a secret
	Leases        []Lease           `json:"leases"`                // that keep it from hibernating by itself, the oldest first
	Activity      *Activity         `json:"activity"`              // while it runs and answers; null in a list
	Next          *Next             `json:"next"`                  // what its limits do to it next; null: nothing
	Usage         Usage             `json:"usage"`
}

// Usage is what an operator would bill a sandbox by, since its creation and up
// to now.
type Usage struct {
	AwakeS      float64 `json:"awake_s"`      // seconds with a guest that runs
	StandbyS    float64 `json:"standby_s"`    // seconds in standby, or failed with what is kept of it
	CPUS        float64 `json:"cpu_s"`        // seconds of processor time; of a run that goes on, as far as it was looked at
	StoredBytes int64   `json:"stored_bytes"` // that its snapshots, those of its checkpoints too, hold in packs that no template shares
}

// Next says what a limit of the policy is going to do, and when.
type Next struct {
	Limit  string    `json:"limit"`  // "ttl", "ttl_idle", "expires" or "timeout"
	Action string    `json:"action"` // ActionDelete, ActionNotify or ActionHibernate
	At     time.Time `json:"at"`     // of a timeout: if it runs on without a break
}

// Replication says where the sandbox's snapshot is kept.
type Replication struct {
	State string `json:"state"`           // "local", "replicating" or "replicated"
	Error string `json:"error,omitempty"` // why the last try failed; it is tried again
	// SentBytes is what the remote store took for this snapshot since the daemon's
	// start, once it is replicated. Objects that it had already and those of the
	// template do not count.
	SentBytes int64 `json:"sent_bytes,omitempty"`
}

// Lease keeps a sandbox from hibernating by itself. It wakes nobody, and
// hibernations that somebody asks for go ahead regardless.
type Lease struct {
	Kind  string     `json:"kind"`  // "exec", "upload", "download" or "hold"
	Owner string     `json:"owner"` // who holds it and what for, for people
	Since time.Time  `json:"since"`
	Until *time.Time `json:"until"` // when it ends by itself; null: when it is released
}

// Activity says what keeps a running sandbox awake besides leases.
type Activity struct {
	Open       int         `json:"open"`                  // inbound connections that are not silent for too long
	Awaiting   int         `json:"awaiting"`              // outbound connections that wait for a reply
	IdleMS     float64     `json:"idle_ms"`               // since the last traffic
	KeepAwake  []KeepAwake `json:"keep_awake"`            // processes that were started to keep it awake
	AgentError string      `json:"agent_error,omitempty"` // why the guest did not say which these are; then none counts
}

// KeepAwake is a process that keeps its sandbox awake.
type KeepAwake struct {
	PID     uint32 `json:"pid"`
	Command string `json:"command"` // cut short; the guest's word
}

// HoldRequest keeps a sandbox from hibernating by itself, also over restarts of
// the daemon. It takes the place of an earlier hold.
type HoldRequest struct {
	For    Duration `json:"for"`              // 1 second to 30 days
	Reason string   `json:"reason,omitempty"` // for people
}

// HibernateRequest is the optional body of a hibernation.
type HibernateRequest struct {
	NoPark bool `json:"no_park,omitempty"` // do not keep the paused VMM: for measuring
}

// ResumeRequest is the optional body of a resume: what it shall do without, for
// measuring.
type ResumeRequest struct {
	NoParked     bool `json:"no_parked,omitempty"`      // drop a parked VMM before
	NoPool       bool `json:"no_pool,omitempty"`        // start a fresh VMM
	NoPrefetch   bool `json:"no_prefetch,omitempty"`    // leave all pages to faults
	StoreDelayMS int  `json:"store_delay_ms,omitempty"` // added to each request to the remote store
}

// EvictRequest asks to let go of cached copies of what a sandbox in standby is
// resumed from. Nothing is lost by it.
type EvictRequest struct {
	Parked    bool `json:"parked,omitempty"`     // the parked VMM
	PageCache bool `json:"page_cache,omitempty"` // the host's page cache of the snapshot's files, file by file
	Local     bool `json:"local,omitempty"`      // the local packs, which must be replicated
}

// Evicted says what an eviction let go of.
type Evicted struct {
	Packs int   `json:"packs"` // local copies deleted
	Bytes int64 `json:"bytes"`
}

// Snapshot describes the snapshot that a sandbox would resume from.
type Snapshot struct {
	ID          string    `json:"id"`
	Parent      string    `json:"parent"` // "" for a template's base snapshot
	CreatedAt   time.Time `json:"created_at"`
	MemoryBytes int64     `json:"memory_bytes"` // size of the guest's RAM
	DirtyBytes  int64     `json:"dirty_bytes"`  // found changed, before elision
	StoredBytes int64     `json:"stored_bytes"` // written for it: pack, state and manifest
}

// HibernateReport says how the last hibernation went. Phases maps a name to
// milliseconds: freeze, pause, state, scan, write, commit, and behind the answer
// park or release, of the VMM. What came before it began is no part of the total:
// detect, from when its reason could have been known.
type HibernateReport struct {
	Trigger  string             `json:"trigger"`  // "call", "idle", "session", "timeout", "drain", "restore" or "checkpoint"; "" where the daemon that began it did not end it
	TotalMS  float64            `json:"total_ms"` // until the commit
	PauseMS  float64            `json:"pause_ms"`
	Phases   map[string]float64 `json:"phases"`
	Warnings []string           `json:"warnings,omitempty"`
	// WorkingSet is about the run that this hibernation ended; null for one that booted.
	WorkingSet *WorkingSetReport `json:"working_set,omitempty"`
}

// WorkingSetReport compares what was prefetched with what the guest touched, in
// pages of 4 KiB where nothing else is said.
type WorkingSetReport struct {
	Pages        int64 `json:"pages"`         // of the working set that the snapshot carried
	Prefetched   int64 `json:"prefetched"`    // pushed ahead of the guest
	Late         int64 `json:"late"`          // of the set, but read on demand before they were pushed
	Missed       int64 `json:"missed"`        // read on demand and not of the set
	Mispredicted int64 `json:"mispredicted"`  // pushed and not touched
	BytesFetched int64 `json:"bytes_fetched"` // from the remote store
}

// ResumeReport says how the last resume (or the creation) went. Phases maps a
// name to milliseconds: vmm, state, unpause, guest_init and others.
type ResumeReport struct {
	Tier            string             `json:"tier"` // "parked", "local" or "remote"; "boot" for a cold boot
	TotalMS         float64            `json:"total_ms"`
	Phases          map[string]float64 `json:"phases"`
	BytesRead       int64              `json:"bytes_read"`
	PrefetchedBytes int64              `json:"prefetched_bytes"` // of the working set, ahead of the guest
	Faults          int64              `json:"faults"`
	DemandPages     int64              `json:"demand_pages"`      // pages of 4 KiB that page reads brought, until the report
	WorkingSetBytes int64              `json:"working_set_bytes"` // of the set that the snapshot carries
	BytesFetched    int64              `json:"bytes_fetched"`     // from the remote store, until the report
	Pooled          bool               `json:"pooled"`            // the VMM was started beforehand
	By              string             `json:"by,omitempty"`      // who woke it: "api", "exec", "files", "agent", "http 8000", "port-forward 5432"
	Warnings        []string           `json:"warnings,omitempty"`
}

// CreateRequest asks for a new sandbox.
type CreateRequest struct {
	Template  string            `json:"template,omitempty"`   // default "base"
	Name      string            `json:"name,omitempty"`       // unique where given
	MemoryMiB int               `json:"memory_mib,omitempty"` // default: the template's
	CPUs      int               `json:"cpus,omitempty"`       // default: the template's
	Env       map[string]string `json:"env,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
	Policy    *PolicyPatch      `json:"policy,omitempty"`    // what differs from the default policy
	ColdBoot  bool              `json:"cold_boot,omitempty"` // boot instead of resuming the base snapshot: for measuring and for finding faults
}

// ExecRequest runs a command to its end.
type ExecRequest struct {
	Cmd       []string          `json:"cmd"`
	Env       map[string]string `json:"env,omitempty"`
	Cwd       string            `json:"cwd,omitempty"`
	User      string            `json:"user,omitempty"`
	Stdin     string            `json:"stdin,omitempty"`
	TimeoutMS int64             `json:"timeout_ms,omitempty"` // 0: none
	KeepAwake bool              `json:"keep_awake,omitempty"` // it keeps the sandbox awake for as long as it runs, also when nobody follows it
}

// ExecResponse is how the command ended. Output beyond 4 MiB a stream is cut.
type ExecResponse struct {
	ExitCode  int    `json:"exit_code"` // 128 + the signal's number where a signal ended it
	Stdout    string `json:"stdout"`
	Stderr    string `json:"stderr"`
	Truncated bool   `json:"truncated"`
	TimedOut  bool   `json:"timed_out"` // it was killed after TimeoutMS
}

// Template is a named, versioned environment.
type Template struct {
	Name        string         `json:"name"`
	Version     int            `json:"version"` // counts from 1
	CreatedAt   time.Time      `json:"created_at"`
	MemoryMiB   int            `json:"memory_mib"` // default shape
	CPUs        int            `json:"cpus"`
	BaseDigest  string         `json:"base_digest"` // "sha256:…" of the EROFS image
	BaseBytes   int64          `json:"base_bytes"`
	Kernel      string         `json:"kernel"` // release
	Bases       []TemplateBase `json:"bases"`  // base snapshots, one a shape
	SandboxRefs int            `json:"sandboxes"`
	MadeOf      string         `json:"made_of,omitempty"` // id of the sandbox that it was made of; not of one that was built
}

// TemplateBase is a base snapshot of a template.
type TemplateBase struct {
	MemoryMiB   int    `json:"memory_mib"`
	CPUs        int    `json:"cpus"`
	Snapshot    string `json:"snapshot"`
	StoredBytes int64  `json:"stored_bytes"`
}

// BuildRequest asks for a template build.
type BuildRequest struct {
	Name      string `json:"name"`
	MemoryMiB int    `json:"memory_mib,omitempty"` // default 2048
	CPUs      int    `json:"cpus,omitempty"`       // default 1
}

// Progress is one line of the answer to a long request (application/x-ndjson).
// The last line has Error or a result, the ones before say what is going on.
type Progress struct {
	Phase    string    `json:"phase,omitempty"`
	Message  string    `json:"message,omitempty"`
	Done     int64     `json:"done,omitempty"`
	Total    int64     `json:"total,omitempty"` // 0: unknown
	Error    *Error    `json:"error,omitempty"`
	Template *Template `json:"template,omitempty"`
	Verify   *Verify   `json:"verify,omitempty"`
	Imported *Imported `json:"imported,omitempty"`
	Drained  *Drained  `json:"drained,omitempty"`
}

// StoreStatus says what the store holds.
type StoreStatus struct {
	Packs         int   `json:"packs"`
	PackBytes     int64 `json:"pack_bytes"`
	Manifests     int   `json:"manifests"`
	ManifestBytes int64 `json:"manifest_bytes"`
	States        int   `json:"states"`
	StateBytes    int64 `json:"state_bytes"`
	BaseImages    int   `json:"base_images"`
	BaseBytes     int64 `json:"base_bytes"`
	FreeBytes     int64 `json:"free_bytes"` // on the store's file system

	Tiers     []TierStatus   `json:"tiers"`     // "local", and "remote" if there is one
	Sandboxes []StoreSandbox `json:"sandboxes"` // the largest first
}

// TierStatus says what one tier of the store holds.
type TierStatus struct {
	Tier    string `json:"tier"`
	Where   string `json:"where"` // folder or URL
	Objects int    `json:"objects"`
	Bytes   int64  `json:"bytes"`
	Budget  int64  `json:"budget"`          // bytes, 0: none
	Pending int    `json:"pending"`         // remote: snapshots that wait for their upload
	Error   string `json:"error,omitempty"` // why the tier is not to be reached
}

// StoreSandbox says what a sandbox's snapshot takes up.
type StoreSandbox struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	Packs       int    `json:"packs"`           // that its manifest names
	LiveBytes   int64  `json:"live_bytes"`      // pages of its memory image in packs that no template shares
	StoredBytes int64  `json:"stored_bytes"`    // size of those packs with their dead pages, state and manifest
	LocalBytes  int64  `json:"local_bytes"`     // of all its packs, shared ones too, what is on the local disk
	Replication string `json:"replication"`     // "local", "replicating", "replicated", "" without a remote store
	Error       string `json:"error,omitempty"` // why it could not be measured
}

// CollectRequest is the optional body of a garbage collection.
type CollectRequest struct {
	DryRun bool `json:"dry_run,omitempty"` // only say what would go
}

// Collected says what a garbage collection removed, or would remove.
type Collected struct {
	DryRun  bool            `json:"dry_run"`
	Tiers   []CollectedTier `json:"tiers"`
	Objects []string        `json:"objects,omitempty"` // keys, of a dry run
}

// CollectedTier is what went from one tier.
type CollectedTier struct {
	Tier    string `json:"tier"`
	Objects int    `json:"objects"`
	Bytes   int64  `json:"bytes"`
	InUse   int    `json:"in_use"`          // left, since somebody has them open
	Error   string `json:"error,omitempty"` // why this tier was not collected; another collection will
}

// ImportRequest asks to take over the sandboxes that the remote store holds.
type ImportRequest struct {
	TakeOver bool `json:"take_over,omitempty"` // also from another node, which must be gone for good
}

// Imported says what an import brought.
type Imported struct {
	Sandboxes []string `json:"sandboxes"` // ids of those that are here now
	Templates []string `json:"templates"`
	Skipped   []string `json:"skipped"` // one line each: what is here already or could not be taken, and why
}

// VerifyRequest is the optional body of a verification.
type VerifyRequest struct {
	Remote bool `json:"remote,omitempty"` // read everything in the remote store, too
}

// Verify is what a verification of the store found.
type Verify struct {
	Objects int      `json:"objects"`
	Bytes   int64    `json:"bytes"`
	Faults  []string `json:"faults"` // one line each, naming the object
}

// Host says what the host has for guests and what of it is promised. A create
// or a resume that it cannot carry is refused.
type Host struct {
	CPUs           int   `json:"cpus"`
	MemoryLimit    int64 `json:"memory_limit"`    // bytes that may be promised, 0: any
	MemoryPromised int64 `json:"memory_promised"` // to the guests that run: their RAM and what a VMM takes up beside it
	Guests         int   `json:"guests"`          // that run
	FreeBytes      int64 `json:"free_bytes"`      // on the store's file system
	DiskReserve    int64 `json:"disk_reserve"`    // of these, kept for guests that run to hibernate
	Parked         int   `json:"parked"`          // machines of sandboxes in standby that are kept
	ParkedBytes    int64 `json:"parked_bytes"`    // of memory that they take up; it is given back when guests need it, and so is the pool's
	Draining       bool  `json:"draining"`        // nothing starts
	PoolBytes      int64 `json:"pool_bytes"`      // of memory that machines take up that were started beforehand
}

// Event is one thing that happened, in the stream /v1/events and in webhooks.
// docs/events.md lists the types with their data.
type Event struct {
	ID      uint64          `json:"id"` // grows, never used twice
	Time    time.Time       `json:"time"`
	Type    string          `json:"type"`
	Sandbox string          `json:"sandbox,omitempty"` // id, "" for what is about the host
	Name    string          `json:"name,omitempty"`    // of the sandbox, as it was then
	Data    json.RawMessage `json:"data,omitempty"`    // an object
}

// WebhookRequest asks for a webhook.
type WebhookRequest struct {
	URL     string   `json:"url"`
	Sandbox string   `json:"sandbox,omitempty"` // id or name, "": all
	Types   []string `json:"types,omitempty"`   // of events, none: all
	Secret  string   `json:"secret,omitempty"`  // that posts are signed with; "": one is made
}

// Webhook is a URL that events are posted to.
type Webhook struct {
	ID        string     `json:"id"`
	URL       string     `json:"url"`
	Sandbox   string     `json:"sandbox"`
	Types     []string   `json:"types"`
	CreatedAt time.Time  `json:"created_at"`
	State     string     `json:"state"`                // "active", "retrying", or "paused" after days of failures
	Cursor    uint64     `json:"cursor"`               // id of the last event that was delivered or passed over
	Failures  int        `json:"failures"`             // attempts in a row that failed
	LastError string     `json:"last_error,omitempty"` // of the last attempt
	NextTry   *time.Time `json:"next_try,omitempty"`
	Secret    string     `json:"secret,omitempty"` // only in the answer that made it
}

// WebhookTest says how the test of a webhook went.
type WebhookTest struct {
	OK     bool    `json:"ok"`
	Status int     `json:"status"` // of HTTP, 0: no answer
	MS     float64 `json:"ms"`
	Error  string  `json:"error,omitempty"`
}

// EventGap is the type of the event that says that others are missing.
const EventGap = "gap"

// DrainRequest is the optional body of a drain.
type DrainRequest struct {
	Undo bool `json:"undo,omitempty"` // end it: let sandboxes start again
}

// Drained says what a drain did.
type Drained struct {
	Hibernated []string          `json:"hibernated"` // ids
	Failed     map[string]string `json:"failed"`     // id → why it still runs, or may
}

// Version is the answer to GET /v1/version.
type Version struct {
	Version string `json:"version"`
	API     int    `json:"api"`
	VMM     string `json:"vmm"`
	Accel   string `json:"accel"`
}

// ResumeHeader is the header of an answer to a request that waited for its
// sandbox to be resumed: "tier=local; ms=41" names the tier and how long the
// resume took.
const ResumeHeader = "Hib-Resume"

// Where a request to a port of a sandbox shows the sandbox's traffic token.
const (
	TokenHeader    = "Hib-Access-Token"
	TokenParameter = "hib_token" // of the query: for browsers, which get a cookie for it
)

// Error is the body of every answer that is no success.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint"`
}

// Codes of errors.
const (
	CodeInvalid      = "invalid"       // 400
	CodeUnauthorized = "unauthorized"  // 401
	CodeNotFound     = "not_found"     // 404
	CodeConflict     = "conflict"      // 409: the state does not allow it
	CodeTooLarge     = "too_large"     // 413
	CodeFailed       = "failed"        // 409: the sandbox has failed, the message says why
	CodeNoSpace      = "no_space"      // 507
	CodeUnavailable  = "unavailable"   // 503: try again
	CodeInternal     = "internal"      // 500
	CodeNotSupported = "not_supported" // 501
)
