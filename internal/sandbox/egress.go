package sandbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// changeEgress puts the egress policy that was just recorded in force at a
// running machine. If it is not known to be in force, the sandbox is unsettled
// and it is tried again until it is.
func (c *Core) changeEgress(ctx context.Context, e *entry) error {
	short, cancel := c.short(ctx)
	defer cancel()
	err := c.applyEgress(short, e)
	if errors.Is(err, ErrUnavailable) {
		e.mu.Lock()
		e.unsettled = true
		e.mu.Unlock()
	}
	return err
}

// recoverEgress puts the recorded egress policy in force at a machine that was
// adopted: a daemon may have died, or lost its shim, between recording the policy
// and putting it in force.
func (c *Core) recoverEgress(ctx context.Context, e *entry) error {
	err := c.applyEgress(ctx, e)
	if errors.Is(err, ErrUnavailable) {
		return err
	}
	if err != nil {
		c.log.Info("the recorded egress policy is not in force", keySandbox, e.id, keyError, err)
	}
	return nil
}

// applyEgress puts the recorded egress policy in force at the machine. Where it
// cannot be read there, everything is closed until the next resume or update,
// which is an ErrConflict; ErrUnavailable says that nobody knows what is in force.
func (c *Core) applyEgress(ctx context.Context, e *entry) error {
	g := e.rec.Policy.Egress
	err := e.vm.SetEgress(ctx, shim.EgressRequest{Profile: g.Profile, Allow: g.Allow, Deny: g.Deny})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, shim.ErrGone), shim.Code(err) == shim.CodeStopped:
		return nil // nothing flows any more; whoever watches it sees to the rest
	case errors.Is(err, shim.ErrUnknown):
		return &Error{Kind: ErrConflict, Message: fmt.Sprintf("the machine of sandbox %s keeps the egress policy that it was resumed with", e.id), Cause: err,
			Hint: fmt.Sprintf("the new one is recorded and holds from the next resume on: hib hibernate %s", e.id)}
	case shim.Code(err) == shim.CodeInvalid:
		if closing := e.vm.SetEgress(ctx, shim.EgressRequest{Profile: EgressNone}); closing != nil {
			return unavailable(errors.Join(err, closing), "the egress policy of sandbox %s is recorded and not in force yet", e.id)
		}
		return &Error{Kind: ErrConflict, Message: fmt.Sprintf("everything is closed to sandbox %s: its machine cannot read the egress policy", e.id), Cause: err,
			Hint: fmt.Sprintf("hib update %s with other rules, or hib hibernate it: the policy is recorded and holds from the next resume on", e.id)}
	}
	return unavailable(err, "the egress policy of sandbox %s is recorded and not in force yet", e.id)
}

// denied tells of what a machine reports that its guest was denied.
func (c *Core) denied(e *entry, d shim.Denied) {
	c.emit(e, Event{Type: EventDenied, Denied: &Denied{Proto: d.Proto, Addr: d.Addr, Port: d.Port, Name: d.Name, Count: d.Count}})
}
