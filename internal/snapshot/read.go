package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

// frameCache bounds the decoded frames of local packs that an open snapshot
// keeps, in bytes, remoteFrameCache those of remote ones: about a working set, whose
// neighbourhood the guest is going to touch, and whose pages a capture compares.
const (
	frameCache       = 8 << 20
	remoteFrameCache = 64 << 20
)

// maxOpening bounds how many packs are being opened at a time.
const maxOpening = 32

// Snapshot is an open snapshot: an io.ReaderAt over its memory image. Its methods
// may be called at the same time, but not after Close.
type Snapshot struct {
	ref      Ref
	manifest *manifest
	state    *reading
	workset  *reading
	packs    []*pack.Reader // as in manifest.packs

	background sync.WaitGroup // fetches

	mu   sync.Mutex
	held []io.Closer
}

// hold opens an object until Close.
func (s *Snapshot) hold(ctx context.Context, store blob.Store, key string) (blob.Object, error) {
	o, err := store.Open(ctx, key)
	if err != nil {
		return nil, objectError(key, err)
	}
	s.keep(o)
	return o, nil
}

// keep closes c on Close.
func (s *Snapshot) keep(c io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = append(s.held, c)
}

// openManifest reads and verifies the manifest. It begins to read state file and
// working set meanwhile, for State and WorkingSet.
func (s *Snapshot) openManifest(ctx context.Context, store blob.Store) error {
	s.state = begin(ctx, store, stateKey(s.ref.ID), maxState+stateOverhead)
	s.keep(s.state)
	s.workset = begin(ctx, store, worksetKey(s.ref.ID), maxWorkset)
	s.keep(s.workset)
	key := manifestKey(s.ref.ID)
	o, b, err := readObject(ctx, store, key, maxManifest)
	if err != nil {
		return err
	}
	s.keep(o)
	if got := hashOf(b); got != s.ref.Manifest {
		return corrupt(key, "its hash is %s, recorded is %q", got, s.ref.Manifest)
	}
	s.manifest, err = parseManifest(s.ref.ID, b)
	return err
}

// openPacks opens the packs that the manifest names.
func (s *Snapshot) openPacks(ctx context.Context, store blob.Store) error {
	s.packs = make([]*pack.Reader, len(s.manifest.packs))
	local, remote := pack.NewCache(frameCache), pack.NewCache(remoteFrameCache)
	var g errgroup.Group
	g.SetLimit(maxOpening)
	for i, p := range s.manifest.packs {
		g.Go(func() error {
			o, err := s.hold(ctx, store, packKey(p.id))
			if err != nil {
				return err
			}
			cache := local
			if isRemote(o) {
				cache = remote
			}
			s.packs[i], err = pack.Open(o, o.Size(), &p.summary, cache)
			return packError(p.id, isRemote(o), err)
		})
	}
	return g.Wait()
}

// Remote reports whether packs of the snapshot are on another machine.
func (s *Snapshot) Remote() bool { return slices.ContainsFunc(s.packs, (*pack.Reader).Remote) }

// isRemote reports whether each read of o costs a request to another machine.
func isRemote(o blob.Object) bool {
	r, ok := o.(interface{ Remote() bool })
	return ok && r.Remote()
}

// checkStateSize waits for the state file, and checks its size.
func (s *Snapshot) checkStateSize(ctx context.Context) error {
	state, err := s.state.wait(ctx)
	if err != nil {
		return err
	}
	if want := s.manifest.state.Size; int64(len(state)) != want {
		return corrupt(stateKey(s.ref.ID), "it has %d bytes instead of %d", len(state), want)
	}
	return nil
}

// readObject opens the object key and reads all of it, no more than limit bytes.
// The caller closes the object, which is nil after an error.
func readObject(ctx context.Context, store blob.Store, key string, limit int64) (blob.Object, []byte, error) {
	o, err := store.Open(ctx, key)
	if err != nil {
		return nil, nil, objectError(key, err)
	}
	b, err := readAll(o, key, limit)
	if err != nil {
		return nil, nil, errors.Join(err, o.Close())
	}
	return o, b, nil
}

func readAll(o blob.Object, key string, limit int64) ([]byte, error) {
	if o.Size() > limit {
		return nil, corrupt(key, "%d bytes are too many", o.Size())
	}
	b := make([]byte, o.Size())
	if n, err := o.ReadAt(b, 0); n < len(b) {
		if err == io.EOF {
			return nil, corrupt(key, "it is cut off at %d", n)
		}
		return nil, objectError(key, err)
	}
	return b, nil
}

