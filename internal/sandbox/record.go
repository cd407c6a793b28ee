package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// The kinds of the catalog's records.
const (
	kindSandbox  = "sandbox"  // id → record
	kindName     = "name"     // name of a sandbox → its id
	kindTemplate = "template" // name → templateRecord
	kindHost     = "host"     // hostKey → {}: this catalog and the store belong together
)

const hostKey = "store"

// recordVersion is the version of the layout of sandbox records. Version 1 had
// no checkpoints and no policy, but the egress rules that are part of it now.
const recordVersion = 2

// record is what the catalog keeps of a sandbox (docs/formats/catalog.md).
// Its maps and pointers are shared between copies: replace them, never write
// into them.
type record struct {
	Version         int               `json:"version"`
	ID              string            `json:"id"`
	Name            string            `json:"name,omitempty"`
	Template        string            `json:"template"`
	TemplateVersion int               `json:"template_version"`
	Shape           vmm.Shape         `json:"shape"`
	Labels          map[string]string `json:"labels,omitempty"`
	Env             map[string]string `json:"env,omitempty"`
	Policy          Policy            `json:"policy"`
	AccessToken     string            `json:"access_token"`
	TrafficToken    string            `json:"traffic_token,omitempty"` // "" in one that an older daemon made, see trafficToken
	CreatedAt       time.Time         `json:"created_at"`
	ForkedFrom      string            `json:"forked_from,omitempty"` // id of the sandbox that it began as a copy of

	State      State  `json:"state"`
	Reason     string `json:"reason,omitempty"` // why it failed, or goes back to its last snapshot; kept while a resume is tried
	Attempt    uint64 `json:"attempt"`          // of the last hibernation
	Generation uint64 `json:"generation"`       // of the last resume

	Handle   *shim.Handle       `json:"handle,omitempty"`   // of the shim that may be alive
	Bound    snapshot.ID        `json:"bound,omitempty"`    // snapshot that this shim reads pages from; "" after a cold boot
	Pending  snapshot.ID        `json:"pending,omitempty"`  // snapshot of the hibernation or checkpoint under way
	Keep     *checkpoint        `json:"keep,omitempty"`     // the checkpoint that it is to become, without its snapshot; nil: none
	GoOn     bool               `json:"go_on,omitempty"`    // behind its commit the guest runs on
	Snapshot *snapshot.Ref      `json:"snapshot,omitempty"` // the last committed one
	Metadata *snapshot.Metadata `json:"metadata,omitempty"` // of Snapshot, without its control token
	Fresh    bool               `json:"fresh,omitempty"`    // Snapshot is the template's base: a resume gives it an identity
	WakeAs   string             `json:"wake_as,omitempty"`  // reason that a resume of Snapshot tells the guest, fork or restore; "": the usual one

	Checkpoints []checkpoint `json:"checkpoints,omitempty"` // the oldest first

	Usage         Usage            `json:"usage,omitzero"`         // until Since
	Since         time.Time        `json:"since,omitzero"`         // when it came to be awake, asleep or in between
	CPUCounted    time.Duration    `json:"cpu_counted,omitempty"`  // of the processor time of the machine that the handle names, what Usage has
	TimeoutFrom   time.Duration    `json:"timeout_from,omitempty"` // what Usage.Awake was when the policy's timeout began to count
	Told          map[string]told  `json:"told,omitempty"`         // limit → what was told of it
	WentBack      time.Time        `json:"went_back,omitzero"`     // when it was last resumed by itself from its last snapshot
	LastUsed      time.Time        `json:"last_used,omitzero"`     // when it last came to standby or to running
	Hold          *Lease           `json:"hold,omitempty"`         // explicit, until its time
	LastHibernate *HibernateReport `json:"last_hibernate,omitempty"`
	LastResume    *ResumeReport    `json:"last_resume,omitempty"`
}

