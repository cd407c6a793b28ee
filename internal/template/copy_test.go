package template

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestCopy: a copy has the same files under another name, shares them with what
// it was made of, and outlives it.
func TestCopy(t *testing.T) {
	dir := t.TempDir()
	from := filepath.Join(dir, "base", "v1")
	if err := os.MkdirAll(from, 0o755); err != nil {
		t.Fatal(err)
	}
	r := record{Format: formatName, Version: formatVersion, Name: "base", KernelRelease: "6.1"}
	for name, file := range map[string]*fileRecord{baseFile: &r.Base, kernelFile: &r.Kernel, initrdFile: &r.Initrd} {
		content := make([]byte, imageAlign)
		copy(content, name)
		if err := os.WriteFile(filepath.Join(from, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
		var err error
		if *file, err = describe(filepath.Join(from, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := writeJSON(filepath.Join(from, recordFile), r); err != nil {
		t.Fatal(err)
	}
	a, err := Load(from)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "other", "v1")
	made, err := Copy(t.Context(), a, "other", out)
	if err != nil {
		t.Fatal(err)
	}
	if made.Name != "other" || made.Dir != out || made.BaseDigest != a.BaseDigest || made.KernelDigest != a.KernelDigest {
		t.Errorf("the copy is %+v", made)
	}
	one, _ := os.Stat(a.BaseImage)
	two, _ := os.Stat(made.BaseImage)
	if !os.SameFile(one, two) {
		t.Error("the base images are two files")
	}
	if _, err := Copy(t.Context(), a, "other", out); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over another one: %v", err)
	}
	if err := os.RemoveAll(from); err != nil {
		t.Fatal(err)
	}
	if err := made.Verify(); err != nil {
		t.Error(err)
	}
	if _, err := Copy(t.Context(), a, "third", filepath.Join(dir, "third")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of nothing: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*", ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
