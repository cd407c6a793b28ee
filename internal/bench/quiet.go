package bench

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// How long a daemon is waited for to come to rest, how often it is looked at,
// and what it may use of a processor when it rests.
const (
	quietPatience = 10 * time.Second
	quietWindow   = 100 * time.Millisecond
	quietCPU      = quietWindow / 10

	leavePause = 5 * time.Millisecond
)

// standby hibernates a sandbox and returns it as the daemon answered, with the
// milliseconds until then. It waits for what comes behind the answer, too: whether its VMM was kept, and
// the whole report, are known only then, and a resume would have to wait for it.
func (r *runner) standby(ctx context.Context, id string, park bool) (sb api.Sandbox, took float64, err error) {
	begun := time.Now()
	sb, err = r.target.HibernateWith(ctx, id, api.HibernateRequest{NoPark: !park})
	took = since(begun)
	if err != nil {
		return sb, took, err
	}
	waiting, cancel := context.WithTimeout(ctx, quietPatience)
	defer cancel()
	until(waiting, leavePause, func() bool {
		var now api.Sandbox
		if now, err = r.target.Get(waiting, id); err != nil {
			return true
		}
		sb.LastHibernate, sb.Parked = now.LastHibernate, now.Parked
		return now.LastHibernate == nil || hasLeft(*now.LastHibernate)
	})
	if waiting.Err() != nil { // a daemon that cannot end its VMM is measured all the same
		err = ctx.Err()
	}
	return sb, took, err
}

// hasLeft tells whether the VMM of a hibernation was released or parked by its report.
func hasLeft(report api.HibernateReport) bool {
	_, released := report.Phases["release"]
	_, parked := report.Phases["park"]
	return released || parked
}

// quiet waits until what came before does not disturb what is measured next:
// the snapshots of the sandboxes ids are replicated, the pool is full again, and
// the daemon has nothing to do, so that no upload, compaction or collection is
// under way. A daemon that does not come to rest is measured all the same, with
// a note; the next time it is not waited for as long.
func (r *runner) quiet(ctx context.Context, ids ...string) error {
	for _, id := range ids {
		err := replicated(ctx, r.target, id, quietPatience)
		if _, ok := errors.AsType[notInPlace](err); err != nil && !ok {
			return err
		}
	}
	r.own.Lock()
	patience := quietPatience
	if r.restless {
		patience /= 10
	}
	r.own.Unlock()
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	last := time.Duration(-1)
	calm := until(waiting, quietWindow, func() bool {
		full := r.poolFull(waiting)
		now := r.daemonCPU()
		idle := last >= 0 && now-last <= quietCPU
		last = now
		return full && idle
	})
	if !calm && ctx.Err() == nil {
		r.note("the daemon did not come to rest within %s before some samples", quietPatience)
	}
	r.own.Lock()
	defer r.own.Unlock()
	if r.restless = !calm; r.restless {
		r.poolMost = 0 // the pool may be smaller from now on
	}
	return ctx.Err()
}

// daemonCPU returns the processor time that the daemon has used, 0 where that is not known.
func (r *runner) daemonCPU() time.Duration {
	if r.opts.Host == nil {
		return 0
	}
	pid, err := r.opts.Host.PID()
	if err != nil {
		return 0
	}
	used, err := cpuTime(pid)
	if err != nil {
		return 0
	}
	return used
}

// poolFull tells whether the pool holds as much as it ever was seen to. A daemon
// that does not tell is not waited for.
func (r *runner) poolFull(ctx context.Context) bool {
	host, err := r.target.Host(ctx)
	if err != nil {
		return true
	}
	r.own.Lock()
	defer r.own.Unlock()
	r.poolMost = max(r.poolMost, host.PoolBytes)
	return host.PoolBytes == r.poolMost
}

// drained waits until no upload is pending. It returns a notInPlace error where
// that cannot be waited for.
func (r *runner) drained(ctx context.Context) error {
	waiting, cancel := context.WithTimeout(ctx, replicationPatience)
	defer cancel()
	var err error = notInPlace{reason: "uploads do not come to an end"}
	until(waiting, quietWindow, func() bool {
		status, failure := r.target.StoreStatus(waiting)
		if failure != nil {
			err = failure
			return true
		}
		i := slices.IndexFunc(status.Tiers, func(t api.TierStatus) bool { return t.Tier == "remote" })
		switch {
		case i < 0:
			err = notInPlace{reason: "the daemon has no remote store"}
		case status.Tiers[i].Error != "":
			err = notInPlace{reason: "the remote store is not to be reached: " + status.Tiers[i].Error}
		case status.Tiers[i].Pending > 0:
			return false
		default:
			err = nil
		}
		return true
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// settle waits between scenarios until what the last one left to do is done.
func (r *runner) settle(ctx context.Context) error {
	if err := r.drained(ctx); err != nil {
		if _, ok := errors.AsType[notInPlace](err); !ok {
			return err
		}
	}
	return r.quiet(ctx)
}
