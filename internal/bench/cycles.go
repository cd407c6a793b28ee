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
		if _, err := r.target.HibernateWith(ctx, s.id, api.HibernateRequest{NoPark: true}); err != nil {
			return err
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
// found changed. Nothing is deleted meanwhile, or a collection would be counted too.
func (r *runner) compression(ctx context.Context) error {
	err := r.compare(ctx)
	if missing, ok := errors.AsType[notInPlace](err); ok {
		r.note("compression: not measured: %s", missing.reason)
		err = nil
	}
	return errors.Join(err, r.deleteAll(ctx))
}

func (r *runner) compare(ctx context.Context) error {
	// The first upload brings the template along, which is not the subject.
	first, err := r.create(ctx, 512, false)
	if err == nil {
		_, err = r.target.HibernateWith(ctx, first.ID, api.HibernateRequest{NoPark: true})
	}
	if err == nil {
		err = replicated(ctx, r.target, first.ID)
	}
	if err != nil {
		return err
	}
	for _, name := range []string{workloadPython50, workloadGit} {
		s, err := r.newSubject(ctx, workloadOf(name), 512, 0)
		if errors.Is(err, errAbsent) {
			r.note("compression, %s: skipped, %v", name, err)
			continue
		}
		if err == nil {
			err = r.uploads(ctx, s)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// uploads hibernates a subject some times and counts what that uploads.
func (r *runner) uploads(ctx context.Context, s *subject) error {
	var remote, dirty float64
	for i := range compressionSteps {
		r.say("compression, %s: hibernation %d of %d", s.workload.name, i+1, compressionSteps)
		if err := s.ask(ctx); err != nil {
			return err
		}
		before, err := r.settled(ctx)
		if err != nil {
			return err
		}
		sb, err := r.target.HibernateWith(ctx, s.id, api.HibernateRequest{NoPark: true})
		if err != nil {
			return err
		}
		if err := replicated(ctx, r.target, s.id); err != nil {
			return err
		}
		after, err := r.settled(ctx)
		if err != nil {
			return err
		}
		remote, dirty = remote+float64(max(0, after-before)), dirty+float64(sb.Snapshot.DirtyBytes)
	}
	r.fact(Fact{Name: factDirtyBytes, Workload: s.workload.name, MemoryMiB: s.memory, Value: dirty, Unit: "B"})
	r.fact(Fact{Name: factRemoteBytes, Workload: s.workload.name, MemoryMiB: s.memory, Value: remote, Unit: "B"})
	return nil
}

// settled waits until no upload is pending and returns the bytes in the remote store.
func (r *runner) settled(ctx context.Context) (bytes int64, err error) {
	waiting, cancel := context.WithTimeout(ctx, replicationPatience)
	defer cancel()
	err = notInPlace{"uploads do not come to an end"}
	until(waiting, 50*time.Millisecond, func() bool {
		status, failure := r.target.StoreStatus(waiting)
		if failure != nil {
			err = failure
			return true
		}
		i := slices.IndexFunc(status.Tiers, func(t api.TierStatus) bool { return t.Tier == "remote" })
		switch {
		case i < 0:
			err = notInPlace{"the daemon has no remote store"}
		case status.Tiers[i].Error != "":
			err = notInPlace{"the remote store is not to be reached: " + status.Tiers[i].Error}
		case status.Tiers[i].Pending > 0:
			return false
		default:
			bytes, err = status.Tiers[i].Bytes, nil
		}
		return true
	})
	return bytes, err
}
