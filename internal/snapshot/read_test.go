package snapshot

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/page"
)

// What is wrong with a snapshot's objects is told with their names, at Open
// where it can be seen without reading pages.
func TestDamage(t *testing.T) {
	flip := func(at int) func([]byte) []byte {
		return func(b []byte) []byte {
			if at < 0 {
				at += len(b)
			}
			b[at] ^= 4
			return b
		}
	}
	cut := func(b []byte) []byte { return b[:len(b)-1] }
	tests := []struct {
		name     string
		key      func(ID) string
		change   func([]byte) []byte // nil: delete
		want     error
		openFine bool // told later
	}{
		{"manifest missing", manifestKey, nil, ErrMissing, false},
		{"manifest flipped", manifestKey, flip(40), ErrCorrupt, false},
		{"manifest cut off", manifestKey, cut, ErrCorrupt, false},
		{"manifest empty", manifestKey, func([]byte) []byte { return nil }, ErrCorrupt, false},
		{"state missing", stateKey, nil, ErrMissing, false},
		{"state cut off", stateKey, cut, ErrCorrupt, false},
		{"state flipped", stateKey, flip(30), ErrCorrupt, true},
		{"pack missing", packKey, nil, ErrMissing, false},
		{"pack cut off", packKey, cut, ErrCorrupt, false},
		{"pack index flipped", packKey, flip(-70), ErrCorrupt, false},
		{"page flipped", packKey, flip(5000), ErrCorrupt, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r, dir := newRepository(t)
			m := newMachine(100)
			for n := range 30 {
				m.fill(n, 1)
			}
			ref, _ := m.capture(t, r, nil)
			key := test.key(ref.ID)
			if test.change == nil {
				if err := os.Remove(filepath.Join(dir, key)); err != nil {
					t.Fatal(err)
				}
			} else {
				damage(t, dir, key, test.change)
			}
			s, err := r.Open(t.Context(), ref)
			if test.openFine {
				if err != nil {
					t.Fatalf("Open: %v", err)
				}
				defer s.Close()
				_, stateErr := s.State(t.Context())
				_, pageErr := s.ReadAt(make([]byte, page.Size), 0)
				err = errors.Join(stateErr, pageErr)
			}
			if !errors.Is(err, test.want) || !strings.Contains(err.Error(), key) {
				t.Errorf("the error is %v", err)
			}
			_, _, faults, verr := r.Verify(t.Context(), nil)
			if verr != nil {
				t.Fatal(verr)
			}
			if test.name == "manifest missing" {
				return // then there is no snapshot, and its rest is garbage
			}
			if len(faults) != 1 || !errors.Is(faults[0], test.want) || !strings.Contains(faults[0].Error(), key) {
				t.Errorf("Verify found %v", faults)
			}
		})
	}
}

func TestOpenWantsTheRecordedManifest(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(2)
	ref, _ := m.capture(t, r, nil)
	other := ref
	other.Manifest = strings.Repeat("0", 64)
	if _, err := r.Open(t.Context(), other); !errors.Is(err, ErrCorrupt) {
		t.Errorf("Open: %v", err)
	}
	if _, err := r.Open(t.Context(), Ref{ID: "../../../etc/passwd00000000"}); err == nil {
		t.Error("a path passed for an id")
	}
	if _, err := r.Find(t.Context(), NewID()); !errors.Is(err, ErrMissing) {
		t.Errorf("Find: %v", err)
	}
}

func TestManifestUnderAnotherName(t *testing.T) {
	r, dir := newRepository(t)
	ref, _ := newMachine(2).capture(t, r, nil)
	b, err := os.ReadFile(filepath.Join(dir, manifestKey(ref.ID)))
	if err != nil {
		t.Fatal(err)
	}
	id := NewID()
	putRaw(t, r.store, manifestKey(id), b)
	if _, err := r.Find(t.Context(), id); !errors.Is(err, ErrCorrupt) {
		t.Errorf("Find: %v", err)
	}
}

func TestOtherVersionsAreRefusedInWords(t *testing.T) {
	for _, version := range []uint32{1, manifestVersion + 1} {
		r, dir := newRepository(t)
		ref, _ := newMachine(2).capture(t, r, nil)
		damage(t, dir, manifestKey(ref.ID), func(b []byte) []byte { binary.LittleEndian.PutUint32(b[8:], version); return b })
		if _, err := r.Find(t.Context(), ref.ID); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), fmt.Sprintf("version %d,", version)) {
			t.Errorf("Find: %v", err)
		}
	}
}

func TestReadAtTheEdges(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(5)
	m.fill(4, 1)
	ref, _ := m.capture(t, r, nil)
	s := open(t, r, ref)
	p := make([]byte, 2*page.Size)
	if n, err := s.ReadAt(p, 4*page.Size); n != page.Size || err != io.EOF {
		t.Errorf("read across the end = %d, %v", n, err)
	}
	if n, err := s.ReadAt(p, 5*page.Size); n != 0 || err != io.EOF {
		t.Errorf("read at the end = %d, %v", n, err)
	}
	if _, err := s.ReadAt(p, -1); err == nil {
		t.Error("a negative offset was read")
	}
	if n, err := s.ReadAt(p[:100], 4*page.Size-50); n != 100 || err != nil || p[49] != 0 || p[50] != 1 {
		t.Errorf("read across pages = %d, %v", n, err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

// A store that is far away is asked for as much as possible at once: the
// manifest, then all packs, and the state file beside them. That is four waits,
// for each object is opened and then read.
func TestOpenWaitsForFewRoundTrips(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(200)
	m.fill(0, 1)
	ref, _ := m.capture(t, r, nil)
	for n := 1; n < 30; n++ {
		m.fill(n, 1)
		ref, _ = m.capture(t, r, open(t, r, ref))
	}
	if err := r.SaveWorkingSet(t.Context(), ref.ID, WorkingSet{{Run: page.Run{First: 3, Count: 2}}}); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) { // its clock stands still while anything is done but waiting
		const latency = 20 * time.Millisecond
		r := NewRepository(&distant{Store: r.store, latency: latency})
		begin := time.Now()
		s := open(t, r, ref)
		if d := time.Since(begin); len(s.packs) != 30 || d != 4*latency {
			t.Errorf("opened with %d packs after %v", len(s.packs), d)
		}
		if _, err := s.State(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := s.WorkingSet(t.Context()); err != nil {
			t.Error(err)
		}
		if d := time.Since(begin); d != 4*latency {
			t.Errorf("state and working set were there after %v", d)
		}
	})
}

// The working set is no reason for a resume to wait.
func TestOpenDoesNotWaitForTheWorkingSet(t *testing.T) {
	r, _ := newRepository(t)
	m := newMachine(2)
	m.fill(1, 1)
	ref, _ := m.capture(t, r, nil)
	released := make(chan struct{})
	r = NewRepository(&blobtest.Faulty{Store: r.store, Fault: func(op blobtest.Op, key string) error {
		if key == worksetKey(ref.ID) {
			<-released
		}
		return nil
	}})
	s := open(t, r, ref)
	same(t, s, m.ram)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.WorkingSet(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("WorkingSet: %v", err)
	}
	close(released)
	if _, err := s.WorkingSet(t.Context()); !errors.Is(err, ErrMissing) {
		t.Errorf("WorkingSet: %v", err)
	}
}
