package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/page"
)

func TestFullImage(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(600) // more than a chunk
	for _, n := range []int{0, 1, 17, 300, 599} {
		m.fill(n, byte(n+1))
	}
	m.dirty = nil // all
	ref, meta := m.capture(t, r, nil)
	if meta.ID != ref.ID || meta.Parent != "" || meta.Attempt != 7 || meta.Generation != 3 || meta.ControlToken != "secret" ||
		meta.Key["cpu"] != "x" || meta.CreatedAt.IsZero() || meta.MemoryBytes != 600*page.Size || meta.DirtyBytes != 600*page.Size {
		t.Errorf("metadata %+v", meta)
	}
	var stored int64
	for _, size := range files(t, r) {
		stored += size
	}
	if meta.StoredBytes != stored {
		t.Errorf("stored_bytes is %d, the files have %d", meta.StoredBytes, stored)
	}
	s := open(t, r, ref)
	if got := s.Metadata(); fmt.Sprint(got) != fmt.Sprint(meta) {
		t.Errorf("metadata read back %+v, want %+v", got, meta)
	}
	same(t, s, m.ram)
	if state, err := s.State(t.Context()); err != nil || string(state) != "registers" {
		t.Errorf("State = %q, %v", state, err)
	}
	if n := s.packs[0].Summary().Pages; n != 5 {
		t.Errorf("the pack has %d pages, want 5: zeros are not stored", n)
	}
	if got, err := r.Find(t.Context(), ref.ID); err != nil || got != ref {
		t.Errorf("Find = %v, %v", got, err)
	}
	noFaults(t, r)
}

func TestChildStoresOnlyWhatChanged(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(100)
	for n := range 10 {
		m.fill(n, 1)
	}
	parent, _ := m.capture(t, r, nil)
	p := open(t, r, parent)

	m.fill(2, 1)  // equal
	m.fill(3, 2)  // changed
	m.fill(4, 0)  // became zero
	m.fill(50, 0) // is zero still
	m.fill(60, 5) // was zero
	ref, meta := m.capture(t, r, p)
	if meta.Parent != parent.ID || meta.DirtyBytes != 5*page.Size {
		t.Errorf("metadata %+v", meta)
	}
	s := open(t, r, ref)
	same(t, s, m.ram)
	if n := s.packs[1].Summary().Pages; n != 2 {
		t.Errorf("the pack has %d pages, want 2", n)
	}
	// Self-contained: the parent's manifest is not needed.
	p.Close()
	if err := r.Delete(t.Context(), parent.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Collect(t.Context(), []ID{ref.ID}, nil); err != nil {
		t.Fatal(err)
	}
	same(t, open(t, r, ref), m.ram)
	noFaults(t, r)
}

func TestNoPack(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(10)
	ref, _ := m.capture(t, r, nil) // all zero
	s := open(t, r, ref)
	same(t, s, m.ram)
	m.fill(3, 0)
	child, _ := m.capture(t, r, s)
	same(t, open(t, r, child), m.ram)
	for key := range files(t, r) {
		if strings.HasPrefix(key, packPrefix) {
			t.Errorf("%s was written for no pages", key)
		}
	}
}

func TestUnusedPacksDropOut(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(4)
	m.fill(0, 1)
	ref, _ := m.capture(t, r, nil)
	for v := range byte(5) {
		m.fill(0, v+2)
		s := open(t, r, ref)
		ref, _ = m.capture(t, r, s)
		s.Close()
	}
	s := open(t, r, ref)
	if len(s.packs) != 1 {
		t.Errorf("%d packs for one page", len(s.packs))
	}
	same(t, s, m.ram)
}

// Every capture changes other pages, so that without a bound each would add a
// pack for ever.
func TestNumberOfPacksIsBounded(t *testing.T) {
	r, _ := newRepository(t)
	const generations = maxPacks + 20
	m := newMachine(3 * generations)
	ref, _ := m.capture(t, r, nil)
	for g := range generations {
		for i := range 1 + g%3 {
			m.fill(3*g+i, byte(g+1))
		}
		s := open(t, r, ref)
		ref, _ = m.capture(t, r, s)
		s.Close()
		s = open(t, r, ref)
		if len(s.packs) > maxPacks {
			t.Fatalf("generation %d: %d packs", g, len(s.packs))
		}
		same(t, s, m.ram)
		s.Close()
	}
	noFaults(t, r)
	if s := open(t, r, ref); len(s.packs) != maxPacks {
		t.Errorf("%d packs; not more should be copied than is needed", len(s.packs))
	}
}

// What the parent lost, but the guest still has, is stored again.
func TestCaptureHealsDirtyPages(t *testing.T) {
	r, dir := newRepository(t)
	m := newMachine(4)
	m.fill(1, 1)
	parent, _ := m.capture(t, r, nil)
	p := open(t, r, parent)
	damage(t, dir, packKey(parent.ID), func(b []byte) []byte { b[4096+9] ^= 1; return b })
	m.fill(1, 1) // equal to what the parent should be
	ref, _ := m.capture(t, r, p)
	same(t, open(t, r, ref), m.ram)
}

func TestCaptureRefusesBadInput(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(4)
	ref, _ := m.capture(t, r, nil)
	p := open(t, r, ref)
	before := files(t, r)
	short := errors.New("short")
	tests := map[string]func(in *CaptureInput){
		"id":                 func(in *CaptureInput) { in.ID = "../../x" },
		"no memory":          func(in *CaptureInput) { in.MemoryBytes = 0 },
		"half a page":        func(in *CaptureInput) { in.MemoryBytes = 100 },
		"too much memory":    func(in *CaptureInput) { in.MemoryBytes = 1 << 60 },
		"other memory":       func(in *CaptureInput) { in.MemoryBytes = 8 * page.Size },
		"dirty outside":      func(in *CaptureInput) { in.Dirty = []page.Run{{First: 3, Count: 2}} },
		"dirty far outside":  func(in *CaptureInput) { in.Dirty = []page.Run{{First: 1 << 62, Count: 1}} },
		"dirty overflows":    func(in *CaptureInput) { in.Dirty = []page.Run{{First: 1, Count: 1<<64 - 1}} },
		"state too large":    func(in *CaptureInput) { in.State = make([]byte, maxState+1) },
		"memory not there":   func(in *CaptureInput) { in.RAM = bytes.NewReader(nil); in.Dirty = []page.Run{{Count: 1}} },
		"memory unreadable":  func(in *CaptureInput) { in.RAM = failingReader{short}; in.Dirty = []page.Run{{Count: 1}} },
		"metadata too large": func(in *CaptureInput) { in.Metadata.ControlToken = strings.Repeat("x", maxMetadata) },
		"id taken":           func(in *CaptureInput) { in.ID = ref.ID },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			in := m.input(p)
			change(&in)
			if _, _, err := r.Capture(t.Context(), in); err == nil {
				t.Error("it was taken")
			} else if name == "memory unreadable" && !errors.Is(err, short) {
				t.Errorf("Capture: %v", err)
			}
			if after := files(t, r); fmt.Sprint(after) != fmt.Sprint(before) {
				t.Errorf("the store holds %v, before %v", after, before)
			}
		})
	}
	same(t, open(t, r, ref), m.ram)
}

