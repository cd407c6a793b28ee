package sandbox

import (
	"context"
	"time"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// Restore rolls the sandbox back to one of its checkpoints. What it is now is
// kept first, as a checkpoint of kind CheckpointRestore whose name is returned, ""
// if that was kept already. A sandbox that ran, and one that had failed, runs
// again afterwards; one in standby stays there. If it does not resume, that is the
// error, the sandbox sleeps (or has failed) at the checkpoint, and both
// checkpoints are there.
func (c *Core) Restore(ctx context.Context, id, name string) (s Sandbox, kept string, err error) {
	e, err := c.find(id)
	if err != nil {
		return Sandbox{}, "", err
	}
	before := make(chan string, 1) // written by an operation that the caller may not wait for
	err = c.run(ctx, e, opCheckpoint, func(ctx context.Context, op *operation) error {
		name, err := c.restore(ctx, e, op, name)
		before <- name
		return err
	})
	select {
	case kept = <-before:
	default:
	}
	return c.view(e), kept, err
}

// restore does what Restore says and returns the name of the checkpoint that it left.
func (c *Core) restore(ctx context.Context, e *entry, op *operation, name string) (kept string, err error) {
	if _, err := e.rec.find(name); err != nil {
		return "", err
	}
	keep, err := e.rec.newCheckpoint("", CheckpointRestore)
	if err != nil {
		return "", err
	}
	wakes := e.rec.State != StateStandby
	if e.rec.State == StateRunning {
		// One commit makes it standby and keeps what it was: whatever happens then, nothing is lost.
		if _, err := c.suspend(ctx, e, op, capturing{beginning: beginning{trigger: TriggerRestore, at: time.Now()}, keep: keep, noPark: true}); err != nil {
			return "", err
		}
		kept = keep.Name
	}
	if err := failpoint.Hit(ctx, fpRestoreKept); err != nil {
		return kept, err
	}
	switch e.rec.State {
	case StateStandby, StateFailed:
	default:
		return kept, conflict("", "sandbox %s is %s", e.id, e.rec.State)
	}
	if err := c.release(ctx, e); err != nil { // a machine that is parked, or could not be ended, is of another snapshot
		return kept, err
	}
	if e.rec.Snapshot != nil && !e.rec.kept(e.rec.Snapshot.ID) {
		kept = keep.Name
	}
	err = c.changeCheckpoints(ctx, e, func(r *record) {
		target, findErr := r.find(name)
		if findErr != nil {
			return // it was found above, in this turn
		}
		if kept == keep.Name && !r.kept(r.Snapshot.ID) {
			r.addCheckpoint(r.present(keep.Name, keep.Kind))
		}
		r.keepLatest(CheckpointRestore, maxBeforeRestores, name)
		r.goTo(target)
		r.LastUsed = time.Now().UTC()
	})
	if err != nil {
		return kept, err
	}
	c.emit(e, Event{Type: EventRestored, Checkpoint: name})
	if err := failpoint.Hit(ctx, fpRestoreSwapped); err != nil {
		return kept, err
	}
	if !wakes {
		return kept, nil
	}
	e.mu.Lock()
	op.kind, op.late = opStart, false // what follows a deletion may cancel
	e.mu.Unlock()
	return kept, c.resume(ctx, e, ResumeOptions{})
}

// goTo makes a checkpoint what the record stands for.
func (rec *record) goTo(k checkpoint) {
	rec.swap(k.Snapshot, k.Metadata)
	rec.Fresh, rec.WakeAs = k.Fresh, k.WakeAs
	if !k.Fresh && k.WakeAs == "" {
		rec.WakeAs = guestapi.ReasonRestore
	}
	rec.continueCounts()
}
