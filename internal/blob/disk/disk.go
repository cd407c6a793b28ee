// Package disk keeps the objects of a blob.Store as files of a local folder:
// the object a/b is the file a/b. Any number of processes may use the folder at
// the same time. The store holds objects: whoever has one open holds a shared lock
// (flock) on its file, and Delete needs the exclusive one.
//
// An object is written to a temporary file in the folder .tmp, on which its
// writer holds an exclusive lock, and linked to its name once it is durable.
// Temporary files that nobody has locked belong to dead writers: see Clean.
package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/atomicfile"
	"github.com/hibernacle/hibernacle/internal/blob"
)

const (
	dirPerm = 0o700
	tmpName = ".tmp" // no key can have it
)

// Store is a blob.Store in a folder.
type Store struct {
	dir   string
	owner *owner // of what is put; nil: this process

	mu      sync.Mutex
	durable map[string]bool // folders whose entry in the folder above this process has synced
}

var _ blob.Store = (*Store)(nil)

// Open returns the store in the folder dir, which it makes if it is missing,
// readable by its owner only.
func Open(dir string) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if err := atomicfile.MkdirAll(filepath.Join(dir, tmpName), dirPerm); err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	return &Store{dir: dir, durable: make(map[string]bool)}, nil
}

// owner is an account.
type owner struct{ uid, gid int }

// GiveTo makes what is put from now on belong to another account: that of the
// processes that read it, where the one that puts is root. Nothing may be put
// meanwhile.
func (s *Store) GiveTo(uid, gid int) { s.owner = &owner{uid, gid} }

func (s *Store) path(key string) string { return filepath.Join(s.dir, filepath.FromSlash(key)) }

// Open implements blob.Store: a shared lock on the file holds the object.
func (s *Store) Open(ctx context.Context, key string) (blob.Object, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("open %s: %w", key, err)
		}
		f, err := openFile(s.path(key))
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", key, err)
		}
		// Blocks only while somebody puts or deletes this very object.
		err = lock(f, unix.LOCK_SH)
		current := false
		if err == nil {
			current, err = isCurrent(f, s.path(key))
		}
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("open %s: %w", key, err)
		}
		if !current { // deleted between open and lock
			f.Close()
			continue
		}
		info, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("open %s: %w", key, err)
		}
		return &object{File: f, size: info.Size()}, nil
	}
}

type object struct {
	*os.File
	size int64
}

func (o *object) Size() int64 { return o.size }

// Stat implements blob.Store.
func (s *Store) Stat(_ context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	info, err := os.Lstat(s.path(key))
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return blob.Info{}, fmt.Errorf("look at %s: %w", key, notExist(err))
	}
	return blob.Info{Key: key, Size: info.Size(), ModTime: info.ModTime()}, nil
}

// List implements blob.Store.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		if blob.CheckPrefix(prefix) != nil {
			return // no key begins so
		}
		// Only the folders that can hold such keys are read.
		parent := prefix[:strings.LastIndexByte(prefix, '/')+1]
		err := filepath.WalkDir(s.path(parent), func(path string, d fs.DirEntry, err error) error {
			if cerr := ctx.Err(); cerr != nil {
				return cerr
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			} else if err != nil {
				return err
			}
			if d.Name() == tmpName && d.IsDir() {
				return fs.SkipDir
			}
			rel, err := filepath.Rel(s.dir, path)
			key := filepath.ToSlash(rel)
			if err != nil || !d.Type().IsRegular() || !strings.HasPrefix(key, prefix) || blob.CheckKey(key) != nil {
				return err
			}
			info, err := d.Info()
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			} else if err != nil {
				return err
			}
			if !yield(blob.Info{Key: key, Size: info.Size(), ModTime: info.ModTime()}, nil) {
				return fs.SkipAll
			}
			return nil
		})
		if err != nil {
			yield(blob.Info{}, fmt.Errorf("list store %s: %w", s.dir, err))
		}
	}
}

// DropCache makes the kernel let go of the pages of an object that it keeps in
// memory and that nobody uses. The next read comes from the disk. The error
// wraps blob.ErrNotExist if there is no such object.
func (s *Store) DropCache(_ context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	f, err := openFile(s.path(key))
	if err != nil {
		return fmt.Errorf("drop the cache of %s: %w", key, err)
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("drop the cache of %s: %w", key, err)
	}
	return nil
}

// Delete implements blob.Store.
func (s *Store) Delete(_ context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	if err := removeUnlocked(s.path(key)); err != nil {
		return fmt.Errorf("delete %s: %w", key, err)
	}
	return nil
}

// removeUnlocked removes a file durably unless somebody has it locked.
func removeUnlocked(path string) error {
	f, err := openFile(path)
	if errors.Is(err, blob.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer f.Close()
	if err := lock(f, unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return blob.ErrInUse
	} else if err != nil {
		return err
	}
	if current, err := isCurrent(f, path); err != nil || !current {
		return err // somebody else deleted it
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	return atomicfile.SyncDir(filepath.Dir(path))
}

// Clean removes the temporary files of writers that died. Those of live ones,
// in whatever process, stay.
func (s *Store) Clean(ctx context.Context) error {
	tmp := filepath.Join(s.dir, tmpName)
	entries, err := os.ReadDir(tmp)
	if err != nil {
		return fmt.Errorf("clean store: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("clean store: %w", err)
		}
		if err := removeUnlocked(filepath.Join(tmp, e.Name())); err != nil && !errors.Is(err, blob.ErrInUse) {
			errs = append(errs, fmt.Errorf("clean store: %w", err))
		}
	}
	return errors.Join(errs...)
}

// openFile opens an object's file; a folder is no object.
func openFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, notExist(err)
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		if err == nil {
			err = blob.ErrNotExist
		}
		return nil, err
	}
	return f, nil
}

// notExist turns a missing file, also one below a file, into blob.ErrNotExist.
func notExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return blob.ErrNotExist
	}
	return err
}

// lock takes a lock on f's open file description; it ends when f is closed.
func lock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if err != unix.EINTR {
			return err
		}
	}
}

// isCurrent reports whether the open file f still is the one called path.
func isCurrent(f *os.File, path string) (bool, error) {
	opened, err := f.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return os.SameFile(opened, named), nil
}

// makeDir makes the folder of objects dir and makes it durable. That another
// process made it proves no durability, so the folder above is synced once by
// each process.
func (s *Store) makeDir(dir string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for d := dir; d != s.dir && !s.durable[d]; d = filepath.Dir(d) {
		if err := atomicfile.MkdirAll(d, dirPerm); err != nil {
			return err
		}
		if s.owner != nil {
			if err := os.Lchown(d, s.owner.uid, s.owner.gid); err != nil {
				return err
			}
		}
		if err := atomicfile.SyncDir(filepath.Dir(d)); err != nil {
			return err
		}
		s.durable[d] = true
	}
	return nil
}

// noSpace adds blob.ErrNoSpace to an error that says that the disk is full or
// the quota used up.
func noSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", blob.ErrNoSpace, err)
	}
	return err
}

// contextWriter fails once its context has ended.
type contextWriter struct {
	ctx context.Context
	w   io.Writer
	n   int64
}

func (c *contextWriter) Write(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
