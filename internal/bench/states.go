package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// planned is one subject of the scenario states.
type planned struct {
	workload string
	memory   int
	caches   []string
}

// plan are the subjects of the scenario states in groups whose samples are
// taken in turns: those that are compared are in one group.
var plan = [][]planned{
	{
		{workloadPython50, 512, Caches},
		{workloadPython50, 4096, []string{CacheWarm}},
		{workloadPython300, 512, []string{CacheWarm}},
	},
	{{workloadShell, 512, []string{CacheAwake, CacheParked, CacheWarm, CacheCold, CacheRemote20}}},
	{{workloadGit, 512, []string{CacheAwake, CacheParked, CacheWarm}}},
	{{workloadBigHeap, 4096, []string{CacheAwake, CacheParked, CacheWarm, CacheCold}}},
	{{workloadNode, 512, []string{CacheAwake, CacheParked, CacheWarm, CacheCold}}},
}

// chosen returns the part of the plan that the options choose.
func (o Options) chosen() [][]planned {
	var groups [][]planned
	for _, group := range plan {
		var kept []planned
		for _, p := range group {
			p.caches = slices.DeleteFunc(slices.Clone(p.caches), func(c string) bool { return !slices.Contains(o.Caches, c) })
			if slices.Contains(o.Workloads, p.workload) && slices.Contains(o.MemoryMiB, p.memory) && len(p.caches) > 0 {
				kept = append(kept, p)
			}
		}
		if len(kept) > 0 {
			groups = append(groups, kept)
		}
	}
	return groups
}

// states measures every cache state, one resume at a time.
func (r *runner) states(ctx context.Context) error {
	groups := r.opts.chosen()
	if len(groups) == 0 {
		r.note("states: no workload has the chosen size of memory and cache states")
	}
	for i, group := range groups {
		over := func(part float64) { r.done((float64(i) + part) / float64(len(groups))) }
		if err := r.group(ctx, group, over); err != nil {
			return errors.Join(err, r.deleteAll(ctx))
		}
		if err := r.deleteAll(ctx); err != nil {
			return err
		}
	}
	return nil
}

// apart gives the remote states of each workload a subject of their own: packs
// that were let go of stay away for the resumes that follow.
func apart(group []planned) []planned {
	var all []planned
	for _, p := range group {
		local, remote := p, p
		local.caches = slices.DeleteFunc(slices.Clone(p.caches), isRemote)
		remote.caches = slices.DeleteFunc(slices.Clone(p.caches), func(c string) bool { return !isRemote(c) })
		for _, part := range []planned{local, remote} {
			if len(part.caches) > 0 {
				all = append(all, part)
			}
		}
	}
	return all
}

// group measures subjects whose samples are taken in turns. over hears how much is done.
func (r *runner) group(ctx context.Context, group []planned, over func(part float64)) error {
	var subjects []*subject
	var ready []func() []*step // asked once all are prepared: whether there is a pool is known then
	for _, p := range apart(group) {
		s, err := r.newSubject(ctx, workloadOf(p.workload), p.memory, warmups)
		if errors.Is(err, errAbsent) {
			r.note("%s: skipped, %v", p.workload, err)
			continue
		}
		if err != nil {
			return fmt.Errorf("prepare %s: %w", p.workload, err)
		}
		subjects = append(subjects, s)
		ready = append(ready, func() []*step { return s.steps(p.caches) })
	}
	var steps []*step
	for _, of := range ready {
		steps = append(steps, of()...)
	}
	if p := group[0]; p.workload == workloadPython50 && slices.Contains(p.caches, CacheWarm) {
		peer, err := r.newPeer(ctx, p.memory)
		if err != nil {
			return err
		}
		if peer != nil {
			defer peer.Close()
			steps = append(steps, r.migrations(peer, p))
		}
	}
	if err := r.interleave(ctx, steps, over); err != nil {
		return err
	}
	for _, s := range subjects {
		if !r.hasPool(s.memory) {
			r.note("%d MiB: no VMM came from the pool; the states that would have one are named …%s", s.memory, noPool)
		}
		if err := s.last(ctx); err != nil {
			return err
		}
	}
	return nil
}

// runningOnly is how many resumes of a warm sandbox, beside those whose first answer
// counts, are measured in each round: the p99 of when vCPUs run needs many.
const runningOnly = 2

// steps returns the steps of a subject for cache states.
func (s *subject) steps(caches []string) []*step {
	var steps []*step
	for _, cache := range caches {
		if cache == CacheFresh && !s.hasPool(s.memory) {
			continue // warm is that already
		}
		for _, v := range variants(cache) {
			steps = append(steps, &step{
				name:  fmt.Sprintf("%s, %d MiB, %s", s.workload.name, s.memory, v),
				every: s.every(v),
				do:    func(ctx context.Context) error { return s.sample(ctx, v) },
			})
		}
		if cache == CacheWarm && s.workload.name == workloadPython50 && s.memory == 512 {
			v := variants(cache)[0]
			resume := step{name: fmt.Sprintf("%s, vCPUs alone", v), every: 1, do: func(ctx context.Context) error { return s.sampleRunning(ctx, v) }}
			for range runningOnly {
				again := resume
				steps = append(steps, &again)
			}
		}
	}
	return steps
}

