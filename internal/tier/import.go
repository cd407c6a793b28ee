package tier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"syscall"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// The failpoints of an import, in order.
const (
	fpTakenOver     = "tier.import.taken-over"
	fpTemplateThere = "tier.import.template"
	fpObjects       = "tier.import.objects"
)

// Receiver takes what an import brings. An error of Template or Sandbox that
// concerns that one only goes to Skipped. Whatever was accepted before is given
// again when an import is repeated.
type Receiver struct {
	Dir      func(t Template) string                     // where the files of t belong; "": nowhere, Template will refuse it
	Template func(ctx context.Context, t Template) error // its files are in t.Dir, its base snapshots in the local store but for the packs
	Sandbox  func(ctx context.Context, r Replica) error  // after its template; its snapshots are in the local store but for the packs
	Skipped  func(sandbox string, err error)             // a sandbox, or a checkpoint of one, that could not be taken, and why
	Progress func(done, total int64)                     // bytes, now and then; nil: not wanted
}

// Import brings back what this node had replicated, or with takeOver whatever
// node had: that one must be gone for good. Templates and the small objects of
// snapshots are fetched and verified, packs stay remote and are read on resume.
// It returns an error if it did not come to its end, which wraps ErrOwned if the
// store is another node's; it can then be called again, and does not fetch again what is there.
func (t *Tier) Import(ctx context.Context, takeOver bool, to Receiver) error {
	i := importing{tier: t, to: to, templates: make(map[string]error)}
	err := t.alone(ctx, func() error { return i.run(ctx, takeOver) })
	if err != nil {
		return fmt.Errorf("import from the remote store: %w", err)
	}
	t.answered()
	t.kick()
	return nil
}

// importing is an Import under way.
type importing struct {
	tier        *Tier
	to          Receiver
	sizes       map[string]int64 // of small objects in the remote store
	templates   map[string]error // how it went, by the key of the list
	lists       map[string]fileList
	done, total int64
}

func (i *importing) run(ctx context.Context, takeOver bool) error {
	own := i.tier.own
	if takeOver {
		own = i.tier.takeOver
	}
	if err := own(ctx); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, fpTakenOver); err != nil {
		return err
	}
	records, err := i.records(ctx)
	if err != nil {
		return err
	}
	if err := i.plan(ctx, records); err != nil {
		return err
	}
	for _, r := range records {
		err := i.sandbox(ctx, r)
		if ctx.Err() != nil || errors.Is(err, blob.ErrUnavailable) || isFull(err) {
			return err // it concerns them all
		}
		if err != nil {
			i.to.Skipped(r.Sandbox, err)
		}
	}
	return nil
}

