package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// The failpoints of a replication, in order.
const (
	fpTemplateFile = "tier.replicate.template-file"
	fpTemplate     = "tier.replicate.template"
	fpPack         = "tier.replicate.pack"
	fpState        = "tier.replicate.state"
	fpManifest     = "tier.replicate.manifest"
	fpRecord       = "tier.replicate.record"
	fpReplaced     = "tier.replicate.replaced" // before an older record goes
)

// errSuperseded ends an upload that is not needed any more.
var errSuperseded = errors.New("a newer snapshot of the sandbox is to be replicated")

// upload is a replication under way.
type upload struct {
	tier    *Tier
	entry   *entry
	replica Replica
	cancel  context.CancelFunc
	sent    int64 // bytes

	// Guarded by the Tier's mu.
	superseded bool
	object     string // key of what is being sent
}

// replicate brings an entry to the remote store, or records why that failed.
func (t *Tier) replicate(e *entry) {
	ctx, cancel := context.WithCancel(t.ctx)
	defer cancel()
	u := &upload{tier: t, entry: e, cancel: cancel}
	t.mu.Lock()
	u.replica = e.replica
	if t.entries[u.replica.Sandbox] != e { // since it was chosen
		t.mu.Unlock()
		return
	}
	t.uploading = u
	t.mu.Unlock()
	err := t.shared(ctx, func() error { return u.run(ctx) })
	t.mu.Lock()
	t.uploading = nil
	done := u.superseded || t.ctx.Err() != nil
	t.mu.Unlock()
	switch {
	case done: // the newer one has an entry of its own
	case err != nil:
		t.failed(&e.attempts, err)
		u.enter(Status{State: Local, Err: err})
	default:
		t.answered()
		u.enter(Status{State: Replicated, Sent: e.sent})
		t.mu.Lock()
		t.evictDue = t.cfg.Budget > 0
		t.mu.Unlock()
	}
}

// enter changes the entry's status.
func (u *upload) enter(s Status) {
	u.tier.mu.Lock()
	u.entry.status = s
	u.tier.mu.Unlock()
}

// recorded tells whether the record is the only one of its sandbox in the
// remote store, as far as that is known.
func (u *upload) recorded() (there, alone bool) {
	u.tier.mu.Lock()
	defer u.tier.mu.Unlock()
	keys := u.tier.records[u.replica.Sandbox]
	there = keys[u.entry.key]
	return there, there && len(keys) == 1
}

// run sends what is missing: data first, the record last.
func (u *upload) run(ctx context.Context) error {
	t := u.tier
	if _, alone := u.recorded(); alone {
		return nil
	}
	if err := t.knowRecords(ctx); err != nil {
		return err
	}
	if there, _ := u.recorded(); !there {
		u.enter(Status{State: Replicating})
		if err := u.send(ctx); err != nil {
			return err
		}
	}
	return t.deleteRecords(ctx, u.replica.Sandbox, u.entry.key)
}

// send puts everything that a resume needs, and then the record.
func (u *upload) send(ctx context.Context) error {
	t, r := u.tier, u.replica
	list, err := u.template(ctx)
	if err != nil {
		return fmt.Errorf("replicate template %s version %d: %w", r.Template.Name, r.Template.Version, err)
	}
	for _, ref := range slices.Concat(r.Template.Bases, r.Checkpoints, []snapshot.Ref{r.Snapshot}) {
		u.sent = 0 // the snapshot's own is counted, which comes last
		err := u.snapshot(ctx, ref)
		if ref == r.Snapshot {
			u.entry.sent += u.sent
		}
		if err != nil {
			return fmt.Errorf("replicate snapshot %s: %w", ref.ID, err)
		}
	}
	if err := failpoint.Hit(ctx, fpRecord); err != nil {
		return err
	}
	// The upload may have taken long enough for another node to take over.
	if err := t.own(ctx); err != nil {
		return err
	}
	if err := u.begin(u.entry.key); err != nil {
		return err
	}
	if err := t.putRecord(ctx, u.entry.key, r, list); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.records[r.Sandbox] == nil {
		t.records[r.Sandbox] = make(map[string]bool)
	}
	t.records[r.Sandbox][u.entry.key] = true
	return nil
}

// begin notes that the object key is being sent, unless the upload is over.
func (u *upload) begin(key string) error {
	u.tier.mu.Lock()
	defer u.tier.mu.Unlock()
	if u.superseded {
		return errSuperseded
	}
	u.object = key
	return nil
}

