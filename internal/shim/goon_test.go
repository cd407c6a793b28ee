package shim

import (
	"context"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// commit lets a sealed guest go on from its snapshot, which is kept.
func (g *guest) commit(attempt uint64) {
	g.t.Helper()
	if err := g.client.Thaw(context.Background(), ThawRequest{Attempt: attempt, Committed: true}); err != nil {
		g.t.Fatal(err)
	}
}

// TestGoOnFromACommittedSnapshot: the guest goes on with its connections, and
// what changes from then on is all that the next snapshot stores, which needs
// nothing of the one before it but what they share.
func TestGoOnFromACommittedSnapshot(t *testing.T) {
	store, ref := sealed(t)
	r := newRig(t, rigOptions{store: store})
	r.resume(ref)
	for page := 700; page < 1000; page++ {
		r.write(page, page%200+1)
	}
	first := r.capture(1)
	r.standsStill()
	r.commit(1)
	r.commit(1) // as after an answer that was lost
	r.goesOn()
	r.refuses(1)
	r.write(1005, 77)
	req := captureRequest(2)
	req.Parent = &first.Snapshot
	second, err := r.client.Capture(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	if m := second.Metadata; m.Parent != first.Snapshot.ID || m.StoredBytes > first.Metadata.StoredBytes/10 {
		t.Errorf("the second snapshot is %+v, the first stored %d bytes", m, first.Metadata.StoredBytes)
	}
	r.thaw(2) // this one is not kept: the first stays what is compared with
	r.write(1006, 78)
	if third := r.capture(3); third.Metadata.Parent != first.Snapshot.ID {
		t.Errorf("the third builds upon %s", third.Metadata.Parent)
	}
}

// TestSnapshotsOfAGuestThatGoesOn writes at random between captures, of which some
// are kept, some are not and some are parked, and compares what every kept
// one holds with what the guest held then: pages that changed, changed
// back, became zero or were left alone.
func TestSnapshotsOfAGuestThatGoesOn(t *testing.T) {
	for _, start := range []string{"boot", "resume"} {
		t.Run(start, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed(t), 1))
			store, ref := sealed(t)
			r := newRig(t, rigOptions{store: store})
			var parent *snapshot.Ref
			if start == "boot" {
				r.boot()
			} else {
				r.resume(ref)
				parent = &ref
			}
			const first, pages = 700, 12
			memory := map[int]int{}
			for page := first; page < first+pages; page++ {
				memory[page] = r.read(page)
			}
			type kept struct {
				ref    snapshot.Ref
				memory map[int]int
			}
			var all []kept
			for attempt := uint64(1); attempt <= 24; attempt++ {
				for range rnd.IntN(6) {
					page, value := first+rnd.IntN(pages), rnd.IntN(4)
					r.write(page, value)
					memory[page] = value
				}
				req := captureRequest(attempt)
				req.Parent, req.Full = parent, start == "boot" && parent == nil
				report, err := r.client.Capture(context.Background(), req)
				if err != nil {
					t.Fatal(err)
				}
				switch rnd.IntN(4) {
				case 0:
					r.thaw(attempt)
					if err := r.repo().Delete(context.Background(), report.Snapshot.ID); err != nil {
						t.Fatal(err)
					}
					continue
				case 1:
					r.park(attempt)
					r.unpark(attempt, report.Snapshot)
				default:
					r.commit(attempt)
				}
				parent = &report.Snapshot
				all = append(all, kept{report.Snapshot, maps.Clone(memory)})
			}
			r.end()
			if len(all) > 6 {
				all = append(all[:3:3], all[len(all)-3:]...) // the others go, with what only they need
			}
			var roots []snapshot.ID
			for _, k := range all {
				roots = append(roots, k.ref.ID)
			}
			if _, err := r.repo().Collect(context.Background(), roots, nil); err != nil {
				t.Fatal(err)
			}
			for i, k := range all {
				again := newRig(t, rigOptions{store: store})
				again.resume(k.ref)
				for page, want := range k.memory {
					if got := again.read(page); got != want {
						t.Errorf("snapshot %d: page %d holds %d, want %d", i, page, got, want)
					}
				}
				again.end()
			}
		})
	}
}
