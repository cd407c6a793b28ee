package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// A run of cycles compares resumes around the tenth with the last ones.
const (
	cyclesWindow = 10
	cyclesFirst  = 5 // the first of the early ones
	minCycles    = cyclesFirst + 2*cyclesWindow
)

// cycles hibernates and resumes one sandbox again and again, and looks at what
// its history costs.
func (r *runner) cycles(ctx context.Context) error {
	s, err := r.newSubject(ctx, workloadOf(workloadPython50), 512, 1)
	if err != nil {
		return err
	}
	return errors.Join(r.history(ctx, s), r.deleteAll(ctx))
}

func (r *runner) history(ctx context.Context, s *subject) error {
	var took []float64
	most := 0
	for i := range r.opts.Cycles {
		r.say("cycle %d of %d", i+1, r.opts.Cycles)
		r.done(float64(i) / float64(r.opts.Cycles))
		if _, _, err := r.standby(ctx, s.id, false); err != nil {
			return err
		}
		if i >= cyclesFirst && i < cyclesFirst+cyclesWindow || i >= r.opts.Cycles-cyclesWindow { // those are compared
			if err := r.quiet(ctx, s.id); err != nil {
				return err
			}
		}
		ms, err := s.wake(ctx, variant{resume: api.ResumeRequest{NoParked: true}}, time.Now())
		if err != nil {
			return err
		}
		took = append(took, ms)
		if (i+1)%cyclesWindow != 0 {
			continue
		}
		store, known, err := r.stored(ctx, s.id)
		if err != nil {
			return err
		}
		if !known {
			r.note("cycles: the daemon does not tell what a sandbox takes up in the store")
		}
		most = max(most, store.Packs)
	}
	early, late := took[cyclesFirst:cyclesFirst+cyclesWindow], took[len(took)-cyclesWindow:]
	r.fact(Fact{Name: factCycles, Value: float64(len(took)), Unit: "hibernations"})
	r.fact(Fact{Name: factEarly, Value: median(early), Unit: "ms"})
	r.fact(Fact{Name: factLate, Value: median(late), Unit: "ms"})
	r.fact(Fact{Name: "cycles.slowest", Value: slices.Max(took), Unit: "ms"})
	if err := r.quiet(ctx); err != nil { // a compaction may be under way
		return err
	}
	store, known, err := r.stored(ctx, s.id)
	if err != nil || !known {
		return err
	}
	r.fact(Fact{Name: "cycles.most_packs", Value: float64(most), Unit: "packs"})
	r.fact(Fact{Name: factPacks, Value: float64(store.Packs), Unit: "packs"})
	r.fact(Fact{Name: factStored, Value: float64(store.StoredBytes), Unit: "B"})
	r.fact(Fact{Name: factLive, Value: float64(store.LiveBytes), Unit: "B"})
	return nil
}

// stored returns what a sandbox takes up in the store, if the daemon tells.
func (r *runner) stored(ctx context.Context, id string) (sb api.StoreSandbox, known bool, err error) {
	status, err := r.target.StoreStatus(ctx)
	if err != nil {
		return sb, false, err
	}
	i := slices.IndexFunc(status.Sandboxes, func(s api.StoreSandbox) bool { return s.ID == id })
	if i < 0 {
		return sb, false, nil
	}
	return status.Sandboxes[i], true, nil
}

// compressionSteps is how many hibernations with work in between are counted.
const compressionSteps = 4

// compression compares what the remote store takes with the pages that were
// found changed.
func (r *runner) compression(ctx context.Context) error {
	for i, name := range []string{workloadPython50, workloadGit} {
		r.done(float64(i) / 2)
		err := r.compress(ctx, name)
		if missing, ok := errors.AsType[notInPlace](err); ok {
			r.note("compression, %s: not measured: %s", name, missing.reason)
			err = nil
		}
		if err = errors.Join(err, r.deleteAll(ctx)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// compress hibernates a workload some times and counts what that uploads.
func (r *runner) compress(ctx context.Context, name string) error {
	s, err := r.newSubject(ctx, workloadOf(name), 512, 0)
	if errors.Is(err, errAbsent) {
		return notInPlace{reason: err.Error()}
	}
	if err != nil {
		return err
	}
	var remote, dirty float64
	for i := range compressionSteps {
		r.say("compression, %s: hibernation %d of %d", name, i+1, compressionSteps)
		if err := s.ask(ctx); err != nil {
			return err
		}
		hibernated, _, err := r.standby(ctx, s.id, false)
		if err == nil {
			err = replicated(ctx, r.target, s.id, replicationPatience)
		}
		if err != nil {
			return err
		}
		now, err := r.target.Get(ctx, s.id)
		switch {
		case err != nil:
			return err
		case now.Snapshot == nil || hibernated.Snapshot == nil || now.Snapshot.ID != hibernated.Snapshot.ID || now.Replication == nil:
			r.note("compression, %s: hibernation %d does not count: its snapshot was compacted before it was uploaded", name, i+1)
			continue
		}
		remote, dirty = remote+float64(now.Replication.SentBytes), dirty+float64(now.Snapshot.DirtyBytes)
	}
	r.fact(Fact{Name: factDirtyBytes, Workload: name, MemoryMiB: s.memory, Value: dirty, Unit: "B"})
	r.fact(Fact{Name: factRemoteBytes, Workload: name, MemoryMiB: s.memory, Value: remote, Unit: "B"})
	return nil
}
