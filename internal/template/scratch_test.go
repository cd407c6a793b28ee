package template

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestScratchIsPublishedOrRemoved(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "made", "on the way")
	s, err := newScratch(parent, ".work-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.path("file"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	final := filepath.Join(parent, "final")
	if err := s.publish(final); err != nil {
		t.Fatal(err)
	}
	s.remove()
	if _, err := os.Stat(filepath.Join(final, "file")); err != nil {
		t.Errorf("what was published is gone: %v", err)
	}

	s, err = newScratch(parent, ".work-")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.publish(final); !errors.Is(err, fs.ErrExist) {
		t.Errorf("publishing over a folder: %v, want fs.ErrExist", err)
	}
	s.remove()
	wantFiles(t, parent, "final")
}

func TestScratchOfTheDeadIsRemoved(t *testing.T) {
	parent := t.TempDir()
	living, err := newScratch(parent, ".work-")
	if err != nil {
		t.Fatal(err)
	}
	defer living.remove()
	for _, dead := range []string{".work-dead", ".other-dead"} {
		if err := os.MkdirAll(filepath.Join(parent, dead, "sub"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	next, err := newScratch(parent, ".work-")
	if err != nil {
		t.Fatal(err)
	}
	defer next.remove()
	wantFiles(t, parent, ".other-dead", filepath.Base(living.dir), filepath.Base(next.dir))
}

// wantFiles checks the names in a folder, in any order.
func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	left := map[string]bool{}
	for _, name := range want {
		left[name] = true
	}
	for _, e := range entries {
		if !left[e.Name()] {
			t.Errorf("%s holds %s", dir, e.Name())
		}
		delete(left, e.Name())
	}
	for name := range left {
		t.Errorf("%s does not hold %s", dir, name)
	}
}
