// Package atomicfile owns the durable replace: a file is seen with its old
// content or with its new one, whole, whatever happens in between, and once
// Write has returned the new one survives a loss of power.
package atomicfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Write replaces the file path, or makes it, with what write writes, and gives
// it the permissions perm. The folder must exist. On error the old file is left
// as it was, and no other file is left behind; only a crash can leave a
// temporary file, named like path with a dot before and a random ending.
func Write(path string, perm fs.FileMode, write func(io.Writer) error) error {
	dir, name := filepath.Split(path)
	if dir == "" {
		dir = "."
	}
	f, err := os.CreateTemp(dir, "."+name+".*")
	if err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	err = fill(f, perm, write)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("replace %s: %w", path, err), os.Remove(f.Name()))
	}
	if err := SyncDir(dir); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return nil
}

// fill writes f's content and makes it durable.
func fill(f *os.File, perm fs.FileMode, write func(io.Writer) error) error {
	w := &countingWriter{w: f}
	if err := write(w); err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() != w.n {
		return fmt.Errorf("wrote %d bytes, the file has %d", w.n, info.Size())
	}
	if err := f.Chmod(perm); err != nil {
		return err
	}
	return f.Sync()
}

type countingWriter struct {
	w io.Writer
	n int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// SyncDir makes the entries of the folder dir durable: files made, renamed and
// removed in it before.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync folder %s: %w", dir, err)
	}
	return nil
}

// MkdirAll makes the folder dir and those above it that are missing, with the
// permissions perm, and makes them durable.
func MkdirAll(dir string, perm fs.FileMode) error {
	if info, err := os.Stat(dir); err == nil {
		if !info.IsDir() {
			return fmt.Errorf("make folder %s: a file of that name is in the way", dir)
		}
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("make folder: %w", err)
	}
	parent := filepath.Dir(dir)
	if err := MkdirAll(parent, perm); err != nil {
		return err
	}
	if err := os.Mkdir(dir, perm); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make folder: %w", err)
	}
	return SyncDir(parent)
}
