package snapshot

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/hibernacle/hibernacle/internal/page"
)

func TestWorkingSetFirst(t *testing.T) {
	runs := func(n ...uint64) (out []page.Run) {
		for i := 0; i < len(n); i += 2 {
			out = append(out, page.Run{First: n[i], Count: n[i+1]})
		}
		return out
	}
	const far = 3 * orderGroup
	tests := []struct {
		name             string
		sorted, set, out []page.Run
	}{
		{"no set", runs(3, 2, 9, 1), nil, runs(3, 2, 9, 1)},
		{"nothing", nil, runs(3, 2), nil},
		{"by address in a group", runs(0, 100), runs(50, 2, 20, 2), runs(20, 2, 50, 2, 0, 20, 22, 28, 52, 48)},
		{"small holes are filled", runs(0, 100), runs(50, 2, 54, 2), runs(50, 6, 0, 50, 56, 44)},
		{"with what is there only", runs(0, 52, 54, 9), runs(50, 2, 54, 2), runs(50, 2, 54, 2, 0, 50, 56, 7)},
		{"groups keep their order", runs(0, 2*far), runs(far, orderGroup, 20, 2), runs(far, orderGroup, 20, 2, 0, 20, 22, far-22, far+orderGroup, far-orderGroup)},
		{"twice in the set", runs(0, 9), runs(5, 2, 5, 3, 6, 1), runs(5, 3, 0, 5, 8, 1)},
		{"set elsewhere", runs(5, 2), runs(1, 2, 80, 9), runs(5, 2)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			set := slices.Clone(test.set)
			if got := workingSetFirst(test.sorted, test.set); !slices.Equal(got, test.out) {
				t.Errorf("got %v, want %v", got, test.out)
			}
			if !slices.Equal(set, test.set) {
				t.Error("the set was changed")
			}
		})
	}
}

// Whatever the set, every page is there, and once.
func TestWorkingSetFirstLosesNothing(t *testing.T) {
	draw := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) page.Run {
		return page.Run{First: rapid.Uint64Range(0, 5000).Draw(t, "first"), Count: rapid.Uint64Range(0, 1500).Draw(t, "count")}
	}), 0, 9)
	rapid.Check(t, func(t *rapid.T) {
		sorted := page.Normalize(draw.Draw(t, "sorted"))
		got := workingSetFirst(sorted, draw.Draw(t, "set"))
		if !slices.Equal(page.Normalize(got), sorted) || page.Total(got) != page.Total(sorted) {
			t.Fatalf("%v became %v", sorted, got)
		}
	})
}

// The pages that a resume needs first lie together at a pack's beginning.
func TestCaptureStoresTheWorkingSetFirst(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(3000)
	for n := range 3000 {
		m.fill(n, byte(n%250+1))
	}
	in := m.input(nil)
	in.WorkingSet = setOf(page.Run{First: 2000, Count: orderGroup - 24}, page.Run{First: 2500, Count: 40}, page.Run{First: 70, Count: 30}, page.Run{First: 10, Count: 5})
	ref, _, err := r.Capture(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, r, ref)
	same(t, s, m.ram)
	want := []run{
		{first: 0, count: 10, packPage: 1035},
		{first: 10, count: 5, packPage: 1000},
		{first: 15, count: 55, packPage: 1045},
		{first: 70, count: 30, packPage: 1005},
		{first: 100, count: 1900, packPage: 1100},
		{first: 2000, count: 1000, packPage: 0},
	}
	if !slices.Equal(s.manifest.runs, want) {
		t.Errorf("the runs are %v, want %v", s.manifest.runs, want)
	}
	got := newFetched(t, len(m.ram))
	if err := s.Fetch(t.Context(), in.WorkingSet.Members(), got.yield); err != nil {
		t.Fatal(err)
	}
	got.check(in.WorkingSet.Members(), m.ram)
	noFaults(t, r)
}

// A capture asks no remote store while the guest stands still: pages whose
// parents are not at hand are stored.
func TestCaptureOnARemoteParentReadsNothing(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(600)
	for n := range 600 {
		m.fill(n, 1)
	}
	ref, _ := m.capture(t, r, nil)
	store := &distant{Store: r.store}
	far := NewRepository(store)
	parent := open(t, far, ref)
	if _, err := parent.ReadAt(make([]byte, 1), 0); err != nil { // the first 16 pages are at hand
		t.Fatal(err)
	}
	for n := range 600 {
		m.fill(n, 1)
	}
	m.fill(3, 2)
	m.fill(400, 0)
	requests := store.requests.Load()
	child, _ := m.capture(t, far, parent)
	if n := store.requests.Load() - requests; n != 0 {
		t.Errorf("the capture read %d times", n)
	}
	s := open(t, far, child)
	same(t, s, m.ram)
	if n := s.packs[1].Summary().Pages; n != 1+600-16-1 {
		t.Errorf("%d pages were stored", n)
	}
}

// However sets and dirty pages meet, what is captured is what was there.
func TestCaptureWithWorkingSets(t *testing.T) {
	for seed := range uint64(6) {
		rnd := rand.New(rand.NewPCG(seed, 9))
		r, _ := newRepository(t)
		m := newMachine(2500)
		var parent *Snapshot
		for range 4 {
			for range rnd.IntN(900) {
				m.fill(rnd.IntN(2500), byte(rnd.IntN(3)))
			}
			in := m.input(parent)
			for range rnd.IntN(40) {
				in.WorkingSet = append(in.WorkingSet, Touched{Run: page.Run{First: rnd.Uint64N(2600), Count: rnd.Uint64N(90)}})
			}
			ref, _, err := r.Capture(t.Context(), in)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			m.dirty = nil
			parent = open(t, r, ref)
			same(t, parent, m.ram)
		}
	}
}

// setOf returns a working set of pages that were touched at the last resume.
func setOf(runs ...page.Run) (set WorkingSet) {
	for _, r := range runs {
		set = append(set, Touched{Run: r})
	}
	return set
}
