package sandbox

import (
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Usage is what an operator would bill a sandbox by, since its creation.
type Usage struct {
	Awake       time.Duration // that a machine of it may have run
	Standby     time.Duration
	CPU         time.Duration // that its machines took, the VMM's own part included; of one that runs, as far as it was looked at
	StoredBytes int64         // that its snapshots hold in packs that no template shares
}

// meter is what a record keeps of a sandbox's usage. The durations do not have
// the present stretch: how long the sandbox has been in its state is added when
// it leaves it. So a daemon that dies loses nothing of a sandbox that goes on,
// and the present stretch of one that ends meanwhile.
type meter struct {
	AwakeMS   int64     `json:"awake_ms,omitempty"`
	StandbyMS int64     `json:"standby_ms,omitempty"`
	CPUMS     int64     `json:"cpu_ms,omitempty"`
	Since     time.Time `json:"since,omitzero"` // when the present stretch began

	CountedMS   int64 `json:"counted_ms,omitempty"`   // of the processor time of the machine that the handle names, what CPUMS has
	StoredBytes int64 `json:"stored_bytes,omitempty"` // see Usage
}

// stretch returns which sum the time in a state counts to, nil for none.
func (m *meter) stretch(s State) *int64 {
	switch s {
	case StateRunning, StateHibernating, StateResuming:
		return &m.AwakeMS
	case StateStandby:
		return &m.StandbyMS
	}
	return nil
}

// leave ends the stretch in the state from. A sandbox that has failed is known
// to have been there only since seen, when this core looked first: its machine
// may have ended while no daemon was there.
func (m *meter) leave(from, to State, now, seen time.Time) {
	begun := m.Since
	if to == StateFailed && begun.Before(seen) {
		begun = seen
	}
	if sum := m.stretch(from); sum != nil && !m.Since.IsZero() && now.After(begun) {
		*sum += now.Sub(begun).Milliseconds()
	}
	m.Since = now
}

// useCPU counts the processor time that the present machine took so far.
func (m *meter) useCPU(total time.Duration) {
	if ms := total.Milliseconds(); ms > m.CountedMS {
		m.CPUMS += ms - m.CountedMS
		m.CountedMS = ms
	}
}

// measured is what was found out about a sandbox beside its record. The next
// change puts it there.
type measured struct {
	cpu    time.Duration // that the machine took which is attached
	stored int64         // of the snapshot of, see Usage
	of     snapshot.ID
}

// usedCPU notes how much processor time the machine that is attached has taken
// since it was started.
func (e *entry) usedCPU(total time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.measured.cpu = max(e.measured.cpu, total)
}

// stores notes what a snapshot of the sandbox holds in packs that no template
// shares.
func (e *entry) stores(id snapshot.ID, bytes int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.measured.stored, e.measured.of = bytes, id
}

// meterUp brings the usage of next, which is to follow the entry's record, up
// to date.
func (c *Core) meterUp(e *entry, next *record) {
	e.mu.Lock()
	found := e.measured
	e.mu.Unlock()
	found.addTo(next)
	now := time.Now().UTC()
	switch {
	case e.rev == 0:
		next.Usage = meter{Since: now}
	case e.rec.State != next.State:
		next.Usage.leave(e.rec.State, next.State, now, c.started)
	}
}

// addTo puts what was measured into a record.
func (m measured) addTo(rec *record) {
	rec.Usage.useCPU(m.cpu)
	if rec.Snapshot != nil && rec.Snapshot.ID == m.of {
		rec.Usage.StoredBytes = m.stored
	}
}

// usage returns the usage up to now. e.mu is held.
func (e *entry) usage(now time.Time) Usage {
	rec := e.rec
	e.measured.addTo(&rec)
	rec.Usage.leave(rec.State, rec.State, now, time.Time{})
	u := rec.Usage
	return Usage{
		Awake: time.Duration(u.AwakeMS) * time.Millisecond, Standby: time.Duration(u.StandbyMS) * time.Millisecond,
		CPU: time.Duration(u.CPUMS) * time.Millisecond, StoredBytes: u.StoredBytes,
	}
}
