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
