package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// wakePairs is how many pairs of wakes are measured for each sample that is
// asked for: the difference of two resumes is small against what each varies.
const wakePairs = 2

// wakes measures what it costs to wake a sandbox by an HTTP request to its
// server rather than by an order, followed by the same request. Both are
// measured in pairs, now the one first, now the other.
func (r *runner) wakes(ctx context.Context) error {
	s, err := r.newSubject(ctx, workloadOf(workloadPython50), burstMemory, warmups)
	if err != nil {
		return fmt.Errorf("prepare %s: %w", workloadPython50, err)
	}
	v := variants(CacheWarm)[0]
	v.resume = api.ResumeRequest{} // as the request itself resumes it
	var over []float64
	pairs, missed := wakePairs*r.opts.N, []string{}
	for i := 0; i < pairs && len(missed) < pairs; {
		r.done(float64(i) / float64(pairs))
		r.say("pair %d of %d: %s, woken by an order and by a request", i+1, pairs, v)
		diff, err := s.wakePair(ctx, v, i%2 == 1)
		missing, notThere := errors.AsType[notInPlace](err)
		switch {
		case err == nil:
			over = append(over, diff)
		case notThere:
			missed = append(missed, missing.reason)
			continue
		case !errors.Is(err, errCounted):
			return errors.Join(err, r.deleteAll(ctx))
		}
		i++
	}
	if len(missed) > 0 {
		r.note("wake: %d tries do not count: %s", len(missed), missed[0])
	}
	if len(over) > 0 {
		r.fact(Fact{Name: factWake, Value: median(over), Unit: "ms"})
		r.fact(Fact{Name: factWakePairs, Value: float64(len(over)), Unit: "pairs"})
	}
	return r.deleteAll(ctx)
}

// wakePair wakes the subject by an order and by a request, in that order or the
// other way round, and returns how many milliseconds longer the latter took.
func (s *subject) wakePair(ctx context.Context, v variant, requestFirst bool) (float64, error) {
	var took [2]float64
	for turn := range took {
		by := turn
		if requestFirst {
			by = 1 - turn
		}
		var err error
		if took[by], err = s.wakeBy(ctx, v, by == 1); err != nil {
			return 0, err
		}
	}
	s.add(s.key(v, MetricResumeAsk), took[0])
	s.add(s.key(v, MetricWake), took[1])
	return took[1] - took[0], nil
}

// wakeBy hibernates the subject and wakes it, by its request alone or by an
// order before it. It returns the milliseconds until the answer.
func (s *subject) wakeBy(ctx context.Context, v variant, request bool) (float64, error) {
	k := s.key(v, MetricResumeAsk)
	if request {
		k = s.key(v, MetricWake)
	}
	if err := s.fallAsleep(ctx, v, k); err != nil {
		return 0, err
	}
	begun := time.Now()
	if !request {
		if _, err := s.target.ResumeWith(ctx, s.id, v.resume); err != nil {
			return 0, s.failed(ctx, k, err)
		}
	}
	if err := askServer(ctx, s.target, s.id, serverPort, "/"); err != nil {
		return 0, s.failed(ctx, k, err)
	}
	took := since(begun)
	s.asleep = false
	_, err := s.reported(ctx, v, k)
	return took, err
}

// askServer sends GET path to an HTTP server in the sandbox by way of the
// daemon's proxy, which wakes it.
func askServer(ctx context.Context, target Target, id string, port int, path string) error {
	hc, base := target.Port(id, port)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, nil)
	if err != nil {
		return err
	}
	resp, err := hc.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("GET :%d%s answered %s: %.200s", port, path, resp.Status, body)
	}
	return err
}
