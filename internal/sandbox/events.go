package sandbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Keys of log attributes.
const (
	keySandbox  = "sandbox"
	keyTemplate = "template"
	keySnapshot = "snapshot"
	keyError    = "error"
)

// EventType says what an Event tells.
type EventType string

// The types of events, and the fields that each has beside Sandbox, Name and At.
const (
	EventState        EventType = "state"        // a recorded change of state: From, To, Reason
	EventCreated      EventType = "created"      // Resume
	EventResumed      EventType = "resumed"      // Resume
	EventWoken        EventType = "woken"        // a request found it asleep: By
	EventIdle         EventType = "idle"         // nothing uses it any more: a hibernation begins
	EventHibernated   EventType = "hibernated"   // its machine is parked or released: Hibernate, Bytes stored
	EventCancelled    EventType = "cancelled"    // a hibernation did not happen: Reason
	EventHook         EventType = "hook"         // a hook ran: Hook, Reason
	EventDenied       EventType = "denied"       // its egress policy stopped it: Denied
	EventFailed       EventType = "failed"       // Reason
	EventCheckpointed EventType = "checkpointed" // Checkpoint, Bytes stored
	EventRestored     EventType = "restored"     // Checkpoint
	EventForked       EventType = "forked"       // Checkpoint, Forks
	EventUpdated      EventType = "updated"      // its settings were changed
	EventExpiring     EventType = "expiring"     // Action is going to happen at Due
	EventDeleted      EventType = "deleted"      // Reason: "" where a user asked for it
)

// EventTypes lists the types of events. docs/events.md says what each means.
var EventTypes = []EventType{
	EventState, EventCreated, EventResumed, EventWoken, EventIdle, EventHibernated, EventCancelled, EventHook, EventDenied,
	EventFailed, EventCheckpointed, EventRestored, EventForked, EventUpdated, EventExpiring, EventDeleted,
}

// Event tells what happened to a sandbox. Which fields are set depends on the
// type; what they point to must not be written to.
type Event struct {
	Type    EventType
	Sandbox string // id
	Name    string // of the sandbox, "" if it has none
	At      time.Time

	From, To   State // From is "" for a new record
	Reason     string
	By         string // who or what woke it
	Resume     *ResumeReport
	Hibernate  *HibernateReport
	Hook       *HookRun // without its output, which is in the log of hooks
	Bytes      int64
	Denied     *Denied
	Checkpoint string   // name
	Forks      []string // ids
	Due        time.Time
	Action     Action
}

// Denied is an outbound flow or a question for a name that the egress policy
// stopped.
type Denied struct {
	Proto string `json:"proto"` // "tcp", "udp" or "dns"; "other" for those that were too many to be told one by one
	Addr  string `json:"addr"`  // IP address; "" of a name that was not looked up
	Port  int    `json:"port"`
	Name  string `json:"name,omitempty"` // that was asked for, where it is known
	Count int64  `json:"count"`          // so many alike since the last report
}

// Events is called at what happens, for logs, metrics and the stream of
// events. A field may be nil. The functions are called by the operation that
// they tell of (EventDenied by what watches the machine), hold it up while they
// run, and must not call the Core.
type Events struct {
	OnEvent   func(Event)
	OnCollect func(deleted snapshot.Collected, err error)
	OnCompact func(sandbox string, done snapshot.Compacted, err error) // a compaction wrote something, found a damage or failed
}

// LogEvents returns Events that write to log.
func LogEvents(log *slog.Logger) Events {
	return Events{
		OnEvent: func(ev Event) {
			switch ev.Type {
			case EventState:
			case EventDenied:
				log.Debug("event", keySandbox, ev.Sandbox, "type", ev.Type, "proto", ev.Denied.Proto, "addr", ev.Denied.Addr,
					"port", ev.Denied.Port, "name", ev.Denied.Name, "count", ev.Denied.Count)
				return
			default:
				log.Debug("event", keySandbox, ev.Sandbox, "type", ev.Type, "reason", ev.Reason, "by", ev.By)
				return
			}
			level := slog.LevelInfo
			if ev.To == StateFailed || ev.From == StateRunning && ev.To == StateResuming {
				level = slog.LevelWarn
			}
			log.Log(context.Background(), level, "sandbox "+string(ev.To), keySandbox, ev.Sandbox, "from", ev.From, "reason", ev.Reason)
		},
		OnCollect: func(deleted snapshot.Collected, err error) {
			if err != nil {
				log.Warn("collecting garbage failed", keyError, err)
				return
			}
			log.Debug("garbage collected", "deleted", deleted)
		},
		OnCompact: func(sandbox string, done snapshot.Compacted, err error) {
			if err != nil {
				log.Warn("compacting a snapshot failed", keySandbox, sandbox, keyError, err)
				return
			}
			for pack, fault := range done.Faults {
				log.Warn("a pack cannot be read whole", keySandbox, sandbox, "pack", pack, keyError, fault)
			}
			log.Debug("snapshot compacted", keySandbox, sandbox, "packs", done.Packs, "left", done.PacksLeft, "written", done.WrittenBytes)
		},
	}
}

// emit tells of something that happened to e just now. The caller need not have
// the turn, and does not hold e.mu.
func (c *Core) emit(e *entry, ev Event) {
	if c.cfg.Events.OnEvent == nil {
		return
	}
	e.mu.Lock()
	name := e.rec.Name
	e.mu.Unlock()
	ev.Sandbox, ev.Name, ev.At = e.id, name, time.Now()
	c.cfg.Events.OnEvent(ev)
}

func (e *Events) collect(deleted snapshot.Collected, err error) {
	if e.OnCollect != nil {
		e.OnCollect(deleted, err)
	}
}

func (e *Events) compact(sandbox string, done snapshot.Compacted, err error) {
	if e.OnCompact != nil {
		e.OnCompact(sandbox, done, err)
	}
}
