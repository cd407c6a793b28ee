package bench

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// What is forked: so many copies at once of a Python server with so many MB of
// state, and so often at most.
const (
	forks      = 8
	forkState  = 200
	forkMemory = 512
	forkRounds = 5
)

// forks makes copies of a sandbox that runs, all at once, and asks each
// something. How much the store grew by that is looked at before they go.
func (r *runner) forks(ctx context.Context) error {
	s, err := r.newSubject(ctx, python("python200", forkState, "/", 1), forkMemory, 1)
	if err != nil {
		return err
	}
	return errors.Join(r.forkRounds(ctx, s), r.deleteAll(ctx))
}

func (r *runner) forkRounds(ctx context.Context, s *subject) error {
	var ready, answered, grown []float64
	rounds := min(r.opts.N, forkRounds)
	for round := range rounds {
		r.done(float64(round) / float64(rounds))
		r.say("fork: %d copies, round %d of %d", forks, round+1, rounds)
		if err := s.ask(ctx); err != nil {
			return err
		}
		if err := r.quiet(ctx, s.id); err != nil {
			return err
		}
		before, err := r.storedBytes(ctx)
		if err != nil {
			return err
		}
		begun := time.Now()
		copies, err := r.fork(ctx, s.id, forks)
		if err != nil {
			return err
		}
		ready = append(ready, since(begun))
		err = parallel(copies, forks, func(c api.Sandbox) error { return s.workload.ask(ctx, r.target, c.ID, 0) })
		if err != nil {
			return err
		}
		answered = append(answered, since(begun))
		after, err := r.storedBytes(ctx)
		if err != nil {
			return err
		}
		grown = append(grown, float64(after-before))
		for _, c := range copies {
			if err := r.delete(ctx, c.ID); err != nil {
				return err
			}
		}
	}
	r.fact(Fact{Name: factForkReady, Value: median(ready), Unit: "ms"})
	r.fact(Fact{Name: "fork.ready.max", Value: slices.Max(ready), Unit: "ms"})
	r.fact(Fact{Name: "fork.answered", Value: median(answered), Unit: "ms"})
	r.fact(Fact{Name: factForkGrown, Value: slices.Max(grown), Unit: "B"})
	return nil
}

// fork makes copies that are deleted at the end, at the latest.
func (r *runner) fork(ctx context.Context, id string, n int) ([]api.Sandbox, error) {
	copies, err := r.target.Fork(ctx, id, api.ForkRequest{Count: n})
	r.own.Lock()
	defer r.own.Unlock()
	for _, c := range copies {
		r.mine[c.ID] = struct{}{}
	}
	return copies, err
}

// storedBytes returns what the local store holds.
func (r *runner) storedBytes(ctx context.Context) (int64, error) {
	s, err := r.target.StoreStatus(ctx)
	return s.PackBytes + s.ManifestBytes + s.StateBytes, err
}
