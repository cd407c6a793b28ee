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
		l.Expect(runs)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				if _, err := l.Prefetch(t.Context(), runs); err != nil {
					t.Error(err)
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
		if s := l.Stats(); s.DemandPages+s.PushedPages != testPages || s.LatePages != s.DemandPages {
			t.Errorf("of %d pages: %+v", testPages, s)
		}
	}
}

// TestPagesAreToldApart: what was expected, pushed and read in time or not.
func TestPagesAreToldApart(t *testing.T) {
	l, c := mappedSlot(t, pattern(testSize).ReadAt)
	l.Expect([]page.Run{{First: 0, Count: 64}})
	read := func(first uint64) { c.must(command{Op: "read", Off: int64(first) * page.Size, Len: page.Size}) }
	read(40)
	late := l.Stats()
	if late.DemandPages == 0 || late.LatePages != late.DemandPages || late.PushedPages != 0 {
		t.Errorf("a page that was read before it was pushed: %+v", late)
	}
	n, err := l.Prefetch(t.Context(), []page.Run{{First: 0, Count: 64}})
	if want := 64 - late.DemandPages; err != nil || n != want*page.Size || l.Stats().PushedPages != want {
		t.Errorf("%d bytes were pushed, %v, want %d pages", n, err, want)
	}
	read(3)
	if s := l.Stats(); s.DemandPages != late.DemandPages {
		t.Errorf("a page that was pushed was read: %+v", s)
	}
	read(1000)
	if s := l.Stats(); s.DemandPages == late.DemandPages || s.LatePages != late.LatePages {
		t.Errorf("a page that was not expected: %+v", s)
	}
	touched := page.Normalize(l.Touched())
	if overlap := page.Total(touched) + page.Total(l.Pushed()) - page.Total(page.Normalize(append(touched, l.Pushed()...))); overlap != 0 {
		t.Errorf("%d pages were read and pushed: %v, %v", overlap, touched, l.Pushed())
	}
	if n, err := l.Prefetch(t.Context(), []page.Run{{First: 0, Count: 64}}); n != 0 || err != nil {
		t.Errorf("%d bytes were pushed again, %v", n, err)
	}
}

// fetching is a source that fetches in an order of its own.
type fetching struct{ sourceFunc }

func (f fetching) Fetch(_ context.Context, runs []page.Run, yield func(off int64, p []byte) error) error {
	for _, r := range slices.Backward(runs) {
		p := make([]byte, r.Bytes())
		if _, err := f.ReadAt(p, r.Offset()); err != nil {
			return err
		}
		if err := yield(r.Offset(), p); err != nil {
			return err
		}
	}
	return nil
}

func TestPrefetchLetsTheSourceFetch(t *testing.T) {
	l := newTestSlot(t, testSize)
	if err := l.Bind(fetching{pattern(testSize).ReadAt}); err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: testSize})
	runs := []page.Run{{First: 7, Count: 1}, {First: 100, Count: 300}}
	if n, err := l.Prefetch(t.Context(), runs); n != 301*page.Size || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	for _, r := range runs {
		if c.must(command{Op: "read", Off: r.Offset(), Len: r.Bytes()}).Sum != pattern(testSize).sum(r.Offset(), r.Bytes()) {
			t.Errorf("the bytes of %v differ", r)
		}
	}
	if s := l.Stats(); s.Reads != 0 {
		t.Errorf("%d requests were made", s.Reads)
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
	l := newSlot("ram", 1<<30, 1)
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
