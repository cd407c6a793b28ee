// Package fake is a vmm.Driver whose machines are Go values: it lets the whole
// daemon be tested, hibernation and all, without a VM.
//
// A machine has RAM that reads through to the memory file and keeps written
// pages apart, a *guest* that lives in that RAM, and an agent in the guest that
// answers the control calls of guestapi over connections made by Machine.Dial.
// Everything that the guest knows is written to its RAM when it pauses, so it
// travels by snapshot as a real guest does and in no other way; the device state
// holds only what a machine has outside its RAM.
//
// The memory file is read with pread, never mapped. Where a pager of the same
// process serves that file the read is an ordinary blocking system call, which
// the runtime lets others run beside; but the process cannot be killed while
// such a read waits for an answer. So: for tests only.
package fake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

const (
	// ProgramBytes is the memory that a Program is given.
	ProgramBytes = 256 << 10
	// FreePage is the number of the first page of RAM that the guest itself does not use.
	FreePage = 512
	// UserPort is a port that the guest serves besides the agent's, as a user's
	// server would be: no call on it needs a token.
	UserPort = 8000

	minMemoryMiB = 4
	pmemAlign    = 2 << 20
)

// Program is run by a guest step by step, about every five milliseconds while it
// neither pauses nor is frozen. It may read and change its memory, zero before
// step 1, and returns a line for the console and, to end the machine, a reason
// (else ""), in which case the line is not printed.
type Program func(memory []byte, cmdline string, step uint64) (line string, end vmm.Reason)

// Faults are called at the start of what they are named after. An error fails
// it, and to block delays it. Nil ones do nothing.
type Faults struct {
	Start     func(context.Context) error
	LoadState func(context.Context) error
	SaveState func(context.Context) error
	Freeze    func(context.Context) error // in the agent; the context ends with the machine or the caller's connection
}

// Driver starts fake machines. It implements vmm.Driver.
type Driver struct {
	// Program, if not nil, is run by the guests of all machines; set it before the first Start.
	Program Program

	mu       sync.Mutex
	faults   Faults
	machines []*Machine
}

var _ vmm.Driver = (*Driver)(nil)

// New returns a driver without machines and without faults.
func New() *Driver { return &Driver{} }

// SetFaults replaces the faults from now on.
func (d *Driver) SetFaults(f Faults) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults = f
}

func (d *Driver) currentFaults() Faults {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.faults
}

// Machines returns the machines that have not ended, the oldest first.
func (d *Driver) Machines() []*Machine {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines = slices.DeleteFunc(d.machines, func(m *Machine) bool { return m.ended() != nil })
	return slices.Clone(d.machines)
}

// Info implements vmm.Driver.
func (d *Driver) Info(context.Context) (vmm.Info, error) {
	return vmm.Info{Driver: "fake", Version: "1", Accelerator: "none"}, nil
}

// Key implements vmm.Driver.
func (d *Driver) Key(_ context.Context, shape vmm.Shape) (vmm.Key, error) {
	if err := checkShape(shape); err != nil {
		return nil, err
	}
	return vmm.Key{
		"driver":     "fake",
		"memory_mib": strconv.Itoa(shape.MemoryMiB),
		"cpus":       strconv.Itoa(shape.CPUs),
	}, nil
}

// Start implements vmm.Driver; the machine is a *Machine. The network socket and
// the kernel of a Spec are not looked at.
func (d *Driver) Start(ctx context.Context, spec vmm.Spec) (vmm.Machine, error) {
	m, err := d.start(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("start a fake machine: %w", err)
	}
	return m, nil
}

func (d *Driver) start(ctx context.Context, spec vmm.Spec) (*Machine, error) {
	if err := inject(ctx, d.currentFaults().Start); err != nil {
		return nil, err
	}
	if err := checkShape(spec.Shape); err != nil {
		return nil, err
	}
	if err := checkBase(spec.BaseImage); err != nil {
		return nil, err
	}
	memory, err := openMemory(spec.MemoryPath, spec.Shape.MemoryBytes())
	if err != nil {
		return nil, err
	}
	m := newMachine(d, spec, memory)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines = append(d.machines, m)
	return m, nil
}

// inject calls a fault and reports a context that has ended.
func inject(ctx context.Context, fault func(context.Context) error) error {
	if fault != nil {
		if err := fault(ctx); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func checkShape(s vmm.Shape) error {
	if s.MemoryMiB < minMemoryMiB {
		return fmt.Errorf("%d MiB of memory: must be at least %d", s.MemoryMiB, minMemoryMiB)
	}
	if s.CPUs < 1 {
		return errors.New("a machine needs a CPU")
	}
	return nil
}

func checkBase(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("base image: %w", err)
	}
	if info.Size() == 0 || info.Size()%pmemAlign != 0 {
		return fmt.Errorf("base image %s is %d bytes long: must be a multiple of 2 MiB", path, info.Size())
	}
	return nil
}
