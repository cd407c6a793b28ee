// Package events keeps the stream of what happened on a host, so that whoever
// listens can say which event it saw last and hear everything after it.
//
// An event has an id, a number that grows with every event and is never used
// twice, also across restarts, crashes and a loss of power. The journal is the
// folder in which events are kept, bounded in size: the oldest go first. A
// subscription is a place in the journal that moves on as events are taken
// from it. It reads at its own pace from the files, so a subscriber that is
// slow, or hangs, costs neither memory nor anybody else's time; what was
// removed before it came to it, it is told as a gap.
//
// The rule that resuming rests on: an event is shown to a subscriber only once
// it is in the file. Who was told of an id finds everything after it there.
//
// The package knows nothing of what the events are about.
package events

import (
	"encoding/json"
	"slices"
	"time"
)

// TypeGap is the type of the one event that this package makes itself: some
// events are not there any more, or never came to be kept. Its data is a Gap.
const TypeGap = "gap"

// Event is one thing that happened.
type Event struct {
	ID      uint64          `json:"id"` // 0 before it is in a journal
	Time    time.Time       `json:"time"`
	Type    string          `json:"type"`              // such as "resumed"
	Sandbox string          `json:"sandbox,omitempty"` // id of the sandbox that it is about, "" for the host
	Name    string          `json:"name,omitempty"`    // of that sandbox, as it was then
	Data    json.RawMessage `json:"data,omitempty"`    // an object; what is in it depends on the type
}

// Gap is the data of a gap.
type Gap struct {
	First  uint64 `json:"first,omitempty"` // id of the first event that is still there
	Lost   uint64 `json:"lost,omitempty"`  // how many were not kept, where that is known
	Reason string `json:"reason"`
}

// gap returns an event that tells of a gap.
func gap(id uint64, at time.Time, g Gap) Event {
	data, _ := json.Marshal(g) // numbers and a text
	return Event{ID: id, Time: at.UTC(), Type: TypeGap, Data: data}
}

// Filter says which events a subscriber wants. The zero value is all of them.
// Gaps always pass.
type Filter struct {
	Sandbox string   // id or name of the sandbox that they are about
	Types   []string // one of these
}

// Match reports whether e passes.
func (f Filter) Match(e *Event) bool {
	if e.Type == TypeGap {
		return true
	}
	if f.Sandbox != "" && f.Sandbox != e.Sandbox && f.Sandbox != e.Name {
		return false
	}
	return len(f.Types) == 0 || slices.Contains(f.Types, e.Type)
}
