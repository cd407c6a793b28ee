package snapshot

import (
	"context"
	"fmt"
	"strings"

	"github.com/hibernacle/hibernacle/internal/pack"
)

// Kind is a kind of object that snapshots consist of.
type Kind string

// The kinds of objects.
const (
	KindManifest   Kind = manifestPrefix
	KindState      Kind = statePrefix
	KindWorkingSet Kind = worksetPrefix
	KindPack       Kind = packPrefix
)

// Prefix returns what the keys of the kind's objects begin with.
func (k Kind) Prefix() string { return string(k) }

// Key returns the key of the kind's object of snapshot id.
func (k Kind) Key(id ID) string { return string(k) + string(id) }

// Parse returns the snapshot that the object of that key is of, and whether the
// key is one of this kind.
func (k Kind) Parse(key string) (ID, bool) {
	rest, ok := strings.CutPrefix(key, string(k))
	if !ok {
		return "", false
	}
	id, err := ParseID(rest)
	return id, err == nil
}

// Pack is a pack that a manifest names.
type Pack struct {
	ID      ID // of the snapshot whose capture wrote it
	Summary pack.Summary
}

// Key returns the pack's key.
func (p Pack) Key() string { return packKey(p.ID) }

// Packs returns the packs that the manifest of ref names, by reading it and
// nothing else. Errors name the manifest and wrap ErrMissing, ErrCorrupt or
// ErrVersion.
func (r *Repository) Packs(ctx context.Context, ref Ref) ([]Pack, error) {
	m, err := r.loadRef(ctx, ref)
	if err != nil {
		return nil, fmt.Errorf("look at the packs of snapshot %s: %w", ref.ID, err)
	}
	packs := make([]Pack, len(m.packs))
	for i, p := range m.packs {
		packs[i] = Pack{ID: p.id, Summary: p.summary}
	}
	return packs, nil
}
