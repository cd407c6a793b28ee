package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

// Snapshot is an open snapshot: an io.ReaderAt over its memory image. ReadAt
// and State may be called at the same time, but not after Close.
type Snapshot struct {
	ref      Ref
	store    blob.Store
	manifest *manifest
	state    blob.Object
	packs    []*pack.Reader // as in manifest.packs
	held     []io.Closer
}

// hold opens an object until Close.
func (s *Snapshot) hold(ctx context.Context, store blob.Store, key string) (blob.Object, error) {
	o, err := store.Open(ctx, key)
	if err != nil {
		return nil, objectError(key, err)
	}
	s.held = append(s.held, o)
	return o, nil
}

// readManifest opens and reads the manifest file.
func (s *Snapshot) readManifest(ctx context.Context, store blob.Store) ([]byte, error) {
	key := manifestKey(s.ref.ID)
	o, err := s.hold(ctx, store, key)
	if err != nil {
		return nil, err
	}
	if o.Size() > maxManifest {
		return nil, corrupt(key, "%d bytes are too many", o.Size())
	}
	return readObject(o, key)
}

// readObject reads a whole object.
func readObject(o blob.Object, key string) ([]byte, error) {
	b := make([]byte, o.Size())
	if n, err := o.ReadAt(b, 0); n < len(b) {
		if err == io.EOF {
			return nil, corrupt(key, "it is cut off at %d", n)
		}
		return nil, objectError(key, err)
	}
	return b, nil
}

// Ref returns what names the snapshot.
func (s *Snapshot) Ref() Ref { return s.ref }

// Metadata returns the snapshot's metadata. The map in it must not be changed.
func (s *Snapshot) Metadata() Metadata { return s.manifest.metadata }

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
			return n + m, fmt.Errorf("read page %d of snapshot %s: %w", pagesOf(off+int64(m)), s.ref.ID,
				objectError(packKey(s.manifest.packs[r.pack].id), err))
		}
		n += len(part)
		off += int64(len(part))
	}
	return n, nil
}

// State returns the machine's saved state, verified. Errors name the object.
func (s *Snapshot) State(ctx context.Context) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return readState(s.state, s.ref.ID, s.manifest.state)
}

// readState reads and verifies the state file of snapshot id.
func readState(o blob.Object, id ID, want stateRef) ([]byte, error) {
	key := stateKey(id)
	if o.Size() != want.Size {
		return nil, corrupt(key, "it has %d bytes instead of %d", o.Size(), want.Size)
	}
	b, err := readObject(o, key)
	if err != nil {
		return nil, err
	}
	if got := stateRefOf(b); got != want {
		return nil, corrupt(key, "its hash is %s, recorded is %s", got.SHA256, want.SHA256)
	}
	return parseState(id, b)
}

// Close gives the snapshot's objects free.
func (s *Snapshot) Close() error {
	var errs []error
	for _, o := range s.held {
		errs = append(errs, o.Close())
	}
	s.held = nil
	return errors.Join(errs...)
}
