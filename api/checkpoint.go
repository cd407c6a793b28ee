package api

import "time"

// The kinds of checkpoints.
const (
	CheckpointUser     = "user"     // somebody asked for it
	CheckpointSchedule = "schedule" // the sandbox's policy did
	CheckpointRestore  = "restore"  // what the sandbox was before it was rolled back
)

// Checkpoint is a snapshot of a sandbox that is kept under a name.
type Checkpoint struct {
	Name      string           `json:"name"`
	Kind      string           `json:"kind"`
	CreatedAt time.Time        `json:"created_at"`
	Snapshot  Snapshot         `json:"snapshot"`
	Current   bool             `json:"current"`          // its snapshot is the one that the sandbox would resume from
	Report    *HibernateReport `json:"report,omitempty"` // how it was taken, in the answer to that only; not of a sandbox that slept
}

// CheckpointRequest is the optional body of a request for a checkpoint.
type CheckpointRequest struct {
	Name string `json:"name,omitempty"` // a RFC 1123 label, unique in its sandbox; default: one that says when
}

// RestoreRequest asks to roll a sandbox back.
type RestoreRequest struct {
	Checkpoint string `json:"checkpoint"`
}

// Restored is a sandbox that was rolled back.
type Restored struct {
	Sandbox Sandbox `json:"sandbox"`
	Kept    string  `json:"kept"` // checkpoint that is what it was before; "" if one was that already
}

// ForkRequest is the optional body of a request for copies.
type ForkRequest struct {
	Count      int    `json:"count,omitempty"`      // default 1
	Checkpoint string `json:"checkpoint,omitempty"` // default: what the sandbox is now
	Name       string `json:"name,omitempty"`       // of the copy; several are NAME-1, NAME-2 …
	Standby    bool   `json:"standby,omitempty"`    // do not start them
}

// TemplateFromRequest asks for a template whose sandboxes begin where a sandbox is.
type TemplateFromRequest struct {
	Sandbox    string `json:"sandbox"`              // id or name
	Checkpoint string `json:"checkpoint,omitempty"` // default: what the sandbox is now
}
