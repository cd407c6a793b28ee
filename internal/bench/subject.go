package bench

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// inGuest tells whether a phase of a resume comes after the vCPUs run, or is
// part of another phase.
func inGuest(phase string) bool {
	switch phase {
	case "guest_init", "hooks", "base_image":
		return true
	}
	return strings.Contains(phase, ".")
}

// subject is a sandbox with a workload that runs in it.
type subject struct {
	*runner
	workload workload
	memory   int
	id       string
	asleep   bool // it is in standby
	before   *key // of the resume that it runs since, if that counts
	seed     int
}

// warmups is how many times a subject is hibernated and resumed before it is
// measured: the first puts its heap into a snapshot, and the working set is known after that.
const warmups = 2

// learnFor is how long a warm-up runs after its resume: the daemon records the
// working set in that time.
const learnFor = 3500 * time.Millisecond

// newSubject makes a sandbox, prepares its workload and warms it up. It returns errAbsent
// where the template lacks what the workload needs.
func (r *runner) newSubject(ctx context.Context, w workload, memory, cycles int) (*subject, error) {
	r.say("%s, %d MiB: prepare", w.name, memory)
	sb, err := r.create(ctx, memory, false)
	if err != nil {
		return nil, err
	}
	s := &subject{runner: r, workload: w, memory: memory, id: sb.ID}
	if err := w.prepare(ctx, r.target, s.id); err != nil {
		return nil, errors.Join(err, r.delete(ctx, s.id))
	}
	if err := s.warmUp(ctx, cycles); err != nil {
		return nil, errors.Join(err, r.delete(ctx, s.id))
	}
	return s, nil
}

// warmUp takes the subject through some cycles.
func (s *subject) warmUp(ctx context.Context, cycles int) error {
	for range cycles {
		if err := s.quiet(ctx); err != nil {
			return err
		}
		sb, took, err := s.standby(ctx, s.id, false)
		if err != nil {
			return err
		}
		s.hibernated(s.workload.name, s.memory, took, sb)
		if err := s.quiet(ctx, s.id); err != nil {
			return err
		}
		if err := s.cycle(ctx); err != nil {
			return err
		}
	}
	return nil
}

// cycle hibernates the subject unless it is in standby, resumes it and lets the
// daemon learn its working set. It finds out whether there is a pool for it.
func (s *subject) cycle(ctx context.Context) error {
	if _, _, err := s.standby(ctx, s.id, false); err != nil {
		return err
	}
	sb, err := s.target.ResumeWith(ctx, s.id, api.ResumeRequest{NoParked: true})
	if err != nil {
		return err
	}
	if sb.LastResume != nil && sb.LastResume.Pooled {
		s.pooled(s.memory)
	}
	if err := s.ask(ctx); err != nil {
		return err
	}
	return sleep(ctx, learnFor)
}

// ask makes the workload's request, a different one each time where that matters.
func (s *subject) ask(ctx context.Context) error {
	s.seed++
	return s.workload.ask(ctx, s.target, s.id, s.seed)
}

// key returns the key of the subject's rows.
func (s *subject) key(v variant, metric string) key {
	k := key{workload: s.workload.name, cache: v.cache, prefetch: v.prefetch, concurrency: 1, memory: s.memory, peer: PeerSelf, metric: metric}
	if v.pool && !s.hasPool(s.memory) {
		k.cache += noPool
	}
	return k
}

// errCounted says that a try failed and was counted as that.
var errCounted = errors.New("the try failed")

// failed counts a failed try of k, unless it failed because ctx ended.
func (s *subject) failed(ctx context.Context, k key, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.before = nil
	s.fail(k, err)
	return errCounted
}

// sample takes one sample of a variant. A notInPlace error says that there is
// none because the state was not brought about, errCounted that it failed.
func (s *subject) sample(ctx context.Context, v variant) error {
	first := s.key(v, MetricFirst)
	if v.cache == CacheAwake {
		return s.awake(ctx, first)
	}
	took, report, err := s.once(ctx, v, first)
	if err != nil {
		return err
	}
	first = s.key(v, MetricFirst) // with or without a pool
	s.add(first, took)
	s.with(first, func(x *series) { x.workingSet = append(x.workingSet, float64(report.WorkingSetBytes)) })
	s.before = &first
	return nil
}

// sampleRunning takes a sample of a variant of which only counts when the vCPUs ran.
func (s *subject) sampleRunning(ctx context.Context, v variant) error {
	_, _, err := s.once(ctx, v, s.key(v, MetricRunning))
	return err
}

// once hibernates and resumes the subject, adds when its vCPUs ran, and returns what its
// first answer took in milliseconds and the report of the resume. A failure counts for k.
func (s *subject) once(ctx context.Context, v variant, k key) (took float64, report api.ResumeReport, err error) {
	if err := s.fallAsleep(ctx, v, k); err != nil {
		return 0, report, err
	}
	if took, err = s.wake(ctx, v, time.Now()); err != nil {
		return 0, report, s.failed(ctx, k, err)
	}
	if report, err = s.reported(ctx, v, k); err != nil {
		return 0, report, err
	}
	k = s.key(v, MetricRunning) // by now it is known whether there is a pool
	s.add(k, UntilRunning(report))
	s.with(k, func(x *series) { x.phases.add(report.Phases) })
	return took, report, nil
}

