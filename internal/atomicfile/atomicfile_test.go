package atomicfile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	for _, content := range []string{"first", "second, and longer", ""} {
		err := Write(path, 0o640, func(w io.Writer) error {
			_, err := io.WriteString(w, content)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != content {
			t.Errorf("content %q, %v; want %q", got, err, content)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
			t.Errorf("mode %v, %v", info.Mode(), err)
		}
	}
	onlyEntry(t, dir, "file")
}

func TestWriteFailsAndLeavesTheOldFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	mine := errors.New("mine")
	err := Write(path, 0o600, func(w io.Writer) error {
		io.WriteString(w, "half")
		return mine
	})
	if !errors.Is(err, mine) {
		t.Errorf("Write: %v", err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" {
		t.Errorf("content %q, %v", got, err)
	}
	onlyEntry(t, dir, "file")
}

func TestWriteIntoMissingFolder(t *testing.T) {
	err := Write(filepath.Join(t.TempDir(), "none", "file"), 0o600, func(io.Writer) error { return nil })
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Write: %v", err)
	}
}

func TestMkdirAll(t *testing.T) {
	root := t.TempDir()
	for range 2 {
		if err := MkdirAll(filepath.Join(root, "a/b/c"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := MkdirAll(filepath.Join(root, "file"), 0o700); err == nil {
		t.Error("a file passed for a folder")
	}
}

func onlyEntry(t *testing.T, dir, name string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != name {
		t.Errorf("folder holds %v, %v", entries, err)
	}
}
