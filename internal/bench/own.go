package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// Own is a sandbox of the user's, with its first useful request.
type Own struct {
	ID   string // or name
	Port int    // of an HTTP server in it
	Path string // "/…"
}

// RunOwn hibernates and resumes a sandbox that is there, o.N times in each of
// the cache states o.Caches that the daemon offers, and leaves it as it was
// found: running or in standby.
func RunOwn(ctx context.Context, target Target, o Options, own Own) (res Result, err error) {
	sb, err := target.Get(ctx, own.ID)
	if err != nil {
		return res, err
	}
	if sb.State != api.StateRunning && sb.State != api.StateStandby {
		return res, fmt.Errorf("sandbox %s is %s: it must run or be in standby", own.ID, sb.State)
	}
	o.Scenarios = []string{ScenarioStates}
	r, err := newRunner(ctx, target, o)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, putBack(ctx, target, sb)) }()
	w := workload{name: workloadOwn, share: 1, ask: func(ctx context.Context, target Target, id string, _ int) error {
		_, err := Ask(ctx, target, id, own.Port, own.Path)
		return err
	}}
	r.enter(o.weight(ScenarioStates))
	s := &subject{runner: r, workload: w, memory: sb.MemoryMiB, id: sb.ID}
	if err := s.ask(ctx); err != nil {
		return res, err
	}
	if err := s.warmUp(ctx, 1); err != nil {
		return res, err
	}
	// There is one sandbox only, so what its remote states let go of comes last.
	for _, p := range apart([]planned{{caches: o.Caches}}) {
		if err = r.interleave(ctx, s.steps(p.caches), r.done); err != nil {
			break
		}
	}
	err = errors.Join(err, s.last(ctx))
	res = r.result()
	res.Bars = []Bar{} // they are about other workloads
	return res, err
}

// putBack brings a sandbox into the state that it was found in, also when ctx
// has ended.
func putBack(ctx context.Context, target Target, found api.Sandbox) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var err error
	if found.State == api.StateStandby {
		_, err = target.HibernateWith(ctx, found.ID, api.HibernateRequest{})
	} else {
		_, err = target.ResumeWith(ctx, found.ID, api.ResumeRequest{})
	}
	if err != nil {
		return fmt.Errorf("bring sandbox %s back to %s: %w", found.ID, found.State, err)
	}
	return nil
}
