package sandbox

import "slices"

// State is where a sandbox is in its lifecycle.
type State string

// The states of a sandbox. Gone is no recorded state: it is what a sandbox is
// in once its record has been removed.
const (
	StateCreating    State = "creating"    // the first machine is being made; nobody was told of the sandbox yet
	StateRunning     State = "running"     // the guest runs in the shim that the record's handle names
	StateHibernating State = "hibernating" // a snapshot is being taken, it is not committed
	StateStandby     State = "standby"     // no machine but perhaps a parked one: the record's snapshot is the sandbox
	StateResuming    State = "resuming"    // a machine is being made of the record's snapshot
	StateFailed      State = "failed"      // no machine, a reason, and the last good snapshot
	StateDeleting    State = "deleting"    // everything of it is being removed
	StateGone        State = "gone"
)

// States lists the recorded states in the order of a sandbox's life.
var States = []State{StateCreating, StateRunning, StateHibernating, StateStandby, StateResuming, StateFailed, StateDeleting}

// Move is one entry of the transition table.
type Move struct {
	From, To State
	When     string // what happened, in words
}

// Moves is the transition table: a change of state that is not in it is
// refused. docs/lifecycle.md shows the same table.
var Moves = []Move{
	{StateCreating, StateRunning, "the guest has its identity"},
	{StateCreating, StateDeleting, "the creation failed, or the sandbox is deleted"},
	{StateRunning, StateHibernating, "a hibernation begins"},
	{StateRunning, StateResuming, "its memory could not be served and no object is to blame: back to its last snapshot"},
	{StateRunning, StateFailed, "the guest, its VMM or its shim ended"},
	{StateRunning, StateDeleting, "the sandbox is deleted"},
	{StateHibernating, StateStandby, "commit point: the snapshot is durable and named by this change"},
	{StateHibernating, StateRunning, "the hibernation failed or was cancelled by a request"},
	{StateHibernating, StateFailed, "the machine ended before its snapshot was whole"},
	{StateHibernating, StateDeleting, "the sandbox is deleted"},
	{StateStandby, StateResuming, "a request or a user wakes it"},
	{StateStandby, StateDeleting, "the sandbox is deleted"},
	{StateResuming, StateRunning, "the guest answered its init"},
	{StateResuming, StateStandby, "the resume failed in a way that may pass"},
	{StateResuming, StateFailed, "the snapshot cannot be resumed, or the sandbox had failed before"},
	{StateResuming, StateDeleting, "the sandbox is deleted"},
	{StateFailed, StateResuming, "a user resumes it from its last snapshot"},
	{StateFailed, StateDeleting, "the sandbox is deleted"},
	{StateDeleting, StateGone, "nothing of it is left"},
}

// allowed reports whether the table has the move. A record may always be
// changed within its state.
func allowed(from, to State) bool {
	return from == to || slices.ContainsFunc(Moves, func(m Move) bool { return m.From == from && m.To == to })
}

// Recovery says, for each recorded state, what a daemon does that finds a
// sandbox in it without knowing how it came there: after its own start, or
// after a step whose outcome it could not learn. recoverSandbox does it.
var Recovery = map[State]string{
	StateCreating:    "end its shim and remove it: its creation was never acknowledged",
	StateRunning:     "adopt its shim, put its egress policy in force, thaw a capture that was left behind, and watch it; if the shim is dead or its machine stopped: failed, or back to its last snapshot",
	StateHibernating: "adopt its shim: sealed → commit, standby; unsealed → running, thaw; dead → commit the pending snapshot if it is whole, else failed",
	StateStandby:     "keep a shim that holds exactly this snapshot as parked, if it may; end any other that is left",
	StateResuming:    "end its shim, back to where it came from: standby, or failed",
	StateFailed:      "end a shim that is left",
	StateDeleting:    "go on deleting",
}

// Failpoints lists the named places at which a test may kill the daemon.
var Failpoints = []string{
	fpCreateRecorded, fpCreateLaunched, fpCreateHandle, fpCreatePrepared, fpCreateRunning,
	fpHibernateRecorded, fpHibernateSealed, fpHibernateCommitted, fpHibernateAnswered, fpHibernateReleased,
	fpResumeRecorded, fpResumeLaunched, fpResumeHandle, fpResumePrepared, fpResumeRunning,
	fpDeleteRecorded, fpDeleteReleased,
	fpBaseRecorded, fpBaseBooted, fpBaseSealed,
}

// CompactFailpoints lists those of a compaction, which happens behind a
// hibernation if that is worth it.
var CompactFailpoints = []string{fpCompactBegun, fpCompactCopying, fpCompactWritten, fpCompactSwapped}

// The names of the failpoints. Each stands directly behind the step it names;
// "running" stands before the change that records it.
const (
	fpCreateRecorded     = "sandbox.create.recorded"
	fpCreateLaunched     = "sandbox.create.launched"
	fpCreateHandle       = "sandbox.create.handle"
	fpCreatePrepared     = "sandbox.create.prepared"
	fpCreateRunning      = "sandbox.create.running"
	fpHibernateRecorded  = "sandbox.hibernate.recorded"
	fpHibernateSealed    = "sandbox.hibernate.sealed"
	fpHibernateCommitted = "sandbox.hibernate.committed"
	fpHibernateAnswered  = "sandbox.hibernate.answered"
	fpHibernateReleased  = "sandbox.hibernate.released"
	fpResumeRecorded     = "sandbox.resume.recorded"
	fpResumeLaunched     = "sandbox.resume.launched"
	fpResumeHandle       = "sandbox.resume.handle"
	fpResumePrepared     = "sandbox.resume.prepared"
	fpResumeRunning      = "sandbox.resume.running"
	fpDeleteRecorded     = "sandbox.delete.recorded"
	fpDeleteReleased     = "sandbox.delete.released"
	fpBaseRecorded       = "sandbox.base.recorded"
	fpBaseBooted         = "sandbox.base.booted"
	fpBaseSealed         = "sandbox.base.sealed"
	fpCompactBegun       = "sandbox.compact.begun"
	fpCompactCopying     = "sandbox.compact.copying"
	fpCompactWritten     = "sandbox.compact.written"
	fpCompactSwapped     = "sandbox.compact.swapped"
)
