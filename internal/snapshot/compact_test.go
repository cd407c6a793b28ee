package snapshot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/page"
)

// compact compacts ref into a new snapshot.
func compact(t testing.TB, r *Repository, ref Ref, shared ...ID) (Ref, Compacted) {
	t.Helper()
	got, _, done, err := r.Compact(t.Context(), CompactInput{Ref: ref, ID: NewID(), Shared: func(id ID) bool { return slices.Contains(shared, id) }})
	if err != nil {
		t.Fatal(err)
	}
	return got, done
}

func none(ID) bool { return false }

func TestCompactMergesPacks(t *testing.T) {
	r, _ := newRepository(t)
	m, refs := family(t, r, tierPacks)
	last := refs[len(refs)-1]
	if err := r.SaveWorkingSet(t.Context(), last.ID, WorkingSet{{Run: page.Run{First: 7, Count: 1}}, {Run: page.Run{First: 60, Count: 2}}}); err != nil {
		t.Fatal(err)
	}
	s := open(t, r, last)
	id := NewID()
	ref, meta, done, err := r.Compact(t.Context(), CompactInput{Ref: last, ID: id})
	if err != nil {
		t.Fatal(err)
	}
	if ref.ID != id || done.Packs != tierPacks || done.PacksLeft != 1 || done.CopiedBytes != tierPacks*page.Size || len(done.Faults) != 0 {
		t.Errorf("Compact = %v, %+v", ref, done)
	}
	want := s.Metadata()
	want.ID, want.Origin, want.StoredBytes = id, last.ID, done.WrittenBytes
	if !reflect.DeepEqual(meta, want) {
		t.Errorf("metadata is %+v, want %+v", meta, want)
	}
	s.Close()
	if err := r.Delete(t.Context(), last.ID); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Collect(t.Context(), ids(ref), nil); err != nil || got.Packs != tierPacks {
		t.Errorf("Collect = %+v, %v", got, err)
	}
	c := open(t, r, ref)
	same(t, c, m.ram)
	if state, err := c.State(t.Context()); err != nil || string(state) != "registers" {
		t.Errorf("state = %q, %v", state, err)
	}
	workset, err := c.WorkingSet(t.Context())
	if err != nil || len(workset) != 2 {
		t.Errorf("working set = %v, %v", workset, err)
	}
	// The working set comes first in the pack.
	first := make([]byte, 2*page.Size)
	if _, err := c.packs[0].ReadAt(first, 0); err != nil || first[0] != 8 || first[page.Size] != 1 {
		t.Errorf("the pack begins with pages of %d and %d, %v", first[0], first[page.Size], err)
	}
	noFaults(t, r)
	// A compacted snapshot is one that children are captured from, and its origin stays.
	m.fill(9, 9)
	child, childMeta := m.capture(t, r, c)
	if childMeta.Parent != id || childMeta.Origin != "" {
		t.Errorf("the child's metadata is %+v", childMeta)
	}
	same(t, open(t, r, child), m.ram)
}

func TestCompactLeavesWhatIsNotWorthIt(t *testing.T) {
	r, _ := newRepository(t)
	_, refs := family(t, r, tierPacks)
	before := files(t, r)
	// Without the first, which somebody shares, the tier is not full.
	ref, done := compact(t, r, refs[tierPacks-1], refs[0].ID)
	if ref != refs[tierPacks-1] || done.WrittenBytes != 0 || done.PacksLeft != tierPacks {
		t.Errorf("Compact = %v, %+v", ref, done)
	}
	if after := files(t, r); !maps.Equal(before, after) {
		t.Errorf("the store has %v", after)
	}
	if again, _ := compact(t, r, ref); again == ref {
		t.Error("a tier that is full was left")
	}
}

// remoteStore says of some packs that they are not local.
type remoteStore struct {
	blob.Store
	remote func(key string) bool
	t      *testing.T
}

func (s remoteStore) Open(ctx context.Context, key string) (blob.Object, error) {
	o, err := s.Store.Open(ctx, key)
	if err == nil && s.remote(key) {
		return remoteObject{o, s.t}, nil
	}
	return o, err
}

type remoteObject struct {
	blob.Object
	t *testing.T
}

func (remoteObject) Remote() bool { return true }

func (o remoteObject) ReadAt([]byte, int64) (int, error) {
	o.t.Error("a pack was fetched")
	return 0, blob.ErrUnavailable
}

