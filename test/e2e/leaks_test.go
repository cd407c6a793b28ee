package e2e

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestNothingIsLeftBehind: fifty lives of a sandbox leave no process, mount,
// socket, file, descriptor or goroutine.
func TestNothingIsLeftBehind(t *testing.T) {
	d := hibtest.Start(t)
	life := func() {
		id := d.Create("--memory", "512")
		d.Shell(id, "echo x > file")
		d.Hib("hibernate", id)
		d.Hib("resume", id)
		d.Shell(id, "cat file")
		d.Hib("rm", id)
	}
	for range 3 { // pools and caches fill
		life()
	}
	d.Settle()
	files, descriptors, goroutines := tree(t, d.Data), d.Descriptors(), d.Goroutines()
	for range 50 {
		life()
	}
	d.Settle()
	if left := d.Processes(); len(left) > 0 {
		t.Errorf("processes: %v", left)
	}
	if left := d.Mounts(); len(left) > 0 {
		t.Errorf("mounts: %v", left)
	}
	// Packs go with the next collection, half a minute after a deletion.
	hibtest.Eventually(t, "no new file is left", func() bool {
		for path := range tree(t, d.Data) {
			if !files[path] {
				return false
			}
		}
		return true
	})
	if now := d.Descriptors(); now > descriptors+3 {
		t.Errorf("the daemon has %d descriptors, %d before", now, descriptors)
	}
	if now := d.Goroutines(); now > goroutines+3 {
		t.Errorf("the daemon has %d goroutines, %d before", now, goroutines)
	}
	left, err := os.ReadDir(d.RunDir())
	if err != nil || len(left) > 0 {
		t.Errorf("runtime folder: %v, %v", left, err)
	}
}

// tree lists every file below dir.
func tree(t *testing.T, dir string) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			all[path] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
