package pager

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// fsName is the subtype of the mounts, by which CleanStale knows them:
	// /proc/mounts shows "fuse.hibernacle".
	fsName = "hibernacle"

	// maxRead bounds one READ in bytes. Larger pages of the kernel's cache or
	// readahead are split.
	maxRead = 128 << 10

	// defaultReadAhead is how much the kernel reads around a page fault, in
	// bytes. docs/decisions/0020-fuse-pager.md has the measurements.
	defaultReadAhead = 32 << 10

	// maxBackground bounds the READs that the kernel keeps under way at once.
	maxBackground = 64

	// closeWait bounds how long Close waits for requests under way.
	closeWait = 10 * time.Second
)

// Errors of slots and servers.
var (
	// ErrUnbound is the failure of a slot that was read before Bind.
	ErrUnbound = errors.New("read before a source was bound")
	// ErrBound is returned by Bind of a slot that has a source.
	ErrBound = errors.New("a source is bound already")
	// ErrClosed is returned by the methods of a server that was closed, and of
	// its slots.
	ErrClosed = errors.New("the pager is closed")
	// ErrEnded is the failure of a server, and of its slots, that serves no more
	// though nobody closed it: its connection was aborted, or it was unmounted.
	ErrEnded = errors.New("the pager's mount has ended")
)

// Server is one FUSE mount whose files are slots. Its methods may be called at
// the same time.
type Server struct {
	dir    string
	fs     *fileSystem
	fuse   *fuse.Server
	served chan struct{} // closed when no goroutine serves any more
	once   sync.Once
	err    error // of Close
}

// Mount mounts an empty file system at the existing folder dir and serves it.
// Root mounts it for the owner of dir: the processes that open its files must
// run under that user's id. Others need the set-uid helper fusermount3 (of the
// package fuse3) and mount for themselves. The server's own complaints about
// the protocol go to log; nil drops them.
func Mount(dir string, log *slog.Logger) (*Server, error) {
	return mount(dir, log, defaultReadAhead)
}

func mount(dir string, log *slog.Logger, readAhead int) (*Server, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("mount pager: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return nil, fmt.Errorf("mount pager at %s: %w", dir, err)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	fs := newFileSystem(st.Uid, st.Gid)
	opts := &fuse.MountOptions{
		Name:                     fsName,
		FsName:                   fsName,
		Options:                  []string{"noexec"},
		MaxWrite:                 maxRead, // go-fuse derives max_read from it
		MaxReadAhead:             readAhead,
		MaxBackground:            maxBackground,
		DisableXAttrs:            true,
		DisableReadDirPlus:       true,
		DisableSplice:            true,
		ExplicitDataCacheControl: true, // pages stay valid, whatever attributes say
		Logger:                   slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		// A panicking source is a bug: let it be seen, not answered with EIO.
		PanicHandler: func(cause any) fuse.Status { panic(cause) },
	}
	if os.Geteuid() == 0 {
		opts.DirectMountStrict = true
		opts.Options = append(opts.Options,
			fmt.Sprintf("user_id=%d", st.Uid), fmt.Sprintf("group_id=%d", st.Gid))
	}
	// NewServer returns after the kernel's INIT was answered, so the mount is
	// usable: go-fuse's WaitMount would only guard processes that poll files of
	// their own mount.
	server, err := fuse.NewServer(fs, dir, opts)
	if err != nil {
		return nil, fmt.Errorf("mount pager at %s (needs /dev/fuse, and fusermount3 unless root): %w", dir, err)
	}
	s := &Server{dir: dir, fs: fs, fuse: server, served: make(chan struct{})}
	go func() {
		defer close(s.served)
		server.Serve()
		fs.fail(ErrEnded)
	}()
	return s, nil
}

// NewSlot adds a slot of size bytes, a positive multiple of the page size,
// whose file has the given name. A name is used once in a server's life.
func (s *Server) NewSlot(name string, size int64) (*Slot, error) {
	l, err := s.fs.add(name, size)
	if err != nil {
		return nil, fmt.Errorf("new slot %s: %w", name, err)
	}
	l.path = filepath.Join(s.dir, name)
	l.store = s.fuse.InodeNotifyStoreCache
	return l, nil
}

// Check returns nil while the kernel takes this server's answers, and otherwise
// an error that wraps ErrEnded. A process that was killed by a SIGBUS may be seen
// before the slots have failed for that; who asks here knows.
func (s *Server) Check() error {
	select {
	case <-s.served:
		return ErrEnded
	default:
	}
	var st unix.Statfs_t // never answered from a cache
	if err := unix.Statfs(s.dir, &st); err != nil {
		return fmt.Errorf("%w: %w", ErrEnded, err)
	}
	return nil
}

// Close unmounts and waits for the goroutines that serve; dir stays as an
// empty folder. A process that still has a slot mapped gets SIGBUS at its next
// fault, so end VMMs first. The READs under way must come to an end for Close
// to do so: it gives up after 10 s with an error. Idempotent.
func (s *Server) Close() error {
	s.once.Do(func() { s.err = s.close() })
	return s.err
}

func (s *Server) close() error {
	s.fs.close()
	if err := s.unmount(); err != nil {
		return fmt.Errorf("close pager at %s: %w", s.dir, err)
	}
	timeout := time.NewTimer(closeWait)
	defer timeout.Stop()
	select {
	case <-s.served:
		return nil
	case <-timeout.C:
		return fmt.Errorf("close pager at %s: unmounted, but still serving after %v: a READ hangs in its source, or a process holds a slot open", s.dir, closeWait)
	}
}

func (s *Server) unmount() error {
	select {
	case <-s.served: // unmounted from outside
		return nil
	default:
	}
	conn, _ := connection(s.dir)
	err := detach(s.dir)
	if err == nil {
		// A mount detached without privilege lives on while a process maps a
		// slot, unless it can be aborted.
		select {
		case <-s.served:
		default:
			abort(conn)
		}
	}
	return err
}
