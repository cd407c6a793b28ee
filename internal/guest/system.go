package guest

import (
	"errors"
	"net/netip"
	"time"
)

// System is what the control calls do to the guest as a whole. Its methods are
// called by one goroutine at a time. NewSystem returns the real one.
type System interface {
	// SetClock sets the wall clock. The monotonic clock is not touched.
	SetClock(time.Time) error
	// AddEntropy mixes secret random bytes into the kernel's generator and
	// makes it use them at once.
	AddEntropy([]byte) error
	// SetIdentity sets the host name and machine id and publishes the
	// sandbox's id.
	SetIdentity(id, hostname, machineID string) error
	// RenewBootID gives the system another boot id.
	RenewBootID() error
	// DestroySockets resets every TCP connection that does not stay within
	// the guest, except keep, and returns how many.
	DestroySockets(keep Flow) (int, error)
	// Publish makes the generation known to programs.
	Publish(generation uint64) error
	// Freeze stops the user's processes. ErrFreezeTimeout: some go on for now.
	Freeze(timeout time.Duration) error
	// Thaw lets them go on.
	Thaw() error
}

// ErrFreezeTimeout is returned by System.Freeze when a process does not stop,
// for example one that waits for a disk that does not answer. It stops as soon
// as it can.
var ErrFreezeTimeout = errors.New("a process has not stopped yet")

// Flow names a TCP connection by its two ends, as the guest sees them.
type Flow struct {
	Local, Remote netip.AddrPort
}
