package sandboxtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/tier"
)

// ErrDown is what a remote store says that is down.
var ErrDown = errors.New("the remote store is down")

// Remote is a remote store, which outlives hosts. Its zero value is empty.
type Remote struct {
	Foreign bool // it belongs to another node until somebody takes it over

	mu        sync.Mutex
	down      bool
	replicas  map[string]tier.Replica
	images    map[snapshot.ID]*image
	files     map[string]map[string][]byte // of templates, by "NAME/VERSION" and then by name
	forgotten []string
	promoted  []snapshot.ID
	evicted   map[snapshot.ID]bool
}

// SetDown makes the store unreachable, or reachable again.
func (r *Remote) SetDown(down bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = down
}

// Replica returns what the store has of a sandbox.
func (r *Remote) Replica(sandbox string) (tier.Replica, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rep, ok := r.replicas[sandbox]
	return rep, ok
}

// Put puts a replica there, whatever is in it.
func (r *Remote) Put(rep tier.Replica) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.replicas[rep.Sandbox] = rep
}

// Forgotten returns the sandboxes that were to be forgotten, in order.
func (r *Remote) Forgotten() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.forgotten)
}

// Promoted returns the snapshots that were promoted, in order.
func (r *Remote) Promoted() []snapshot.ID {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.promoted)
}

// Snapshots returns how many snapshots the store holds.
func (r *Remote) Snapshots() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.images)
}

// Tier returns the daemon's way to a remote store. Replication takes no time.
func (d *Daemon) Tier(r *Remote) sandbox.Tier {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.replicas == nil {
		r.replicas, r.images, r.files = map[string]tier.Replica{}, map[snapshot.ID]*image{}, map[string]map[string][]byte{}
		r.evicted = map[snapshot.ID]bool{}
	}
	return remoteTier{d, r}
}

type remoteTier struct {
	d *Daemon
	r *Remote
}

// lock holds the world and the store; false: the daemon is dead.
func (t remoteTier) lock() (unlock func(), ok bool) {
	t.d.w.mu.Lock()
	t.r.mu.Lock()
	return func() { t.r.mu.Unlock(); t.d.w.mu.Unlock() }, t.d.alive() == nil
}

func versionKey(t tier.Template) string { return fmt.Sprintf("%s/%d", t.Name, t.Version) }

func (t remoteTier) Replicate(rep tier.Replica) {
	unlock, ok := t.lock()
	defer unlock()
	if !ok || t.r.down {
		return
	}
	for _, ref := range slices.Concat(rep.Template.Bases, rep.Checkpoints, []snapshot.Ref{rep.Snapshot}) {
		img := t.d.w.snapshots[ref.ID]
		if img == nil {
			t.d.w.violate("snapshot %s of %s is to be replicated and not there", ref.ID, rep.Sandbox)
			return
		}
		t.r.images[ref.ID] = img
	}
	if _, ok := t.r.files[versionKey(rep.Template)]; !ok {
		files := map[string][]byte{}
		entries, err := os.ReadDir(rep.Template.Dir)
		if err != nil {
			t.d.w.violate("the template of %s is to be replicated and not there: %v", rep.Sandbox, err)
			return
		}
		for _, e := range entries {
			if files[e.Name()], err = os.ReadFile(filepath.Join(rep.Template.Dir, e.Name())); err != nil {
				t.d.w.violate("%v", err)
			}
		}
		t.r.files[versionKey(rep.Template)] = files
	}
	t.r.replicas[rep.Sandbox] = rep
}

func (t remoteTier) Forget(sandbox string) {
	unlock, ok := t.lock()
	defer unlock()
	if ok {
		t.r.forgotten = append(t.r.forgotten, sandbox)
		delete(t.r.replicas, sandbox)
	}
}

func (t remoteTier) Promote(ref snapshot.Ref) {
	unlock, ok := t.lock()
	defer unlock()
	if ok {
		t.r.promoted = append(t.r.promoted, ref.ID)
		delete(t.r.evicted, ref.ID)
	}
}

func (t remoteTier) Status(sandbox string, id snapshot.ID) tier.Status {
	t.r.mu.Lock()
	defer t.r.mu.Unlock()
	switch {
	case t.r.replicas[sandbox].Snapshot.ID == id:
		return tier.Status{State: tier.Replicated}
	case t.r.down:
		return tier.Status{State: tier.Local, Err: ErrDown}
	}
	return tier.Status{State: tier.Local}
}

func (t remoteTier) Usage(context.Context) ([]tier.Usage, error) {
	unlock, _ := t.lock()
	defer unlock()
	remote := tier.Usage{Tier: "remote", Where: "s3://bucket", Objects: len(t.r.images)}
	if t.r.down {
		remote = tier.Usage{Tier: "remote", Where: "s3://bucket", Err: ErrDown}
	}
	return []tier.Usage{{Tier: "local", Objects: len(t.d.w.snapshots)}, remote}, nil
}

