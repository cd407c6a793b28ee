package sandbox

import (
	"context"
	"errors"
	"os"

	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Delete removes the sandbox and all that only it needs, whatever state it is
// in: a start or a hibernation under way is cancelled. ErrNotFound says that
// there is none; two deletions at once both succeed. After another error the
// deletion goes on in the background or can be repeated.
func (c *Core) Delete(ctx context.Context, id string) error {
	e, err := c.find(id)
	if err != nil {
		return err
	}
	return c.delete(ctx, e, "", nil)
}

// delete is Delete; reason says what deletes it, "" for a user. confirm is asked
// at the sandbox's turn whether it is to go still; nil: yes.
func (c *Core) delete(ctx context.Context, e *entry, reason string, confirm func() bool) error {
	e.doom(+1)
	defer e.doom(-1)
	e.interrupt(errDelete)
	c.compactor.stop(e, errDelete)
	return c.run(ctx, e, opDelete, func(ctx context.Context, _ *operation) error {
		if e.unsettled {
			if err := c.reload(ctx, e); err != nil || e.gone {
				return err
			}
		}
		if confirm != nil && !confirm() {
			return nil
		}
		return c.remove(ctx, e, reason)
	})
}

// doom counts the deletions that wait: while there is one, nothing else begins.
func (e *entry) doom(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.doomed += n
}

// remove takes a sandbox from any state through deleting to gone. Each step
// may find that it was done before.
func (c *Core) remove(ctx context.Context, e *entry, reason string) error {
	if e.rev != 0 {
		if err := c.change(ctx, e, func(r *record) {
			if r.State != StateDeleting {
				r.State, r.Reason = StateDeleting, reason
			}
		}); err != nil {
			return err
		}
	}
	if err := failpoint.Hit(ctx, fpDeleteRecorded); err != nil {
		return err
	}
	if err := c.end(ctx, e); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, fpDeleteReleased); err != nil {
		return err
	}
	if path := c.cfg.Console(e.id); path != "" {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			c.log.Warn("a console log is left", keySandbox, e.id, keyError, err)
		}
	}
	if err := c.removeHookLog(e.id); err != nil {
		c.log.Warn("a log of hooks is left", keySandbox, e.id, keyError, err)
	}
	return c.erase(ctx, e)
}

// erase removes the records of a sandbox of which nothing else is left.
func (c *Core) erase(ctx context.Context, e *entry) error {
	ctx, cancel := c.short(ctx)
	defer cancel()
	if err := c.eraseName(ctx, e.rec.Name, e.id); err != nil {
		return stepError(err, "free the name of sandbox %s", e.id)
	}
	if e.rev != 0 {
		if c.cfg.Tier != nil && e.rec.replicable() {
			c.cfg.Tier.Forget(e.id) // while the record is still there to bring us here again
		}
		if err := erase(ctx, c.cfg.Catalog, kindSandbox, e.id, e.rev); err != nil {
			e.mu.Lock()
			e.unsettled = true
			e.mu.Unlock()
			return stepError(err, "remove the record of sandbox %s", e.id)
		}
	}
	c.forget(e)
	c.trash.add(e.rec.snapshots()...) // a base snapshot among them stays: its template names it
	return nil
}

// forget drops a sandbox that has no record.
func (c *Core) forget(e *entry) {
	e.detach()
	e.mu.Lock()
	from := e.rec.State
	e.gone, e.unsettled = true, false
	e.mu.Unlock()
	c.mu.Lock()
	delete(c.entries, e.id)
	if c.names[e.rec.Name] == e.id {
		delete(c.names, e.rec.Name)
	}
	c.mu.Unlock()
	c.emit(e, Event{Type: EventState, From: from, To: StateGone})
	c.emit(e, Event{Type: EventDeleted, Reason: e.rec.Reason})
	c.pruneLater(e.rec.Template)
	c.trash.wake()
}

// eraseName frees a name if it is id's.
func (c *Core) eraseName(ctx context.Context, name, id string) error {
	if name == "" {
		return nil
	}
	rec, err := c.cfg.Catalog.Get(ctx, kindName, name)
	switch {
	case isNotFound(err):
		return nil
	case err != nil:
		return err
	case string(rec.Value) != id:
		return nil
	}
	return erase(ctx, c.cfg.Catalog, kindName, name, rec.Revision)
}

// erase deletes a record; that it is gone already is no error.
func erase(ctx context.Context, cat Catalog, kind, key string, rev uint64) error {
	err := cat.Delete(ctx, kind, key, rev)
	if err == nil || errors.Is(err, catalog.ErrNotFound) {
		return nil
	}
	if _, getErr := cat.Get(ctx, kind, key); isNotFound(getErr) {
		return nil
	}
	return err
}

// roots returns the snapshots that any record needs, and those that records
// announce, which may not exist yet.
func (c *Core) roots() (needed, announced map[snapshot.ID]struct{}) {
	needed, announced = map[snapshot.ID]struct{}{}, map[snapshot.ID]struct{}{}
	// A copy that is made while this runs has taken over what its original may
	// have dropped by the time that one is looked at: look until there is nobody new.
	seen := map[*entry]struct{}{}
	for looked := -1; looked < len(seen); {
		looked = len(seen)
		for _, e := range c.all() {
			if _, ok := seen[e]; ok {
				continue
			}
			seen[e] = struct{}{}
			e.mu.Lock()
			e.rec.roots(needed, announced)
			e.mu.Unlock()
		}
	}
	for _, v := range c.versions() {
		v.roots(needed, announced)
	}
	return needed, announced
}