type failingReader struct{ err error }

func (r failingReader) ReadAt([]byte, int64) (int, error) { return 0, r.err }

// Whatever fails, nothing is left behind, the cause is told, and a second
// attempt works.
func TestFailedCaptureLeavesNothing(t *testing.T) {
	for _, prefix := range []string{packPrefix, statePrefix, manifestPrefix} {
		for _, op := range []blobtest.Op{blobtest.OpPut, blobtest.OpWrite, blobtest.OpPublish} {
			t.Run(fmt.Sprintf("%s %s", op, prefix), func(t *testing.T) {
				r, _ := newRepository(t)
				m := newMachine(64)
				m.fill(1, 1)
				ref, _ := m.capture(t, r, nil)
				p := open(t, r, ref)
				m.fill(2, 2)
				before := files(t, r)
				faulty := &blobtest.Faulty{Store: r.store, Fault: func(o blobtest.Op, key string) error {
					if o == op && strings.HasPrefix(key, prefix) {
						return blob.ErrNoSpace
					}
					return nil
				}}
				if _, _, err := NewRepository(faulty).Capture(t.Context(), m.input(p)); !errors.Is(err, blob.ErrNoSpace) {
					t.Errorf("Capture: %v", err)
				}
				if after := files(t, r); fmt.Sprint(after) != fmt.Sprint(before) {
					t.Errorf("the store holds %v, before %v", after, before)
				}
				second, _ := m.capture(t, r, p)
				same(t, open(t, r, second), m.ram)
			})
		}
	}
}

func TestCancelledCaptureLeavesNothing(t *testing.T) {
	for _, prefix := range []string{packPrefix, statePrefix, manifestPrefix} {
		r, _ := newRepository(t)
		m := newMachine(64)
		m.fill(1, 1)
		ctx, cancel := context.WithCancel(t.Context())
		faulty := &blobtest.Faulty{Store: r.store, Fault: func(o blobtest.Op, key string) error {
			if o == blobtest.OpPublish && strings.HasPrefix(key, prefix) {
				cancel()
			}
			return nil
		}}
		if _, _, err := NewRepository(faulty).Capture(ctx, m.input(nil)); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled at %s: %v", prefix, err)
		}
		if left := files(t, r); len(left) != 0 {
			t.Errorf("cancelled at %s: left %v", prefix, left)
		}
	}
}

// sparse is a large memory of which every step-th MiB is random.
type sparse struct{ step int64 }

func (s sparse) ReadAt(p []byte, off int64) (int, error) {
	if off>>20%s.step != 0 {
		clear(p)
		return len(p), nil
	}
	for i := range len(p) / page.Size {
		rand.NewChaCha8([32]byte{byte(off >> 12), byte(off >> 20), byte(off >> 28), byte(i)}).Read(p[i*page.Size : (i+1)*page.Size])
	}
	return len(p), nil
}

func TestLargeMemoryNeedsLittle(t *testing.T) {
	if testing.Short() {
		t.Skip("reads 4 GiB")
	}
	r, _ := newRepository(t)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	ref, meta, err := r.Capture(t.Context(), CaptureInput{ID: NewID(), MemoryBytes: 4 << 30, RAM: sparse{64}})
	if err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 32<<20 {
		t.Errorf("%d MiB were allocated", n>>20)
	}
	if meta.StoredBytes < 64<<20 || meta.StoredBytes > 66<<20 {
		t.Errorf("%d bytes stored", meta.StoredBytes)
	}
	s := open(t, r, ref)
	for off := int64(0); off < 4<<30; off += 1 << 28 {
		got, want := make([]byte, 1<<20), make([]byte, 1<<20)
		sparse{64}.ReadAt(want, off)
		if _, err := s.ReadAt(got, off); err != nil && err != io.EOF || !bytes.Equal(got, want) {
			t.Errorf("read at %d: %v", off, err)
		}
	}
}