func (t remoteTier) Evict(ctx context.Context, ref snapshot.Ref) (packs int, bytes int64, err error) {
	err = t.d.step(ctx, "evict", "", func() error {
		t.r.mu.Lock()
		defer t.r.mu.Unlock()
		img := t.r.images[ref.ID]
		if img == nil {
			return fmt.Errorf("snapshot %s: %w", ref.ID, tier.ErrNotReplicated)
		}
		if !t.r.evicted[ref.ID] {
			t.r.evicted[ref.ID] = true
			packs, bytes = 1, img.meta.StoredBytes
		}
		return nil
	})
	return packs, bytes, err
}

func (t remoteTier) Local(_ context.Context, ref snapshot.Ref) (int64, error) {
	unlock, _ := t.lock()
	defer unlock()
	img := t.d.w.snapshots[ref.ID]
	if img == nil || t.r.evicted[ref.ID] {
		return 0, nil
	}
	return img.meta.StoredBytes, nil
}

func (t remoteTier) Collect(ctx context.Context, roots, keep []snapshot.ID, dryRun bool) (out tier.Collected, err error) {
	err = t.d.step(ctx, "collect remote", "", func() error {
		t.r.mu.Lock()
		defer t.r.mu.Unlock()
		if t.r.down {
			return ErrDown
		}
		needed := slices.Concat(roots, keep)
		for _, rep := range t.r.replicas {
			needed = append(needed, rep.Snapshot.ID)
			for _, k := range rep.Checkpoints {
				needed = append(needed, k.ID)
			}
			for _, b := range rep.Template.Bases {
				needed = append(needed, b.ID)
			}
		}
		for id := range t.r.images {
			if slices.Contains(needed, id) {
				continue
			}
			out.Objects++
			if dryRun {
				out.Keys = append(out.Keys, string(id))
				continue
			}
			delete(t.r.images, id)
		}
		return nil
	})
	return out, err
}

func (t remoteTier) VerifyRemote(_ context.Context, progress func(done, total int64)) (objects int, bytes int64, faults []error, err error) {
	unlock, ok := t.lock()
	defer unlock()
	if !ok || t.r.down {
		return 0, 0, nil, ErrDown
	}
	progress(1, 1)
	for sandbox, rep := range t.r.replicas {
		objects++
		if t.r.images[rep.Snapshot.ID] == nil {
			faults = append(faults, fmt.Errorf("remote tier: the snapshot of %s is missing", sandbox))
		}
	}
	return objects, 1, faults, nil
}

func (t remoteTier) Import(ctx context.Context, takeOver bool, to tier.Receiver) error {
	t.r.mu.Lock()
	foreign, down, replicas := t.r.Foreign, t.r.down, maps.Clone(t.r.replicas)
	t.r.Foreign = foreign && !takeOver
	t.r.mu.Unlock()
	if foreign && !takeOver {
		return tier.ErrOwned
	}
	if down {
		return ErrDown
	}
	for i, id := range slices.Sorted(maps.Keys(replicas)) {
		rep := replicas[id]
		rep.Template.Dir = to.Dir(rep.Template)
		err := t.fetch(ctx, rep)
		if err != nil {
			return err
		}
		if err = to.Template(ctx, rep.Template); err == nil {
			err = to.Sandbox(ctx, rep)
		}
		if errors.Is(err, ErrKilled) {
			return err
		}
		if err != nil {
			to.Skipped(id, err)
		}
		to.Progress(int64(i+1), int64(len(replicas)))
	}
	return nil
}

// fetch brings a replica's template and snapshots to the host.
func (t remoteTier) fetch(ctx context.Context, rep tier.Replica) error {
	return t.d.step(ctx, "import", "", func() error {
		t.r.mu.Lock()
		defer t.r.mu.Unlock()
		for _, ref := range slices.Concat(rep.Template.Bases, rep.Checkpoints, []snapshot.Ref{rep.Snapshot}) {
			if img := t.r.images[ref.ID]; img != nil {
				t.d.w.snapshots[ref.ID] = img
				t.r.evicted[ref.ID] = true
			}
		}
		if rep.Template.Dir == "" {
			return nil
		}
		if err := os.MkdirAll(rep.Template.Dir, 0o755); err != nil {
			return err
		}
		for name, b := range t.r.files[versionKey(rep.Template)] {
			if err := os.WriteFile(filepath.Join(rep.Template.Dir, name), b, 0o644); err != nil {
				return err
			}
		}
		return nil
	})
}
