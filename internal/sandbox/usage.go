package sandbox

import "time"

// Usage sums up what a sandbox used, up to the last change of its state.
type Usage struct {
	Awake   time.Duration `json:"awake"`   // with a machine that runs, from the moment it ran
	Standby time.Duration `json:"standby"` // in standby, or failed with a snapshot that is kept
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
	rec.Usage, rec.Since = from.usedAt(now), now
}
