package snapshot

import (
	"errors"
	"slices"
	"testing"
)

// TestKeys are those of a snapshot's objects, packs of its ancestors among them.
func TestKeys(t *testing.T) {
	r, _ := newRepository(t)
	_, refs := family(t, r, 2)
	keys, err := r.Keys(t.Context(), refs[1])
	if err != nil {
		t.Fatal(err)
	}
	id, parent := refs[1].ID, refs[0].ID
	slices.Sort(keys)
	want := []string{manifestKey(id), stateKey(id), worksetKey(id), packKey(id), packKey(parent)}
	slices.Sort(want)
	if !slices.Equal(keys, want) {
		t.Errorf("%v, want %v", keys, want)
	}
	if _, err := r.Keys(t.Context(), Ref{ID: id, Manifest: refs[0].Manifest}); !errors.Is(err, ErrCorrupt) {
		t.Errorf("of another manifest: %v", err)
	}
	if _, err := r.Keys(t.Context(), Ref{ID: NewID()}); !errors.Is(err, ErrMissing) {
		t.Errorf("of no manifest: %v", err)
	}
}