// fallAsleep hibernates the subject, waits until nothing disturbs its resume and
// brings the state of v about. A failure counts for k.
func (s *subject) fallAsleep(ctx context.Context, v variant, k key) error {
	sb, err := s.hibernate(ctx, v.park)
	if err == nil {
		err = s.quiet(ctx, s.id) // first: an upload reads what shall not be in the page cache
	}
	if err != nil {
		return err
	}
	err = v.arrange(ctx, s.target, sb)
	if _, ok := errors.AsType[notInPlace](err); err == nil || ok {
		return err
	}
	return s.failed(ctx, k, err)
}

// reported returns the daemon's report of the resume that just took place, a notInPlace
// error if that was not of v. A failure counts for k.
func (s *subject) reported(ctx context.Context, v variant, k key) (api.ResumeReport, error) {
	sb, err := s.target.Get(ctx, s.id)
	switch {
	case err != nil:
		return api.ResumeReport{}, s.failed(ctx, k, err)
	case sb.LastResume == nil:
		return api.ResumeReport{}, notInPlace{reason: "the daemon does not report the resume"}
	}
	report := *sb.LastResume
	if report.Pooled {
		s.pooled(s.memory)
	}
	if reason := v.check(report, v.pool && s.hasPool(s.memory)); reason != "" {
		return report, notInPlace{reason: reason, pool: reason == notPooled}
	}
	return report, nil
}

// wake resumes the sandbox as v says, and returns the milliseconds from begun to
// the answer of its workload.
func (s *subject) wake(ctx context.Context, v variant, begun time.Time) (float64, error) {
	if v.tier != "parked" { // that is woken by the request itself
		if _, err := s.target.ResumeWith(ctx, s.id, v.resume); err != nil {
			return 0, err
		}
	}
	if err := s.ask(ctx); err != nil {
		return 0, err
	}
	s.asleep = false
	return since(begun), nil
}

// awake measures the request to the sandbox while it runs.
func (s *subject) awake(ctx context.Context, k key) error {
	if s.before != nil { // what it read on demand so far is told by a hibernation
		if _, err := s.hibernate(ctx, false); err != nil {
			return err
		}
	}
	for range 2 { // the request and what it needs are warm afterwards
		if err := s.ask(ctx); err != nil {
			return s.failed(ctx, k, err)
		}
	}
	s.asleep = false
	if err := s.quiet(ctx); err != nil {
		return err
	}
	begun := time.Now()
	if err := s.ask(ctx); err != nil {
		return s.failed(ctx, k, err)
	}
	s.add(k, since(begun))
	return nil
}

// hibernate takes the subject to standby and measures that.
func (s *subject) hibernate(ctx context.Context, park bool) (api.Sandbox, error) {
	k := key{workload: s.workload.name, cache: CacheAwake, concurrency: 1, memory: s.memory, peer: PeerSelf, metric: MetricHibernate}
	if s.asleep { // the last try ended half-way
		if _, err := s.wake(ctx, variant{}, time.Now()); err != nil {
			return api.Sandbox{}, s.failed(ctx, k, err)
		}
	}
	sb, took, err := s.standby(ctx, s.id, park)
	if err != nil {
		return sb, s.failed(ctx, k, err)
	}
	s.asleep = true
	s.add(k, took)
	s.hibernated(s.workload.name, s.memory, took, sb)
	if w := workingSet(sb); w != nil && s.before != nil {
		s.with(*s.before, func(x *series) {
			x.demand = append(x.demand, float64(w.Late+w.Missed))
			x.fetched = append(x.fetched, float64(w.BytesFetched))
		})
	}
	s.before = nil
	return sb, nil
}

// last has the daemon report about the run since the last sample.
func (s *subject) last(ctx context.Context) error {
	if s.before == nil {
		return nil
	}
	_, err := s.hibernate(ctx, false)
	if errors.Is(err, errCounted) {
		return nil
	}
	return err
}

// every returns in one of how many rounds a variant is sampled.
func (s *subject) every(v variant) int {
	judged := slices.Contains(judgedCaches, v.cache) && (s.workload.name == workloadPython50 || s.workload.name == workloadPython300) &&
		(v.prefetch || s.workload.name == workloadPython50 && s.memory == 512)
	switch {
	case !s.opts.Sparse || judged:
		return s.workload.share
	case isRemote(v.cache): // a lazy one waits for the store some hundred times
		return 4 * s.workload.share
	}
	return 2 * s.workload.share
}

func workingSet(sb api.Sandbox) *api.WorkingSetReport {
	if sb.LastHibernate == nil {
		return nil
	}
	return sb.LastHibernate.WorkingSet
}