func TestCompactFetchesNothing(t *testing.T) {
	r, _ := newRepository(t)
	m, refs := family(t, r, tierPacks+2)
	last := refs[tierPacks+1]
	far := map[string]bool{packKey(refs[2].ID): true}
	there := &Repository{store: remoteStore{r.store, func(key string) bool { return far[key] }, t}}
	ref, done := compact(t, there, last)
	if done.Remote != 1 || done.PacksLeft != 2 || len(done.Faults) != 0 {
		t.Errorf("Compact = %+v", done)
	}
	same(t, open(t, r, ref), m.ram)

	away := &Repository{store: &blobtest.Faulty{Store: r.store, Fault: func(op blobtest.Op, key string) error {
		if op == blobtest.OpOpen && key != manifestKey(last.ID) {
			return blob.ErrUnavailable
		}
		return nil
	}}}
	if ref, done := compact(t, away, last); ref != last || done.Remote == 0 {
		t.Errorf("Compact while the store is away = %v, %+v", ref, done)
	}
}

// What cannot be read stays where it is, and the error of whoever reads it is
// the one that it was.
func TestCompactLeavesUnreadablePages(t *testing.T) {
	for name, tt := range map[string]struct {
		damage  func(b []byte) []byte
		corrupt bool // the snapshot can be opened still
	}{
		"page":    {func(b []byte) []byte { b[5000] ^= 1; return b }, true},
		"cut off": {func(b []byte) []byte { return b[:100] }, false},
	} {
		t.Run(name, func(t *testing.T) {
			r, dir := newRepository(t)
			m, refs := family(t, r, tierPacks+1)
			bad := refs[3].ID
			damage(t, dir, packKey(bad), tt.damage)
			ref, done := compact(t, r, refs[tierPacks])
			if len(done.Faults) != 1 || !errors.Is(done.Faults[bad], ErrCorrupt) || done.PacksLeft != 2 {
				t.Fatalf("Compact = %+v", done)
			}
			s, err := r.Open(t.Context(), ref)
			if !tt.corrupt {
				if !errors.Is(err, ErrCorrupt) {
					t.Errorf("Open = %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			p := make([]byte, page.Size)
			for n := range tierPacks + 1 {
				_, err := s.ReadAt(p, int64(n)*page.Size)
				if n == 3 {
					if !errors.Is(err, ErrCorrupt) {
						t.Errorf("page %d: %v", n, err)
					}
				} else if err != nil || p[0] != m.ram[n*page.Size] {
					t.Errorf("page %d: %d, %v", n, p[0], err)
				}
			}
		})
	}
}

func TestCompactNeedsTheSnapshot(t *testing.T) {
	r, dir := newRepository(t)
	_, refs := family(t, r, tierPacks)
	last := refs[tierPacks-1]
	before := len(files(t, r))
	try := func(ref Ref) error {
		_, _, _, err := r.Compact(t.Context(), CompactInput{Ref: ref, ID: NewID()})
		return err
	}
	if err := try(Ref{ID: NewID()}); !errors.Is(err, ErrMissing) {
		t.Errorf("no such snapshot: %v", err)
	}
	if err := try(Ref{ID: last.ID, Manifest: "00"}); !errors.Is(err, ErrCorrupt) {
		t.Errorf("another manifest: %v", err)
	}
	damage(t, dir, stateKey(last.ID), func(b []byte) []byte { b[30] ^= 1; return b })
	if err := try(last); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a damaged state: %v", err)
	}
	if after := len(files(t, r)); after != before {
		t.Errorf("%d objects, before %d", after, before)
	}
}

// TestCompactFailsAtEveryStep lets each operation of the store fail, and each
// be the last before ctx ends: nothing is left behind, and the snapshot is whole.
func TestCompactFailsAtEveryStep(t *testing.T) {
	r, _ := newRepository(t)
	m, refs := family(t, r, tierPacks)
	last := refs[tierPacks-1]
	if err := r.SaveWorkingSet(t.Context(), last.ID, WorkingSet{{Run: page.Run{First: 1, Count: 1}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Collect(t.Context(), ids(last), nil); err != nil {
		t.Fatal(err)
	}
	before := files(t, r)
	for _, cancelled := range []bool{false, true} {
		for n := int64(1); ; n++ {
			ctx, cancel := context.WithCancel(t.Context())
			var ops atomic.Int64
			var hit string
			faulty := &Repository{store: &blobtest.Faulty{Store: r.store, Fault: func(op blobtest.Op, key string) error {
				if op == blobtest.OpDelete || ops.Add(1) != n {
					return nil
				}
				hit = fmt.Sprintf("operation %d, %s %s", n, op, key)
				if cancelled {
					cancel()
					return nil
				}
				return blob.ErrNoSpace
			}}}
			ref, _, done, err := faulty.Compact(ctx, CompactInput{Ref: last, ID: NewID()})
			cancel()
			if err == nil && !cancelled && hit != "" && len(done.Faults) == 0 {
				t.Fatalf("%s failed and nobody noticed", hit)
			}
			if err == nil { // what could not be read was left out
				s := open(t, r, ref)
				same(t, s, m.ram)
				s.Close()
				if _, err := r.Collect(t.Context(), ids(last), nil); err != nil {
					t.Fatal(err)
				}
			}
			if after := files(t, r); !maps.Equal(before, after) {
				t.Fatalf("%s: the store has %v, before %v", hit, after, before)
			}
			if hit == "" {
				t.Logf("%d operations", n-1)
				break
			}
		}
	}
	noFaults(t, r)
}

func TestFootprint(t *testing.T) {
	r, dir := newRepository(t)
	m := newMachine(64)
	for n := range 40 {
		m.fill(n, 1)
	}
	base, _ := m.capture(t, r, nil)
	s := open(t, r, base)
	for n := range 10 {
		m.fill(n, 2)
	}
	second, _ := m.capture(t, r, s)
	s.Close()
	s = open(t, r, second)
	for n := range 4 {
		m.fill(n, 3)
	}
	third, _ := m.capture(t, r, s)
	s.Close()
	if err := r.SaveWorkingSet(t.Context(), third.ID, WorkingSet{{Run: page.Run{First: 1, Count: 1}}}); err != nil {
		t.Fatal(err)
	}
	sizes := files(t, r)
	got, err := r.Footprint(t.Context(), third, func(id ID) bool { return id == base.ID })
	if err != nil {
		t.Fatal(err)
	}
	want := Footprint{
		Packs: []PackUse{
			{ID: third.ID, Pages: 4, Live: 4, Bytes: sizes[packKey(third.ID)]},
			{ID: second.ID, Pages: 10, Live: 6, Bytes: sizes[packKey(second.ID)]},
			{ID: base.ID, Shared: true, Pages: 40, Live: 30, Bytes: sizes[packKey(base.ID)]},
		},
		LiveBytes: 10 * page.Size, DeadBytes: 4 * page.Size,
		PackBytes:   sizes[packKey(third.ID)] + sizes[packKey(second.ID)],
		RecordBytes: sizes[manifestKey(third.ID)] + sizes[stateKey(third.ID)] + sizes[worksetKey(third.ID)],
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("Footprint = %+v, want %+v", got, want)
	}
	away := &Repository{store: &blobtest.Faulty{Store: r.store, Fault: func(op blobtest.Op, _ string) error {
		if op == blobtest.OpStat {
			return blob.ErrUnavailable
		}
		return nil
	}}}
	if got, err := away.Footprint(t.Context(), third, none); err != nil || got.Packs[1].Bytes != 10*page.Size {
		t.Errorf("Footprint while the store is away = %+v, %v", got, err)
	}
	if _, err := r.Footprint(t.Context(), Ref{ID: third.ID, Manifest: "00"}, none); !errors.Is(err, ErrCorrupt) {
		t.Errorf("Footprint of another manifest: %v", err)
	}
	damage(t, dir, manifestKey(third.ID), func(b []byte) []byte { return b[:40] })
	if _, err := r.Footprint(t.Context(), third, none); !errors.Is(err, ErrCorrupt) {
		t.Errorf("Footprint of a damaged one: %v", err)
	}
}

// TestLongLife plays the life of a machine of a template: hundreds of captures, each with a
// compaction behind it, and a collection now and then. The memory is exact after each, and
// what the store holds and what was written for it are bounded.
func TestLongLife(t *testing.T) {
	for name, keepsUp := range map[string]bool{"compaction keeps up": true, "compaction never runs": false} {
		t.Run(name, func(t *testing.T) {
			cycles := 300
			if testing.Short() || !keepsUp {
				cycles = 60
			}
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			rnd := rand.New(rand.NewPCG(seed, 0))
			r, _ := newRepository(t)
			const pages = 1500
			m := newMachine(pages)
			for n := range pages / 2 {
				m.fill(2*n, byte(n)|1)
			}
			base, _ := m.capture(t, r, nil)
			shared := func(id ID) bool { return id == base.ID }
			now := base
			var captured, rewritten, most int64
			for cycle := range cycles {
				s := open(t, r, now)
				for range 60 {
					n := rnd.IntN(pages)
					if rnd.IntN(3) > 0 {
						n %= pages / 20 // hot
					}
					copy(m.ram[n*page.Size:], fmt.Sprintf("cycle %d", cycle))
					m.fill(n, byte(rnd.IntN(20)))
				}
				ref, meta := m.capture(t, r, s)
				s.Close()
				captured += meta.StoredBytes
				now = ref
				if keepsUp {
					var done Compacted
					now, done = compact(t, r, ref, base.ID)
					rewritten += done.WrittenBytes
				}
				s = open(t, r, now)
				same(t, s, m.ram)
				s.Close()
				f, err := r.Footprint(t.Context(), now, shared)
				if err != nil {
					t.Fatal(err)
				}
				if most = max(most, int64(len(f.Packs))); most > maxPacks || keepsUp && most > packsLimit {
					t.Fatalf("cycle %d: %d packs", cycle, most)
				}
				if keepsUp && f.DeadBytes > max(f.LiveBytes/deadLimit, deadFloor*page.Size) {
					t.Fatalf("cycle %d: %d bytes live, %d dead", cycle, f.LiveBytes, f.DeadBytes)
				}
				if cycle%20 == 0 || cycle == cycles-1 {
					if _, err := r.Collect(t.Context(), ids(base, now), nil); err != nil {
						t.Fatal(err)
					}
				}
			}
			f, err := r.Footprint(t.Context(), now, shared)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d packs (at most %d), %d KiB live, %d KiB stored; captures wrote %d KiB, compactions %d",
				len(f.Packs), most, f.LiveBytes>>10, f.StoredBytes()>>10, captured>>10, rewritten>>10)
			if keepsUp && f.StoredBytes() > 2*f.LiveBytes {
				t.Errorf("%d bytes are stored for %d live ones", f.StoredBytes(), f.LiveBytes)
			}
			if rewritten > 3*captured {
				t.Errorf("captures wrote %d bytes, compactions %d", captured, rewritten)
			}
			s, err := r.Status(t.Context())
			if err != nil || s.Manifests.Objects != 2 || s.Packs.Objects > len(f.Packs)+1 {
				t.Errorf("the store holds %+v, %v", s, err)
			}
			noFaults(t, r)
		})
	}
}

// BenchmarkCompact merges eight packs of 3 MiB, as after eight hibernations,
// in runs of the given length.
func BenchmarkCompact(b *testing.B) {
	for _, runPages := range []int{1, 16} {
		b.Run(fmt.Sprintf("runs-of-%d", runPages), func(b *testing.B) {
			r, m, parent := benchMachine(b)
			base, now := parent.Ref(), parent.Ref()
			pages := len(m.ram) / page.Size
			rnd := rand.New(rand.NewPCG(1, 2))
			for range tierPacks {
				for range 3 << 20 / page.Size / runPages {
					first := rnd.IntN(pages/runPages) * runPages
					m.dirty = append(m.dirty, page.Run{First: uint64(first), Count: uint64(runPages)})
					for n := first; n < first+runPages; n++ {
						m.ram[n*page.Size+rnd.IntN(page.Size)]++
					}
				}
				s := open(b, r, now)
				now, _ = m.capture(b, r, s)
				s.Close()
			}
			b.SetBytes(tierPacks * 3 << 20)
			for b.Loop() {
				ref, done := compact(b, r, now, base.ID)
				b.StopTimer()
				if ref == now || done.PacksLeft != 2 {
					b.Fatalf("Compact = %+v", done)
				}
				if err := r.Delete(b.Context(), ref.ID); err != nil {
					b.Fatal(err)
				}
				if err := r.store.Delete(b.Context(), packKey(ref.ID)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

func BenchmarkFootprint(b *testing.B) {
	r, _ := newRepository(b)
	m := newMachine(64 << 20 / page.Size)
	now, _ := m.capture(b, r, nil)
	for i := range packsLimit {
		for n := range 500 {
			m.fill(n*packsLimit+i, byte(n)|1)
		}
		s := open(b, r, now)
		now, _ = m.capture(b, r, s)
		s.Close()
	}
	for b.Loop() {
		if f, err := r.Footprint(b.Context(), now, none); err != nil || f.Rewrite() == 0 {
			b.Fatal(f.Rewrite(), err)
		}
	}
}
