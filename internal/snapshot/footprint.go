package snapshot

import (
	"context"
	"errors"
	"fmt"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/page"
)

// Footprint says what a snapshot takes up in the store. Own packs are those
// that nobody else uses.
type Footprint struct {
	Packs       []PackUse // in the order of the manifest
	LiveBytes   int64     // pages of the memory image that are in own packs
	DeadBytes   int64     // pages in own packs that the snapshot does not need
	PackBytes   int64     // of the objects of own packs
	RecordBytes int64     // of manifest, state file and working set
}

// PackUse says what a snapshot uses of a pack.
type PackUse struct {
	ID     ID
	Shared bool  // others use it as well
	Pages  int64 // in the pack
	Live   int64 // of these, part of the memory image
	Bytes  int64 // of the object in the store
}

// StoredBytes is what would be free without the snapshot.
func (f Footprint) StoredBytes() int64 { return f.PackBytes + f.RecordBytes }

// Rewrite returns how many bytes of pages a compaction would write now, 0 if
// none is worth it.
func (f Footprint) Rewrite() int64 {
	uses := make([]packUse, len(f.Packs))
	for i, p := range f.Packs {
		uses[i] = packUse{pages: p.Pages, live: p.Live, fixed: p.Shared}
	}
	var pages int64
	for i, is := range chooseVictims(uses) {
		if is {
			pages += uses[i].live
		}
	}
	return pages * page.Size
}

// Footprint measures the snapshot that ref names; shared says which packs
// others use. It reads the manifest and asks for the sizes of objects. Errors
// name the object and wrap ErrMissing, ErrCorrupt or ErrVersion. While the store
// is not available, the packs there count as large as their pages.
func (r *Repository) Footprint(ctx context.Context, ref Ref, shared func(ID) bool) (Footprint, error) {
	f, err := r.footprint(ctx, ref, shared)
	if err != nil {
		return Footprint{}, fmt.Errorf("measure snapshot %s: %w", ref.ID, err)
	}
	return f, nil
}

func (r *Repository) footprint(ctx context.Context, ref Ref, shared func(ID) bool) (Footprint, error) {
	m, err := r.loadRef(ctx, ref)
	if err != nil {
		return Footprint{}, err
	}
	f := Footprint{RecordBytes: m.state.Size}
	live := livePages(m.runs, len(m.packs))
	for i, p := range m.packs {
		bytes, err := r.size(ctx, packKey(p.id), p.summary.Pages*page.Size)
		if err != nil {
			return Footprint{}, err
		}
		u := PackUse{ID: p.id, Shared: shared(p.id), Pages: p.summary.Pages, Live: live[i], Bytes: bytes}
		f.Packs = append(f.Packs, u)
		if !u.Shared {
			f.LiveBytes += u.Live * page.Size
			f.DeadBytes += (u.Pages - u.Live) * page.Size
			f.PackBytes += u.Bytes
		}
	}
	for _, key := range []string{manifestKey(ref.ID), worksetKey(ref.ID)} {
		n, err := r.size(ctx, key, 0)
		if err != nil && !errors.Is(err, ErrMissing) { // a working set need not be there
			return Footprint{}, err
		}
		f.RecordBytes += n
	}
	return f, nil
}

// size returns the size of an object, or guess if the store cannot be asked.
func (r *Repository) size(ctx context.Context, key string, guess int64) (int64, error) {
	info, err := r.store.Stat(ctx, key)
	if errors.Is(err, blob.ErrUnavailable) {
		return guess, nil
	}
	return info.Size, objectError(key, err)
}