// put sends an object with what send writes unless it is there. failpoint
// follows it.
func (u *upload) put(ctx context.Context, key, point string, send func(w io.Writer) error) error {
	if err := u.begin(key); err != nil {
		return err
	}
	there, err := u.tier.isRemote(ctx, key)
	if err != nil {
		return err
	}
	if !there {
		n, err := u.tier.putRemote(ctx, key, send)
		if err != nil {
			return err
		}
		u.sent += n
	}
	return failpoint.Hit(ctx, point)
}

// isRemote asks the remote store whether it has an object.
func (t *Tier) isRemote(ctx context.Context, key string) (bool, error) {
	_, err := t.cfg.Remote.Stat(ctx, key)
	switch {
	case errors.Is(err, blob.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("remote store: %w", err)
	}
	return true, nil
}

// snapshot sends the objects of a snapshot, its manifest last: a manifest in
// the remote store says that all it names is there too.
func (u *upload) snapshot(ctx context.Context, ref snapshot.Ref) error {
	t := u.tier
	if there, err := t.isRemote(ctx, snapshot.KindManifest.Key(ref.ID)); err != nil || there {
		return err
	}
	packs, err := t.local.Packs(ctx, ref)
	if err != nil {
		return err
	}
	held, err := t.hold(ctx, ref, packs)
	if err != nil {
		return err
	}
	defer held.close()
	for _, p := range packs {
		err := u.put(ctx, p.Key(), fpPack, func(w io.Writer) error { return held.sendPack(ctx, w, p) })
		if err != nil {
			return err
		}
	}
	small := []struct{ key, point string }{
		{snapshot.KindWorkingSet.Key(ref.ID), fpState},
		{snapshot.KindState.Key(ref.ID), fpState},
		{snapshot.KindManifest.Key(ref.ID), fpManifest},
	}
	for _, s := range small {
		o, ok := held[s.key]
		if !ok {
			continue // only a working set may be missing
		}
		err := u.put(ctx, s.key, s.point, func(w io.Writer) error {
			_, err := encode(w, io.NewSectionReader(o, 0, o.Size()))
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// objects are local objects that are held open, by key: nobody deletes them meanwhile.
type objects map[string]blob.Object

func (o objects) close() {
	for _, object := range maps.All(o) {
		_ = object.Close() // only read
	}
}

// hold opens the local objects of a snapshot. A pack that was evicted is not
// among them, nor a working set that was never recorded.
func (t *Tier) hold(ctx context.Context, ref snapshot.Ref, packs []snapshot.Pack) (_ objects, err error) {
	held := make(objects)
	defer func() {
		if err != nil {
			held.close()
		}
	}()
	open := func(key string, optional bool) error {
		o, err := t.cfg.Local.Open(ctx, key)
		if optional && errors.Is(err, blob.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
		held[key] = o
		return nil
	}
	for _, p := range packs {
		if err := open(p.Key(), true); err != nil {
			return nil, err
		}
	}
	for key, optional := range map[string]bool{
		snapshot.KindManifest.Key(ref.ID): false, snapshot.KindState.Key(ref.ID): false, snapshot.KindWorkingSet.Key(ref.ID): true,
	} {
		if err := open(key, optional); err != nil {
			return nil, err
		}
	}
	return held, nil
}

// sendPack writes a pack to w as the remote store has it, each frame verified.
func (o objects) sendPack(ctx context.Context, w io.Writer, p snapshot.Pack) error {
	object, ok := o[p.Key()]
	if !ok {
		return fmt.Errorf("%w %s: neither on the local disk nor in the remote store", snapshot.ErrMissing, p.Key())
	}
	return recodePack(ctx, w, object, p, pack.Zstd)
}

// recodePack writes the pack in object, which must be p, to w with another
// codec. Errors name the pack.
func recodePack(ctx context.Context, w io.Writer, object blob.Object, p snapshot.Pack, codec pack.Codec) error {
	r, err := pack.Open(object, object.Size(), &p.Summary, nil)
	if err == nil {
		_, err = pack.Recode(ctx, w, r, codec)
	}
	switch {
	case errors.Is(err, pack.ErrCorrupt):
		return fmt.Errorf("%w %s: %w", snapshot.ErrCorrupt, p.Key(), err)
	case err != nil:
		return fmt.Errorf("%s: %w", p.Key(), err)
	}
	return nil
}