// isFull tells whether err says that the disk is full: that of the store, or that
// of the templates' folder.
func isFull(err error) bool {
	return errors.Is(err, blob.ErrNoSpace) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// records returns the newest record of each sandbox, in the order of the sandboxes.
func (i *importing) records(ctx context.Context) ([]record, error) {
	newest, failed := make(map[string]record), make(map[string]error)
	err := i.tier.readRecords(ctx, func(sandbox string, r record, err error) error {
		switch {
		case errors.Is(err, blob.ErrUnavailable) || ctx.Err() != nil:
			return err
		case err != nil:
			failed[sandbox] = errors.Join(failed[sandbox], err)
		case r.WrittenAt.After(newest[sandbox].WrittenAt):
			newest[sandbox] = r
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for sandbox, err := range failed {
		if _, ok := newest[sandbox]; !ok {
			i.to.Skipped(sandbox, err)
		}
	}
	return slices.SortedFunc(maps.Values(newest), func(a, b record) int { return strings.Compare(a.Sandbox, b.Sandbox) }), nil
}

// plan counts what there is to fetch.
func (i *importing) plan(ctx context.Context, records []record) error {
	i.sizes, i.lists = make(map[string]int64), make(map[string]fileList)
	for _, k := range smallKinds {
		for info, err := range i.tier.cfg.Remote.List(ctx, k.Prefix()) {
			if err != nil {
				return err
			}
			i.sizes[info.Key] = info.Size
		}
	}
	counted := make(map[snapshot.ID]bool)
	for _, r := range records {
		for _, ref := range slices.Concat(r.Template.Bases, r.Checkpoints, []snapshot.Ref{r.Snapshot}) {
			if !counted[ref.ID] {
				counted[ref.ID] = true
				i.total += i.size(ref)
			}
		}
		key := r.Template.listKey()
		if _, ok := i.lists[key]; ok || r.Template.List == "" {
			continue
		}
		l, err := i.tier.fetchList(ctx, r.Template)
		if errors.Is(err, blob.ErrUnavailable) || ctx.Err() != nil {
			return err
		}
		if err != nil {
			i.templates[key] = err
		}
		i.lists[key] = l
		i.total += l.bytes()
	}
	i.progress(0)
	return nil
}

// smallKinds are the objects that an import fetches, the manifest last: what
// it names but packs is local when it is.
var smallKinds = []snapshot.Kind{snapshot.KindWorkingSet, snapshot.KindState, snapshot.KindManifest}

func (i *importing) size(ref snapshot.Ref) (n int64) {
	for _, k := range smallKinds {
		n += i.sizes[k.Key(ref.ID)]
	}
	return n
}

func (i *importing) progress(n int64) {
	i.done += n
	if i.to.Progress != nil {
		i.to.Progress(i.done, i.total)
	}
}

// sandbox brings the template that a record names, then its snapshot, and then
// gives it to the receiver.
func (i *importing) sandbox(ctx context.Context, r record) error {
	tpl, err := i.template(ctx, r.Template)
	if err != nil {
		return fmt.Errorf("template %s version %d: %w", tpl.Name, tpl.Version, err)
	}
	if err := i.snapshot(ctx, r.Snapshot); err != nil {
		return err
	}
	checkpoints, err := i.checkpoints(ctx, r)
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, fpObjects); err != nil {
		return err
	}
	return i.to.Sandbox(ctx, Replica{Sandbox: r.Sandbox, Snapshot: r.Snapshot, Checkpoints: checkpoints, Record: r.Record, Template: tpl, LastUsed: r.LastUsed})
}

// checkpoints brings the checkpoints of a sandbox. It comes without one that is
// damaged, which is better than not at all.
func (i *importing) checkpoints(ctx context.Context, r record) (there []snapshot.Ref, err error) {
	for _, ref := range r.Checkpoints {
		err := i.snapshot(ctx, ref)
		switch {
		case err == nil:
			there = append(there, ref)
		case ctx.Err() != nil || errors.Is(err, blob.ErrUnavailable) || isFull(err):
			return nil, err
		default:
			i.to.Skipped(r.Sandbox, fmt.Errorf("without the checkpoint that is snapshot %s: %w", ref.ID, err))
		}
	}
	return there, nil
}

// template brings a template, once.
func (i *importing) template(ctx context.Context, rec templateRecord) (Template, error) {
	tpl := Template{Name: rec.Name, Version: rec.Version, Record: rec.Record, Bases: rec.Bases}
	if rec.List != "" {
		tpl.Dir = i.to.Dir(tpl)
	}
	key := rec.listKey()
	if err, ok := i.templates[key]; ok {
		return tpl, err
	}
	err := i.fetchTemplate(ctx, rec, tpl)
	i.templates[key] = err
	return tpl, err
}

func (i *importing) fetchTemplate(ctx context.Context, rec templateRecord, tpl Template) error {
	if tpl.Dir != "" {
		if err := i.tier.fetchTemplate(ctx, rec, i.lists[rec.listKey()], tpl.Dir, i.progress); err != nil {
			return err
		}
	}
	for _, ref := range rec.Bases {
		if err := i.snapshot(ctx, ref); err != nil {
			return err
		}
	}
	if err := failpoint.Hit(ctx, fpTemplateThere); err != nil {
		return err
	}
	return i.to.Template(ctx, tpl)
}

// snapshot brings the small objects of a snapshot and checks that they, and the
// packs in whichever tier, are those that ref means.
func (i *importing) snapshot(ctx context.Context, ref snapshot.Ref) error {
	t := i.tier
	for _, k := range smallKinds {
		key := k.Key(ref.ID)
		if _, there := i.sizes[key]; !there {
			continue // a working set that was never recorded; of another kind, Open tells
		}
		if err := t.fetchLocal(ctx, key); err != nil {
			return err
		}
		i.progress(i.sizes[key])
	}
	s, err := snapshot.NewRepository(t.store).Open(ctx, ref)
	if err != nil {
		return err
	}
	_, err = s.State(ctx)
	return errors.Join(err, s.Close())
}

// fetchLocal makes an object of the remote store local unless it is.
func (t *Tier) fetchLocal(ctx context.Context, key string) error {
	if _, err := t.cfg.Local.Stat(ctx, key); !errors.Is(err, blob.ErrNotExist) {
		return err
	}
	b, err := t.fetch(ctx, key, maxObject)
	if err != nil {
		return err
	}
	_, err = t.cfg.Local.Put(ctx, key, func(w io.Writer) error {
		_, err := io.Copy(w, bytes.NewReader(b))
		return err
	})
	if errors.Is(err, blob.ErrExist) {
		return nil
	}
	return err
}
