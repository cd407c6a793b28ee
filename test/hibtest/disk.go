package hibtest

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// SmallDisk mounts a file system of the given size (as mount's size option
// writes it) and returns its root. It needs root.
func SmallDisk(t testing.TB, size string) string {
	t.Helper()
	dir := tempDir(t)
	if err := unix.Mount("hibtest", dir, "tmpfs", 0, "size="+size+",mode=755"); err != nil {
		t.Fatalf("mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount the small disk: %v", err)
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
	return dir
}

// FillDisk writes the file path until only leave bytes are free.
func FillDisk(t testing.TB, path string, leave int64) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		t.Fatal(err)
	}
	fill := int64(fs.Bavail)*fs.Bsize - leave
	if err := unix.Fallocate(int(f.Fd()), 0, 0, fill); err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}
