package e2e

import (
	"cmp"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestLongHistory: over many cycles, parked and not, memory is exact, and
// compactions behind the sandbox's back keep packs and bytes bounded.
func TestLongHistory(t *testing.T) {
	const cycles = 24
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 5, 8000)
	first := srv.Get("/sum")
	last := first
	for cycle := 1; cycle <= cycles; cycle++ {
		hibernate(t, d, id, cycle%2 == 0)
		now := srv.Get("/") // wakes it
		if now.PID != first.PID || now.Counter < last.Counter {
			t.Fatalf("cycle %d: the server says %+v, before %+v", cycle, now, last)
		}
		last = now
	}
	hibernate(t, d, id, false)
	// Without compactions there would be a pack for each cycle.
	hibtest.Eventually(t, "few packs, well filled", func() bool {
		f, err := footprint(t, d, id) // fails if a compaction comes in between
		if err == nil && len(f.Packs) <= cycles/2 && f.StoredBytes() <= 2*f.LiveBytes {
			t.Logf("after %d cycles: %d packs, %d bytes live, %d stored", cycles, len(f.Packs), f.LiveBytes, f.StoredBytes())
			return true
		}
		return false
	})
	d.Restart()
	if got := srv.Get("/sum"); got.PID != first.PID || got.Sum != srv.WantSum() || got.Counter < last.Counter {
		t.Errorf("the server says %+v, before %+v; its sum should be %d", got, last, srv.WantSum())
	}
	d.Hib("store", "verify")
}

// hibernate hibernates a sandbox, and keeps its machine parked or not.
func hibernate(t *testing.T, d *hibtest.Daemon, id string, park bool) {
	t.Helper()
	c, err := client.New(d.URL, d.Key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.HibernateWith(t.Context(), id, api.HibernateRequest{NoPark: !park}); err != nil {
		t.Fatal(err)
	}
}

// footprint measures the sandbox's snapshot, whose oldest pack is its template's.
func footprint(t *testing.T, d *hibtest.Daemon, id string) (f snapshot.Footprint, err error) {
	t.Helper()
	store, err := disk.Open(filepath.Join(d.Data, "store"))
	if err != nil {
		return f, err
	}
	r := snapshot.NewRepository(store)
	ref, err := r.Find(t.Context(), snapshot.ID(d.Inspect(id).Snapshot.ID))
	if err != nil {
		return f, err
	}
	packs, err := r.Packs(t.Context(), ref)
	if err != nil {
		return f, err
	}
	oldest := slices.MinFunc(packs, func(a, b snapshot.Pack) int { return cmp.Compare(a.ID, b.ID) })
	return r.Footprint(t.Context(), ref, func(pack snapshot.ID) bool { return pack == oldest.ID })
}
