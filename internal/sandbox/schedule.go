package sandbox

import (
	"context"
	"errors"
	"time"
)

// A sandbox whose policy says so is checkpointed again and again while it runs.
// One timer per sandbox does it, which is set at the end of each operation and
// stopped by one that ends in another state: what sleeps costs nothing.

// Bounds of a schedule's timer.
const (
	scheduleSettle = 10 * time.Second // from a resume to a checkpoint that was due before, unless it is due more often
	scheduleRetry  = time.Minute      // from one that failed to the next try, unless it is due more often
)

// schedule is the timer of a sandbox's scheduled checkpoints. The entry's mu guards it.
type schedule struct {
	timer     *time.Timer // nil: none is due
	due       time.Time   // of timer
	notBefore time.Time   // after one that failed
}

// nextScheduled returns when the next scheduled checkpoint is due; false: none is.
func (rec *record) nextScheduled() (due time.Time, ok bool) {
	every := rec.Policy.Checkpoints.Every
	if every <= 0 || rec.State != StateRunning {
		return time.Time{}, false
	}
	last := rec.CreatedAt
	for _, k := range rec.Checkpoints {
		if k.Kind == CheckpointSchedule && k.CreatedAt.After(last) {
			last = k.CreatedAt
		}
	}
	due = last.Add(every)
	if settled := rec.LastUsed.Add(min(every, scheduleSettle)); settled.After(due) {
		due = settled
	}
	return due, true
}

// arrange sets or stops the timer of the sandbox's scheduled checkpoints. The
// entry's mu is held.
func (c *Core) arrange(e *entry) {
	due, ok := e.rec.nextScheduled()
	if e.schedule.notBefore.After(due) {
		due = e.schedule.notBefore
	}
	ok = ok && !e.gone && !e.unsettled
	s := &e.schedule
	switch {
	case s.timer != nil && (!ok || !s.due.Equal(due)):
		s.timer.Stop()
		s.timer = nil
	case s.timer != nil:
		return
	}
	if ok {
		s.due = due
		s.timer = time.AfterFunc(time.Until(due), func() { c.checkpointScheduled(e, due) })
	}
}

// checkpointScheduled takes the checkpoint that was due.
func (c *Core) checkpointScheduled(e *entry, due time.Time) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.opsDone.Add(1)
	c.mu.Unlock()
	defer c.opsDone.Done()
	_, err := c.checkpoint(context.Background(), e, "", CheckpointSchedule, func() bool {
		now, ok := e.rec.nextScheduled()
		return ok && !now.After(due) // nobody took one, changed the policy or put it to sleep meanwhile
	})
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil && !errors.Is(err, errNotWanted) && !errors.Is(err, ErrNotFound) && !errors.Is(err, errClosing) {
		c.log.Warn("a scheduled checkpoint was not taken", keySandbox, e.id, keyError, err)
		e.schedule.notBefore = time.Now().Add(min(e.rec.Policy.Checkpoints.Every, scheduleRetry))
	}
	if e.schedule.due.Equal(due) {
		e.schedule.timer = nil // it fired
	}
	if e.op == nil { // else the end of that operation arranges
		c.arrange(e)
	}
}

// errNotWanted says that a checkpoint was to be taken only under a condition that does not hold.
var errNotWanted = errors.New("it is not wanted any more")
