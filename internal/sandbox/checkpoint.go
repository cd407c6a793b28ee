package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// CheckpointKind says what a checkpoint was taken for.
type CheckpointKind string

// The kinds of checkpoints. Those of a user stay until somebody removes them;
// of the others the latest are kept.
const (
	CheckpointUser     CheckpointKind = "user"     // somebody asked for it
	CheckpointSchedule CheckpointKind = "schedule" // the sandbox's policy did
	CheckpointRestore  CheckpointKind = "restore"  // what the sandbox was before it was rolled back
)

// Bounds of the checkpoints of one sandbox: behind the first a user makes no
// more, and of those that restores leave the latest are kept.
const (
	maxCheckpoints    = 256
	maxBeforeRestores = 5
)

// checkpoint is a snapshot that a record keeps beside the last committed one.
type checkpoint struct {
	Name      string            `json:"name"`
	Kind      CheckpointKind    `json:"kind"`
	CreatedAt time.Time         `json:"created_at"`
	Snapshot  snapshot.Ref      `json:"snapshot"`
	Metadata  snapshot.Metadata `json:"metadata"`          // without the control token
	Fresh     bool              `json:"fresh,omitempty"`   // as in the record that it was taken of
	WakeAs    string            `json:"wake_as,omitempty"` // likewise, if it needs an identity
}

// same reports whether c and d are the same checkpoint.
func (c checkpoint) same(d checkpoint) bool { return c.Name == d.Name && c.Snapshot == d.Snapshot }

// Checkpoint is a checkpoint as others see it.
type Checkpoint struct {
	Name      string // a RFC 1123 label, unique in its sandbox
	Kind      CheckpointKind
	CreatedAt time.Time
	Snapshot  Snapshot
	Current   bool             // its snapshot is the one that the sandbox would resume from
	Report    *HibernateReport // how it was taken, in the answer to that only; nil of a sandbox that slept
}

// find returns the checkpoint of that name.
func (rec *record) find(name string) (checkpoint, error) {
	i := slices.IndexFunc(rec.Checkpoints, func(c checkpoint) bool { return c.Name == name })
	if i < 0 {
		return checkpoint{}, &Error{Kind: ErrNotFound, Message: fmt.Sprintf("sandbox %s has no checkpoint %s", rec.ID, clip(name)),
			Hint: "hib checkpoint ls " + rec.ID + " shows those that it has"}
	}
	return rec.Checkpoints[i], nil
}

// kept reports whether a checkpoint of the record has that snapshot.
func (rec *record) kept(id snapshot.ID) bool {
	return slices.ContainsFunc(rec.Checkpoints, func(c checkpoint) bool { return c.Snapshot.ID == id })
}

// present returns the snapshot that the record stands for as a checkpoint.
func (rec *record) present(name string, kind CheckpointKind) checkpoint {
	c := checkpoint{Name: name, Kind: kind, CreatedAt: time.Now().UTC(), Snapshot: *rec.Snapshot, Metadata: *rec.Metadata, Fresh: rec.Fresh}
	if rec.WakeAs == guestapi.ReasonFork { // a restore needs no identity, wherever it is told
		c.WakeAs = rec.WakeAs
	}
	return c
}

// addCheckpoint adds a checkpoint; of those of a schedule only the latest stay.
// What a restore leaves pushes nothing out: that may be what it goes to.
func (rec *record) addCheckpoint(c checkpoint) {
	rec.Checkpoints = append(slices.Clone(rec.Checkpoints), c)
	if c.Kind == CheckpointSchedule {
		rec.keepLatest(c.Kind, rec.Policy.Checkpoints.Keep, "")
	}
}

// keepLatest drops the checkpoints of a kind but the latest n, one at least, and
// the one that is named.
func (rec *record) keepLatest(kind CheckpointKind, n int, but string) {
	list, of := slices.Clone(rec.Checkpoints), 0
	for i := len(list) - 1; i >= 0; i-- {
		if list[i].Kind != kind {
			continue
		}
		if of++; of > max(n, 1) && list[i].Name != but {
			list = slices.Delete(list, i, i+1)
		}
	}
	rec.Checkpoints = list
}

// dropped returns the snapshots of the checkpoints that r has and next has not.
func (rec *record) dropped(next *record) (ids []snapshot.ID) {
	for _, c := range rec.Checkpoints {
		if !next.kept(c.Snapshot.ID) {
			ids = append(ids, c.Snapshot.ID)
		}
	}
	return ids
}

