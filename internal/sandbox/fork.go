package sandbox

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// maxForks bounds how many copies one call makes.
const maxForks = 100

// ForkOptions says what copies of a sandbox to make. The zero value asks for
// one that runs, of what the sandbox is now.
type ForkOptions struct {
	Count      int    // 0: 1
	Checkpoint string // "": what the sandbox is now
	Name       string // of the copy; of several NAME-1, NAME-2 …; "" for none
	Standby    bool   // do not start them
}

// Fork makes sandboxes that begin as copies of one: of what it is now, or of one
// of its checkpoints. Each has an identity and tokens of its own from its first
// resume on, and the labels, environment and policies of the one that it was made of,
// with which it shares what neither changes. A sandbox that runs stands still as
// for a checkpoint and goes on; none is left of it but the copies.
//
// All are there, or none is: where one cannot be made, those that can be are
// taken back. If that fails for some the error names them.
func (c *Core) Fork(ctx context.Context, id string, o ForkOptions) ([]Sandbox, error) {
	if o.Count == 0 {
		o.Count = 1
	}
	if o.Count < 1 || o.Count > maxForks {
		return nil, invalid("%d copies: take 1 to %d", o.Count, maxForks)
	}
	names, err := o.names()
	if err != nil {
		return nil, err
	}
	e, err := c.find(id)
	if err != nil {
		return nil, err
	}
	var (
		mu    sync.Mutex
		left  bool // nobody waits for the operation any more
		forks []*entry
		name  string // of the parent
	)
	err = c.run(ctx, e, opCheckpoint, func(ctx context.Context, op *operation) error {
		made, err := c.announceForks(ctx, e, op, o, names)
		mu.Lock()
		defer mu.Unlock()
		if left {
			c.withdraw(made)
			return err
		}
		forks, name = made, e.rec.Name
		return err
	})
	mu.Lock()
	left = true
	mu.Unlock()
	if err != nil {
		c.withdraw(forks)
		return nil, err
	}
	out, err := c.bringUpForks(ctx, e.id, forks, o)
	if err == nil && c.cfg.Events.OnEvent != nil {
		ev := Event{Type: EventForked, Sandbox: e.id, Name: name, At: time.Now(), Checkpoint: o.Checkpoint}
		for _, s := range out {
			ev.Forks = append(ev.Forks, s.ID)
		}
		c.cfg.Events.OnEvent(ev) // the turn is somebody else's by now
	}
	return out, err
}

