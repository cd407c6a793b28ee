package sandbox

import (
	"context"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Usage sums up what a sandbox used since its creation, up to the last change
// of its state: what an operator would bill it by.
type Usage struct {
	Awake       time.Duration `json:"awake"`                  // with a machine that runs, from the moment it ran
	Standby     time.Duration `json:"standby"`                // in standby, or failed with a snapshot that is kept
	CPU         time.Duration `json:"cpu,omitempty"`          // that its machines took, the VMM's own part included; of one that runs, as far as it was looked at
	StoredBytes int64         `json:"stored_bytes,omitempty"` // that its snapshots, those of its checkpoints too, hold in packs that no template shares
}

// awake reports whether a sandbox in such a state has a guest that runs. One
// that is being hibernated counts until its snapshot is committed.
func (s State) awake() bool { return s == StateRunning || s == StateHibernating }

// asleep reports whether a sandbox in such a state is kept without a machine.
func (s State) asleep() bool { return s == StateStandby || s == StateFailed }

// usedAt returns the sums up to now. A clock that was set back adds nothing.
func (rec *record) usedAt(now time.Time) Usage {
	u := rec.Usage
	stretch := max(0, now.Sub(rec.Since))
	switch {
	case rec.Since.IsZero():
	case rec.State.awake():
		u.Awake += stretch
	case rec.State.asleep():
		u.Standby += stretch
	}
	return u
}

// moved sums up the time in the state that rec had before, if next is another
// kind of state.
func (rec *record) moved(from record, now time.Time) {
	if from.State.awake() == rec.State.awake() && from.State.asleep() == rec.State.asleep() && !from.Since.IsZero() {
		return
	}
	used := from.usedAt(now)
	rec.Usage.Awake, rec.Usage.Standby, rec.Since = used.Awake, used.Standby, now
}

// useCPU counts the processor time that the present machine took so far.
func (rec *record) useCPU(total time.Duration) {
	if total > rec.CPUCounted {
		rec.Usage.CPU += total - rec.CPUCounted
		rec.CPUCounted = total
	}
}

// measured is what was found out about a sandbox beside its record. The next
// change puts it there.
type measured struct {
	cpu    time.Duration // that the machine took which is attached
	stored int64         // of the snapshot of, see Usage
	of     snapshot.ID
}

// addTo puts what was measured into a record.
func (m measured) addTo(rec *record) {
	rec.useCPU(m.cpu)
	if rec.Snapshot != nil && rec.Snapshot.ID == m.of {
		rec.Usage.StoredBytes = m.stored
	}
}

// usedCPU notes how much processor time vm has taken since it was started, if it
// still is the machine that is attached.
func (e *entry) usedCPU(vm VM, total time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.vm == vm {
		e.measured.cpu = max(e.measured.cpu, total)
	}
}

// stores notes what a snapshot of the sandbox holds in packs that no template
// shares.
func (e *entry) stores(id snapshot.ID, bytes int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.measured.stored, e.measured.of = bytes, id
}

// measureStored finds out what the snapshots of a sandbox hold: its own and those
// of its checkpoints, each pack once and none that a template shares. What a
// snapshot holds never changes, so each is measured once. The compactor alone calls it.
func (c *Core) measureStored(ctx context.Context, e *entry) {
	e.mu.Lock()
	now, refs := e.rec.Snapshot, []snapshot.Ref{}
	if e.rec.replicable() {
		refs = append(refs, *now)
	}
	for _, k := range e.rec.Checkpoints {
		if !k.Fresh {
			refs = append(refs, k.Snapshot)
		}
	}
	e.mu.Unlock()
	if now == nil {
		return
	}
	counted, found, total := c.basePacks(), map[snapshot.ID]snapshot.Footprint{}, int64(0)
	for _, ref := range refs {
		if _, twice := found[ref.ID]; twice {
			continue
		}
		f, ok := e.footprints[ref.ID]
		if !ok {
			var err error
			if f, err = c.cfg.Snapshots.Footprint(ctx, ref, func(snapshot.ID) bool { return false }); err != nil {
				c.log.Debug("what a sandbox stores is not known", keySandbox, e.id, keySnapshot, ref.ID, keyError, err)
				return // a later snapshot or checkpoint comes here again
			}
		}
		found[ref.ID] = f
		total += f.RecordBytes
		for _, p := range f.Packs {
			if !has(counted, p.ID) {
				counted[p.ID] = struct{}{}
				total += p.Bytes
			}
		}
	}
	e.footprints = found
	e.stores(now.ID, total)
}

// account brings the usage of next, which is to follow the entry's record, up
// to date. A machine that is found to have ended may have done so while no daemon
// was there: nobody knows when, so the time before this core began is nobody's.
func (c *Core) account(e *entry, next *record) {
	e.mu.Lock()
	found := e.measured
	e.mu.Unlock()
	found.addTo(next)
	before := e.rec
	if next.State == StateFailed && before.State.awake() && before.Since.Before(c.started) {
		before.Since = c.started
	}
	next.moved(before, time.Now().UTC())
}
