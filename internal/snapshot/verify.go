package snapshot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/pack"
)

// Usage counts objects of one kind.
type Usage struct {
	Objects int   `json:"objects"`
	Bytes   int64 `json:"bytes"`
}

// Status says what the store holds.
type Status struct {
	Manifests Usage `json:"manifests"`
	States    Usage `json:"states"`
	Packs     Usage `json:"packs"`
	Worksets  Usage `json:"worksets"`
}

// Status counts the objects in the store.
func (r *Repository) Status(ctx context.Context) (Status, error) {
	var s Status
	for prefix, u := range map[string]*Usage{manifestPrefix: &s.Manifests, statePrefix: &s.States, packPrefix: &s.Packs, worksetPrefix: &s.Worksets} {
		objects, err := r.list(ctx, prefix)
		if err != nil {
			return Status{}, fmt.Errorf("look at snapshots: %w", err)
		}
		u.Objects = len(objects)
		for _, size := range objects {
			u.Bytes += size
		}
	}
	return s, nil
}

// Verify reads every object in the store and checks every hash. progress, if
// not nil, is called with the bytes read so far and those to be read, now and
// then. It returns how many objects and bytes it looked at, and what is wrong
// with them: one fault per object, which names it and wraps ErrMissing,
// ErrCorrupt or ErrVersion where it can. err says why the check itself could
// not go on, also because a store could not be asked (blob.ErrUnavailable). Objects
// that are deleted meanwhile are no fault. Packs that manifests name and the store does
// not list, but has, are those of another tier: of them only the index is read, if that
// tier can be asked.
func (r *Repository) Verify(ctx context.Context, progress func(done, total int64)) (objects int, bytes int64, faults []error, err error) {
	v := verification{repo: r, progress: progress, named: make(map[ID]*namedPack)}
	if err := v.run(ctx); err != nil {
		return v.objects, v.bytes, v.faults, fmt.Errorf("verify snapshots: %w", err)
	}
	return v.objects, v.bytes, v.faults, nil
}

// verification is a Verify under way.
type verification struct {
	repo     *Repository
	progress func(done, total int64)
	total    int64
	objects  int
	bytes    int64
	faults   []error
	named    map[ID]*namedPack
}

// namedPack is a pack as manifests record it.
type namedPack struct {
	summary pack.Summary
	by      []ID // manifests
}

