package snapshot

import (
	"bytes"
	"context"
	"flag"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/page"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newRepository returns a repository on a disk store, and the store's folder.
func newRepository(t testing.TB) (*Repository, string) {
	t.Helper()
	dir := t.TempDir()
	store, err := disk.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return NewRepository(store), dir
}

// machine stands for a guest's memory.
type machine struct {
	ram   []byte
	dirty []page.Run
}

func newMachine(pages int) *machine { return &machine{ram: make([]byte, pages*page.Size)} }

// fill writes v all over page n.
func (m *machine) fill(n int, v byte) {
	copy(m.ram[n*page.Size:(n+1)*page.Size], bytes.Repeat([]byte{v}, page.Size))
	m.dirty = append(m.dirty, page.Run{First: uint64(n), Count: 1})
}

// capture takes a snapshot of the machine; parent may be nil. The machine then
// counts as clean.
func (m *machine) capture(t testing.TB, r *Repository, parent *Snapshot) (Ref, Metadata) {
	t.Helper()
	ref, meta, err := r.Capture(t.Context(), m.input(parent))
	if err != nil {
		t.Fatal(err)
	}
	m.dirty = nil
	return ref, meta
}

func (m *machine) input(parent *Snapshot) CaptureInput {
	return CaptureInput{
		ID:          NewID(),
		Parent:      parent,
		Metadata:    Metadata{Attempt: 7, Generation: 3, Key: map[string]string{"cpu": "x"}, ControlToken: "secret"},
		MemoryBytes: int64(len(m.ram)),
		State:       []byte("registers"),
		RAM:         bytes.NewReader(m.ram),
		Dirty:       m.dirty,
	}
}

func open(t testing.TB, r *Repository, ref Ref) *Snapshot {
	t.Helper()
	s, err := r.Open(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// same checks that the snapshot's memory image is want.
func same(t testing.TB, s *Snapshot, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if n, err := s.ReadAt(got, 0); n != len(got) || err != nil {
		t.Fatalf("read of the whole image = %d, %v", n, err)
	}
	if !bytes.Equal(got, want) {
		for i := range len(got) / page.Size {
			if !bytes.Equal(got[i*page.Size:(i+1)*page.Size], want[i*page.Size:(i+1)*page.Size]) {
				t.Fatalf("page %d differs: it begins with %x instead of %x", i, got[i*page.Size], want[i*page.Size])
			}
		}
	}
}

// files returns the sizes of the objects in a store's folder.
func files(t testing.TB, r *Repository) map[string]int64 {
	t.Helper()
	out := make(map[string]int64)
	for info, err := range r.store.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		out[info.Key] = info.Size
	}
	return out
}

// noFaults checks that everything in the store verifies.
func noFaults(t testing.TB, r *Repository) {
	t.Helper()
	_, _, faults, err := r.Verify(t.Context(), nil)
	if err != nil || len(faults) > 0 {
		t.Fatalf("Verify: %v, faults %v", err, faults)
	}
}

// damage changes a stored file behind the store's back.
func damage(t testing.TB, dir, key string, change func(b []byte) []byte) {
	t.Helper()
	path := filepath.Join(dir, key)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

// putRaw puts an object as it is.
func putRaw(t testing.TB, s blob.Store, key string, b []byte) {
	t.Helper()
	if _, err := s.Put(t.Context(), key, func(w io.Writer) error { _, err := w.Write(b); return err }); err != nil {
		t.Fatal(err)
	}
}

// distant is a store that lies so far away that each request takes a while.
type distant struct {
	blob.Store
	latency time.Duration

	requests, bytes atomic.Int64 // of reads
}

func (d *distant) Open(ctx context.Context, key string) (blob.Object, error) {
	time.Sleep(d.latency)
	o, err := d.Store.Open(ctx, key)
	if err != nil {
		return nil, err
	}
	return &distantObject{o, d}, nil
}

type distantObject struct {
	blob.Object
	d *distant
}

func (o *distantObject) Remote() bool { return true }

func (o *distantObject) ReadAt(p []byte, off int64) (int, error) {
	time.Sleep(o.d.latency)
	o.d.requests.Add(1)
	o.d.bytes.Add(int64(len(p)))
	return o.Object.ReadAt(p, off)
}
