package disk

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
)

func TestConformance(t *testing.T) {
	root := t.TempDir()
	blobtest.Suite{Open: func(t *testing.T, name string) blob.Store {
		s, err := Open(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}}.Run(t)
}

func openStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "new", "store"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestOnlyTheOwnerReads(t *testing.T) {
	s := openStore(t)
	if _, err := s.Put(t.Context(), "a/b/c", func(w io.Writer) error { return nil }); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestAnotherAccountOwnsWhatIsPut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	s := openStore(t)
	s.GiveTo(1234, 2345)
	if _, err := s.Put(t.Context(), "a/b/c", func(io.Writer) error { return nil }); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"a", "a/b", "a/b/c"} {
		var st unix.Stat_t
		if err := unix.Stat(s.path(key), &st); err != nil || st.Uid != 1234 || st.Gid != 2345 {
			t.Errorf("%s belongs to %d:%d, %v", key, st.Uid, st.Gid, err)
		}
	}
}

func temps(t *testing.T, s *Store) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(s.dir, tmpName))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestCleanRemovesOnlyWhatDeadWritersLeft(t *testing.T) {
	s := openStore(t)
	dead := filepath.Join(s.dir, tmpName, "put-dead")
	if err := os.WriteFile(dead, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := s.Put(t.Context(), "a/b", func(w io.Writer) error {
		if err := s.Clean(t.Context()); err != nil {
			t.Errorf("Clean: %v", err)
		}
		if got := temps(t, s); len(got) != 1 || got[0] == "put-dead" {
			t.Errorf("temporary files while writing: %v", got)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := temps(t, s); len(got) != 0 {
		t.Errorf("temporary files at the end: %v", got)
	}
}

// A crash between link and unlink leaves two names of one object.
func TestDeleteInSpiteOfLeftTemporaryName(t *testing.T) {
	s := openStore(t)
	if _, err := s.Put(t.Context(), "a/b", func(w io.Writer) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(s.path("a/b"), filepath.Join(s.dir, tmpName, "put-left")); err != nil {
		t.Fatal(err)
	}
	o, err := s.Open(t.Context(), "a/b")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Clean(t.Context()); err != nil {
		t.Fatal(err)
	}
	o.Close()
	if err := s.Delete(t.Context(), "a/b"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Open(t.Context(), "a/b"); !errors.Is(err, blob.ErrNotExist) {
		t.Errorf("Open: %v", err)
	}
	if err := s.Clean(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := temps(t, s); len(got) != 0 {
		t.Errorf("temporary files: %v", got)
	}
}

func TestSymlinksAndFoldersAreNoObjects(t *testing.T) {
	s := openStore(t)
	outside := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(outside, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, s.path("link")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Open(t.Context(), "link"); err == nil {
		t.Error("Open followed a symbolic link")
	}
	for info := range s.List(t.Context(), "") {
		t.Errorf("listed %s", info.Key)
	}
}

// A small tmpfs stands for a full disk.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount a small tmpfs: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Put(t.Context(), "a/big", func(w io.Writer) error {
		_, err := w.Write(make([]byte, 2<<20))
		return err
	})
	if !errors.Is(err, blob.ErrNoSpace) || !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "a/big") {
		t.Errorf("Put: %v", err)
	}
	if got := temps(t, s); len(got) != 0 {
		t.Errorf("temporary files: %v", got)
	}
	// What was half written is gone, so there is room again.
	if _, err := s.Put(t.Context(), "a/small", func(w io.Writer) error {
		_, err := w.Write(make([]byte, 1<<19))
		return err
	}); err != nil {
		t.Errorf("Put of a small object: %v", err)
	}
}

// resident counts the pages of an object's file that are in memory.
func resident(t *testing.T, s *Store, key string) int {
	t.Helper()
	f, err := os.Open(s.path(key))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	mapped, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mapped)
	pages := make([]byte, (len(mapped)+4095)/4096)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mapped[0])), uintptr(len(mapped)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		t.Fatal(errno)
	}
	n := 0
	for _, p := range pages {
		n += int(p & 1)
	}
	return n
}

func TestDropCache(t *testing.T) {
	s := openStore(t)
	want := strings.Repeat("0123456789abcdef", 1<<16)
	if _, err := s.Put(t.Context(), "a/b", func(w io.Writer) error { _, err := io.WriteString(w, want); return err }); err != nil {
		t.Fatal(err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(s.dir, &fs); err != nil {
		t.Fatal(err)
	}
	if n := resident(t, s, "a/b"); n == 0 {
		t.Error("nothing is cached after a Put: the test shows nothing")
	}
	if err := s.DropCache(t.Context(), "a/b"); err != nil {
		t.Fatal(err)
	}
	if n := resident(t, s, "a/b"); n != 0 && fs.Type != unix.TMPFS_MAGIC {
		t.Errorf("%d pages are cached", n)
	}
	o, err := s.Open(t.Context(), "a/b")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	got := make([]byte, len(want))
	if _, err := o.ReadAt(got, 0); err != nil || string(got) != want {
		t.Errorf("it reads otherwise (%v)", err)
	}
	if err := s.DropCache(t.Context(), "a/c"); !errors.Is(err, blob.ErrNotExist) {
		t.Errorf("of what is not there: %v", err)
	}
	if err := s.DropCache(t.Context(), "../a"); !errors.Is(err, blob.ErrInvalidKey) {
		t.Errorf("of a path: %v", err)
	}
}