// decodeRecord reads a sandbox record and refuses one that it cannot know.
func decodeRecord(value []byte) (record, error) {
	var rec record
	if err := json.Unmarshal(value, &rec); err != nil {
		return record{}, err
	}
	switch rec.Version {
	case recordVersion:
	case 1:
		var old struct{ Allow, Deny []string }
		if err := json.Unmarshal(value, &old); err != nil {
			return record{}, err
		}
		rec.Version, rec.Policy = recordVersion, DefaultPolicy()
		rec.Policy.Egress.Allow, rec.Policy.Egress.Deny = old.Allow, old.Deny
	default:
		return record{}, fmt.Errorf("it has version %d, this daemon reads up to %d: it was written by a newer one", rec.Version, recordVersion)
	}
	if !slices.Contains(States, rec.State) {
		return record{}, fmt.Errorf("unknown state %q", rec.State)
	}
	return rec, nil
}

// commit makes a sealed snapshot the one that rec stands for, and a checkpoint
// if that is what it was taken for.
func (rec *record) commit(ref snapshot.Ref, meta snapshot.Metadata) {
	rec.Fresh, rec.WakeAs = false, ""
	rec.swap(ref, meta)
	if rec.Keep != nil {
		kept := *rec.Keep
		kept.Snapshot, kept.Metadata = *rec.Snapshot, *rec.Metadata
		rec.addCheckpoint(kept)
	}
	rec.endCapture()
}

// swap puts a snapshot in the place of one that holds the same.
func (rec *record) swap(ref snapshot.Ref, meta snapshot.Metadata) {
	meta.ControlToken = "" // it lives in the snapshot, nobody needs it here
	rec.Snapshot, rec.Metadata = &ref, &meta
}

// endCapture notes that no capture is under way any more.
func (rec *record) endCapture() { rec.Pending, rec.Keep, rec.GoOn = "", nil, false }

// bind notes the shim that is to run the record's snapshot.
func (rec *record) bind(h shim.Handle) {
	rec.Handle, rec.Bound, rec.CPUCounted = &h, "", 0
	if rec.Snapshot != nil {
		rec.Bound = rec.Snapshot.ID
	}
}

// unbind notes that the shim is dead.
func (rec *record) unbind() { rec.Handle, rec.Bound = nil, "" }

// roots adds the snapshots that the record and its shim need and the one that it announces.
func (rec *record) roots(needed, announced map[snapshot.ID]struct{}) {
	if rec.Snapshot != nil {
		needed[rec.Snapshot.ID] = struct{}{}
	}
	for _, c := range rec.Checkpoints {
		needed[c.Snapshot.ID] = struct{}{}
	}
	if rec.Bound != "" {
		needed[rec.Bound] = struct{}{}
	}
	if rec.Pending != "" {
		announced[rec.Pending] = struct{}{}
	}
}

// trafficToken returns the token that opens the sandbox's private ports. One
// that was made before there were such tokens has one that follows from its
// other secret, so that it stays the same without being written.
func (rec *record) trafficToken() string {
	if rec.TrafficToken != "" {
		return rec.TrafficToken
	}
	sum := sha256.Sum256([]byte("traffic token of sandbox " + rec.ID + " " + rec.AccessToken))
	return hex.EncodeToString(sum[:13])
}

// snapshots returns all the snapshots that the record names.
func (rec *record) snapshots() []snapshot.ID {
	ids := map[snapshot.ID]struct{}{}
	rec.roots(ids, ids)
	return slices.Collect(maps.Keys(ids))
}

// Sandbox is a sandbox as others see it: a copy of one instant.
type Sandbox struct {
	ID              string
	Name            string
	Template        string
	TemplateVersion int
	State           State
	Reason          string // why it failed, "" otherwise
	CreatedAt       time.Time
	MemoryMiB       int
	CPUs            int
	Labels          map[string]string
	Env             map[string]string
	Policy          Policy
	ForkedFrom      string // id of the sandbox that it began as a copy of, "" for none
	Checkpoints     int    // how many it has
	TrafficToken    string // opens its private ports: a secret
	Snapshot        *Snapshot
	LastHibernate   *HibernateReport
	LastResume      *ResumeReport
	Replication     *Replication // of Snapshot; nil without a remote store
	Usage           Usage        // up to now
	Next            *Due         // what its limits do to it next, nil: nothing
	Parked          bool         // in standby, its paused VMM is kept
	Leases          []Lease      // that keep it from hibernating by itself, the oldest first
	Activity        *Activity    // of Inspect, while it runs
}