// newPeer prepares QEMU's own restore; nil if it cannot be compared here.
func (r *runner) newPeer(ctx context.Context, memory int) (Peer, error) {
	if r.opts.NewPeer == nil {
		r.note("QEMU's own restore is not compared: the template's files are not on this host")
		return nil, nil
	}
	r.say("python50, %d MiB: prepare QEMU's own restore", memory)
	command := inBackground(serverCommand(`-c "$1"`, 50, serverPort, "records"))
	peer, err := r.opts.NewPeer(ctx, memory, []string{"bash", "-c", command, "server", ServerScript}, serverPort)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		r.note("QEMU's own restore is not compared: %v", err)
		return nil, nil
	}
	return peer, nil
}

// migrations restores a guest by QEMU's own means.
func (r *runner) migrations(peer Peer, p planned) *step {
	k := key{workload: p.workload, cache: CacheWarm, concurrency: 1, memory: p.memory, peer: PeerMigrate, metric: MetricFirst}
	return &step{name: "QEMU's own restore", every: 1, do: func(ctx context.Context) error {
		if err := r.quiet(ctx); err != nil {
			return err
		}
		took, err := peer.Restore(ctx, "/")
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			r.fail(k, err)
			return errCounted
		}
		r.add(k, ms(took))
		return nil
	}}
}

// step is one of those that take turns.
type step struct {
	name  string
	every int // rounds for one sample
	do    func(context.Context) error

	asked         int      // for samples
	taken, failed int      // samples, failures in a row
	empty         bool     // it was missed last because the pool was empty
	missed        []string // why the state was not in place, a line for each try
}

// What a step may miss before it is left out: states that were not in place at
// first, for a reason that does not pass, and failures in a row.
const (
	firstMisses = 3
	maxFailures = 3
)

// interleave lets the steps take turns until each has its samples, in another
// order each round. over hears how much is done.
func (r *runner) interleave(ctx context.Context, steps []*step, over func(part float64)) error {
	for round := range r.opts.N {
		order := rand.New(rand.NewPCG(1, uint64(round))).Perm(len(steps))
		for turn, i := range order {
			over((float64(round) + float64(turn)/float64(len(order))) / float64(r.opts.N))
			st := steps[i]
			if st == nil || round%st.every != 0 {
				continue
			}
			r.say("round %d of %d: %s", round+1, r.opts.N, st.name)
			if err := r.turn(ctx, st); err != nil {
				return err
			}
			if st.failed >= maxFailures || st.taken == 0 && len(st.missed) >= firstMisses && !st.empty {
				r.noteStep(st, "left out")
				steps[i] = nil
			}
		}
	}
	for _, st := range steps {
		if st != nil && len(st.missed) > 0 {
			r.noteStep(st, fmt.Sprintf("%d of %d samples, %d tries do not count", st.taken, st.asked, len(st.missed)))
		}
	}
	return nil
}

// noteStep notes what became of a step, and why.
func (r *runner) noteStep(st *step, what string) {
	reasons := slices.Compact(slices.Sorted(slices.Values(st.missed)))
	if st.failed >= maxFailures {
		reasons = append(reasons, fmt.Sprintf("it failed %d times in a row", st.failed))
	}
	r.note("%s: %s: %s", st.name, what, strings.Join(reasons, "; "))
}

// turn takes one sample of a step. It is repeated while its state was not in place.
func (r *runner) turn(ctx context.Context, st *step) error {
	st.asked++
	for range firstMisses {
		err := st.do(ctx)
		missing, notThere := errors.AsType[notInPlace](err)
		switch {
		case err == nil:
			st.taken, st.failed = st.taken+1, 0
			return nil
		case notThere:
			st.missed, st.empty = append(st.missed, missing.reason), missing.pool
		case errors.Is(err, errCounted):
			st.failed++
			return nil
		default:
			return err
		}
	}
	return nil
}

// creations measures the creation of sandboxes, and holds it against cold boots.
func (r *runner) creations(ctx context.Context) error {
	var steps []*step
	for _, memory := range r.opts.MemoryMiB {
		// The first sandbox of a shape boots its base snapshot: that is not the subject.
		r.say("%d MiB: prepare the shape", memory)
		if _, err := r.timeCreate(ctx, memory, false); err != nil {
			return err
		}
		for _, peer := range []string{PeerSelf, PeerBoot} {
			k := key{workload: workloadShell, cache: CacheWarm, prefetch: peer == PeerSelf, concurrency: 1, memory: memory, peer: peer, metric: MetricCreate}
			every := 1
			if peer == PeerBoot {
				every = 4
			}
			steps = append(steps, &step{name: fmt.Sprintf("create, %d MiB, %s", memory, peer), every: every, do: func(ctx context.Context) error {
				took, err := r.timeCreate(ctx, memory, peer == PeerBoot)
				switch {
				case ctx.Err() != nil:
					return ctx.Err()
				case err != nil:
					r.fail(k, err)
					return errCounted
				}
				r.add(k, took)
				return nil
			}})
		}
	}
	return errors.Join(r.interleave(ctx, steps, r.done), r.deleteAll(ctx))
}

// timeCreate measures from the create request to the answer of a first exec.
func (r *runner) timeCreate(ctx context.Context, memory int, cold bool) (float64, error) {
	if err := r.quiet(ctx); err != nil {
		return 0, err
	}
	begun := time.Now()
	sb, err := r.create(ctx, memory, cold)
	if err != nil {
		return 0, err
	}
	_, err = r.target.Exec(ctx, sb.ID, api.ExecRequest{Cmd: []string{"/bin/true"}})
	took := since(begun)
	return took, errors.Join(err, r.delete(ctx, sb.ID))
}
