package pager

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
)

const testPages = testSize / page.Size

// mappedSlot is a slot bound to src that a child has mapped.
func mappedSlot(t *testing.T, src sourceFunc) (*Slot, *child) {
	t.Helper()
	l := newTestSlot(t, testSize)
	if err := l.Bind(src); err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: testSize})
	return l, c
}

func TestPrefetchedBytesNeedNoRequest(t *testing.T) {
	l, c := mappedSlot(t, pattern(testSize).ReadAt)
	runs := []page.Run{{First: 200, Count: 100}, {First: 3, Count: 1}, {First: testPages - 5, Count: 5}}
	n, err := l.Prefetch(t.Context(), runs)
	if err != nil || n != int64(page.Total(runs))*page.Size {
		t.Errorf("%d bytes, %v", n, err)
	}
	for _, r := range runs {
		if c.must(command{Op: "read", Off: r.Offset(), Len: r.Bytes()}).Sum != pattern(testSize).sum(r.Offset(), r.Bytes()) {
			t.Errorf("the bytes of %v differ", r)
		}
	}
	if s, touched := l.Stats(), l.Touched(); s.Reads != 0 || len(touched) != 0 {
		t.Errorf("%d requests were made, for %v", s.Reads, touched)
	}
}

// TestPrefetchRacesReads: faults of another process and pushes of the same
// pages, in both directions, see the same bytes and come to an end.
func TestPrefetchRacesReads(t *testing.T) {
	for range 5 {
		l, c := mappedSlot(t, pattern(testSize).ReadAt)
		var runs []page.Run
		for p := uint64(testPages); p > 0; p -= 64 {
			runs = append(runs, page.Run{First: p - 64, Count: 64})
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				if n, err := l.Prefetch(t.Context(), runs); n != testSize || err != nil {
					t.Errorf("%d bytes, %v", n, err)
				}
			})
		}
		const part = testSize / 64
		for off := int64(0); off < testSize; off += part {
			if c.must(command{Op: "read", Off: off, Len: part}).Sum != pattern(testSize).sum(off, part) {
				t.Fatalf("the bytes at %d differ", off)
			}
		}
		wg.Wait()
		if err := l.Err(); err != nil {
			t.Error(err)
		}
	}
}

func TestPrefetchEnds(t *testing.T) {
	broken := errors.New("broken on purpose")
	all := []page.Run{{First: 0, Count: testPages}}
	t.Run("unbound", func(t *testing.T) {
		if n, err := newTestSlot(t, testSize).Prefetch(t.Context(), all); n != 0 || err == nil {
			t.Errorf("%d bytes, %v", n, err)
		}
	})
	t.Run("with its context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var calls atomic.Int32
		l, _ := mappedSlot(t, func(p []byte, off int64) (int, error) {
			if calls.Add(1) == 3 {
				cancel()
			}
			return pattern(testSize).ReadAt(p, off)
		})
		if n, err := l.Prefetch(ctx, all); n != 3*pushBytes || !errors.Is(err, context.Canceled) {
			t.Errorf("%d bytes, %v", n, err)
		}
	})
	t.Run("where the source fails", func(t *testing.T) {
		l, c := mappedSlot(t, func(p []byte, off int64) (int, error) {
			if off >= testSize/2 {
				return 0, broken
			}
			return pattern(testSize).ReadAt(p, off)
		})
		n, err := l.Prefetch(t.Context(), all)
		if n != testSize/2 || !errors.Is(err, broken) || !strings.Contains(err.Error(), "slot ram") {
			t.Errorf("%d bytes, %v", n, err)
		}
		if err := l.Err(); err != nil {
			t.Errorf("nobody read there, yet the slot failed: %v", err)
		}
		if !c.try(command{Op: "read", Off: testSize / 2, Len: 1}).Fault {
			t.Error("what could not be prefetched was read")
		}
	})
	t.Run("when the pager is closed", func(t *testing.T) {
		s := mountTest(t)
		l, err := s.NewSlot("ram", testSize)
		if err == nil {
			err = l.Bind(Zero)
		}
		if err == nil {
			err = s.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		if n, err := l.Prefetch(t.Context(), all); n != 0 || !errors.Is(err, ErrClosed) {
			t.Errorf("%d bytes, %v", n, err)
		}
	})
}

func TestTouched(t *testing.T) {
	l := newSlot("ram", 1<<40, 1)
	if err := l.Bind(Zero); err != nil {
		t.Fatal(err)
	}
	read := func(first, pages int64) {
		t.Helper()
		if _, err := l.read(make([]byte, pages*page.Size), first*page.Size); err != nil {
			t.Fatal(err)
		}
	}
	read(8, 2)
	read(3, 1)
	read(7, 4) // two of them again
	want := []page.Run{{First: 8, Count: 2}, {First: 3, Count: 1}, {First: 7, Count: 1}, {First: 10, Count: 1}}
	got := l.Touched()
	if !slices.Equal(got, want) {
		t.Errorf("touched are %v, want %v", got, want)
	}
	got[0].Count = 99
	if !slices.Equal(l.Touched(), want) {
		t.Error("the answer shares memory with the record")
	}
	for first := int64(100); first < 100+maxRecorded; first += 1024 {
		read(first, 1024)
	}
	if n := page.Total(l.Touched()); n != maxRecorded {
		t.Errorf("%d pages are recorded, want %d", n, maxRecorded)
	}
}