// newCheckpoint returns a checkpoint to be taken under the name, or under one
// that says when and what for, or why there can be none.
func (rec *record) newCheckpoint(name string, kind CheckpointKind) (*checkpoint, error) {
	if name != "" && !namePattern.MatchString(name) {
		return nil, invalid("the name %q is not usable for a checkpoint: take 1 to 63 of a-z, 0-9 and '-', not '-' at an end", clip(name))
	}
	taken := func(name string) bool {
		return slices.ContainsFunc(rec.Checkpoints, func(c checkpoint) bool { return c.Name == name })
	}
	if taken(name) {
		return nil, conflict("choose another name, or hib checkpoint rm "+rec.ID+" "+name, "sandbox %s has a checkpoint %s already", rec.ID, name)
	}
	if kind == CheckpointUser && len(rec.Checkpoints) >= maxCheckpoints { // of others the oldest make room
		return nil, conflict("hib checkpoint rm removes one", "sandbox %s has %d checkpoints, which is as many as there can be", rec.ID, len(rec.Checkpoints))
	}
	now := time.Now().UTC()
	if name == "" {
		prefix := map[CheckpointKind]string{CheckpointSchedule: "auto-", CheckpointRestore: "before-restore-"}[kind]
		stem := prefix + now.Format("20060102-150405")
		name = stem
		for n := 2; taken(name); n++ {
			name = fmt.Sprintf("%s-%d", stem, n)
		}
	}
	return &checkpoint{Name: name, Kind: kind, CreatedAt: now}, nil
}

// view returns the checkpoint as others may see it.
func (rec *record) viewCheckpoint(c checkpoint) Checkpoint {
	return Checkpoint{Name: c.Name, Kind: c.Kind, CreatedAt: c.CreatedAt, Snapshot: describe(&c.Metadata),
		Current: rec.Snapshot != nil && *rec.Snapshot == c.Snapshot}
}

// Checkpoints returns the checkpoints of a sandbox, the oldest first.
func (c *Core) Checkpoints(_ context.Context, id string) ([]Checkpoint, error) {
	e, err := c.find(id)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []Checkpoint
	for _, kept := range e.rec.Checkpoints {
		list = append(list, e.rec.viewCheckpoint(kept))
	}
	return list, nil
}

// Checkpoint keeps what the sandbox is now under a name; "" gives it one. A
// sandbox that runs stands still as long as for a hibernation and goes on with
// its connections; requests wait for that. Of one in standby only the record
// changes. A failed one has nothing but its last snapshot, which is kept.
func (c *Core) Checkpoint(ctx context.Context, id, name string) (Checkpoint, error) {
	e, err := c.find(id)
	if err != nil {
		return Checkpoint{}, err
	}
	return c.checkpoint(ctx, e, name, CheckpointUser, nil)
}

// checkpoint is Checkpoint for every kind; wanted (which may be nil) is asked
// when it is its turn.
func (c *Core) checkpoint(ctx context.Context, e *entry, name string, kind CheckpointKind, wanted func() bool) (Checkpoint, error) {
	taken := make(chan Checkpoint, 1) // written by an operation that the caller may not wait for
	err := c.run(ctx, e, opCheckpoint, func(ctx context.Context, op *operation) error {
		if wanted != nil && !wanted() {
			return errNotWanted
		}
		keep, err := e.rec.newCheckpoint(name, kind)
		if err != nil {
			return err
		}
		report, err := c.takeCheckpoint(ctx, e, op, keep)
		if err != nil {
			return err
		}
		kept, err := e.rec.find(keep.Name)
		if err != nil {
			return err
		}
		out := e.rec.viewCheckpoint(kept)
		out.Report = report
		taken <- out
		c.compactor.add(e) // which measures it
		c.emit(e, Event{Type: EventCheckpointed, Checkpoint: keep.Name, Hibernate: report, Bytes: kept.Metadata.StoredBytes})
		return nil
	})
	if err != nil {
		return Checkpoint{}, err
	}
	return <-taken, nil
}

