package shim

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

func TestEvolve(t *testing.T) {
	run := func(first, count uint64) page.Run { return page.Run{First: first, Count: count} }
	at := func(first, count uint64, idle uint8) snapshot.Touched {
		return snapshot.Touched{Run: run(first, count), Idle: idle}
	}
	const candidate = snapshot.Candidate
	carried := snapshot.WorkingSet{at(10, 4, 0), at(5, 1, 2), at(30, 2, 1), at(50, 1, candidate)}
	long := snapshot.WorkingSet{at(100, 200, 0), at(900, 1, 2)}
	all := []page.Run{run(0, 1000)}
	for name, tt := range map[string]struct {
		carried           snapshot.WorkingSet
		demanded, present []page.Run
		lasted            bool
		loading           uint64
		want              snapshot.WorkingSet
	}{
		"nothing at all":     {want: nil},
		"the first life":     {demanded: []page.Run{run(7, 4), run(1, 1)}, present: []page.Run{run(1, 8)}, want: snapshot.WorkingSet{at(7, 2, 0), at(1, 1, 0)}},
		"all touched again":  {carried, nil, all, true, 0, snapshot.WorkingSet{at(10, 4, 0), at(5, 1, 0), at(30, 2, 0)}},
		"half left alone":    {carried, nil, []page.Run{run(10, 4)}, false, 0, snapshot.WorkingSet{at(10, 4, 0), at(30, 2, 2)}},
		"short":              {carried, nil, []page.Run{run(11, 2)}, false, 0, snapshot.WorkingSet{at(10, 1, 0), at(11, 2, 0), at(13, 1, 0), at(5, 1, 2), at(30, 2, 1), at(50, 1, candidate)}},
		"nothing, for long":  {carried, nil, nil, true, 0, snapshot.WorkingSet{at(10, 4, 1), at(30, 2, 2)}},
		"late goes first":    {long, []page.Run{run(900, 1), run(250, 1)}, all, true, 0, snapshot.WorkingSet{at(100, heldPages, 0), at(900, 1, 0), at(250, 1, 0), at(100+heldPages, 150-heldPages, 0), at(251, 49, 0)}},
		"late for the load":  {long, []page.Run{run(900, 2), run(250, 1), run(70, 1)}, all, true, 3, snapshot.WorkingSet{at(900, 2, 0), at(250, 1, 0), at(100, heldPages, 0), at(100+heldPages, 150-heldPages, 0), at(251, 49, 0), at(70, 1, candidate)}},
		"new, and once more": {carried, []page.Run{run(50, 2)}, all, true, 0, snapshot.WorkingSet{at(10, 4, 0), at(5, 1, 0), at(30, 2, 0), at(50, 1, 0), at(51, 1, candidate)}},
		"unused readahead":   {carried, []page.Run{run(50, 2)}, []page.Run{run(0, 40)}, true, 0, snapshot.WorkingSet{at(10, 4, 0), at(5, 1, 0), at(30, 2, 0)}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := evolve(tt.carried, tt.demanded, tt.loading, tt.present, tt.lasted); !slices.Equal(joined(got), joined(tt.want)) {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
}

// joined returns the set with neighbours of the same history in one run.
func joined(set snapshot.WorkingSet) (out snapshot.WorkingSet) {
	for _, r := range set {
		for p := r.First; p < r.End(); p++ {
			out = out.Append(p, r.Idle)
		}
	}
	return out
}

// TestSetFollowsItsGuest lets a guest live many lives that touch some pages
// always, some mostly and some once, some of the lives short.
func TestSetFollowsItsGuest(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	const always, mostly, memory = 300, 100, 1 << 16 // pages [0, always), then mostly, then the rest
	var set snapshot.WorkingSet
	missed := 0
	for life := range 200 {
		short := life > 0 && rng.IntN(4) == 0
		var touched []page.Run
		touch := func(p uint64) { touched = append(touched, page.Run{First: p, Count: 1}) }
		for p := range uint64(always) {
			if !short || p < 20 {
				touch(p)
			}
		}
		for p := uint64(always); p < always+mostly; p++ {
			if !short && rng.IntN(10) > 0 {
				touch(p)
			}
		}
		for range 30 {
			touch(always + mostly + rng.Uint64N(memory-always-mostly))
		}
		rng.Shuffle(len(touched), func(i, j int) { touched[i], touched[j] = touched[j], touched[i] })
		before := idleTimes(set)
		var demanded []page.Run
		for _, r := range touched {
			if idle, known := before[r.First]; !known || idle == snapshot.Candidate {
				demanded = append(demanded, r)
			}
		}
		if life > 10 && !short {
			for _, r := range demanded {
				if r.First < always {
					t.Errorf("life %d: page %d, which is always touched, was not prefetched", life, r.First)
				}
				if r.First < always+mostly {
					missed++
				}
			}
		}
		set = evolve(set, demanded, 0, page.Normalize(touched), !short)
		after := idleTimes(set)
		if got := int(page.Total(set.Members())); life > 10 && got > always+mostly+20 {
			t.Errorf("life %d: the set has %d members", life, got)
		}
		if short {
			for p, idle := range before {
				if kept, ok := after[p]; !ok || idle != snapshot.Candidate && kept > idle {
					t.Errorf("life %d, a short one, took page %d away", life, p)
				}
			}
		}
	}
	if missed > 200*mostly/20 {
		t.Errorf("pages that are mostly touched were missed %d times in 200 lives", missed)
	}
}

// workingSet returns what the store holds for a snapshot.
func workingSet(t *testing.T, store string, ref snapshot.Ref) snapshot.WorkingSet {
	t.Helper()
	snap, err := openRepo(t, store).Open(context.Background(), ref)
	if err != nil {
		t.Fatal(err)
	}
	defer snap.Close()
	set, err := snap.WorkingSet(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// TestWorkingSetIsCarriedOver: what a guest touches after a resume is in the
// next snapshot's working set, and goes on from there to the one after it,
// whose guest had it prefetched. What is new later is a candidate at first.
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
		set := workingSet(t, store, ref)
		if idle, ok := idleTimes(set)[uint64(touched)]; !ok || (idle == snapshot.Candidate) != (life > 0) {
			t.Errorf("life %d: page %d is not as it should be in %v", life, touched, set)
		}
		old := workingSet(t, store, before).Members()
		if now := page.Normalize(set.Members()); len(old) == 0 || common(old, now) != page.Total(old) {
			t.Errorf("life %d: the members were %v and are %v", life, old, now)
		}
	}
}

// TestWorkingSetIsReported: a capture tells how right the set was, a boot's not.
func TestWorkingSetIsReported(t *testing.T) {
	store, ref := sealed(t)
	set := snapshot.WorkingSet{
		{Run: page.Run{First: 600, Count: 40}},
		{Run: page.Run{First: 1000, Count: 24}, Idle: 1},
		{Run: page.Run{First: 2000, Count: 8}, Idle: snapshot.Candidate},
	}
	if err := openRepo(t, store).SaveWorkingSet(context.Background(), ref.ID, set); err != nil {
		t.Fatal(err)
	}
	for _, prefetch := range []bool{true, false} {
		r := newRig(t, rigOptions{store: store})
		req := resumeRequest(ref)
		req.NoPrefetch = !prefetch
		r.prepare(false)
		report, err := r.client.Resume(context.Background(), req)
		if err != nil {
			t.Fatal(err)
		}
		if report.WorkingSetBytes != 64*page.Size || !prefetch && report.PrefetchedBytes > 0 {
			t.Errorf("prefetch %v: the start's report is %+v", prefetch, report)
		}
		r.read(610)
		r.read(2003)
		w := r.capture(1).WorkingSet
		r.end()
		switch {
		case w == nil || w.Pages != 64 || w.Missed == 0:
			t.Errorf("prefetch %v: the capture's report is %+v", prefetch, w)
		case prefetch && (w.Prefetched+w.Late < 40 || w.Mispredicted > w.Prefetched):
			t.Errorf("with prefetch: %+v", w)
		case !prefetch && (w.Prefetched > 0 || w.Late == 0 || w.Mispredicted > 0):
			t.Errorf("without prefetch: %+v", w)
		}
	}
}

// TestWorkingSetIsPrefetched: the whole set is pushed, with the right bytes.
func TestWorkingSetIsPrefetched(t *testing.T) {
	store, ref := sealed(t)
	set := snapshot.WorkingSet{{Run: page.Run{First: 600, Count: 40}}, {Run: page.Run{First: 1000, Count: 24}}}
	if err := openRepo(t, store).SaveWorkingSet(context.Background(), ref.ID, set); err != nil {
		t.Fatal(err)
	}
	var r *rig
	eventually(t, "a start reports that all was prefetched", func() bool { // one that ends sooner reports less
		if r != nil {
			r.end()
		}
		r = newRig(t, rigOptions{store: store})
		return r.resume(ref).PrefetchedBytes == int64(page.Total(set.Members()))*page.Size
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
