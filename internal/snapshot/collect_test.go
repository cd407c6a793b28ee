package snapshot

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
)

// family captures a chain of n snapshots, each with one new page.
func family(t *testing.T, r *Repository, n int) (*machine, []Ref) {
	t.Helper()
	m := newMachine(64)
	m.fill(0, 1)
	ref, _ := m.capture(t, r, nil)
	refs := []Ref{ref}
	for i := 1; i < n; i++ {
		s := open(t, r, ref)
		m.fill(i, byte(i+1))
		ref, _ = m.capture(t, r, s)
		s.Close()
		refs = append(refs, ref)
	}
	return m, refs
}

func ids(refs ...Ref) []ID {
	var out []ID
	for _, ref := range refs {
		out = append(out, ref.ID)
	}
	return out
}

func TestCollectKeepsWhatRootsNeed(t *testing.T) {
	r, _ := newRepository(t)
	m, refs := family(t, r, 4)
	status, err := r.Status(t.Context())
	if err != nil || status.Manifests.Objects != 4 || status.States.Objects != 4 || status.Packs.Objects != 4 || status.Packs.Bytes < 4*4096 {
		t.Errorf("Status = %+v, %v", status, err)
	}
	// The third needs the packs of the first three.
	got, err := r.Collect(t.Context(), ids(refs[2]), nil)
	if err != nil || got.Manifests != 3 || got.States != 3 || got.Packs != 1 || got.InUse != 0 || got.Bytes == 0 {
		t.Errorf("Collect = %+v, %v", got, err)
	}
	want := slices.Clone(m.ram)
	clear(want[3*4096 : 4*4096])
	same(t, open(t, r, refs[2]), want)
	noFaults(t, r)
	if got, err := r.Collect(t.Context(), ids(refs[2]), nil); err != nil || got.Manifests+got.States+got.Packs+got.InUse != 0 {
		t.Errorf("second Collect = %+v, %v", got, err)
	}
}

