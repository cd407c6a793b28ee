package tier

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// TestCheckpointsAreReplicated, kept by collections for as long as they are
// named, and brought back by an import, which does without one that is damaged.
func TestCheckpointsAreReplicated(t *testing.T) {
	remote := t.TempDir()
	n := newNode(t, "aaaa", remote, 0)
	g := newGuest("s1", newTemplate(t, filepath.Join(n.dir, "debian")))
	var kept []*guest // what the guest was at its checkpoints
	for i := range 3 {
		n.hibernate(g, byte(i+1), i, 7)
		was := *g
		was.ram = append([]byte(nil), g.ram...)
		kept = append(kept, &was)
		g.rep.Checkpoints = append(g.rep.Checkpoints, g.rep.Snapshot)
	}
	n.hibernate(g, 9, 7)
	n.replicate(g)
	if _, err := n.tier.Collect(t.Context(), nil, nil, false); err != nil {
		t.Fatal(err)
	}
	if faults := verifyFaults(t, n); len(faults) > 0 {
		t.Errorf("the remote store: %v", faults)
	}
	n.tier.Close()
	// The middle one loses its state.
	if err := n.store.Store.Delete(t.Context(), snapshot.KindState.Key(kept[1].rep.Snapshot.ID)); err != nil {
		t.Fatal(err)
	}

	b := newNode(t, "bbbb", remote, 0)
	r := newReceiver(filepath.Join(b.dir, "templates"))
	if err := b.tier.Import(t.Context(), true, r.to()); err != nil {
		t.Fatal(err)
	}
	got := r.sandboxes["s1"]
	if len(got.Checkpoints) != 2 || got.Checkpoints[0] != kept[0].rep.Snapshot || got.Checkpoints[1] != kept[2].rep.Snapshot {
		t.Errorf("it came with %v", got.Checkpoints)
	}
	if why := r.skipped["s1"]; why == nil || !strings.Contains(why.Error(), string(kept[1].rep.Snapshot.ID)) {
		t.Errorf("skipped: %v", r.skipped)
	}
	for _, was := range []*guest{kept[0], kept[2], g} {
		b.check(was)
	}
	// Without its checkpoints nothing needs them any more.
	g.rep.Checkpoints = nil
	g.rep.Template.Dir = r.templates["debian"].Dir
	b.replicate(g)
	if _, err := b.tier.Collect(t.Context(), nil, nil, false); err != nil {
		t.Fatal(err)
	}
	for _, was := range kept {
		if _, there := keys(t, b.store.Store, "manifests/")[snapshot.KindManifest.Key(was.rep.Snapshot.ID)]; there {
			t.Errorf("the manifest of checkpoint %s is left", was.rep.Snapshot.ID)
		}
	}
}

func verifyFaults(t *testing.T, n *node) []error {
	t.Helper()
	_, _, faults, err := n.tier.VerifyRemote(t.Context(), func(int64, int64) {})
	if err != nil {
		t.Fatal(err)
	}
	return faults
}
