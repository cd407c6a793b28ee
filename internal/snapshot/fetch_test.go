package snapshot

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

// history captures a machine several times, so that its pages lie scattered in
// several packs, and returns the last snapshot.
func history(t testing.TB, r *Repository, m *machine, rnd *rand.Rand) Ref {
	t.Helper()
	pages := len(m.ram) / page.Size
	var parent *Snapshot
	var ref Ref
	for range 4 {
		for range pages / 6 {
			n := rnd.IntN(pages)
			m.fill(n, byte(rnd.IntN(4))) // also zeros
			m.ram[n*page.Size] *= byte(n)
		}
		ref, _ = m.capture(t, r, parent)
		parent = open(t, r, ref)
	}
	return ref
}

// recoded returns a repository with the same snapshots, all packs of which are compressed.
func recoded(t testing.TB, r *Repository) *Repository {
	t.Helper()
	far, _ := newRepository(t)
	for key := range files(t, r) {
		o, err := r.store.Open(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(key, packPrefix) {
			src, err := pack.Open(o, o.Size(), nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := far.store.Put(t.Context(), key, func(w io.Writer) error {
				_, err := pack.Recode(t.Context(), w, src, pack.Zstd)
				return err
			}); err != nil {
				t.Fatal(err)
			}
		} else {
			b, err := readAll(o, key, 1<<30)
			if err != nil {
				t.Fatal(err)
			}
			putRaw(t, far.store, key, b)
		}
		o.Close()
	}
	return far
}

// fetched collects what a Fetch yields, and checks that calls do not overlap and
// that no page comes twice.
type fetched struct {
	t     testing.TB
	mu    sync.Mutex
	image []byte
	got   []bool // pages
}

func newFetched(t testing.TB, size int) *fetched {
	return &fetched{t: t, image: make([]byte, size), got: make([]bool, size/page.Size)}
}

func (f *fetched) yield(off int64, p []byte) error {
	if !f.mu.TryLock() {
		f.t.Error("calls of yield overlap")
		return nil
	}
	defer f.mu.Unlock()
	if off%page.Size != 0 || len(p) == 0 || len(p)%page.Size != 0 {
		f.t.Errorf("%d bytes at %d are no pages", len(p), off)
	}
	for i := range len(p) / page.Size {
		n := int(off)/page.Size + i
		if f.got[n] {
			f.t.Errorf("page %d came twice", n)
		}
		f.got[n] = true
	}
	copy(f.image[off:], p)
	return nil
}

// check checks that the pages that came are those in runs, with the bytes of want.
func (f *fetched) check(runs []page.Run, want []byte) {
	f.t.Helper()
	wanted := make([]bool, len(f.got))
	for _, r := range runs {
		for n := r.First; n < min(r.End(), uint64(len(wanted))); n++ {
			wanted[n] = true
		}
	}
	for n := range wanted {
		if wanted[n] != f.got[n] {
			f.t.Errorf("page %d: wanted %v, came %v", n, wanted[n], f.got[n])
		}
		if at := n * page.Size; f.got[n] && !bytes.Equal(f.image[at:at+page.Size], want[at:at+page.Size]) {
			f.t.Errorf("page %d has wrong bytes", n)
		}
	}
}

func TestFetch(t *testing.T) {
	const pages = 1200
	for seed := range uint64(3) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		local, _ := newRepository(t)
		m := newMachine(pages)
		ref := history(t, local, m, rnd)
		far := recoded(t, local)
		noFaults(t, far)
		far = NewRepository(&distant{Store: far.store})
		var runs []page.Run
		for range rnd.IntN(200) {
			runs = append(runs, page.Run{First: uint64(rnd.IntN(pages)), Count: uint64(rnd.IntN(20))}) // overlapping, beyond the end
		}
		all := []page.Run{{First: 0, Count: pages}}
		for name, r := range map[string]*Repository{"local": local, "remote": far} {
			for _, runs := range [][]page.Run{nil, runs, all, {{First: pages + 5, Count: 3}, {First: 1 << 60, Count: 7}}} {
				s := open(t, r, ref)
				got := newFetched(t, len(m.ram))
				if err := s.Fetch(t.Context(), runs, got.yield); err != nil {
					t.Fatalf("seed %d, %s: %v", seed, name, err)
				}
				got.check(runs, m.ram)
				same(t, s, m.ram)
			}
		}
	}
}

// A fetch is bound by few round trips, and reads little in vain.
func TestFetchFromAfar(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(8 << 20 / page.Size)
	rand.NewChaCha8([32]byte{1}).Read(m.ram)
	ref, _ := m.capture(t, r, nil)
	var runs []page.Run
	for n := uint64(0); n+80 <= uint64(len(m.ram)/page.Size); n += 80 {
		runs = append(runs, page.Run{First: n, Count: 64})
	}
	synctest.Test(t, func(t *testing.T) {
		const latency = 20 * time.Millisecond
		store := &distant{Store: r.store, latency: latency}
		s := open(t, NewRepository(store), ref)
		store.bytes.Store(0)
		begin := time.Now()
		got := newFetched(t, len(m.ram))
		if err := s.Fetch(t.Context(), runs, got.yield); err != nil {
			t.Fatal(err)
		}
		got.check(runs, m.ram)
		if d := time.Since(begin); d != latency {
			t.Errorf("it took %v, a single round trip is %v", d, latency)
		}
		if n := float64(store.bytes.Load()) / float64(page.Total(runs)*page.Size); n > 1.5 {
			t.Errorf("it read %.2f times as much as was wanted", n)
		}
		// What was read is not read again, neither alone nor in whole frames.
		requests := store.requests.Load()
		for _, r := range runs {
			p := make([]byte, r.Bytes())
			if _, err := s.ReadAt(p, r.Offset()); err != nil || !bytes.Equal(p, m.ram[r.Offset():][:r.Bytes()]) {
				t.Errorf("page %d: %v", r.First, err)
			}
		}
		if n := store.requests.Load() - requests; n != 0 {
			t.Errorf("%d requests for what was fetched", n)
		}
	})
}

// A page fault waits for a fetch under way, and survives its failure.
func TestReadAtJoinsAFetch(t *testing.T) {
	for _, fails := range []bool{false, true} {
		r, _ := newRepository(t)
		m := newMachine(64)
		for n := range 64 {
			m.fill(n, 1)
		}
		ref, _ := m.capture(t, r, nil)
		synctest.Test(t, func(t *testing.T) {
			store := &distant{Store: r.store, latency: time.Second}
			var broken sync.Once
			s := open(t, NewRepository(&blobtest.Faulty{Store: store, Fault: func(op blobtest.Op, key string) (err error) {
				if fails && op == blobtest.OpRead && key == packKey(ref.ID) && store.requests.Load() > 2 {
					broken.Do(func() { time.Sleep(time.Second); err = blob.ErrUnavailable })
				}
				return err
			}}), ref)
			requests := store.requests.Load()
			var wg sync.WaitGroup
			wg.Go(func() {
				err := s.Fetch(t.Context(), []page.Run{{First: 0, Count: 64}}, func(int64, []byte) error { return nil })
				if fails != errors.Is(err, blob.ErrUnavailable) {
					t.Errorf("Fetch: %v", err)
				}
			})
			synctest.Wait() // its request is under way
			for _, size := range []int{page.Size, pack.FrameBytes} {
				wg.Go(func() {
					p := make([]byte, size)
					if _, err := s.ReadAt(p, 2*pack.FrameBytes); err != nil || !bytes.Equal(p, m.ram[:size]) {
						t.Errorf("ReadAt of %d bytes: %v", size, err)
					}
				})
			}
			wg.Wait()
			if n := store.requests.Load() - requests; !fails && n != 1 {
				t.Errorf("%d requests, want the fetch's alone", n)
			}
		})
	}
}

func TestFetchGoesOnBehindDamage(t *testing.T) {
	r, dir := newRepository(t)
	m := newMachine(400)
	for n := range 400 {
		m.fill(n, 1)
	}
	ref, _ := m.capture(t, r, nil)
	s := open(t, r, ref)
	damage(t, dir, packKey(ref.ID), func(b []byte) []byte {
		b[4096+3*pack.FrameBytes] ^= 1
		b[4096+20*pack.FrameBytes] ^= 1
		return b
	})
	got := newFetched(t, len(m.ram))
	err := s.Fetch(t.Context(), []page.Run{{First: 0, Count: 400}}, got.yield)
	if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), packKey(ref.ID)) ||
		!strings.Contains(err.Error(), "frame 3:") || !strings.Contains(err.Error(), "frame 20:") {
		t.Errorf("the error is %v", err)
	}
	got.check([]page.Run{{First: 0, Count: 48}, {First: 64, Count: 256}, {First: 336, Count: 64}}, m.ram)
}

func TestFetchEnds(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(2000)
	for n := range 2000 {
		m.fill(n, 1)
	}
	ref, _ := m.capture(t, r, nil)
	all := []page.Run{{First: 0, Count: 2000}}
	t.Run("when yield fails", func(t *testing.T) {
		s, calls, full := open(t, r, ref), 0, errors.New("full")
		err := s.Fetch(t.Context(), all, func(int64, []byte) error { calls++; return full })
		if !errors.Is(err, full) || calls != 1 {
			t.Errorf("%d calls, %v", calls, err)
		}
	})
	t.Run("when its context does, though a read does not", func(t *testing.T) {
		released := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		var reading atomic.Bool
		s := open(t, NewRepository(&blobtest.Faulty{Store: r.store, Fault: func(op blobtest.Op, key string) error {
			if reading.Load() {
				cancel()
				<-released
			}
			return nil
		}}), ref)
		reading.Store(true)
		err := s.Fetch(ctx, all, func(int64, []byte) error { t.Error("yield was called"); return nil })
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Fetch: %v", err)
		}
		close(released)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}
