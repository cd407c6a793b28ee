package template

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// scratch is a folder for work under way. It either becomes something under
// its final name or is removed; one that a killed process left behind is
// removed by the next that works at the same place, told by its lock.
type scratch struct {
	dir  string
	lock *os.File // the folder itself, flocked while its owner lives
}

// newScratch makes a scratch folder in parent, which is made if it is not
// there, with a name that begins with prefix.
func newScratch(parent, prefix string) (*scratch, error) {
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, err
	}
	removeStale(parent, prefix)
	for {
		dir, err := os.MkdirTemp(parent, prefix)
		if err != nil {
			return nil, err
		}
		// Before it was locked, another's removeStale may have taken it for a
		// dead one's.
		lock, err := lockDir(dir)
		if err == nil {
			if _, err = os.Stat(dir); err == nil {
				return &scratch{dir: dir, lock: lock}, nil
			}
			lock.Close()
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EWOULDBLOCK) {
			_ = os.RemoveAll(dir)
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
	}
}

// lockDir opens a folder and locks it, without waiting.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// removeStale removes the scratch folders of dead owners.
func removeStale(parent, prefix string) {
	entries, _ := os.ReadDir(parent)
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		dir := filepath.Join(parent, e.Name())
		if f, err := lockDir(dir); err == nil {
			_ = os.RemoveAll(dir)
			f.Close()
		}
	}
}

// path returns the path of a file in the folder.
func (s *scratch) path(name string) string { return filepath.Join(s.dir, name) }

// publish makes the folder durable and gives it its final name, where nothing
// may be yet (fs.ErrExist).
func (s *scratch) publish(to string) error {
	if err := syncFolder(s.dir); err != nil {
		return err
	}
	if err := os.Chmod(s.dir, 0o755); err != nil {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, s.dir, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE); err != nil {
		return &os.LinkError{Op: "rename", Old: s.dir, New: to, Err: err}
	}
	return syncPath(filepath.Dir(to))
}

// remove removes the folder if it was not published, and lets go of its lock.
func (s *scratch) remove() {
	_ = os.RemoveAll(s.dir)
	_ = s.lock.Close()
}

// syncFolder fsyncs the files in a folder, which has no subfolders, and the folder.
func syncFolder(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := syncPath(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return syncPath(dir)
}

// syncPath fsyncs a file or folder.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	return nil
}
