package shim

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

func TestIntersect(t *testing.T) {
	run := func(first, count uint64) page.Run { return page.Run{First: first, Count: count} }
	sorted := []page.Run{run(10, 5), run(20, 1), run(30, 100)}
	for name, tt := range map[string]struct{ ordered, sorted, want []page.Run }{
		"nothing":         {nil, sorted, nil},
		"with nothing":    {[]page.Run{run(1, 100)}, nil, nil},
		"apart":           {[]page.Run{run(0, 10), run(15, 5), run(130, 9)}, sorted, nil},
		"cut":             {[]page.Run{run(8, 4), run(14, 8)}, sorted, []page.Run{run(10, 2), run(14, 1), run(20, 1)}},
		"keeps the order": {[]page.Run{run(40, 2), run(20, 1), run(10, 1)}, sorted, []page.Run{run(40, 2), run(20, 1), run(10, 1)}},
		"each page once":  {[]page.Run{run(31, 3), run(30, 5), run(31, 3)}, sorted, []page.Run{run(31, 3), run(30, 1), run(34, 1)}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := intersect(tt.ordered, tt.sorted); !slices.Equal(got, tt.want) {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
}

// workingSet returns what the store holds for a snapshot.
func workingSet(t *testing.T, store string, ref snapshot.Ref) []page.Run {
	t.Helper()
	snap, err := openRepo(t, store).Open(context.Background(), ref)
	if err != nil {
		t.Fatal(err)
	}
	defer snap.Close()
	runs, err := snap.WorkingSet(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return runs
}

// TestWorkingSetIsCarriedOver: what a guest touches after a resume is in the
// next snapshot's working set, and goes on from there to the one after it,
// whose guest had it prefetched.
func TestWorkingSetIsCarriedOver(t *testing.T) {
	store, ref := sealed(t)
	for life, touched := range []int{639, 700, 800} {
		before := ref
		r := newRig(t, rigOptions{store: store})
		report := r.resume(ref)
		if len(report.Warnings) > 0 {
			t.Errorf("life %d: warnings %q", life, report.Warnings)
		}
		r.read(touched)
		ref = r.capture(1).Snapshot
		r.end()
		runs := workingSet(t, store, ref)
		if len(intersect([]page.Run{{First: uint64(touched), Count: 1}}, page.Normalize(runs))) != 1 {
			t.Errorf("life %d: page %d is not in %v", life, touched, runs)
		}
		if old := workingSet(t, store, before); len(old) == 0 || page.Total(intersect(old, page.Normalize(runs))) != page.Total(old) {
			t.Errorf("life %d: the set was %v and is %v", life, old, runs)
		}
	}
}

// TestWorkingSetIsPrefetched: the whole set is pushed, with the right bytes.
func TestWorkingSetIsPrefetched(t *testing.T) {
	store, ref := sealed(t)
	set := []page.Run{{First: 600, Count: 40}, {First: 1000, Count: 24}}
	if err := openRepo(t, store).SaveWorkingSet(context.Background(), ref.ID, set); err != nil {
		t.Fatal(err)
	}
	var r *rig
	eventually(t, "a start reports that all was prefetched", func() bool { // one that ends sooner reports less
		if r != nil {
			r.end()
		}
		r = newRig(t, rigOptions{store: store})
		return r.resume(ref).PrefetchedBytes == int64(page.Total(set))*page.Size
	})
	for p := 600; p < 640; p++ {
		if got := r.read(p); got != 1 {
			t.Errorf("page %d holds %d", p, got)
		}
	}
}

// TestDamagedWorkingSet: it only costs time.
func TestDamagedWorkingSet(t *testing.T) {
	store, ref := sealed(t)
	key := "worksets/" + string(ref.ID)
	path := filepath.Join(store, key)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, bytes.Repeat([]byte("x"), 100), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, rigOptions{store: store})
	report := r.resume(ref)
	if len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], key) || report.PrefetchedBytes != 0 {
		t.Errorf("the report is %+v", report)
	}
	r.goesOn()
	next := r.capture(1).Snapshot
	r.end()
	if len(workingSet(t, store, next)) == 0 {
		t.Error("the next snapshot has no working set")
	}
}

// TestShortLifeTeaches: a release right after the resume gives a base its set,
// once: the lives after it leave that one alone.
func TestShortLifeTeaches(t *testing.T) {
	store, ref := sealed(t)
	live := func(touched int) []byte {
		r := newRig(t, rigOptions{store: store})
		r.resume(ref)
		r.read(touched)
		r.end()
		b, err := os.ReadFile(filepath.Join(store, "worksets", string(ref.ID)))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if first := live(639); !bytes.Equal(first, live(900)) {
		t.Error("the second life changed the working set")
	}
}
