package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// VerifyRemote reads every object of the remote store and checks every hash:
// those of snapshots, of records and what they name, and of the files of templates. It
// returns what snapshot.Repository.Verify returns of one store. Each fault says that it
// is about the remote tier. Objects that are deleted meanwhile are no fault; that the
// store cannot be asked is in err, which wraps blob.ErrUnavailable.
func (t *Tier) VerifyRemote(ctx context.Context, progress func(done, total int64)) (objects int, bytes int64, faults []error, err error) {
	v := verification{tier: t, progress: progress}
	if err := v.run(ctx); err != nil {
		return v.objects, v.bytes, v.faults, fmt.Errorf("verify the remote store: %w", err)
	}
	return v.objects, v.bytes, v.faults, nil
}

// verification is a VerifyRemote under way.
type verification struct {
	tier     *Tier
	progress func(done, total int64)
	total    int64
	objects  int
	bytes    int64
	faults   []error
}

func (v *verification) run(ctx context.Context) error {
	records, lists := make(map[string]int64), make(map[string]int64)
	files := make(map[string]int64)
	for info, err := range v.tier.cfg.Remote.List(ctx, "") {
		if err != nil {
			return err
		}
		switch {
		case strings.HasPrefix(info.Key, recordPrefix):
			records[info.Key] = info.Size
		case strings.HasPrefix(info.Key, templatePrefix) && isListKey(info.Key):
			lists[info.Key] = info.Size
		case strings.HasPrefix(info.Key, templatePrefix):
			files[info.Key] = info.Size
		case strings.HasPrefix(info.Key, ownerPrefix):
			continue // it says all in its key
		}
		v.total += info.Size
	}
	if err := v.snapshots(ctx); err != nil {
		return err
	}
	if err := v.records(ctx, records); err != nil {
		return err
	}
	return v.templates(ctx, lists, files)
}

// snapshots checks packs, manifests, states and working sets.
func (v *verification) snapshots(ctx context.Context) error {
	objects, bytes, faults, err := v.tier.far().Verify(ctx, func(done, _ int64) { v.read(done - v.bytes) })
	v.objects, v.bytes = objects, bytes
	for _, f := range faults {
		v.found(f)
	}
	return err
}

// records checks records, and that the snapshots which they name are there.
func (v *verification) records(ctx context.Context, sizes map[string]int64) error {
	checked := make(map[snapshot.Ref]bool)
	far := v.tier.far()
	for _, key := range slices.Sorted(maps.Keys(sizes)) {
		r, err := v.tier.readRecord(ctx, key)
		if err := v.object(ctx, sizes[key], unlessGone(err)); err != nil {
			return err
		}
		if err != nil {
			continue
		}
		for _, ref := range slices.Concat([]snapshot.Ref{r.Snapshot}, r.Checkpoints, r.Template.Bases) {
			if checked[ref] {
				continue
			}
			checked[ref] = true
			_, err := far.Packs(ctx, ref)
			if err != nil {
				err = fmt.Errorf("snapshot %s, which %s names: %w", ref.ID, key, err)
			}
			if err := v.fault(ctx, v.unlessDeleted(ctx, key, err)); err != nil {
				return err
			}
		}
	}
	return nil
}

// templates checks the lists of the templates' files, and the files on them. A
// file that is on none is of an upload that did not end.
func (v *verification) templates(ctx context.Context, lists, files map[string]int64) error {
	for _, key := range slices.Sorted(maps.Keys(lists)) {
		dir, ok := parseListKey(key)
		if !ok {
			if err := v.object(ctx, lists[key], fmt.Errorf("%w %s: it is no key of a list", snapshot.ErrCorrupt, key)); err != nil {
				return err
			}
			continue
		}
		l, err := v.tier.fetchList(ctx, dir)
		if err := v.object(ctx, lists[key], unlessGone(err)); err != nil {
			return err
		}
		for _, f := range l.Files {
			file := dir.fileKey(f.Name)
			err := v.tier.fetchFile(ctx, io.Discard, file, f)
			if errors.Is(err, blob.ErrNotExist) {
				err = fmt.Errorf("%w %s, which %s names", snapshot.ErrMissing, file, key)
			}
			if err := v.object(ctx, files[file], v.unlessDeleted(ctx, key, err)); err != nil {
				return err
			}
		}
	}
	return nil
}

// unlessGone returns err, but nil if it says that the object is not there: it
// was when it was listed.
func unlessGone(err error) error {
	if errors.Is(err, blob.ErrNotExist) {
		return nil
	}
	return err
}

// unlessDeleted returns err, but nil if it says that an object is missing and
// the one with the key by, which names it, is gone as well.
func (v *verification) unlessDeleted(ctx context.Context, by string, err error) error {
	if errors.Is(err, snapshot.ErrMissing) {
		if there, serr := v.tier.isRemote(ctx, by); serr == nil && !there {
			return nil
		}
	}
	return err
}

// object counts an object of size bytes, all of them read, and takes what is
// wrong with it as a fault.
func (v *verification) object(ctx context.Context, size int64, fault error) error {
	v.objects++
	v.read(size)
	return v.fault(ctx, fault)
}

// fault records a fault, unless it only says that the check cannot go on.
func (v *verification) fault(ctx context.Context, err error) error {
	if cerr := ctx.Err(); cerr != nil {
		return cerr
	}
	if errors.Is(err, blob.ErrUnavailable) {
		return err
	}
	if err != nil {
		v.found(err)
	}
	return nil
}

func (v *verification) found(fault error) {
	v.faults = append(v.faults, fmt.Errorf("remote tier: %w", fault))
}

// read counts bytes.
func (v *verification) read(n int64) {
	v.bytes += n
	if v.progress != nil {
		v.progress(v.bytes, max(v.bytes, v.total))
	}
}
