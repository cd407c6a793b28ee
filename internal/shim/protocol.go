// Package shim owns the process that holds one virtual machine: its VMM, its
// pager mount, its network and its capture. The daemon starts it, records its
// Handle, gives it orders over a Unix socket and may die and come back while
// the guest runs on.
//
// # Protocol
//
// HTTP/1.1 over the Unix socket Handle.Socket. Orders are POST /v1/ORDER with a
// JSON request and answer; errors are a JSON Error with status 4xx or 5xx.
// "CONNECT port" switches the connection to a byte stream into the guest. GET
// /v1/events streams Events as JSON lines for as long as the caller listens.
//
// A shim lives through these phases:
//
//	idle → prepared → running → (capturing → sealed → parked → running) → gone
//
// A Boot, a Resume or an Unpark that fails once it has begun ends the machine: its guest
// must not run on without its init, and its VMM cannot be used again.
//
// Until Adopt, or a Resume that says so, a shim ends when its lifeline (standard
// input, held by the daemon) is closed; from then on it outlives the daemon. Cancelling a Capture
// request (also by the daemon's death) thaws the guest unless it was sealed.
package shim

import (
	"encoding/json"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// ProtocolVersion is the version of the protocol that this build speaks. A
// daemon of version N adopts shims of N and N−1.
//
// From version 2 on a shim answers CodeUnknown to an order that it does not
// know and leaves fields alone that it does not know, so that orders and fields
// can be added without another version. A shim of version 1 has none of the
// orders that were added; the client answers for it with ErrUnknown.
const ProtocolVersion = 2

// Handle finds a shim again after the daemon came back. It is recorded in the
// catalog before the shim starts a VMM.
type Handle struct {
	VM        string `json:"vm"`         // name of the machine, unique for ever
	Socket    string `json:"socket"`     // path of the Unix socket
	PID       int    `json:"pid"`        // of the shim
	StartTime uint64 `json:"start_time"` // of the process, in clock ticks since boot (/proc/PID/stat field 22)
	BootID    string `json:"boot_id"`    // of the host
	Protocol  int    `json:"protocol"`
}

// Phase is where a shim is in its life.
type Phase string

// The phases of a shim.
const (
	PhaseIdle      Phase = "idle"
	PhasePrepared  Phase = "prepared"  // the VMM is up, its vCPUs never ran
	PhaseStarting  Phase = "starting"  // a boot or a resume is under way
	PhaseRunning   Phase = "running"   // the guest runs and its init is done
	PhaseCapturing Phase = "capturing" // frozen or paused for a snapshot that is not sealed
	PhaseSealed    Phase = "sealed"    // the snapshot is whole and durable; the guest runs again only by order
	PhaseParked    Phase = "parked"    // sealed and committed: a cache that runs on by Unpark
	PhaseStopped   Phase = "stopped"   // the guest or the VMM ended, see Status.Exit
)

// Status is the answer to GET /v1/status.
type Status struct {
	Protocol int            `json:"protocol"`
	VM       string         `json:"vm"`
	Phase    Phase          `json:"phase"`
	Adopted  bool           `json:"adopted"`
	VMMPID   int            `json:"vmm_pid"`            // 0 without a VMM
	Attempt  uint64         `json:"attempt"`            // of the capture under way, sealed or parked
	Captured *CaptureReport `json:"captured,omitempty"` // in PhaseSealed
	Exit     *vmm.Exit      `json:"exit,omitempty"`     // in PhaseStopped
	Failure  string         `json:"failure,omitempty"`  // in PhaseStopped: why memory could not be served, if that was it
	Code     string         `json:"code,omitempty"`     // with Failure: CodeCorrupt, CodeUnavailable, or CodeFailed where no object is to blame
}

// PrepareRequest starts the VMM: for a cold boot, or to wait for a snapshot of
// the same shape and base image.
type PrepareRequest struct {
	Shape     vmm.Shape `json:"shape"`
	BaseImage string    `json:"base_image"`
	Boot      *vmm.Boot `json:"boot,omitempty"`
}

// Attach is what a machine gets when it becomes somebody's: it is decided
// before the guest's first instruction.
type Attach struct {
	Console string   `json:"console"` // file that takes what the guest prints; "" drops it
	Profile string   `json:"profile"` // of the egress policy, see vnet.ParsePolicy; "" is vnet.ProfileInternet
	Allow   []string `json:"allow"`   // its rules
	Deny    []string `json:"deny"`
}

// BootRequest lets a machine prepared with Boot start and waits for its agent.
type BootRequest struct {
	Attach Attach               `json:"attach"`
	Init   guestapi.InitRequest `json:"init"` // UnixNano and Entropy are filled in by the shim
}

// ResumeRequest binds a prepared machine to a snapshot and lets it run.
type ResumeRequest struct {
	Attach   Attach               `json:"attach"`
	Snapshot snapshot.Ref         `json:"snapshot"`
	Key      vmm.Key              `json:"key"`             // of this machine; compared with the snapshot's
	Init     guestapi.InitRequest `json:"init"`            // UnixNano, Entropy, SleptSeconds are filled in by the shim
	Adopt    bool                 `json:"adopt,omitempty"` // also outlive the daemon from now on

	NoPrefetch bool          `json:"no_prefetch,omitempty"` // leave all pages to faults
	StoreDelay time.Duration `json:"store_delay,omitempty"` // nanoseconds, added to each request to the remote store: for measuring
}

// ParkRequest keeps a sealed machine, once its snapshot is committed, as a
// cache: paused, without connections, until Unpark or Release.
type ParkRequest struct {
	Attempt uint64 `json:"attempt"` // that is sealed
}

// ParkReport says what a parked machine costs.
type ParkReport struct {
	MemoryBytes int64 `json:"memory_bytes"` // that ending it would give back: private memory of the VMM and of the shim
}

// UnparkRequest lets a parked machine run on. Snapshot is the one that it was
// sealed as, or one with the same memory image that replaced it: what the
// next capture is compared with.
type UnparkRequest struct {
	Attempt  uint64               `json:"attempt"`
	Attach   Attach               `json:"attach"`
	Snapshot snapshot.Ref         `json:"snapshot"`
	Init     guestapi.InitRequest `json:"init"`
}

// StartReport says how a Boot or a Resume went. Phases maps a name to
// milliseconds: resume has at least bind, state, unpause, guest_init; vmm is the
// time that Prepare took.
type StartReport struct {
	Phases          map[string]float64 `json:"phases"`
	BytesRead       int64              `json:"bytes_read"`        // from snapshots by page reads, until the report
	Faults          int64              `json:"faults"`            // page reads that the pager answered, until the report
	PrefetchedBytes int64              `json:"prefetched_bytes"`  // pushed ahead of them, if that is done already
	DemandPages     int64              `json:"demand_pages"`      // of 4 KiB that page reads brought, until the report
	WorkingSetBytes int64              `json:"working_set_bytes"` // of the set that the snapshot carries
	BytesFetched    int64              `json:"bytes_fetched"`     // from the remote store, until the report
	Remote          bool               `json:"remote"`            // not all packs of the snapshot were on the local disk
	Warnings        []string           `json:"warnings,omitempty"`

	Hooks []guestapi.HookResult `json:"hooks,omitempty"` // that were waited for; they are the phase hooks
}

// CaptureRequest takes a snapshot. When the answer comes, snapshot.ID is whole
// and durable in the store and the guest is paused and sealed.
type CaptureRequest struct {
	Attempt    uint64        `json:"attempt"`
	ID         snapshot.ID   `json:"id"`         // of the snapshot to be made
	Deadline   time.Duration `json:"deadline"`   // nanoseconds: not sealed by then, the guest is thawed and the attempt refused for ever
	Generation uint64        `json:"generation"` // that the guest runs at
	Key        vmm.Key       `json:"key"`
	Full       bool          `json:"full"` // save every page, not only what changed since the parent

	Reason string          `json:"reason,omitempty"` // for hooks, see guestapi.FreezeRequest
	Hooks  []guestapi.Hook `json:"hooks,omitempty"`  // of the sandbox

	// Unfrozen lets the capture go on, with a warning, where the guest's agent does
	// not answer. The snapshot is whole, but hooks were not run, and what the guest
	// does between its resume and its init is done by the user's processes, too.
	Unfrozen bool `json:"unfrozen,omitempty"`

	// Parent is the snapshot that the sandbox's record names. A compaction may
	// have put it, with the same memory image, in place of the one resumed from:
	// then the capture builds upon it.
	Parent *snapshot.Ref `json:"parent,omitempty"`
}

// CaptureReport describes a sealed snapshot. Phases has at least freeze, pause,
// state, scan, write.
type CaptureReport struct {
	Snapshot snapshot.Ref       `json:"snapshot"`
	Metadata snapshot.Metadata  `json:"metadata"`
	Phases   map[string]float64 `json:"phases"`
	PauseMS  float64            `json:"pause_ms"` // from the pause to the seal
	Warnings []string           `json:"warnings,omitempty"`
	CPU      time.Duration      `json:"cpu,omitempty"` // nanoseconds of processor time that the VMM took since it was started; 0: not known

	Hooks []guestapi.HookResult `json:"hooks,omitempty"` // that ran; those that were waited for are the phase hooks

	WorkingSet *WorkingSetReport `json:"working_set,omitempty"` // nil after a boot
}

// WorkingSetReport compares what was prefetched at a resume with what the guest
// touched until its capture, in pages of 4 KiB where nothing else is said.
type WorkingSetReport struct {
	Pages        int64 `json:"pages"`         // of the working set that the snapshot carried
	Prefetched   int64 `json:"prefetched"`    // pushed ahead of the guest
	Late         int64 `json:"late"`          // of the set, but read on demand before they were pushed
	Missed       int64 `json:"missed"`        // read on demand and not of the set
	Mispredicted int64 `json:"mispredicted"`  // pushed and not touched
	BytesFetched int64 `json:"bytes_fetched"` // from the remote store
}

// ThawRequest lets the guest of a capture go on, sealed or not, and the attempt
// is refused from now on. Unless the snapshot was committed that is the end of
// the capture, and the unneeded snapshot is the caller's to delete. Idempotent.
type ThawRequest struct {
	Attempt uint64 `json:"attempt"`

	// Committed says that the snapshot is kept: the next capture is compared with
	// it. A shim that does not know the field compares with the one before, which
	// is as right and stores more.
	Committed bool `json:"committed,omitempty"`
}

// HooksRequest asks for results of hooks.
type HooksRequest struct {
	KeptOnly bool `json:"kept_only,omitempty"` // those that the shim has: the guest is not asked
}

// HooksReport has the results of hooks that no other report had: those of the
// background, and those of hibernations that were cancelled.
type HooksReport struct {
	Hooks []guestapi.HookResult `json:"hooks,omitempty"`
}

// Event is something that the shim noticed by itself: a change of phase, or
// what the guest was denied.
type Event struct {
	Status Status  `json:"status"`           // a full one
	Denied *Denied `json:"denied,omitempty"` // nil for a change of phase
}

// Error is the body of an answer that is no success.
type Error struct {
	Code    string          `json:"code"` // one of the Code constants
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data,omitempty"`
}

// Codes of errors that callers act on.
const (
	CodeInvalid = "invalid"  // the order does not fit the phase or is malformed
	CodeUnknown = "unknown"  // this shim does not know such an order
	CodeRefused = "refused"  // the attempt was thawed before
	CodeStopped = "stopped"  // the machine ended
	CodeCorrupt = "corrupt"  // an object of the store is damaged or missing; the message names it
	CodeNoSpace = "no_space" // the disk is full

	// CodeUnavailable says that the remote store could not be asked for what the
	// machine needs: another try may succeed.
	CodeUnavailable = "unavailable"

	CodeMismatch = "mismatch" // the compatibility keys differ
	CodeGuest    = "guest"    // the agent failed or did not answer in time
	CodeFailed   = "failed"   // anything else
)
