package sandbox

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
