package sandboxtest

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// repository is the world's store as a daemon reaches it.
type repository struct{ d *Daemon }

func (r repository) find(id snapshot.ID) (*image, error) {
	if img := r.d.w.snapshots[id]; img != nil {
		return img, nil
	}
	return nil, fmt.Errorf("snapshot %s: %w", id, snapshot.ErrMissing)
}

func (r repository) Find(ctx context.Context, id snapshot.ID) (ref snapshot.Ref, err error) {
	err = r.d.step(ctx, "find", "", func() error {
		_, err := r.find(id)
		ref = snapshot.Ref{ID: id, Manifest: "manifest of " + string(id)}
		return err
	})
	return ref, err
}

func (r repository) Metadata(ctx context.Context, ref snapshot.Ref) (meta snapshot.Metadata, err error) {
	err = r.d.step(ctx, "metadata", "", func() error {
		img, err := r.find(ref.ID)
		if err == nil {
			meta = img.meta
		}
		return err
	})
	return meta, err
}

func (r repository) Delete(ctx context.Context, id snapshot.ID) error {
	return r.d.step(ctx, "delete", "", func() error {
		r.remove(id)
		return nil
	})
}

// remove deletes a snapshot and looks whether it was needed.
func (r repository) remove(id snapshot.ID) {
	w := r.d.w
	img := w.snapshots[id]
	if img == nil {
		return
	}
	if state, snap, pending := w.recorded(img.identity); state != sandbox.StateDeleting && (snap == id || pending == id) {
		w.violate("snapshot %s of sandbox %s (%s) was deleted", id, img.identity, state)
	}
	w.checkNamed(id)
	for name, m := range w.machines {
		if m.bound == id && m.phase != shim.PhaseStopped {
			w.violate("snapshot %s was deleted, machine %s (%s) reads it", id, name, m.phase)
		}
	}
	delete(w.snapshots, id)
}

// checkNamed notes a violation if a template's record names the snapshot, or one
// of a sandbox that is not being deleted, other than as one that a capture is
// announced for.
func (w *World) checkNamed(id snapshot.ID) {
	for _, kind := range []string{"template", "sandbox"} {
		list, err := w.truth().List(context.Background(), kind)
		if err != nil {
			w.violate("%v", err)
		}
		for _, rec := range list {
			text := string(rec.Value)
			if strings.Contains(text, `{"id":"`+string(id)+`"`) && !strings.Contains(text, `"state":"deleting"`) {
				w.violate("snapshot %s was deleted, which the record of %s %s names", id, kind, rec.Key)
			}
		}
	}
}

func (r repository) Collect(ctx context.Context, roots, keep []snapshot.ID) (out snapshot.Collected, err error) {
	err = r.d.step(ctx, "collect", "", func() error {
		for _, id := range roots {
			if r.d.w.snapshots[id] == nil {
				return fmt.Errorf("collect: root %s: %w", id, snapshot.ErrMissing)
			}
		}
		for id := range r.d.w.snapshots {
			if !slices.Contains(roots, id) && !slices.Contains(keep, id) {
				r.remove(id)
			}
		}
		return nil
	})
	return out, err
}

func (r repository) Garbage(ctx context.Context, roots, keep []snapshot.ID) (out snapshot.Collected, err error) {
	err = r.d.step(ctx, "garbage", "", func() error {
		for id := range r.d.w.snapshots {
			if !slices.Contains(roots, id) && !slices.Contains(keep, id) {
				out.Manifests++
				out.Objects = append(out.Objects, string(id))
			}
		}
		return nil
	})
	return out, err
}

// packPages is the length of every pack; all of them are live.
const packPages = 100

// packBytes is the size of every pack, as the metadata of each snapshot has it.
const packBytes = 4096

// Footprint counts the packs of a snapshot, all of the same size. It is no step: the background looks as well.
func (r repository) Footprint(_ context.Context, ref snapshot.Ref, shared func(snapshot.ID) bool) (f snapshot.Footprint, err error) {
	r.d.w.mu.Lock()
	defer r.d.w.mu.Unlock()
	img, err := r.find(ref.ID)
	if err != nil {
		return f, err
	}
	for _, id := range img.packs {
		use := snapshot.PackUse{ID: id, Shared: shared(id), Pages: packPages, Live: packPages, Bytes: packBytes}
		f.Packs = append(f.Packs, use)
		if !use.Shared {
			f.PackBytes += use.Bytes
		}
	}
	if !shared(ref.ID) {
		f.LiveBytes, f.RecordBytes = img.meta.DirtyBytes, 1
	}
	return f, nil
}

func (r repository) Packs(_ context.Context, ref snapshot.Ref) (packs []snapshot.Pack, err error) {
	r.d.w.mu.Lock()
	defer r.d.w.mu.Unlock()
	img, err := r.find(ref.ID)
	if err != nil {
		return nil, err
	}
	for _, id := range img.packs {
		packs = append(packs, snapshot.Pack{ID: id})
	}
	return packs, nil
}

// Compact merges all packs that nobody shares and that are not damaged.
func (r repository) Compact(ctx context.Context, in snapshot.CompactInput) (ref snapshot.Ref, meta snapshot.Metadata, done snapshot.Compacted, err error) {
	if err := in.Pace(ctx); err != nil {
		return ref, meta, done, err
	}
	err = r.d.step(ctx, "compact", "", func() error {
		img, err := r.find(in.Ref.ID)
		if err != nil {
			return err
		}
		now := *img
		now.meta.ID, now.meta.Origin = in.ID, img.meta.Content()
		now.packs = nil
		for _, pack := range img.packs {
			switch {
			case in.Shared(pack):
				now.packs = append(now.packs, pack)
			case r.d.w.damaged[pack]:
				now.packs = append(now.packs, pack)
				done.Faults = map[snapshot.ID]error{pack: snapshot.ErrCorrupt}
			}
		}
		now.packs = append(now.packs, in.ID)
		r.d.w.snapshots[in.ID] = &now
		ref, meta = snapshot.Ref{ID: in.ID, Manifest: "manifest of " + string(in.ID)}, now.meta
		done.Packs, done.PacksLeft, done.WrittenBytes = len(img.packs), len(now.packs), packPages*4096
		return nil
	})
	return ref, meta, done, err
}

// DropCache is a step and nothing else: there is no cache.
func (r repository) DropCache(ctx context.Context, ref snapshot.Ref) error {
	return r.d.step(ctx, "drop cache", "", func() error {
		_, err := r.find(ref.ID)
		return err
	})
}

func (r repository) Status(context.Context) (snapshot.Status, error) {
	r.d.w.mu.Lock()
	defer r.d.w.mu.Unlock()
	return snapshot.Status{Manifests: snapshot.Usage{Objects: len(r.d.w.snapshots)}}, nil
}

func (r repository) Verify(_ context.Context, progress func(done, total int64)) (int, int64, []error, error) {
	n := int64(r.d.w.Snapshots())
	progress(n, n)
	return int(n), n, nil, nil
}