func TestCollectKeepsOpenSnapshots(t *testing.T) {
	r, _ := newRepository(t)
	m, refs := family(t, r, 3)
	s := open(t, r, refs[2])
	got, err := r.Collect(t.Context(), nil, nil)
	if err != nil || got.Manifests != 2 || got.States != 2 || got.Packs != 0 || got.InUse != 1 {
		t.Errorf("Collect = %+v, %v", got, err)
	}
	same(t, s, m.ram)
	if err := r.Delete(t.Context(), refs[2].ID); !errors.Is(err, blob.ErrInUse) {
		t.Errorf("Delete of an open snapshot: %v", err)
	}
	s.Close()
	if _, err := r.Collect(t.Context(), nil, nil); err != nil {
		t.Fatal(err)
	}
	if left := files(t, r); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// What is being uploaded or read alone is open, without its snapshot.
func TestCollectKeepsOpenObjects(t *testing.T) {
	r, _ := newRepository(t)
	_, refs := family(t, r, 2)
	o, err := r.store.Open(t.Context(), packKey(refs[1].ID))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := r.Collect(t.Context(), nil, nil); err != nil || got.Packs != 1 || got.InUse != 1 {
		t.Errorf("Collect = %+v, %v", got, err)
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Collect(t.Context(), nil, nil); err != nil || got.Packs != 1 || got.InUse != 0 {
		t.Errorf("Collect = %+v, %v", got, err)
	}
}

// TestGarbageIsWhatCollectDeletes: the dry run names just that, and deletes nothing.
func TestGarbageIsWhatCollectDeletes(t *testing.T) {
	r, _ := newRepository(t)
	_, refs := family(t, r, 5)
	if err := r.SaveWorkingSet(t.Context(), refs[4].ID, nil); err != nil {
		t.Fatal(err)
	}
	before := files(t, r)
	roots, keep := ids(refs[1]), ids(refs[3])
	dry, err := r.Garbage(t.Context(), roots, keep)
	if err != nil {
		t.Fatal(err)
	}
	if now := files(t, r); !maps.Equal(before, now) {
		t.Errorf("the dry run left %v of %v", now, before)
	}
	got, err := r.Collect(t.Context(), roots, keep)
	if err != nil {
		t.Fatal(err)
	}
	var gone []string
	var bytes int64
	after := files(t, r)
	for _, key := range slices.Sorted(maps.Keys(before)) {
		if _, ok := after[key]; !ok {
			gone = append(gone, key)
			bytes += before[key]
		}
	}
	if !slices.Equal(dry.Objects, gone) || dry.Bytes != bytes {
		t.Errorf("the dry run named %d bytes in %v, then %d in %v went", dry.Bytes, dry.Objects, bytes, gone)
	}
	if dry.Objects = nil; !reflect.DeepEqual(dry, got) {
		t.Errorf("Garbage = %+v, Collect = %+v", dry, got)
	}
	if _, err := r.Garbage(t.Context(), []ID{NewID()}, nil); !errors.Is(err, ErrMissing) {
		t.Errorf("Garbage with a root that is missing: %v", err)
	}
}

// TestCollectDiesAtEveryStep: whatever was the last thing that a collection did,
// the roots are whole and the next one does the rest.
func TestCollectDiesAtEveryStep(t *testing.T) {
	for n := 1; ; n++ {
		r, _ := newRepository(t)
		m, refs := family(t, r, 4)
		ops := 0
		dying := &Repository{store: &blobtest.Faulty{Store: r.store, Fault: func(blobtest.Op, string) error {
			if ops++; ops >= n {
				return errors.New("dead")
			}
			return nil
		}}}
		_, err := dying.Collect(t.Context(), ids(refs[3]), nil)
		if ops < n {
			t.Logf("%d steps", ops)
			return
		}
		if err == nil {
			t.Fatalf("step %d failed and nobody noticed", n)
		}
		s := open(t, r, refs[3])
		same(t, s, m.ram)
		s.Close()
		if _, err := r.Collect(t.Context(), ids(refs[3]), nil); err != nil {
			t.Fatal(err)
		}
		noFaults(t, r)
		if st, err := r.Status(t.Context()); err != nil || st.Manifests.Objects != 1 || st.States.Objects != 1 {
			t.Fatalf("step %d: Status = %+v, %v", n, st, err)
		}
	}
}

// A capture that is under way has a pack and a state file, but no manifest.
func TestCollectKeepsCapturesUnderWay(t *testing.T) {
	r, dir := newRepository(t)
	m, refs := family(t, r, 2)
	if err := os.Remove(filepath.Join(dir, manifestKey(refs[1].ID))); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Collect(t.Context(), ids(refs[0]), ids(refs[1])); err != nil || got.Manifests+got.States+got.Packs+got.InUse != 0 {
		t.Errorf("Collect = %+v, %v", got, err)
	}
	if got, err := r.Collect(t.Context(), ids(refs[0]), nil); err != nil || got.Packs != 1 || got.States != 1 {
		t.Errorf("Collect = %+v, %v", got, err)
	}
	clear(m.ram[4096:8192])
	same(t, open(t, r, refs[0]), m.ram)
}

// Who cannot read a root does not know what it needs.
func TestCollectSparesPacksIfARootIsUnreadable(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, dir string, id ID){
		"corrupt": func(t *testing.T, dir string, id ID) {
			damage(t, dir, manifestKey(id), func(b []byte) []byte { b[50] ^= 1; return b })
		},
		"missing": func(t *testing.T, dir string, id ID) {
			if err := os.Remove(filepath.Join(dir, manifestKey(id))); err != nil {
				t.Fatal(err)
			}
		},
		"newer": func(t *testing.T, dir string, id ID) {
			damage(t, dir, manifestKey(id), func(b []byte) []byte { b[8] = 9; return b })
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, dir := newRepository(t)
			_, refs := family(t, r, 3)
			change(t, dir, refs[1].ID)
			got, err := r.Collect(t.Context(), ids(refs[1]), nil)
			if err == nil || !strings.Contains(err.Error(), manifestKey(refs[1].ID)) || got.Packs != 0 || got.States != 0 {
				t.Errorf("Collect = %+v, %v", got, err)
			}
		})
	}
}

func TestDeleteIsIdempotent(t *testing.T) {
	r, _ := newRepository(t)
	_, refs := family(t, r, 1)
	for range 2 {
		if err := r.Delete(t.Context(), refs[0].ID); err != nil {
			t.Error(err)
		}
	}
	if _, err := r.Open(t.Context(), refs[0]); !errors.Is(err, ErrMissing) {
		t.Errorf("Open: %v", err)
	}
	if err := r.Delete(t.Context(), "../../x"); err == nil {
		t.Error("a path passed for an id")
	}
}

