package snapshot

import (
	"errors"
	"slices"
	"testing"
)

func TestPacksOfASnapshot(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(64)
	m.fill(1, 1)
	parent, _ := m.capture(t, r, nil)
	s := open(t, r, parent)
	m.fill(2, 2)
	child, _ := m.capture(t, r, s)

	packs, err := r.Packs(t.Context(), child)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, p := range packs {
		keys = append(keys, p.Key())
		if p.Summary.Pages != 1 {
			t.Errorf("%s has %d pages", p.Key(), p.Summary.Pages)
		}
	}
	slices.Sort(keys)
	want := []string{KindPack.Key(parent.ID), KindPack.Key(child.ID)}
	slices.Sort(want)
	if !slices.Equal(keys, want) {
		t.Errorf("packs %v, want %v", keys, want)
	}
	if _, err := r.Packs(t.Context(), Ref{ID: child.ID, Manifest: parent.Manifest}); !errors.Is(err, ErrCorrupt) {
		t.Errorf("with another manifest's hash: %v", err)
	}
	if _, err := r.Packs(t.Context(), Ref{ID: NewID()}); !errors.Is(err, ErrMissing) {
		t.Errorf("of no snapshot: %v", err)
	}
}

func TestKindsOfKeys(t *testing.T) {
	id := NewID()
	kinds := []Kind{KindManifest, KindState, KindWorkingSet, KindPack}
	for _, k := range kinds {
		for _, other := range kinds {
			got, ok := other.Parse(k.Key(id))
			if ok != (k == other) || ok && got != id {
				t.Errorf("%s.Parse(%s) = %s, %v", other, k.Key(id), got, ok)
			}
		}
		if _, ok := k.Parse(k.Prefix() + "x"); ok {
			t.Errorf("%sx is taken for an object of a snapshot", k)
		}
	}
}
