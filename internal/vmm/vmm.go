// Package vmm owns the contract between the platform and a virtual machine
// monitor: a Driver starts Machines, a Machine is one virtual machine and the
// process that runs it. Drivers live in subpackages (qemu, and fake for tests
// without a VM); vmmtest is the suite that a driver must pass.
//
// The memory contract: the machine maps its RAM privately (MAP_PRIVATE) from
// the file Spec.MemoryPath and never writes to that file. A machine that waits
// for a state to be loaded does not read its RAM before LoadState, so the
// file's content may be decided after the machine was started.
package vmm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"

	"github.com/hibernacle/hibernacle/internal/page"
)

// Shape is what is fixed in a snapshot about a machine's size.
type Shape struct {
	MemoryMiB int `json:"memory_mib"`
	CPUs      int `json:"cpus"`
}

// MemoryBytes returns the size of the machine's RAM in bytes.
func (s Shape) MemoryBytes() int64 { return int64(s.MemoryMiB) << 20 }

// String returns the shape as it is used in names, for example "1x2048".
func (s Shape) String() string { return fmt.Sprintf("%dx%d", s.CPUs, s.MemoryMiB) }

// Boot says what a machine that boots from cold starts with. Paths are host files.
type Boot struct {
	Kernel  string `json:"kernel"`  // uncompressed kernel (vmlinux, PVH entry)
	Initrd  string `json:"initrd"`  // initramfs archive
	Cmdline string `json:"cmdline"` // added behind the driver's own arguments
}

// Spec describes one machine.
type Spec struct {
	Shape      Shape
	Dir        string    // existing private folder for the machine's sockets
	MemoryPath string    // file of exactly Shape.MemoryBytes() that backs the RAM
	BaseImage  string    // read-only EROFS image, a multiple of 2 MiB long, shown as persistent memory
	NetSocket  string    // Unix stream socket that the machine's network card connects to (QEMU's framing: 32-bit big-endian length before each frame)
	MAC        string    // the card's address
	Console    io.Writer // takes what the guest prints on its serial line; a Write that blocks stalls the guest
	Boot       *Boot     // nil: wait for LoadState
}

// Key is the compatibility key of a snapshot (driver, machine type, CPU model
// with its resolved features, accelerator, shape, device topology, digests of
// base image and kernel): a snapshot resumes only on a machine with an equal key.
type Key map[string]string

// Diff returns "" if a machine with key k can load a snapshot with key other,
// and otherwise the differing entries in words, sorted by name.
func (k Key) Diff(other Key) string {
	var diffs []string
	for name, v := range k {
		if other[name] != v {
			diffs = append(diffs, fmt.Sprintf("%s: this machine has %q, the snapshot %q", name, v, other[name]))
		}
	}
	for name, v := range other {
		if _, ok := k[name]; !ok {
			diffs = append(diffs, fmt.Sprintf("%s: this machine has none, the snapshot %q", name, v))
		}
	}
	sort.Strings(diffs)
	return strings.Join(diffs, "; ")
}

// Info is what a driver found out about its VMM and the host.
type Info struct {
	Driver      string `json:"driver"`      // "qemu"
	Version     string `json:"version"`     // of the VMM, recorded, never compared
	Accelerator string `json:"accelerator"` // "kvm" or "tcg"
	Binary      string `json:"binary"`
}

// Driver starts machines. Its methods may be called at the same time.
type Driver interface {
	// Info looks at the VMM that is installed. The error says what to install
	// where it is missing or too old.
	Info(ctx context.Context) (Info, error)

	// Key returns the driver's part of the compatibility key for a shape. The
	// caller adds the digests of base image and kernel.
	Key(ctx context.Context, shape Shape) (Key, error)

	// Start starts a machine whose vCPUs are stopped and returns when it takes
	// orders. Spec.Dir must be empty or hold nothing of the same names. The
	// machine dies with the calling process. On error nothing is left running.
	Start(ctx context.Context, spec Spec) (Machine, error)
}

// Reason says why a machine ended.
type Reason string

// The reasons for which a machine ends.
const (
	ReasonClosed   Reason = "closed"    // Close was called
	ReasonShutdown Reason = "shutdown"  // the guest powered off or halted
	ReasonReset    Reason = "reset"     // the guest rebooted (it is stopped, never restarted)
	ReasonPanic    Reason = "panic"     // the guest's kernel panicked
	ReasonCrashed  Reason = "vmm-crash" // the VMM died or reported an internal error
)

// Exit is how a machine ended.
type Exit struct {
	Reason Reason `json:"reason"`
	Detail string `json:"detail"` // for people: signal, exit status, last lines of the VMM's standard error
}

// ErrExited is returned by the methods of a machine that has ended.
var ErrExited = errors.New("the virtual machine has ended")

// Machine is one virtual machine. LoadState, SaveState, Pause, Run and
// DirtyPages are called by one goroutine at a time; the others may be called
// at any time. All but Close return an error that wraps ErrExited once the
// machine has ended.
type Machine interface {
	// PID returns the process id of the VMM.
	PID() int

	// LoadState loads vCPU and device state into a machine that was started
	// without Boot and has not run. r is read to its end. The vCPUs stay
	// stopped. After an error the machine can only be closed.
	LoadState(ctx context.Context, r io.Reader) error

	// SaveState writes vCPU and device state, never RAM, of a paused machine.
	SaveState(ctx context.Context, w io.Writer) error

	// Run lets the vCPUs run: the first time after Start with Boot or after
	// LoadState, later after Pause. Idempotent.
	Run(ctx context.Context) error

	// Pause stops the vCPUs and completes outstanding device requests.
	// Idempotent.
	Pause(ctx context.Context) error

	// DirtyPages returns, sorted and normalised, the pages of a paused
	// machine's RAM that may differ from the file Spec.MemoryPath. It may name
	// too many pages, never too few.
	DirtyPages(ctx context.Context) ([]page.Run, error)

	// PresentPages returns, sorted and normalised, the pages of the RAM that the
	// guest has touched since the machine was started, and perhaps neighbours
	// of them.
	PresentPages(ctx context.Context) ([]page.Run, error)

	// RAM reads the guest's memory from outside. Its methods may be called at
	// the same time, on a paused machine, for pages that DirtyPages named.
	RAM() io.ReaderAt

	// Exited is closed when the machine has ended; Exit then says why.
	Exited() <-chan struct{}
	Exit() Exit

	// Close kills the VMM, waits for it and removes what it left in Spec.Dir.
	// Idempotent.
	Close() error
}
