package sandbox

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// checkHost refuses a catalog that is new where the store is not: whoever lost
// the catalog would otherwise lose the snapshots too, as garbage.
func (c *Core) checkHost(ctx context.Context) error {
	_, err := c.cfg.Catalog.Get(ctx, kindHost, hostKey)
	if err == nil {
		return nil
	}
	if !isNotFound(err) {
		return fmt.Errorf("read the catalog: %w", err)
	}
	st, err := c.cfg.Snapshots.Status(ctx)
	if err != nil {
		return fmt.Errorf("look through the store: %w", err)
	}
	if st.Manifests.Objects > 0 {
		return &Error{Kind: ErrInvalid, Message: fmt.Sprintf("the catalog is new, but the store holds %d snapshots, which would be garbage to it", st.Manifests.Objects),
			Hint: "put the catalog back that belongs to this store, or take the store away"}
	}
	if _, err := swap(ctx, c.cfg.Catalog, kindHost, hostKey, []byte("{}"), 0); err != nil {
		return fmt.Errorf("write to the catalog: %w", err)
	}
	return nil
}

// load reads the sandboxes of the catalog. All are unsettled.
func (c *Core) load(ctx context.Context) error {
	records, err := c.cfg.Catalog.List(ctx, kindSandbox)
	if err != nil {
		return fmt.Errorf("read the sandboxes: %w", err)
	}
	for _, r := range records {
		rec, err := decodeRecord(r.Value)
		if err != nil {
			return fmt.Errorf("read the record of sandbox %s: %w", r.Key, err)
		}
		e := newEntry(rec, r.Revision)
		e.unsettled = true
		c.entries[rec.ID] = e
		if rec.Name != "" {
			c.names[rec.Name] = rec.ID
		}
	}
	return c.loadNames(ctx)
}

// loadNames frees names that a creation took and did not come to use.
func (c *Core) loadNames(ctx context.Context) error {
	records, err := c.cfg.Catalog.List(ctx, kindName)
	if err != nil {
		return fmt.Errorf("read the names: %w", err)
	}
	for _, r := range records {
		if c.names[r.Key] == string(r.Value) {
			continue
		}
		if err := erase(ctx, c.cfg.Catalog, kindName, r.Key, r.Revision); err != nil {
			return fmt.Errorf("free the name %s: %w", r.Key, err)
		}
	}
	return nil
}

