package snapshot

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/page"
)

const worksetID ID = "00000000000000000000000009"

func TestWorksetGolden(t *testing.T) {
	set := WorkingSet{{page.Run{First: 700, Count: 8}, 0}, {page.Run{First: 3, Count: 1}, Candidate}, {page.Run{First: 1 << 20, Count: 512}, 2}}
	want, err := os.ReadFile("testdata/v2.workset")
	if err != nil {
		t.Fatal(err)
	}
	if got := encodeWorkset(set); !bytes.Equal(got, want) {
		t.Errorf("encoded %x, golden %x", got, want)
	}
	got, err := parseWorkset(worksetID, want)
	if err != nil || !slices.Equal(got, set) {
		t.Errorf("parsed %v, %v, want %v", got, err, set)
	}
	for i := range want {
		broken := slices.Clone(want)
		broken[i] ^= 1
		if _, err := parseWorkset(worksetID, broken); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
			t.Errorf("a flipped bit at %d: %v", i, err)
		}
		if _, err := parseWorkset(worksetID, want[:i]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
}

func TestWorksetIsBounded(t *testing.T) {
	var set WorkingSet
	for i := range uint64(3 * maxWorksetRuns) {
		set = append(set, Touched{Run: page.Run{First: 4 * i, Count: 2}})
	}
	got, err := parseWorkset(worksetID, encodeWorkset(set))
	if n := page.Total(got.Members()); err != nil || n != maxWorksetPages {
		t.Errorf("%d pages kept, %v, want the first %d", n, err, maxWorksetPages)
	}
}

func TestWorksetIsWrittenOnce(t *testing.T) {
	ctx := context.Background()
	store, err := disk.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := NewRepository(store)
	if _, err := readWorkset(ctx, store, worksetID); !errors.Is(err, ErrMissing) {
		t.Errorf("before: %v, want ErrMissing", err)
	}
	first := WorkingSet{{Run: page.Run{First: 1, Count: 2}}}
	for _, set := range []WorkingSet{first, {{Run: page.Run{First: 9, Count: 9}}}} {
		if err := r.SaveWorkingSet(ctx, worksetID, set); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := readWorkset(ctx, store, worksetID); err != nil || !slices.Equal(got, first) {
		t.Errorf("kept %v, %v, want the first one", got, err)
	}
	if _, err := r.Collect(ctx, nil, nil); err != nil {
		t.Fatal(err)
	}
	if s, err := r.Status(ctx); err != nil || s.Worksets.Objects != 0 {
		t.Errorf("after the collection: %+v, %v", s.Worksets, err)
	}
}

func FuzzParseWorkset(f *testing.F) {
	f.Add(encodeWorkset(WorkingSet{{page.Run{First: 1, Count: 1}, 1}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		set, err := parseWorkset(worksetID, b)
		if err == nil && !bytes.Equal(encodeWorkset(set), b) {
			t.Errorf("%x parses to %v, which is written otherwise", b, set)
		}
	})
}
