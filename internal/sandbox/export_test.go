package sandbox

import "context"

// Rest waits until no operation has a turn at the sandbox: what went on behind
// an answer has ended.
func (c *Core) Rest(id string) {
	e, err := c.find(id)
	if err != nil {
		return // deleted
	}
	e.turn <- struct{}{}
	<-e.turn
}

// Waiting returns how many requests want to connect to a sandbox.
func (c *Core) Waiting(id string) int {
	e, err := c.find(id)
	if err != nil {
		return 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.dials
}

// DeleteDue is what happens at the end of a limit that deletes.
func (c *Core) DeleteDue(ctx context.Context, id, limit string) error {
	e, err := c.find(id)
	if err != nil {
		return err
	}
	return c.deleteDue(ctx, e, limit)
}
