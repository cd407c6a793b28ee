package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// burstRounds returns how many times a burst of a size takes place in each
// state: until there are N samples.
func (o Options) burstRounds(size int) int { return max(1, (o.N+size-1)/size) }

// burstMemory is the size of the sandboxes of a burst in MiB.
const burstMemory = 512

// preparers is how many sandboxes are prepared at once.
const preparers = 6

// bursts resumes many sandboxes at once.
func (r *runner) bursts(ctx context.Context) error {
	if len(r.opts.Burst) == 0 {
		return nil
	}
	subjects := make([]*subject, slices.Max(r.opts.Burst))
	var mu sync.Mutex
	prepared := 0
	err := parallel(indices(len(subjects)), preparers, func(i int) (err error) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if subjects[i], err = r.newSubject(ctx, workloadOf(workloadPython50), burstMemory, 0); err == nil {
			err = subjects[i].cycle(ctx)
		}
		mu.Lock()
		defer mu.Unlock()
		prepared++
		r.say("burst: %d of %d sandboxes are prepared", prepared, len(subjects))
		return err
	})
	if err != nil {
		return errors.Join(err, r.deleteAll(ctx))
	}
	r.done(0.3)
	for i, n := range r.opts.Burst {
		for round := range r.opts.burstRounds(n) {
			r.done(0.3 + 0.7*(float64(i)+float64(round)/float64(r.opts.burstRounds(n)))/float64(len(r.opts.Burst)))
			for _, cache := range []string{CacheWarm, CacheCold} {
				if !r.wantsCache(cache) {
					continue
				}
				for _, v := range variants(cache) {
					if r.opts.Sparse && cache == CacheCold && !v.prefetch {
						continue
					}
					r.say("burst of %d, %s", n, v)
					if err := r.burst(ctx, subjects[:n], v); err != nil {
						return errors.Join(err, r.deleteAll(ctx))
					}
				}
			}
		}
	}
	return r.deleteAll(ctx)
}

func indices(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// burst hibernates all subjects, and resumes them at once.
func (r *runner) burst(ctx context.Context, subjects []*subject, v variant) error {
	asleep := make([]api.Sandbox, len(subjects))
	err := parallel(indices(len(subjects)), deleters, func(i int) (err error) {
		asleep[i], _, err = r.standby(ctx, subjects[i].id, false)
		return err
	})
	if err != nil {
		return fmt.Errorf("hibernate before a burst: %w", err)
	}
	ids := make([]string, len(subjects))
	for i, s := range subjects {
		ids[i] = s.id
	}
	if err := r.quiet(ctx, ids...); err != nil {
		return err
	}
	for _, sb := range asleep {
		err := v.arrange(ctx, r.target, sb)
		if missing, ok := errors.AsType[notInPlace](err); ok {
			r.note("burst, %s: left out: %s", v, missing.reason)
			return r.wakeAll(ctx, subjects)
		}
		if err != nil {
			return err
		}
	}
	begun := time.Now()
	pooled := 0
	var mu sync.Mutex
	_ = parallel(subjects, len(subjects), func(s *subject) error { // failures are counted
		k := key{workload: s.workload.name, cache: v.cache, prefetch: v.prefetch, concurrency: len(subjects), memory: s.memory, peer: PeerSelf, metric: MetricFirst}
		took, err := s.wake(ctx, v, begun)
		var sb api.Sandbox
		if err == nil {
			sb, err = s.target.Get(ctx, s.id)
		}
		if err == nil && sb.LastResume == nil {
			err = errors.New("the daemon does not report the resume")
		}
		if err != nil {
			r.fail(k, err)
			return nil
		}
		// The pool is not meant for so many: where the VMM came from is left open.
		report := *sb.LastResume
		if report.Pooled {
			mu.Lock()
			pooled++
			mu.Unlock()
		}
		report.Pooled = false
		if reason := v.check(report, false); reason != "" {
			r.note("burst of %d, %s: a resume does not count: %s", len(subjects), v, reason)
			return nil
		}
		r.add(k, took)
		k.metric = MetricRunning
		r.add(k, UntilRunning(report))
		return nil
	})
	r.fact(Fact{Name: fmt.Sprintf("burst.%d.pooled", len(subjects)), Cache: v.cache, Prefetch: &v.prefetch, Value: float64(pooled), Unit: "VMMs"})
	return ctx.Err()
}

// wakeAll lets subjects run again after a burst that did not take place.
func (r *runner) wakeAll(ctx context.Context, subjects []*subject) error {
	return parallel(subjects, deleters, func(s *subject) error {
		_, err := r.target.ResumeWith(ctx, s.id, api.ResumeRequest{})
		return err
	})
}
