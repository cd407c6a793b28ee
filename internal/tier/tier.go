// Package tier owns where snapshots live: on the local disk, and, compressed,
// in a remote store. It copies committed snapshots to the remote store in the
// background, deletes local packs that are there too when the disk's budget is
// used up, reads what is not local from the remote store, and brings back what
// a node that lost its disk had replicated.
//
// An object has the same key in both tiers. Remotely a pack is encoded with
// Zstandard frame by frame, under the same sum; every other object is
// compressed as a whole.
package tier

import (
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// State says how far the replication of a snapshot is.
type State string

// The states of a replication.
const (
	Local       State = "local"       // not begun, or waiting for another try
	Replicating State = "replicating" // being uploaded
	Replicated  State = "replicated"  // all that a resume needs is in the remote store
)

// Replica is what a node that lost its disk needs to resume a sandbox.
type Replica struct {
	Sandbox  string       // id
	Snapshot snapshot.Ref // the last committed one
	Record   []byte       // the sandbox as its owner knows it, opaque here; may hold secrets
	Template Template     // that the snapshot is of
	LastUsed time.Time    // when it was last hibernated or resumed: what was not used for long is evicted first
}

// Template names the files of a template's version.
type Template struct {
	Name    string
	Version int
	Dir     string // folder of its files on this node
	Record  []byte // the template as its owner knows it, opaque here
}

// Status is how far the replication of one sandbox is.
type Status struct {
	State State
	Err   error // why the last try failed, nil if it did not; it is tried again
}