func TestVerifyReportsProgressAndCanBeCancelled(t *testing.T) {
	r, _ := newRepository(t)
	family(t, r, 3)
	var done, total int64
	objects, bytes, faults, err := r.Verify(t.Context(), func(d, n int64) {
		if d < done {
			t.Errorf("progress went back from %d to %d", done, d)
		}
		done, total = d, n
	})
	if err != nil || len(faults) != 0 || objects != 9 || bytes != done || done != total {
		t.Errorf("Verify = %d, %d, %v, %v; progress %d of %d", objects, bytes, faults, err, done, total)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, _, _, err := r.Verify(ctx, func(int64, int64) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled Verify: %v", err)
	}
}

// TestModel plays random generations of several small machines that fork, are
// compacted, deleted and collected, and compares each snapshot with what it must be.
func TestModel(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	r, _ := newRepository(t)
	const pages = 96
	type generation struct {
		ref Ref
		ram []byte
	}
	alive := map[ID]generation{}
	pick := func() generation {
		all := slices.Sorted(maps.Keys(alive))
		return alive[all[rnd.IntN(len(all))]]
	}
	for step := range 300 {
		switch action := rnd.IntN(12); {
		case len(alive) == 0 || action == 0:
			m := newMachine(pages)
			for range rnd.IntN(pages) {
				m.fill(rnd.IntN(pages), byte(rnd.IntN(4)))
			}
			m.dirty = nil
			ref, _ := m.capture(t, r, nil)
			alive[ref.ID] = generation{ref, m.ram}
		case action < 7:
			parent := pick()
			m := &machine{ram: slices.Clone(parent.ram)}
			for range rnd.IntN(30) {
				m.fill(rnd.IntN(pages), byte(rnd.IntN(4))) // often zero, often equal
			}
			s := open(t, r, parent.ref)
			ref, _ := m.capture(t, r, s)
			s.Close()
			alive[ref.ID] = generation{ref, m.ram}
		case action == 7:
			g := pick()
			delete(alive, g.ref.ID)
			if err := r.Delete(t.Context(), g.ref.ID); err != nil {
				t.Fatal(err)
			}
		case action == 8:
			g := pick()
			delete(alive, g.ref.ID)
			if _, err := r.Collect(t.Context(), slices.Collect(maps.Keys(alive)), nil); err != nil {
				t.Fatal(err)
			}
		case action == 9:
			g := pick()
			s := open(t, r, g.ref)
			same(t, s, g.ram)
			s.Close()
		default:
			g := pick()
			ref, _ := compact(t, r, g.ref)
			delete(alive, g.ref.ID) // what it shared with others is theirs still
			alive[ref.ID] = generation{ref, g.ram}
		}
		if t.Failed() {
			t.Fatalf("at step %d", step)
		}
	}
	noFaults(t, r)
	for _, g := range alive {
		same(t, open(t, r, g.ref), g.ram)
	}
}

// TestCollectBesideEverything runs captures, opens and collections at the same
// time, as shims and the daemon do: the head of each lineage is always whole.
func TestCollectBesideEverything(t *testing.T) {
	r, _ := newRepository(t)
	const lineages, generations = 3, 25
	// What a catalog knows: of each lineage its head, and the ids of captures
	// that are under way or will begin while a collection runs.
	var mu sync.Mutex
	heads, pending := map[int]Ref{}, map[int][]ID{}
	for l := range lineages {
		for range generations {
			pending[l] = append(pending[l], NewID())
		}
	}
	var running atomic.Int32
	running.Store(lineages)
	var wg sync.WaitGroup
	for l := range lineages {
		wg.Go(func() {
			defer running.Add(-1)
			rnd := rand.New(rand.NewPCG(uint64(l), 1))
			m := newMachine(64)
			var parent *Snapshot
			for g := range generations {
				for range 5 {
					m.fill(rnd.IntN(64), byte(rnd.IntN(5)))
				}
				in := m.input(parent)
				mu.Lock()
				in.ID = pending[l][0]
				mu.Unlock()
				ref, _, err := r.Capture(t.Context(), in)
				if err != nil {
					t.Errorf("lineage %d, generation %d: %v", l, g, err)
					return
				}
				mu.Lock()
				heads[l] = ref
				pending[l] = pending[l][1:]
				mu.Unlock()
				if parent != nil {
					parent.Close()
				}
				if parent, err = r.Open(t.Context(), ref); err != nil {
					t.Errorf("lineage %d, generation %d: %v", l, g, err)
					return
				}
				got := make([]byte, len(m.ram))
				if _, err := parent.ReadAt(got, 0); err != nil || !slices.Equal(got, m.ram) {
					t.Errorf("lineage %d, generation %d: wrong memory, %v", l, g, err)
				}
			}
			parent.Close()
		})
	}
	wg.Go(func() {
		for running.Load() > 0 {
			mu.Lock()
			roots := ids(slices.Collect(maps.Values(heads))...)
			keep := slices.Concat(slices.Collect(maps.Values(pending))...)
			mu.Unlock()
			if _, err := r.Collect(t.Context(), roots, keep); err != nil {
				t.Errorf("Collect: %v", err)
			}
		}
	})
	wg.Wait()
	if _, err := r.Collect(t.Context(), ids(slices.Collect(maps.Values(heads))...), nil); err != nil {
		t.Fatal(err)
	}
	noFaults(t, r)
	if s, err := r.Status(t.Context()); err != nil || s.Manifests.Objects != lineages || s.States.Objects != lineages {
		t.Errorf("Status = %+v, %v", s, err)
	}
}
