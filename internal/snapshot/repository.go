package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/hibernacle/hibernacle/internal/blob"
)

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
//
// The store may be far away: Open asks for the manifest, the state file and the
// working set at once, and for all packs once it knows them. It does not wait for
// the working set.
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
	if err := s.openManifest(ctx, r.store); err != nil {
		return nil, err
	}
	if err := s.openPacks(ctx, r.store); err != nil {
		return nil, err
	}
	if err := s.checkStateSize(ctx); err != nil {
		return nil, err
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
	o, b, err := readObject(ctx, r.store, manifestKey(id), maxManifest)
	if err != nil {
		return nil, "", err
	}
	defer o.Close()
	m, err := parseManifest(id, b)
	if err != nil {
		return nil, "", err
	}
	return m, hashOf(b), nil
}

// loadRef reads the manifest that ref names.
func (r *Repository) loadRef(ctx context.Context, ref Ref) (*manifest, error) {
	m, hash, err := r.load(ctx, ref.ID)
	if err == nil && hash != ref.Manifest {
		err = corrupt(manifestKey(ref.ID), "its hash is %s, recorded is %q", hash, ref.Manifest)
	}
	return m, err
}

// Delete removes the snapshot id: its manifest, then its state file and its
// working set. Its packs
// may be used by others and are left to Collect. A snapshot that is not there is no error;
// one that is open is one that wraps blob.ErrInUse.
func (r *Repository) Delete(ctx context.Context, id ID) error {
	if _, err := ParseID(string(id)); err != nil {
		return err
	}
	for _, key := range []string{manifestKey(id), stateKey(id), worksetKey(id)} {
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
