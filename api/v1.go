// Package api owns the wire types of the native REST interface under /v1 and
// its OpenAPI document. The server and the Go client both use them; the core
// does not.
package api

import "time"

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
// milliseconds: freeze, pause, state, scan, write, commit.
type HibernateReport struct {
	TotalMS  float64            `json:"total_ms"`
	PauseMS  float64            `json:"pause_ms"`
	Phases   map[string]float64 `json:"phases"`
	Warnings []string           `json:"warnings,omitempty"`
}

// ResumeReport says how the last resume (or the creation) went. Phases maps a
// name to milliseconds: vmm, state, unpause, guest_init and others.
type ResumeReport struct {
	Tier            string             `json:"tier"` // "local"
	TotalMS         float64            `json:"total_ms"`
	Phases          map[string]float64 `json:"phases"`
	BytesRead       int64              `json:"bytes_read"`
	PrefetchedBytes int64              `json:"prefetched_bytes"` // of the working set, ahead of the guest
	Faults          int64              `json:"faults"`
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
	Egress    *Egress           `json:"egress,omitempty"`
	ColdBoot  bool              `json:"cold_boot,omitempty"` // boot instead of resuming the base snapshot: for measuring and for finding faults
}

// Egress is what a sandbox may reach. Without rules it may reach public
// addresses, and neither the host nor private ranges nor other sandboxes.
type Egress struct {
	// Allow opens what the default denies: "CIDR[:PORT]", or "host:PORT" for a
	// port of the host's own loopback, reached in the guest as host.hib.internal.
	Allow []string `json:"allow,omitempty"`
	// Deny closes what is open otherwise: "CIDR[:PORT]". It wins over Allow.
	Deny []string `json:"deny,omitempty"`
}

// ExecRequest runs a command to its end.
type ExecRequest struct {
	Cmd       []string          `json:"cmd"`
	Env       map[string]string `json:"env,omitempty"`
	Cwd       string            `json:"cwd,omitempty"`
	User      string            `json:"user,omitempty"`
	Stdin     string            `json:"stdin,omitempty"`
	TimeoutMS int64             `json:"timeout_ms,omitempty"` // 0: none
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
}

// Verify is what a verification of the store found.
type Verify struct {
	Objects int      `json:"objects"`
	Bytes   int64    `json:"bytes"`
	Faults  []string `json:"faults"` // one line each, naming the object
}

// Version is the answer to GET /v1/version.
type Version struct {
	Version string `json:"version"`
	API     int    `json:"api"`
	VMM     string `json:"vmm"`
	Accel   string `json:"accel"`
}

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
