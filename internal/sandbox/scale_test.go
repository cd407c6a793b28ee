package sandbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// fill makes n sandboxes in standby of the one that is there, in a catalog. ref
// is the snapshot of each.
func fill(t testing.TB, from, to sandbox.Catalog, n int, ref func(i int) snapshot.Ref) {
	t.Helper()
	for _, kind := range []string{"host", "template"} {
		records, err := from.List(t.Context(), kind)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			if _, err := to.Put(t.Context(), kind, r.Key, r.Value, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	records, err := from.List(t.Context(), "sandbox")
	if err != nil || len(records) != 1 {
		t.Fatalf("%d sandboxes, %v", len(records), err)
	}
	var rec map[string]any
	if err := json.Unmarshal(records[0].Value, &rec); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		id := fmt.Sprintf("sandbox%013d", i)
		rec["id"], rec["name"], rec["snapshot"] = id, fmt.Sprintf("name-%d", i), ref(i)
		value, err := json.Marshal(rec)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := to.Put(t.Context(), "name", rec["name"].(string), []byte(id), 0); err != nil {
			t.Fatal(err)
		}
		if _, err := to.Put(t.Context(), "sandbox", id, value, 0); err != nil {
			t.Fatal(err)
		}
	}
}

// oneAsleep returns a host with one sandbox in standby whose daemon is dead.
func oneAsleep(t testing.TB) (*host, snapshot.Ref) {
	t.Helper()
	h := newHost(t)
	s := h.hibernate(h.create().ID)
	h.core.Close()
	h.d.Kill()
	return h, snapshot.Ref{ID: s.Snapshot.ID, Manifest: "manifest of " + string(s.Snapshot.ID)}
}

// TestSleepersCostNothing: a start, a listing and a look at one read no
// snapshot, and nothing runs on their account.
func TestSleepersCostNothing(t *testing.T) {
	const n = 1000
	h, ref := oneAsleep(t)
	var many sandboxtest.World
	fill(t, &h.w.Catalog, &many.Catalog, n, func(int) snapshot.Ref { return ref })
	h.w.Truth = &many.Catalog
	begun := runtime.NumGoroutine()
	h.options = []func(*sandbox.Config){func(c *sandbox.Config) { c.Catalog = &many.Catalog }}
	var mu sync.Mutex
	steps := map[string]int{}
	h.d, h.hook = h.w.Daemon(), new(hook)
	h.d.Hook = func(_ context.Context, s sandboxtest.Step) error {
		mu.Lock()
		defer mu.Unlock()
		steps[s.Name]++
		return nil
	}
	cfg := h.d.Config()
	cfg.Catalog, cfg.CollectDelay = &many.Catalog, patience
	core, err := sandbox.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	h.core = core
	if list := h.list(); len(list) != n {
		t.Fatalf("%d sandboxes", len(list))
	}
	h.get("name-17")
	mu.Lock()
	defer mu.Unlock()
	delete(steps, "orphans")
	if len(steps) != 0 {
		t.Errorf("it took steps: %v", steps)
	}
	if more := runtime.NumGoroutine() - begun; more > 10 {
		t.Errorf("%d goroutines more than without them", more)
	}
}

// BenchmarkStandby measures a daemon with many sandboxes in standby, whose
// snapshots and catalog are on the disk.
func BenchmarkStandby(b *testing.B) {
	for _, n := range []int{1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) { benchmarkStandby(b, n) })
	}
}

func benchmarkStandby(b *testing.B, n int) {
	dir := b.TempDir()
	store, err := disk.Open(filepath.Join(dir, "store"))
	if err != nil {
		b.Fatal(err)
	}
	repo := snapshot.NewRepository(store)
	// A few snapshots stand for all: what is measured is how often they are read.
	refs := make([]snapshot.Ref, 16)
	for i := range refs {
		refs[i] = capture(b, repo)
	}
	h, _ := oneAsleep(b)
	cat, err := catalog.Open(filepath.Join(dir, "catalog.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer cat.Close()
	fill(b, &h.w.Catalog, cat, n, func(i int) snapshot.Ref { return refs[i%len(refs)] })
	cfg := h.w.Daemon().Config()
	cfg.Catalog, cfg.CollectDelay = cat, patience
	cfg.Snapshots = measured{cfg.Snapshots, sandbox.FromRepository(repo, store)}
	start := func() *sandbox.Core {
		core, err := sandbox.New(context.Background(), cfg)
		if err != nil {
			b.Fatal(err)
		}
		return core
	}
	b.Run("start", func(b *testing.B) {
		for b.Loop() {
			core := start()
			b.StopTimer()
			core.Close()
			b.StartTimer()
		}
	})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	core := start()
	defer core.Close()
	runtime.GC()
	runtime.ReadMemStats(&after)
	for name, f := range map[string]func() error{
		"list":   func() error { _, err := core.List(b.Context()); return err },
		"get":    func() error { _, err := core.Get(b.Context(), "name-17"); return err },
		"host":   func() error { _, err := core.Host(b.Context()); return err },
		"status": func() error { _, err := core.StoreStatus(b.Context()); return err },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := f(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(n), "heap-B/sandbox")
		})
	}
}

// capture takes a snapshot with a manifest of a usual size: two thousand runs.
func capture(b *testing.B, repo *snapshot.Repository) snapshot.Ref {
	b.Helper()
	ram := make([]byte, 4000*page.Size)
	for i := 0; i < len(ram); i += 2 * page.Size {
		ram[i] = byte(i/page.Size) | 1
	}
	ref, _, err := repo.Capture(b.Context(), snapshot.CaptureInput{ID: snapshot.NewID(), MemoryBytes: int64(len(ram)), State: []byte("state"), RAM: bytes.NewReader(ram)})
	if err != nil {
		b.Fatal(err)
	}
	return ref
}

// measured is a Repository that measures with another one.
type measured struct {
	sandbox.Repository
	real sandbox.Repository
}

func (m measured) Footprint(ctx context.Context, ref snapshot.Ref, shared func(snapshot.ID) bool) (snapshot.Footprint, error) {
	return m.real.Footprint(ctx, ref, shared)
}