// Replication says where a sandbox's snapshot is kept.
type Replication struct {
	State string // "local", "replicating" or "replicated"
	Error string // why the last try failed; it is tried again
	// SentBytes is what the remote store took for this snapshot since the daemon's
	// start, once it is replicated. Objects that it had already and those of the
	// template do not count.
	SentBytes int64
}

// Snapshot describes the snapshot that a sandbox would resume from.
type Snapshot struct {
	ID          snapshot.ID
	Parent      snapshot.ID // "" for a template's base snapshot
	CreatedAt   time.Time
	MemoryBytes int64 // size of the guest's RAM
	DirtyBytes  int64 // found changed, before elision
	StoredBytes int64 // written for it
}

// HibernateReport says how a hibernation went. Phases maps a name to
// milliseconds: those of the capture (freeze, pause, state, scan, write),
// commit and, once that is done, park or release. What came before it began is
// no part of its total: detect, from when its reason could have been known.
type HibernateReport struct {
	Trigger  Trigger            `json:"trigger,omitempty"` // "" where the daemon that began it did not end it
	TotalMS  float64            `json:"total_ms"`          // until the commit
	PauseMS  float64            `json:"pause_ms"`          // from the pause to the seal
	Phases   map[string]float64 `json:"phases"`
	Warnings []string           `json:"warnings,omitempty"`

	WorkingSet *shim.WorkingSetReport `json:"working_set,omitempty"` // of the run that it ended; nil after a boot
}

// ResumeReport says how a resume (or a creation) went. Phases maps a name to
// milliseconds: vmm (start of the shim and its VMM), those of the shim (bind,
// state, unpause, guest_init), and base_image where the guest had to wait until
// its base image, which was touched, was read and compared with its hash.
type ResumeReport struct {
	Tier            string             `json:"tier"` // "parked", "local" or "remote"; "boot" for a cold boot
	TotalMS         float64            `json:"total_ms"`
	Phases          map[string]float64 `json:"phases"`
	BytesRead       int64              `json:"bytes_read"`
	PrefetchedBytes int64              `json:"prefetched_bytes"`
	Faults          int64              `json:"faults"`
	DemandPages     int64              `json:"demand_pages,omitempty"`      // of 4 KiB that page reads brought, until the report
	WorkingSetBytes int64              `json:"working_set_bytes,omitempty"` // of the set that the snapshot carries
	BytesFetched    int64              `json:"bytes_fetched,omitempty"`     // from the remote store, until the report
	Pooled          bool               `json:"pooled,omitempty"`            // the VMM was started beforehand
	By              string             `json:"by,omitempty"`                // who woke it, see Core.Wake; "" for a creation
	Warnings        []string           `json:"warnings,omitempty"`
}

// describe returns a snapshot as others may see it.
func describe(m *snapshot.Metadata) Snapshot {
	return Snapshot{ID: m.ID, Parent: m.Parent, CreatedAt: m.CreatedAt,
		MemoryBytes: m.MemoryBytes, DirtyBytes: m.DirtyBytes, StoredBytes: m.StoredBytes}
}

// view returns the record as others may see it.
func (rec *record) view() Sandbox {
	s := Sandbox{
		ID: rec.ID, Name: rec.Name, Template: rec.Template, TemplateVersion: rec.TemplateVersion,
		State: rec.State, CreatedAt: rec.CreatedAt,
		MemoryMiB: rec.Shape.MemoryMiB, CPUs: rec.Shape.CPUs,
		Labels: maps.Clone(rec.Labels), Env: maps.Clone(rec.Env),
		Policy: rec.Policy, TrafficToken: rec.trafficToken(), ForkedFrom: rec.ForkedFrom, Checkpoints: len(rec.Checkpoints),
	}
	now := time.Now()
	s.Usage, s.Next = rec.usedAt(now), rec.next(now)
	if rec.State == StateFailed {
		s.Reason = rec.Reason
	}
	if m := rec.Metadata; m != nil {
		described := describe(m)
		s.Snapshot = &described
	}
	if r := rec.LastHibernate; r != nil {
		c := *r
		c.Phases, c.Warnings = maps.Clone(r.Phases), slices.Clone(r.Warnings)
		s.LastHibernate = &c
	}
	if r := rec.LastResume; r != nil {
		c := *r
		c.Phases, c.Warnings = maps.Clone(r.Phases), slices.Clone(r.Warnings)
		s.LastResume = &c
	}
	return s
}
