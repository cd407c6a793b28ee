package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/atomicfile"
	"github.com/hibernacle/hibernacle/internal/blob"
)

// Put implements blob.Store: file first, then its name, each synced.
func (s *Store) Put(ctx context.Context, key string, write func(io.Writer) error) (blob.Info, error) {
	info, err := s.put(ctx, key, write)
	if err != nil {
		return blob.Info{}, fmt.Errorf("put %s: %w", key, noSpace(err))
	}
	return info, nil
}

func (s *Store) put(ctx context.Context, key string, write func(io.Writer) error) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	if _, err := os.Lstat(s.path(key)); err == nil {
		return blob.Info{}, blob.ErrExist
	}
	f, err := s.createTemp()
	if err != nil {
		return blob.Info{}, err
	}
	// The lock lasts until Close: nobody opens the object before it is durable.
	defer f.Close()
	info, err := s.fill(ctx, f, key, write)
	if err == nil {
		err = s.publish(f, key)
	}
	if rerr := os.Remove(f.Name()); err != nil {
		return blob.Info{}, errors.Join(err, rerr)
	}
	return info, nil // if the temporary name is left, Clean takes it
}

// createTemp makes a temporary file and locks it. Clean may remove it in
// between; then the next one is tried.
func (s *Store) createTemp() (*os.File, error) {
	for {
		f, err := os.CreateTemp(filepath.Join(s.dir, tmpName), "put-*")
		if err != nil {
			return nil, err
		}
		err = lock(f, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			var current bool
			if current, err = isCurrent(f, f.Name()); current {
				return f, nil
			}
		}
		f.Close()
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(err, os.Remove(f.Name()))
		}
	}
}

// fill writes the content and makes it durable.
func (s *Store) fill(ctx context.Context, f *os.File, key string, write func(io.Writer) error) (blob.Info, error) {
	if s.owner != nil {
		if err := f.Chown(s.owner.uid, s.owner.gid); err != nil {
			return blob.Info{}, err
		}
	}
	w := &contextWriter{ctx: ctx, w: f}
	if err := write(w); err != nil {
		return blob.Info{}, err
	}
	if err := ctx.Err(); err != nil {
		return blob.Info{}, err
	}
	if err := f.Sync(); err != nil {
		return blob.Info{}, err
	}
	info, err := f.Stat()
	if err != nil {
		return blob.Info{}, err
	}
	if info.Size() != w.n {
		return blob.Info{}, fmt.Errorf("wrote %d bytes, the file has %d", w.n, info.Size())
	}
	return blob.Info{Key: key, Size: info.Size(), ModTime: info.ModTime()}, nil
}

// publish gives the durable file f its name, without replacing another, and
// makes the name durable.
func (s *Store) publish(f *os.File, key string) error {
	path := s.path(key)
	dir := filepath.Dir(path)
	if err := s.makeDir(dir); err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); errors.Is(err, fs.ErrExist) {
		return blob.ErrExist
	} else if err != nil {
		return err
	}
	if err := atomicfile.SyncDir(dir); err != nil {
		// Whether the name is durable is unknown; it must not be seen.
		return errors.Join(err, os.Remove(path))
	}
	return nil
}