// takeCheckpoint makes what the sandbox is now its snapshot and, unless keep is
// nil, that snapshot a checkpoint. report is nil if it slept. The caller has the turn.
func (c *Core) takeCheckpoint(ctx context.Context, e *entry, op *operation, keep *checkpoint) (report *HibernateReport, err error) {
	switch {
	case e.rec.State == StateRunning:
		if err := c.checkRoom("a checkpoint of sandbox " + e.id); err != nil {
			return nil, err
		}
		return c.captureRunning(ctx, e, op, keep)
	case e.rec.State != StateStandby && e.rec.State != StateFailed:
		return nil, conflict("", "sandbox %s is %s", e.id, e.rec.State)
	case e.rec.Snapshot == nil:
		return nil, failedError(&e.rec)
	case keep == nil:
		return nil, nil
	}
	return nil, c.changeCheckpoints(ctx, e, func(r *record) { r.addCheckpoint(r.present(keep.Name, keep.Kind)) })
}

// changeCheckpoints changes the record, and throws away what only checkpoints
// needed that it does not have then.
func (c *Core) changeCheckpoints(ctx context.Context, e *entry, mutate func(*record)) error {
	before := e.rec
	if err := c.change(ctx, e, mutate); err != nil {
		return err
	}
	c.trash.add(before.dropped(&e.rec)...)
	return nil
}

// captureRunning takes a snapshot of a sandbox that goes on.
func (c *Core) captureRunning(ctx context.Context, e *entry, op *operation, keep *checkpoint) (*HibernateReport, error) {
	report, err := c.suspend(ctx, e, op, capturing{beginning: beginning{trigger: TriggerCheckpoint, at: time.Now()}, keep: keep, goOn: true})
	if err != nil {
		return nil, err
	}
	return &report, nil
}

// commitGoOn is the commit point of a snapshot behind which the guest goes on:
// running is recorded together with it, then the guest is thawed. Only a
// change that failed is an error.
func (c *Core) commitGoOn(ctx context.Context, e *entry, sealed shim.CaptureReport, begun beginning) (HibernateReport, error) {
	before, attempt := e.rec, e.rec.Attempt
	report := begun.report(sealed)
	committing := time.Now()
	err := c.change(ctx, e, func(r *record) {
		r.State = StateRunning
		r.commit(sealed.Snapshot, sealed.Metadata)
	})
	if err != nil {
		return report, err
	}
	commitMS := since(committing)
	thawing := time.Now()
	err = failpoint.Hit(ctx, fpCheckpointCommitted)
	if err == nil {
		err = c.thaw(ctx, e, shim.ThawRequest{Attempt: attempt, Committed: true})
	} else {
		e.mu.Lock()
		e.unsettled = true // its recovery thaws the guest
		e.mu.Unlock()
	}
	if err != nil {
		c.log.Warn("a guest does not go on behind its checkpoint yet", keySandbox, e.id, keyError, err)
	}
	report = report.with("commit", commitMS).with("thaw", since(thawing))
	report.TotalMS = since(begun.at)
	if before.Snapshot != nil {
		c.trash.add(before.Snapshot.ID)
	}
	c.trash.add(before.dropped(&e.rec)...)
	c.hit(ctx, e, fpCheckpointThawed)
	return report, nil
}

// RemoveCheckpoint removes a checkpoint; what only it needed is deleted.
// Sandboxes and templates that were made of it stay.
func (c *Core) RemoveCheckpoint(ctx context.Context, id, name string) error {
	e, err := c.find(id)
	if err != nil {
		return err
	}
	return c.run(ctx, e, opCheck, func(ctx context.Context, _ *operation) error {
		if _, err := e.rec.find(name); err != nil {
			return err
		}
		err := c.changeCheckpoints(ctx, e, func(r *record) {
			r.Checkpoints = slices.DeleteFunc(slices.Clone(r.Checkpoints), func(k checkpoint) bool { return k.Name == name })
		})
		if err == nil {
			c.compactor.add(e)
		}
		return err
	})
}

// source returns the snapshot that a copy of the sandbox is made of: that of a
// checkpoint, or with "" what the sandbox is now. The caller has the turn and keeps it
// until something that names the snapshot is known to the core.
func (c *Core) source(ctx context.Context, e *entry, op *operation, name string) (checkpoint, error) {
	if name != "" {
		return e.rec.find(name)
	}
	if e.rec.State == StateFailed {
		err := failedError(&e.rec).(*Error)
		err.Hint = strings.Join([]string{"--checkpoint makes a copy of one of its checkpoints", err.Hint}, "; ")
		return checkpoint{}, err
	}
	if _, err := c.takeCheckpoint(ctx, e, op, nil); err != nil {
		return checkpoint{}, err
	}
	return e.rec.present("", ""), nil
}
