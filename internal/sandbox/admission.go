package sandbox

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// vmOverhead is what a machine takes up in bytes beside its guest's RAM: its
// shim and the VMM's own memory. Under KVM it is half of this, under TCG
// translated code adds to it (docs/decisions/0074).
const vmOverhead = 128 << 20

// admission keeps what was promised to the machines that may be alive. A guest
// may write to all of its RAM at any time, so all of it counts; what it wrote
// has to find room on the disk when it hibernates, so a share of it is kept
// free there.
type admission struct {
	mu     sync.Mutex
	claims map[string]int64 // guest RAM in bytes, by id of the sandbox or name of a base machine
}

// promised returns what the claims come to, with the overhead and without.
// mu is held.
func (a *admission) promised() (memory, ram int64) {
	for _, n := range a.claims {
		ram += n
	}
	return ram + int64(len(a.claims))*vmOverhead, ram
}

// claim notes that a machine may be alive, whatever that comes to.
func (a *admission) claim(holder string, shape vmm.Shape) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.claims[holder] = ramOf(shape)
}

// release takes a claim back; one that is not there is no matter.
func (a *admission) release(holder string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.claims, holder)
}

func ramOf(shape vmm.Shape) int64 { return int64(shape.MemoryMiB) << 20 }

// admit promises a machine of a shape the memory of the host and room on its
// disk, or refuses it with the reason. It comes before the machine is started.
// A sandbox's claim is given back by settleClaim at the end of the operation,
// that of any other machine by admission.release. what names the machine.
//
// A sandbox that is known to be in standby may still have its machine for a
// moment: nobody is refused because of that. While the host is drained everybody is.
func (c *Core) admit(ctx context.Context, holder, what string, shape vmm.Shape) error {
	if err := c.drained(); err != nil {
		return err
	}
	room, err := c.tryAdmit(holder, what, shape)
	if err != nil && c.awaitLeaving(ctx) {
		room, err = c.tryAdmit(holder, what, shape)
	}
	if err == nil && c.cfg.GuestMemory > 0 {
		c.reclaim(room)
	}
	return err
}

// awaitLeaving waits for the end of the hibernations that are behind the point
// up to which they may be cancelled; false: ctx ended first. They wait for
// nobody, so an operation may wait for them.
func (c *Core) awaitLeaving(ctx context.Context) bool {
	for _, e := range c.all() {
		e.mu.Lock()
		op := e.op
		leaving := op != nil && op.kind == opHibernate && op.late
		e.mu.Unlock()
		if !leaving {
			continue
		}
		select {
		case <-op.ended:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// tryAdmit makes the claim and returns the memory that is left beside all claims.
func (c *Core) tryAdmit(holder, what string, shape vmm.Shape) (room int64, err error) {
	a := &c.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	memory, ram := a.promised()
	if _, ok := a.claims[holder]; !ok {
		memory += ramOf(shape) + vmOverhead
		ram += ramOf(shape)
	}
	room = c.cfg.GuestMemory - memory
	if c.cfg.GuestMemory > 0 && room < 0 {
		need := ramOf(shape) + vmOverhead
		return 0, &Error{Kind: ErrUnavailable,
			Message: fmt.Sprintf("no memory for %s: it may take up %d MiB, %d MiB are promised to %d guests, the limit is %d MiB",
				what, need>>20, (memory-need)>>20, len(a.claims), c.cfg.GuestMemory>>20),
			Hint: "hibernate or delete sandboxes, or raise the limit with hib serve --guest-memory"}
	}
	if err := c.checkDisk(what, ram); err != nil {
		return 0, err
	}
	a.claims[holder] = ramOf(shape)
	return room, nil
}

// diskReserve returns the free space in bytes that guests with so much RAM
// need to be able to hibernate.
func (c *Core) diskReserve(ram int64) int64 {
	return c.cfg.Reserve + ram*int64(c.cfg.HibernateShare)/100
}

// checkDisk refuses what where guests with so much RAM could not hibernate
// because of it.
func (c *Core) checkDisk(what string, ram int64) error {
	if c.cfg.FreeBytes == nil {
		return nil
	}
	free, err := c.cfg.FreeBytes()
	if err != nil {
		return unavailable(err, "look at the free space of the data folder")
	}
	if need := c.diskReserve(ram); free < need {
		return &Error{Kind: ErrNoSpace,
			Message: fmt.Sprintf("no disk space for %s: %d MiB are free, %d MiB are kept for the guests that run to hibernate", what, free>>20, need>>20),
			Hint:    "free space on the disk of the data folder, delete or hibernate sandboxes, or lower hib serve --disk-reserve"}
	}
	return nil
}

// checkRoom refuses what would take the room that the guests that run need.
func (c *Core) checkRoom(what string) error {
	c.admission.mu.Lock()
	_, ram := c.admission.promised()
	c.admission.mu.Unlock()
	return c.checkDisk(what, ram)
}

// refusedWake returns the error of a request for which a sandbox was not
// woken. To the request a full disk of the host is like any other reason that may pass.
func refusedWake(err error) error {
	if e, ok := errors.AsType[*Error](err); ok && e.Kind == ErrNoSpace {
		return &Error{Kind: ErrUnavailable, Message: e.Message, Hint: e.Hint, Cause: e.Cause}
	}
	return err
}

// settleClaim makes the claim of a sandbox follow from its record: whatever
// way an operation took, a sandbox has a claim afterwards if, and only if, a machine of
// it may be alive. The caller has the turn.
func (c *Core) settleClaim(e *entry) {
	e.mu.Lock()
	holds, shape := e.holdsMachine(), e.rec.Shape
	e.mu.Unlock()
	if holds {
		c.admission.claim(e.id, shape)
		return
	}
	c.admission.release(e.id)
}

// holdsMachine reports whether a machine of the sandbox may be alive. mu is held.
func (e *entry) holdsMachine() bool {
	switch {
	case e.gone:
		return false
	case e.rec.State == StateStandby, e.rec.State == StateFailed:
		return e.rec.Handle != nil && e.parked == nil
	}
	return true
}

// Host says what the host has for guests and what of it is promised.
type Host struct {
	CPUs           int
	MemoryLimit    int64 // bytes that may be promised, 0: any
	MemoryPromised int64 // to the guests that run: their RAM and what a VMM takes up beside it
	Guests         int   // that run
	FreeBytes      int64 // on the store's file system, 0 if it is not watched
	DiskReserve    int64 // of these, kept for guests that run to hibernate
	Parked         int   // machines of sandboxes in standby that are kept
	ParkedBytes    int64 // of memory that they take up; it is given back when guests need it, and so is the pool's
	Draining       bool  // nothing starts
	PoolBytes      int64 // of memory that machines take up that were started beforehand
}

// Host returns what the host has for guests.
func (c *Core) Host(context.Context) (Host, error) {
	c.admission.mu.Lock()
	memory, ram := c.admission.promised()
	guests := len(c.admission.claims)
	c.admission.mu.Unlock()
	h := Host{CPUs: runtime.NumCPU(), MemoryLimit: c.cfg.GuestMemory, MemoryPromised: memory, Guests: guests, DiskReserve: c.diskReserve(ram), Draining: c.draining.Load()}
	parked, bytes := c.parkedMachines()
	h.Parked, h.ParkedBytes, h.PoolBytes = len(parked), bytes, c.pool.bytes()
	if c.cfg.FreeBytes != nil {
		var err error
		if h.FreeBytes, err = c.cfg.FreeBytes(); err != nil {
			return Host{}, unavailable(err, "look at the free space of the data folder")
		}
	}
	return h, nil
}
