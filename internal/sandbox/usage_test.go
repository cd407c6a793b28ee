package sandbox

import (
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// TestOneThatEndedUnseen does not bill the time in which no daemon looked at a
// machine that is found dead.
func TestOneThatEndedUnseen(t *testing.T) {
	now := time.Now()
	c := &Core{started: now.Add(-time.Minute)}
	for to, want := range map[State]time.Duration{StateFailed: time.Minute, StateStandby: 24 * time.Hour} {
		e := &entry{rev: 1, rec: record{State: StateHibernating, Since: now.Add(-24 * time.Hour)}}
		next := e.rec
		next.State = to
		c.account(e, &next)
		if got := next.Usage.Awake - want; got < 0 || got > time.Second {
			t.Errorf("to %s: %s, want %s", to, next.Usage.Awake, want)
		}
	}
}

func TestProcessorTimeCountsOnce(t *testing.T) {
	var rec record
	for _, total := range []time.Duration{time.Second, time.Second, 3 * time.Second} {
		rec.useCPU(total)
	}
	rec.bind(shim.Handle{VM: "another"})
	rec.useCPU(2 * time.Second)
	if rec.Usage.CPU != 5*time.Second {
		t.Error(rec.Usage.CPU)
	}
}

func TestMeasuredBytesAreOfTheirSnapshot(t *testing.T) {
	rec := record{Snapshot: &snapshot.Ref{ID: "a"}, Usage: Usage{StoredBytes: 1}}
	measured{stored: 5, of: "b"}.addTo(&rec)
	if rec.Usage.StoredBytes != 1 {
		t.Error("bytes of another snapshot were taken")
	}
	measured{stored: 5, of: "a"}.addTo(&rec)
	if rec.Usage.StoredBytes != 5 {
		t.Error("bytes were not taken")
	}
}
