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

// Transition is a recorded change of state.
type Transition struct {
	Sandbox  string
	From, To State // From is "" for a new record
	Reason   string
	At       time.Time
}

// Events is called at what happens, for logs and metrics. A field may be nil.
// The functions are called by the operation that they tell of, hold it up
// while they run, and must not call the Core.
type Events struct {
	OnTransition func(Transition)
	OnHibernate  func(sandbox string, report HibernateReport, err error) // a hibernation ended, its machine parked or released
	OnStart      func(sandbox string, report ResumeReport, err error)    // a creation or a resume ended
	OnCollect    func(deleted snapshot.Collected, err error)
	OnCompact    func(sandbox string, done snapshot.Compacted, err error) // a compaction wrote something, found a damage or failed
}

// LogEvents returns Events that write to log.
func LogEvents(log *slog.Logger) Events {
	return Events{
		OnTransition: func(t Transition) {
			level := slog.LevelInfo
			if t.To == StateFailed || t.From == StateRunning && t.To == StateResuming {
				level = slog.LevelWarn
			}
			log.Log(context.Background(), level, "sandbox "+string(t.To), keySandbox, t.Sandbox, "from", t.From, "reason", t.Reason)
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

func (e *Events) transition(t Transition) {
	if e.OnTransition != nil {
		e.OnTransition(t)
	}
}

func (e *Events) hibernate(sandbox string, report HibernateReport, err error) {
	if e.OnHibernate != nil {
		e.OnHibernate(sandbox, report, err)
	}
}

func (e *Events) start(sandbox string, report ResumeReport, err error) {
	if e.OnStart != nil {
		e.OnStart(sandbox, report, err)
	}
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
