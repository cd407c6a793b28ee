package e2e

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestNothingIsLeftBehind: fifty lives of a sandbox, some of which end parked,
// leave no process, mount, socket, file, descriptor or goroutine but those of the
// machines that are kept ready, and these end with the daemon.
func TestNothingIsLeftBehind(t *testing.T) {
	d := hibtest.Start(t)
	life := func() {
		id := d.Create("--memory", "512")
		d.Shell(id, "echo x > file")
		d.Hib("hibernate", id)
		d.Hib("resume", id)
		d.Shell(id, "cat file")
		if !d.Hibernate(id).Parked {
			t.Error("it is not parked")
		}
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
	if left := d.Left(); len(left) > 0 {
		t.Errorf("processes: %v", left)
	}
	waiting := len(d.Waiting())
	if waiting != 2 {
		t.Errorf("%d machines are kept ready, want 2", waiting)
	}
	if left := d.Mounts(); len(left) != waiting {
		t.Errorf("mounts beside those of %d machines: %v", waiting, left)
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
	run := d.RunDir()
	if left, err := os.ReadDir(run); err != nil || len(left) != waiting {
		t.Errorf("runtime folder: %v, %v", left, err)
	}
	d.Stop()
	if left, err := os.ReadDir(run); err == nil && len(left) > 0 {
		t.Errorf("runtime folder once the daemon has ended: %v", left)
	}
	if left := hibtest.ProcessesOf(run); len(left) > 0 {
		t.Errorf("processes once the daemon has ended: %v", left)
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
