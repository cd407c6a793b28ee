package sandbox

import (
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

func TestMeterAddsStretches(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	m := meter{Since: at}
	seen := at.Add(-time.Hour)
	for _, step := range []struct {
		from, to State
		after    time.Duration
	}{
		{StateCreating, StateRunning, time.Second}, // nobody's yet
		{StateRunning, StateHibernating, 10 * time.Second},
		{StateHibernating, StateStandby, time.Second},
		{StateStandby, StateResuming, time.Hour},
		{StateResuming, StateRunning, time.Second},
		{StateRunning, StateFailed, 3 * time.Second},
		{StateFailed, StateResuming, time.Hour}, // nobody's
		{StateResuming, StateRunning, -time.Minute},
	} {
		at = at.Add(step.after)
		m.leave(step.from, step.to, at, seen)
	}
	if m.AwakeMS != 15_000 || m.StandbyMS != time.Hour.Milliseconds() {
		t.Errorf("awake for %d ms, in standby for %d ms", m.AwakeMS, m.StandbyMS)
	}
}

// TestMeterOfOneThatEndedUnseen does not bill the time in which no daemon
// looked at a machine that is found dead.
func TestMeterOfOneThatEndedUnseen(t *testing.T) {
	begun := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	started := begun.Add(24 * time.Hour)
	for to, want := range map[State]time.Duration{StateFailed: time.Second, StateHibernating: 24*time.Hour + time.Second} {
		m := meter{Since: begun}
		m.leave(StateRunning, to, started.Add(time.Second), started)
		if m.AwakeMS != want.Milliseconds() {
			t.Errorf("to %s: %d ms, want %s", to, m.AwakeMS, want)
		}
	}
	var unknown meter // of a record that an older daemon wrote
	unknown.leave(StateRunning, StateStandby, started, begun)
	if unknown.AwakeMS != 0 || !unknown.Since.Equal(started) {
		t.Errorf("%+v", unknown)
	}
}

func TestMeterCountsEachMachineOnce(t *testing.T) {
	var rec record
	for _, total := range []time.Duration{time.Second, time.Second, 3 * time.Second} {
		rec.Usage.useCPU(total)
	}
	rec.bind(shim.Handle{VM: "another"})
	rec.Usage.useCPU(2 * time.Second)
	if rec.Usage.CPUMS != 5000 {
		t.Errorf("%d ms", rec.Usage.CPUMS)
	}
}

func TestMeasuredBytesAreOfTheirSnapshot(t *testing.T) {
	rec := record{Snapshot: &snapshot.Ref{ID: "a"}, Usage: meter{StoredBytes: 1}}
	measured{stored: 5, of: "b"}.addTo(&rec)
	if rec.Usage.StoredBytes != 1 {
		t.Error("bytes of another snapshot were taken")
	}
	measured{stored: 5, of: "a"}.addTo(&rec)
	if rec.Usage.StoredBytes != 5 {
		t.Error("bytes were not taken")
	}
}
