package peer

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// TestSaveAndRestore restores one saved guest more than once: the file stays as it was.
func TestSaveAndRestore(t *testing.T) {
	fixture := os.Getenv("HIB_TEST_FIXTURE")
	if fixture == "" {
		t.Skip("needs a template: set HIB_TEST_FIXTURE")
	}
	dirs, err := filepath.Glob(filepath.Join(fixture, "templates", "base", "v*"))
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no template in %s: %v", fixture, err)
	}
	p, err := New(t.Context(), Config{
		Template: dirs[0], Shape: vmm.Shape{MemoryMiB: 512, CPUs: 1},
		Server: []string{"bash", "-c", "setsid python3 -m http.server -d /etc 8000 </dev/null >/dev/null 2>&1 &"}, Port: 8000,
	})
	if err != nil {
		t.Fatal(err)
	}
	size, err := p.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	if base := p.art.BaseBytes; size >= 512<<20 || size <= 16<<20 {
		t.Errorf("%d bytes were saved of a machine of 512 MiB with a base image of %d bytes", size, base)
	}
	for range 2 {
		took, err := p.Restore(t.Context(), "/hostname")
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("restored %d MB in %v", size>>20, took)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(p.dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", p.dir, err)
	}
}
