package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/pack"
)

// frameCache bounds the decoded frames that an open snapshot keeps, in bytes.
const frameCache = 8 << 20

// Repository keeps snapshots in a store. Its methods may be called at the same
// time, and any number of processes may have repositories on one store.
type Repository struct {
	store blob.Store
}

// NewRepository returns the repository of the snapshots in store.
func NewRepository(store blob.Store) *Repository { return &Repository{store: store} }

// Open opens the snapshot that ref names and holds its objects against deletion
// until Close. It verifies the manifest against ref, the size of the state file and
// the index of every pack, so what is missing or cut off is told here; it reads
// no pages, these are verified when they are read. Errors name the object and
// wrap ErrMissing, ErrCorrupt or ErrVersion.
func (r *Repository) Open(ctx context.Context, ref Ref) (_ *Snapshot, err error) {
	if _, err := ParseID(string(ref.ID)); err != nil {
		return nil, err
	}
	s := &Snapshot{ref: ref}
	defer func() {
		if err != nil {
			err = fmt.Errorf("open snapshot %s: %w", ref.ID, errors.Join(err, s.Close()))
		}
	}()
	b, err := s.readManifest(ctx, r.store)
	if err != nil {
		return nil, err
	}
	if got := hashOf(b); got != ref.Manifest {
		return nil, corrupt(manifestKey(ref.ID), "its hash is %s, recorded is %q", got, ref.Manifest)
	}
	if s.manifest, err = parseManifest(ref.ID, b); err != nil {
		return nil, err
	}
	if s.state, err = s.hold(ctx, r.store, stateKey(ref.ID)); err != nil {
		return nil, err
	}
	if s.state.Size() != s.manifest.state.Size {
		return nil, corrupt(stateKey(ref.ID), "it has %d bytes instead of %d", s.state.Size(), s.manifest.state.Size)
	}
	cache := pack.NewCache(frameCache)
	for _, p := range s.manifest.packs {
		o, err := s.hold(ctx, r.store, packKey(p.id))
		if err != nil {
			return nil, err
		}
		reader, err := pack.Open(o, o.Size(), &p.summary, cache)
		if err != nil {
			return nil, objectError(packKey(p.id), err)
		}
		s.packs = append(s.packs, reader)
	}
	return s, nil
}

// Find returns the Ref of the snapshot id, by reading its manifest and trusting
// the hash in it: for recovery, when it is not known whether a capture ended.
// Errors name the object and wrap ErrMissing if there is no such snapshot,
// ErrCorrupt or ErrVersion.
func (r *Repository) Find(ctx context.Context, id ID) (Ref, error) {
	m, hash, err := r.load(ctx, id)
	if err != nil {
		return Ref{}, fmt.Errorf("find snapshot: %w", err)
	}
	return Ref{ID: m.metadata.ID, Manifest: hash}, nil
}

// load reads the manifest of snapshot id and returns it with its hash.
func (r *Repository) load(ctx context.Context, id ID) (*manifest, string, error) {
	if _, err := ParseID(string(id)); err != nil {
		return nil, "", err
	}
	s := &Snapshot{ref: Ref{ID: id}}
	defer s.Close()
	b, err := s.readManifest(ctx, r.store)
	if err != nil {
		return nil, "", err
	}
	m, err := parseManifest(id, b)
	if err != nil {
		return nil, "", err
	}
	return m, hashOf(b), nil
}

// Delete removes the snapshot id: its manifest, then its state file. Its packs
// may be used by others and are left to Collect. A snapshot that is not there is no error;
// one that is open is one that wraps blob.ErrInUse.
func (r *Repository) Delete(ctx context.Context, id ID) error {
	if _, err := ParseID(string(id)); err != nil {
		return err
	}
	for _, key := range []string{manifestKey(id), stateKey(id)} {
		if err := r.store.Delete(ctx, key); err != nil {
			return fmt.Errorf("delete snapshot: %w", err)
		}
	}
	return nil
}

// hashOf returns the SHA-256 of b in hexadecimal digits.
func hashOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