// names returns the name of each copy.
func (o ForkOptions) names() ([]string, error) {
	names := make([]string, o.Count)
	for i := range names {
		if o.Name == "" {
			continue
		}
		names[i] = o.Name
		if o.Count > 1 {
			names[i] = fmt.Sprintf("%s-%d", o.Name, i+1)
		}
		if err := checkName(names[i]); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// announceForks captures the sandbox, if need be, and makes its copies known to
// the core. From then on they keep what they are made of, whatever becomes of
// the sandbox. After an error none is known. The caller has the turn of the sandbox.
func (c *Core) announceForks(ctx context.Context, e *entry, op *operation, o ForkOptions, names []string) (forks []*entry, err error) {
	records := make([]record, o.Count)
	for i := range records {
		records[i].ID = newID()
	}
	defer func() {
		if err != nil {
			c.withdraw(forks)
			for _, r := range records {
				c.admission.release(r.ID)
			}
			forks = nil
		}
	}()
	for _, r := range records {
		if o.Standby {
			break
		}
		// Before anything is done for them: the host carries all, or none is begun.
		if err := c.admit(ctx, r.ID, fmt.Sprintf("%d copies of sandbox %s", o.Count, e.id), e.rec.Shape); err != nil {
			return nil, err
		}
	}
	from, err := c.source(ctx, e, op, o.Checkpoint)
	if err != nil {
		return nil, err
	}
	for i := range records {
		fork, err := c.announce(e.rec.fork(from, records[i].ID, names[i], o.Standby))
		if err != nil {
			return forks, err
		}
		forks = append(forks, fork)
	}
	return forks, nil
}

// fork returns the record of a copy that begins at a checkpoint.
func (rec *record) fork(from checkpoint, id, name string, standby bool) record {
	now := time.Now().UTC()
	r := record{
		Version: recordVersion, ID: id, Name: name, Template: rec.Template, TemplateVersion: rec.TemplateVersion, Shape: rec.Shape,
		Labels: rec.Labels, Env: rec.Env, Policy: rec.Policy,
		AccessToken: newToken(), TrafficToken: newToken(), CreatedAt: now, LastUsed: now, ForkedFrom: rec.ID,
		State: StateCreating, Fresh: from.Fresh, WakeAs: guestapi.ReasonFork,
	}
	r.swap(from.Snapshot, from.Metadata)
	if standby {
		r.State = StateStandby
		return r
	}
	r.Generation = nextGeneration(&r)
	return r
}

// withdraw makes copies that were announced and not begun unknown again.
func (c *Core) withdraw(forks []*entry) {
	for _, f := range forks {
		c.uninsert(f)
		f.mu.Lock()
		f.gone = true // to those who wait for it
		f.mu.Unlock()
		<-f.turn
		c.admission.release(f.id)
		c.trash.add(f.rec.Snapshot.ID) // unless somebody else needs it
	}
}

// startsAtOnce is how many copies start at a time: a start waits about as long
// for the disk and for other processes as it computes.
func startsAtOnce() int { return 2 * runtime.NumCPU() }

// bringUpForks records the copies and starts them, or takes them all back.
func (c *Core) bringUpForks(ctx context.Context, parent string, forks []*entry, o ForkOptions) ([]Sandbox, error) {
	var group errgroup.Group
	group.SetLimit(startsAtOnce())
	work, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	errs := make([]error, len(forks))
	for i, f := range forks {
		group.Go(func() error {
			if errs[i] = c.bringUpFork(work, f, o.Standby); errs[i] != nil {
				giveUp(errs[i]) // the first says why
			}
			return nil
		})
	}
	_ = group.Wait() // the errors are in errs
	cause := context.Cause(work)
	if cause == nil {
		out := make([]Sandbox, len(forks))
		for i, f := range forks {
			out[i] = c.view(f)
		}
		return out, nil
	}
	return nil, c.takeBack(ctx, parent, forks, errs, cause)
}

// bringUpFork records one copy and starts it, unless it is to sleep.
func (c *Core) bringUpFork(ctx context.Context, f *entry, standby bool) error {
	err := context.Cause(ctx)
	if err == nil {
		err = failpoint.Hit(ctx, fpForkRecorded)
	}
	if err != nil {
		c.withdraw([]*entry{f})
		return err
	}
	if standby {
		return c.enroll(ctx, f, func() { c.emit(f, Event{Type: EventCreated}) })
	}
	return c.bringUp(ctx, f, false)
}

// takeBack deletes the copies that were made before another one failed with
// cause, and returns the error for the caller.
func (c *Core) takeBack(ctx context.Context, parent string, forks []*entry, errs []error, cause error) error {
	ctx = context.WithoutCancel(ctx)
	var left []string
	for i, f := range forks {
		if errs[i] != nil {
			continue
		}
		if err := c.Delete(ctx, f.id); err != nil && !errors.Is(err, ErrNotFound) {
			left = append(left, f.id)
			c.log.Warn("a copy is not taken back", keySandbox, f.id, keyError, err)
		}
	}
	if len(left) == 0 {
		return notForked(cause, parent)
	}
	return &Error{Kind: ErrConflict, Message: fmt.Sprintf("sandbox %s was not forked as asked; these copies are there: %s", parent, strings.Join(left, ", ")),
		Hint: "hib rm " + strings.Join(left, " ") + " deletes them", Cause: cause}
}

// notForked says that no copy of a sandbox is there, because one could not be made.
func notForked(cause error, parent string) error {
	e, ok := errors.AsType[*Error](cause)
	if !ok {
		return stepError(cause, "sandbox %s was not forked", parent)
	}
	return &Error{Kind: e.Kind, Message: fmt.Sprintf("sandbox %s was not forked", parent), Hint: e.Hint, Cause: cause}
}