func (v *verification) run(ctx context.Context) error {
	var lists [4]map[ID]int64
	for i, prefix := range []string{manifestPrefix, statePrefix, packPrefix, worksetPrefix} {
		l, err := v.repo.list(ctx, prefix)
		if err != nil {
			return err
		}
		for _, size := range l {
			v.total += size
		}
		lists[i] = l
	}
	manifests, states, packs, worksets := lists[0], lists[1], lists[2], lists[3]
	for _, id := range slices.Sorted(maps.Keys(manifests)) {
		if err := v.manifest(ctx, id, manifests[id], states); err != nil {
			return err
		}
	}
	for _, id := range slices.Sorted(maps.Keys(states)) { // without a manifest
		if err := v.object(ctx, states[id], v.unlessDeleted(ctx, v.repo.verifyState(ctx, id, nil))); err != nil {
			return err
		}
	}
	for _, id := range slices.Sorted(maps.Keys(worksets)) {
		_, err := readWorkset(ctx, v.repo.store, id)
		if err := v.object(ctx, worksets[id], v.unlessDeleted(ctx, err)); err != nil {
			return err
		}
	}
	for _, id := range slices.Sorted(maps.Keys(packs)) {
		if err := v.pack(ctx, id, true); err != nil {
			return err
		}
		delete(v.named, id)
	}
	for _, id := range slices.Sorted(maps.Keys(v.named)) {
		err := v.pack(ctx, id, false)
		if errors.Is(err, blob.ErrUnavailable) {
			break // the check of their own tier will tell
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// object counts an object of size bytes, all of them read, and takes what is
// wrong with it as a fault.
func (v *verification) object(ctx context.Context, size int64, fault error) error {
	v.objects++
	if err := v.read(ctx, size); err != nil {
		return err
	}
	return v.fault(ctx, fault)
}

// fault records a fault, unless it only says that the check was cancelled, or
// that the store could not be asked.
func (v *verification) fault(ctx context.Context, err error) error {
	if cerr := ctx.Err(); cerr != nil {
		return cerr
	}
	if errors.Is(err, blob.ErrUnavailable) {
		return err
	}
	if err != nil {
		v.faults = append(v.faults, err)
	}
	return nil
}

// read counts bytes.
func (v *verification) read(ctx context.Context, n int64) error {
	v.bytes += n
	if v.progress != nil {
		v.progress(v.bytes, max(v.bytes, v.total))
	}
	return ctx.Err()
}

// manifest checks a manifest and its state file, which it takes off states.
func (v *verification) manifest(ctx context.Context, id ID, size int64, states map[ID]int64) error {
	m, _, lerr := v.repo.load(ctx, id)
	if errors.Is(lerr, ErrMissing) {
		return nil // deleted since it was listed
	}
	if err := v.object(ctx, size, lerr); err != nil || lerr != nil {
		return err
	}
	for _, p := range m.packs {
		n, ok := v.named[p.id]
		if !ok {
			n = &namedPack{summary: p.summary}
			v.named[p.id] = n
		}
		n.by = append(n.by, id)
		if !n.summary.Same(p.summary) {
			v.faults = append(v.faults, corrupt(manifestKey(id), "it records pack %s differently than %s", p.id, n.by[0]))
		}
	}
	stateSize := states[id]
	delete(states, id)
	err := v.repo.verifyState(ctx, id, &m.state)
	return v.object(ctx, stateSize, v.unlessDeleted(ctx, err, id))
}

// unlessDeleted returns err, but nil if it says that an object is missing which
// none of the snapshots by needs any more: they were deleted meanwhile.
func (v *verification) unlessDeleted(ctx context.Context, err error, by ...ID) error {
	if !errors.Is(err, ErrMissing) {
		return err
	}
	for _, id := range by {
		if _, serr := v.repo.store.Stat(ctx, manifestKey(id)); !errors.Is(serr, blob.ErrNotExist) {
			return err
		}
	}
	return nil
}

// verifyState verifies a state file, against the manifest's record if there is one.
func (r *Repository) verifyState(ctx context.Context, id ID, want *stateRef) error {
	o, b, err := readObject(ctx, r.store, stateKey(id), maxState+stateOverhead)
	if err != nil {
		return err
	}
	defer o.Close()
	if want != nil {
		_, err = checkState(id, b, *want)
	} else {
		_, err = parseState(id, b)
	}
	return err
}

// pack checks a pack, against the manifests' record if there is one. Of one that
// the store did not list only the index is read.
func (v *verification) pack(ctx context.Context, id ID, listed bool) error {
	var want *pack.Summary
	var by []ID
	if n, ok := v.named[id]; ok {
		want, by = &n.summary, n.by
	}
	o, err := v.repo.store.Open(ctx, packKey(id))
	if !errors.Is(err, blob.ErrUnavailable) {
		v.objects++
	}
	if err != nil {
		return v.fault(ctx, v.unlessDeleted(ctx, objectError(packKey(id), err), by...))
	}
	defer o.Close()
	p, err := pack.Open(o, o.Size(), want, nil)
	if err != nil || !listed {
		return v.fault(ctx, packError(id, !listed, err))
	}
	left := o.Size()
	err = p.Verify(func(n int64) error {
		left -= n
		return v.read(ctx, n)
	})
	if err := v.fault(ctx, objectError(packKey(id), err)); err != nil {
		return err
	}
	return v.read(ctx, left)
}