// recoverAll settles every sandbox and ends the shims that no record names.
func (c *Core) recoverAll(ctx context.Context) error {
	var group errgroup.Group
	group.SetLimit(c.cfg.Parallel)
	for _, e := range c.all() {
		group.Go(func() error {
			err := c.run(ctx, e, opCheck, func(context.Context, *operation) error { return nil })
			if err != nil && !errors.Is(err, ErrNotFound) {
				c.log.Warn("sandbox is not settled yet", keySandbox, e.id, keyError, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("recover the sandboxes: %w", context.Cause(ctx))
	}
	var known []string
	for _, e := range c.all() {
		e.mu.Lock()
		if h := e.rec.Handle; h != nil {
			known = append(known, h.VM)
		}
		e.mu.Unlock()
	}
	if err := c.cfg.Launcher.Orphans(ctx, known); err != nil {
		return fmt.Errorf("end the machines that no record names: %w", err)
	}
	return nil
}

// reload reads the sandbox's record again and lets go of the machine, whose
// state is as unknown as the record's was.
func (c *Core) reload(ctx context.Context, e *entry) error {
	ctx, cancel := c.short(ctx)
	defer cancel()
	r, err := c.cfg.Catalog.Get(ctx, kindSandbox, e.id)
	if isNotFound(err) {
		// Its machine, if there is one, was never to outlive the record.
		if err := c.end(ctx, e); err != nil {
			return err
		}
		if err := c.eraseName(ctx, e.rec.Name, e.id); err != nil {
			return stepError(err, "free the name of sandbox %s", e.id)
		}
		c.forget(e)
		return nil
	}
	if err != nil {
		return unavailable(err, "read the record of sandbox %s", e.id)
	}
	rec, err := decodeRecord(r.Value)
	if err != nil {
		return fmt.Errorf("read the record of sandbox %s: %w", e.id, err)
	}
	e.mu.Lock()
	e.rec, e.rev = rec, r.Revision
	e.mu.Unlock()
	return nil
}

// recoverSandbox does the recovery action of the state that the sandbox's
// record is in; Recovery says in words what that is. When it returns without
// error the sandbox is settled.
func (c *Core) recoverSandbox(ctx context.Context, e *entry) error {
	if err := c.reload(ctx, e); err != nil || e.gone {
		return err
	}
	e.mu.Lock()
	e.unsettled = false // until a step says otherwise
	e.mu.Unlock()
	if err := c.recoverState(ctx, e); err != nil {
		e.mu.Lock()
		e.unsettled = !e.gone
		e.mu.Unlock()
		return err
	}
	if !e.gone {
		c.replicate(e)
	}
	return nil
}

func (c *Core) recoverState(ctx context.Context, e *entry) error {
	switch e.rec.State {
	case StateCreating, StateDeleting:
		return c.remove(ctx, e, "it was not created")
	case StateStandby:
		return c.recoverStandby(ctx, e)
	case StateFailed:
		return c.release(ctx, e)
	case StateResuming:
		if err := c.end(ctx, e); err != nil {
			return err
		}
		return c.change(ctx, e, func(r *record) {
			r.State = StateStandby
			r.unbind()
			if r.Reason != "" {
				r.State = StateFailed
			}
		})
	case StateRunning:
		return c.recoverRunning(ctx, e)
	case StateHibernating:
		return c.recoverHibernating(ctx, e)
	}
	return fmt.Errorf("sandbox %s: no recovery action for state %q", e.id, e.rec.State)
}

// adopt connects the sandbox to its shim; dead says that it is proven dead.
func (c *Core) adopt(ctx context.Context, e *entry) (dead bool, err error) {
	e.detach()
	if e.rec.Handle == nil {
		return true, nil
	}
	vm, err := c.cfg.Launcher.Adopt(ctx, *e.rec.Handle)
	if err == nil {
		if err = vm.Adopt(ctx); err == nil {
			e.attach(vm)
			return false, nil
		}
		vm.Close()
	}
	switch {
	case errors.Is(err, shim.ErrGone):
		return true, nil
	case errors.Is(err, shim.ErrProtocol):
		return false, &Error{Kind: ErrUnavailable, Message: "sandbox " + e.id, Cause: err,
			Hint: "start a daemon of the version that started it, or hib rm " + e.id}
	}
	return false, unavailable(err, "the machine of sandbox %s does not answer", e.id)
}

func (c *Core) recoverRunning(ctx context.Context, e *entry) error {
	whole := ctx
	ctx, cancel := c.short(ctx)
	defer cancel()
	dead, err := c.adopt(ctx, e)
	if err != nil {
		return err
	}
	if dead {
		return c.fail(ctx, e, reasonShimEnded)
	}
	vm := e.vm
	st, err := vm.Status(ctx)
	switch {
	case errors.Is(err, shim.ErrGone):
		return c.fail(ctx, e, reasonShimEnded)
	case err != nil:
		return unavailable(err, "the machine of sandbox %s does not answer", e.id)
	}
	switch st.Phase {
	case shim.PhaseStopped:
		if c.canGoBack(e, st) {
			return c.goBack(whole, e, exitReason(st))
		}
		return c.fail(ctx, e, exitReason(st))
	case shim.PhaseCapturing, shim.PhaseSealed, shim.PhaseRunning:
	default:
		return c.fail(ctx, e, fmt.Sprintf("its shim lost it: it is %s", st.Phase))
	}
	if err := c.recoverEgress(ctx, e); err != nil {
		return err
	}
	if st.Phase != shim.PhaseRunning {
		if err := c.thaw(ctx, e, st.Attempt); err != nil {
			return err
		}
		if e.rec.State != StateRunning {
			return nil // it ended instead
		}
	}
	c.watch(e, vm)
	return nil
}

func (c *Core) recoverHibernating(ctx context.Context, e *entry) error {
	short, cancel := c.short(ctx)
	defer cancel()
	dead, err := c.adopt(short, e)
	if err != nil {
		return err
	}
	if dead {
		return c.concludeDead(short, e, reasonShimEnded)
	}
	vm := e.vm
	if err := c.conclude(ctx, e, false); err != nil {
		return err
	}
	if e.rec.State == StateRunning {
		c.watch(e, vm)
	}
	return nil
}