// reading is an object that is read by a goroutine of its own.
type reading struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when the rest is set
	object blob.Object   // nil after an error
	bytes  []byte
	err    error
}

// begin begins to read the object key. It goes on when ctx has ended, until close.
func begin(ctx context.Context, store blob.Store, key string, limit int64) *reading {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r := &reading{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.object, r.bytes, r.err = readObject(ctx, store, key, limit)
	}()
	return r
}

// wait returns the object's bytes once they are read.
func (r *reading) wait(ctx context.Context) ([]byte, error) {
	select {
	case <-r.done:
		return r.bytes, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close ends the reading and closes the object.
func (r *reading) Close() error {
	r.cancel()
	<-r.done
	if r.object == nil {
		return nil
	}
	return r.object.Close()
}

// Ref returns what names the snapshot.
func (s *Snapshot) Ref() Ref { return s.ref }

// Metadata returns the snapshot's metadata. The map in it must not be changed.
func (s *Snapshot) Metadata() Metadata { return s.manifest.metadata }

// Zeros returns how many pages from guest page first on are known to be zero
// without looking at a pack, n at most.
func (s *Snapshot) Zeros(first, n uint64) uint64 {
	end := min(first+n, uint64(pagesOf(s.manifest.metadata.MemoryBytes)))
	if first >= end {
		return 0
	}
	zeros, ended := uint64(0), false
	s.eachRun(uint32(first), uint32(end), func(r run) {
		ended = ended || r.pack != zeroPack
		if !ended {
			zeros += uint64(r.count)
		}
	})
	return zeros
}

// ReadAt reads the memory image, which has Metadata().MemoryBytes bytes. Pages that the
// manifest records as zero are zeros, all others are verified. Errors name the
// pack; they wrap ErrCorrupt if its bytes are not those that were written.
func (s *Snapshot) ReadAt(p []byte, off int64) (int, error) {
	return s.read(p, off, (*pack.Reader).ReadAt)
}

// peek is ReadAt without the promise that the bytes are right: see
// pack.Reader.Peek.
func (s *Snapshot) peek(p []byte, off int64) (int, error) {
	return s.read(p, off, (*pack.Reader).Peek)
}

// read cuts a read into parts of one run each.
func (s *Snapshot) read(p []byte, off int64, readPack func(*pack.Reader, []byte, int64) (int, error)) (int, error) {
	if off < 0 {
		return 0, errors.New("read snapshot: negative offset")
	}
	if off >= s.manifest.metadata.MemoryBytes {
		return 0, io.EOF
	}
	n := 0
	for i := find(s.manifest.runs, pagesOf(off)); n < len(p); i++ {
		if i == len(s.manifest.runs) {
			return n, io.EOF
		}
		r := s.manifest.runs[i]
		from := off - int64(r.first)*page.Size // in the run
		part := p[n:]
		if rest := int64(r.count)*page.Size - from; rest < int64(len(part)) {
			part = part[:rest]
		}
		if r.pack == zeroPack {
			clear(part)
		} else if m, err := readPack(s.packs[r.pack], part, int64(r.packPage)*page.Size+from); m < len(part) {
			return n + m, s.readError(pagesOf(off+int64(m)), r.pack, err)
		}
		n += len(part)
		off += int64(len(part))
	}
	return n, nil
}

// packError names the pack in an error about its content, and the remote store
// if it is read from there: an error of that store names it by itself.
func packError(id ID, remote bool, err error) error {
	damaged := errors.Is(err, pack.ErrCorrupt) || errors.Is(err, pack.ErrVersion)
	err = objectError(packKey(id), err)
	if damaged && remote {
		return fmt.Errorf("remote store: %w", err)
	}
	return err
}

// readError says that guest page n cannot be read from a pack.
func (s *Snapshot) readError(n, pack uint32, err error) error {
	return fmt.Errorf("read page %d of snapshot %s: %w", n, s.ref.ID, packError(s.manifest.packs[pack].id, s.packs[pack].Remote(), err))
}

// State returns the machine's saved state, verified. Errors name the object.
func (s *Snapshot) State(ctx context.Context) ([]byte, error) {
	b, err := s.state.wait(ctx)
	if err != nil {
		return nil, err
	}
	return checkState(s.ref.ID, b, s.manifest.state)
}

// Close gives the snapshot's objects free.
func (s *Snapshot) Close() error {
	var errs []error
	for _, o := range s.held {
		errs = append(errs, o.Close())
	}
	s.held = nil
	s.background.Wait()
	return errors.Join(errs...)
}
