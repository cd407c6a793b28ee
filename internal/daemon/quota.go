package daemon

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// The quota of a sandbox for events that its guest can cause at will: some at
// once, and then few, so that no guest can push what happened to others out of
// the journal.
const (
	guestEventBurst = 50
	guestEventEvery = 10 * time.Second
)

// quotas counts, for each sandbox, the events that its guest caused. The zero
// value is ready.
type quotas struct {
	mu sync.Mutex
	of map[string]*quota
}

type quota struct {
	limiter    *rate.Limiter
	suppressed int64
}

// take reports whether an event of the sandbox may be kept, and how many before
// it were not.
func (q *quotas) take(sandbox string, now time.Time) (ok bool, suppressed int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.of == nil {
		q.of = map[string]*quota{}
	}
	s := q.of[sandbox]
	if s == nil {
		s = &quota{limiter: rate.NewLimiter(rate.Every(guestEventEvery), guestEventBurst)}
		q.of[sandbox] = s
	}
	if !s.limiter.AllowN(now, 1) {
		s.suppressed++
		return false, 0
	}
	suppressed, s.suppressed = s.suppressed, 0
	return true, suppressed
}

// forget drops a sandbox that is gone.
func (q *quotas) forget(sandbox string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.of, sandbox)
}
