package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/events"
)

const (
	// heartbeatEvery is how often a silent stream of events says that it lives,
	// and how far it has come.
	heartbeatEvery = 15 * time.Second
	// eventPatience is how long a client may leave its stream unread once the
	// connection is full. It comes back by the last id.
	eventPatience = 30 * time.Second
	// endPatience is the same for a stream that the server ends.
	endPatience = time.Second
	// eventBurst is how many events are written before they are sent.
	eventBurst = 64
)

// lastEventID is the header by which a client says how far it came.
const lastEventID = "Last-Event-ID"

// getEvents streams events as Server-Sent Events.
func (s *Server) getEvents(w http.ResponseWriter, r *http.Request) {
	if s.events == nil {
		s.fail(w, r, fmt.Errorf("events: %w", errors.ErrUnsupported))
		return
	}
	q, err := s.eventQuery(r)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	ctx, done := s.stream(r.Context())
	defer done()
	sub := s.events.Subscribe(q.after, q.filter)
	defer sub.Close()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	out := &eventWriter{ended: ctx.Done(), w: w, rc: http.NewResponseController(w)}
	defer context.AfterFunc(ctx, out.deadline)()
	if q.follow {
		err = s.followEvents(ctx, out, sub)
	} else {
		err = out.ready(sub)
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, io.EOF) {
		note(ctx, err)
	}
}

// eventQuery says what a request for events asks for.
type eventQuery struct {
	after  uint64
	follow bool
	filter events.Filter
}

func (s *Server) eventQuery(r *http.Request) (eventQuery, error) {
	query := r.URL.Query()
	q := eventQuery{follow: true, filter: events.Filter{Sandbox: query.Get("sandbox")}}
	var err error
	if v := query.Get("follow"); v != "" {
		if q.follow, err = strconv.ParseBool(v); err != nil {
			return q, requestError{"the query parameter \"follow\" must be true or false", ""}
		}
	}
	for _, v := range query["type"] {
		for t := range strings.SplitSeq(v, ",") {
			if t = strings.TrimSpace(t); t != "" {
				q.filter.Types = append(q.filter.Types, t)
			}
		}
	}
	from := r.Header.Get(lastEventID) // a client that comes back keeps its URL
	if from == "" {
		from = query.Get("after")
	}
	switch {
	case from != "":
		if q.after, err = strconv.ParseUint(from, 10, 63); err != nil {
			return q, requestError{fmt.Sprintf("%.40q is no id of an event", from), "\"after\" and Last-Event-ID take the id of the last event that was seen, or 0"}
		}
	case q.follow:
		q.after = s.events.Last()
	}
	return q, nil
}

// followEvents writes events until the client, the server or the journal ends.
func (s *Server) followEvents(ctx context.Context, out *eventWriter, sub *events.Subscription) error {
	if err := out.heartbeat(sub.After()); err != nil { // the answer begins also where nothing happens
		return err
	}
	for {
		wait, cancel := context.WithTimeout(ctx, s.heartbeat)
		e, err := sub.Next(wait)
		cancel()
		switch {
		case err == nil:
			if err = out.event(e); err == nil {
				err = out.ready(sub)
			}
		case ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded):
			err = out.heartbeat(sub.After())
		}
		if err != nil {
			return err
		}
	}
}

// eventWriter writes Server-Sent Events.
type eventWriter struct {
	w     io.Writer
	rc    *http.ResponseController
	ended <-chan struct{} // closed when the stream is to end
	n     int             // events that are not sent yet
}

// ready writes the events that are there already.
func (o *eventWriter) ready(sub *events.Subscription) error {
	for {
		e, err := sub.Ready()
		if errors.Is(err, io.EOF) {
			return o.flush()
		}
		if err == nil {
			err = o.event(e)
		}
		if err != nil {
			return err
		}
	}
}

func (o *eventWriter) event(e events.Event) error {
	data, err := json.Marshal(api.Event(e))
	if err != nil {
		return err
	}
	if o.n == 0 {
		o.deadline()
	}
	// A type has no line break: those of the core are constants.
	if _, err = fmt.Fprintf(o.w, "id: %d\nevent: %s\ndata: %s\n\n", e.ID, e.Type, data); err != nil {
		return err
	}
	if o.n++; o.n >= eventBurst {
		return o.flush()
	}
	return nil
}

// heartbeat says that the stream lives and that events up to id were looked
// at: a block without data is none for a client, but it remembers the id.
func (o *eventWriter) heartbeat(id uint64) error {
	o.deadline()
	if _, err := fmt.Fprintf(o.w, ": alive\nid: %d\n\n", id); err != nil {
		return err
	}
	return o.flush()
}

// deadline bounds how long a client that does not read may hold what follows.
// Where the connection has no deadlines, it ends with its client.
func (o *eventWriter) deadline() {
	_ = o.rc.SetWriteDeadline(time.Now().Add(eventPatience))
	select {
	case <-o.ended: // looked at afterwards: whichever call comes last knows of the end
		_ = o.rc.SetWriteDeadline(time.Now().Add(endPatience))
	default:
	}
}

func (o *eventWriter) flush() error {
	o.n = 0
	return o.rc.Flush()
}
