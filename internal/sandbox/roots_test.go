package sandbox

import (
	"fmt"
	"testing"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// TestRootsWhileTheyMove: a snapshot that goes from one sandbox to a copy of it,
// and on to the next, is needed all the while.
func TestRootsWhileTheyMove(t *testing.T) {
	c := &Core{entries: map[string]*entry{}, names: map[string]string{}, templates: map[string]*tmpl{}}
	add := func(id string, s *snapshot.Ref) *entry {
		e := newEntry(record{ID: id, Snapshot: s}, 1)
		if err := c.insert(e); err != nil {
			t.Error(err)
		}
		return e
	}
	for i := range 100 { // to look at them takes a while
		add(fmt.Sprint("other-", i), nil)
	}
	const moves = 5000
	done := make(chan struct{})
	now := add("0", &snapshot.Ref{ID: "s"})
	go func() {
		defer close(done)
		for i := range moves {
			next := add(fmt.Sprint(i+1), &snapshot.Ref{ID: "s"})
			now.mu.Lock()
			now.rec.Snapshot = nil
			now.mu.Unlock()
			c.uninsert(now)
			now = next
		}
	}()
	for {
		if needed, _ := c.roots(); !has(needed, "s") {
			t.Fatal("the snapshot is garbage")
		}
		select {
		case <-done:
			return
		default:
		}
	}
}
