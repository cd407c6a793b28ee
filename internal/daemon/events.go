package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/events"
	"github.com/hibernacle/hibernacle/internal/metrics"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/server"
	"github.com/hibernacle/hibernacle/internal/webhook"
)

// observers are told of what happens: those who look at metrics, read the
// stream of events, or have them posted.
type observers struct {
	metrics  *metrics.Metrics
	journal  *events.Journal
	webhooks *webhook.Manager
	quotas   quotas
	unwatch  func() // has the metrics ask the core no more
}

// openObservers opens the journal and lets the webhooks go on where they were.
func openObservers(ctx context.Context, c Config, f Folders, cat *catalog.Catalog) (*observers, error) {
	o := &observers{metrics: metrics.New(), unwatch: func() {}}
	var err error
	if o.journal, err = events.Open(f.Events, events.Options{Log: c.Log}); err != nil {
		return nil, err
	}
	var types []string
	for _, t := range sandbox.EventTypes {
		types = append(types, string(t))
	}
	o.webhooks, err = webhook.New(ctx, webhook.Config{Journal: o.journal, Catalog: cat, Types: types, Observe: o.metrics.Delivery, Log: c.Log})
	if err != nil {
		o.journal.Close()
		return nil, err
	}
	return o, nil
}

// watch has the gauges asked of core.
func (o *observers) watch(core metrics.Core) { o.unwatch = o.metrics.Watch(core) }

// close ends them, after the core has told its last.
func (o *observers) close() {
	o.webhooks.Close()
	o.journal.Close()
}

// addTo has a server show what they know.
func (o *observers) addTo(c *server.Config) {
	if o != nil {
		c.Events, c.Webhooks, c.Metrics, c.Answered = o.journal, o.webhooks, o.metrics.Handler(), o.metrics.Request
	}
}

// sink returns what the core tells of: each event goes to the log, the metrics
// and the journal. None of them keeps the core waiting.
func (o *observers) sink(log *slog.Logger) sandbox.Events {
	told := sandbox.LogEvents(log)
	toLog := told.OnEvent
	told.OnEvent = func(e sandbox.Event) {
		toLog(e)
		o.metrics.Event(e)
		var suppressed int64
		switch e.Type {
		case sandbox.EventDenied:
			var ok bool
			if ok, suppressed = o.quotas.take(e.Sandbox, e.At); !ok {
				return
			}
		case sandbox.EventDeleted:
			o.quotas.forget(e.Sandbox)
		}
		kept, err := journalled(e, suppressed)
		if err != nil {
			log.Error("an event is lost", "type", e.Type, "sandbox", e.Sandbox, "error", err)
			return
		}
		o.journal.Append(kept)
	}
	return told
}

// eventData is the data of the types of events whose fields are plain. Those
// of hibernations and resumes have the fields of their report as well.
type eventData struct {
	From       sandbox.State    `json:"from,omitempty"`
	To         sandbox.State    `json:"to,omitempty"`
	Reason     string           `json:"reason,omitempty"`
	By         string           `json:"by,omitempty"`
	Bytes      int64            `json:"bytes,omitempty"`
	Hook       *sandbox.HookRun `json:"hook,omitempty"`
	Denied     *sandbox.Denied  `json:"denied,omitempty"`
	Checkpoint string           `json:"checkpoint,omitempty"`
	Forks      []string         `json:"forks,omitempty"`
	Due        time.Time        `json:"due,omitzero"`
	Action     sandbox.Action   `json:"action,omitempty"`
	Suppressed int64            `json:"suppressed,omitempty"`

	*sandbox.ResumeReport
}

// hibernatedData is the data of a hibernation.
type hibernatedData struct {
	Bytes int64 `json:"bytes"`
	*sandbox.HibernateReport
}

// journalled returns an event of the core as it is kept and sent; suppressed is
// how many of its kind were not.
func journalled(e sandbox.Event, suppressed int64) (events.Event, error) {
	var data any
	if e.Type == sandbox.EventHibernated {
		data = hibernatedData{e.Bytes, e.Hibernate}
	} else {
		data = eventData{
			From: e.From, To: e.To, Reason: e.Reason, By: e.By, Bytes: e.Bytes, Hook: e.Hook, Denied: e.Denied,
			Checkpoint: e.Checkpoint, Forks: e.Forks, Due: e.Due, Action: e.Action, Suppressed: suppressed, ResumeReport: e.Resume,
		}
	}
	text, err := json.Marshal(data)
	if err != nil {
		return events.Event{}, fmt.Errorf("encode its data: %w", err)
	}
	if string(text) == "{}" {
		text = nil
	}
	return events.Event{Time: e.At, Type: string(e.Type), Sandbox: e.Sandbox, Name: e.Name, Data: text}, nil
}
