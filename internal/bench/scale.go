package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// scaleMemory is the size of the many sandboxes in MiB.
const scaleMemory = 512

// lists is how many times the sandboxes are listed; the median counts.
const lists = 5

// scale measures a daemon that keeps many sandboxes in standby, each of which
// ran and was hibernated.
func (r *runner) scale(ctx context.Context) error {
	if r.opts.Host == nil {
		r.note("scale: not measured: the daemon runs on another host")
		return nil
	}
	err := r.crowd(ctx)
	r.say("scale: delete the sandboxes")
	return errors.Join(err, r.deleteAll(ctx))
}

func (r *runner) crowd(ctx context.Context) error {
	if _, err := r.timeCreate(ctx, scaleMemory, false); err != nil { // prepares the shape
		return err
	}
	empty, err := r.idleCPU(ctx, "none")
	if err != nil {
		return err
	}
	before, err := r.target.StoreStatus(ctx)
	if err != nil {
		return err
	}
	var done atomic.Int64
	err = parallel(indices(r.opts.Scale), preparers, func(int) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		sb, err := r.create(ctx, scaleMemory, false)
		if err == nil {
			_, _, err = r.standby(ctx, sb.ID, false)
		}
		n := done.Add(1)
		r.say("scale: %d of %d sandboxes are in standby", n, r.opts.Scale)
		r.done(0.2 + 0.5*float64(n)/float64(r.opts.Scale))
		return err
	})
	if err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	after, err := r.target.StoreStatus(ctx)
	if err != nil {
		return err
	}
	n := float64(r.opts.Scale)
	r.fact(Fact{Name: factScale, Value: n, Unit: "sandboxes"})
	r.fact(Fact{Name: factDisk, Value: float64(storeBytes(after)-storeBytes(before)) / n, Unit: "B"})
	if err := r.listing(ctx); err != nil {
		return err
	}
	busy, err := r.resident() // after the work, and below after a start
	if err != nil {
		return err
	}
	if err := r.restart(ctx); err != nil {
		return err
	}
	full, err := r.idleCPU(ctx, fmt.Sprint(r.opts.Scale))
	if err != nil {
		return err
	}
	// An idle daemon's processor time is the same in every minute.
	minute := float64(time.Minute) / float64(r.opts.IdleFor)
	r.fact(Fact{Name: factCPUEmpty, Value: ms(empty) * minute, Unit: "ms in 60 s"})
	r.fact(Fact{Name: factCPUFull, Value: ms(full) * minute, Unit: "ms in 60 s"})
	idle, err := r.resident()
	r.fact(Fact{Name: factRSS, Value: float64(max(busy, idle)), Unit: "B"})
	return err
}

// resident returns the memory that the daemon holds.
func (r *runner) resident() (int64, error) {
	pid, err := r.opts.Host.PID()
	if err != nil {
		return 0, err
	}
	return residentBytes(pid)
}

func storeBytes(s api.StoreStatus) int64 { return s.PackBytes + s.ManifestBytes + s.StateBytes }

func (r *runner) listing(ctx context.Context) error {
	var took []float64
	for range lists {
		d, err := r.opts.Host.List(ctx)
		if err != nil {
			return err
		}
		took = append(took, ms(d))
	}
	r.fact(Fact{Name: factList, Value: median(took), Unit: "ms"})
	return nil
}

func (r *runner) restart(ctx context.Context) error {
	r.say("scale: restart the daemon")
	took, err := r.opts.Host.Restart(ctx)
	if errors.Is(err, errors.ErrUnsupported) {
		r.note("scale: the daemon's start is not measured: %v", err)
		return nil
	}
	if err != nil {
		return err
	}
	r.fact(Fact{Name: factStart, Value: ms(took), Unit: "ms"})
	return nil
}

// settleTime is how long a daemon may still be busy with what came before: it
// collects garbage half a minute after a start or a deletion.
const settleTime = 35 * time.Second

// idleCPU returns the processor time that the daemon uses while nobody asks it
// for anything.
func (r *runner) idleCPU(ctx context.Context, what string) (time.Duration, error) {
	r.say("scale: the daemon's processor time over %s with %s in standby", r.opts.IdleFor, what)
	pid, err := r.opts.Host.PID()
	if err != nil {
		return 0, err
	}
	if err := sleep(ctx, settleTime); err != nil {
		return 0, err
	}
	if err := r.settle(ctx); err != nil {
		return 0, err
	}
	before, err := cpuTime(pid)
	if err != nil {
		return 0, err
	}
	if err := sleep(ctx, r.opts.IdleFor); err != nil {
		return 0, err
	}
	after, err := cpuTime(pid)
	return after - before, err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
