package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// EventsOptions says which events are wanted. The zero value is all that are
// kept.
type EventsOptions struct {
	// After is the id of the last event that was seen: what is behind it is
	// delivered. 0 begins with the oldest one; nil does so too, or with Follow only
	// what happens from now on.
	After   *uint64
	Follow  bool     // go on with what happens from now on
	Sandbox string   // id or name
	Types   []string // one of these
}

// Waits between attempts to connect again.
const (
	reconnectFirst = 250 * time.Millisecond
	reconnectMax   = 10 * time.Second
)

// maxEvent bounds a line of the stream of events.
const maxEvent = 1 << 20

// Events yields events in order, none twice. With Follow it goes on until ctx
// ends, and when the daemon can't be reached any more, or restarts, it connects
// again behind the last event. An event of the type api.EventGap says that some
// are missing. An error is the last that it yields: what the daemon refuses, a
// daemon that can't be reached at first, or the cause of ctx.
func (c *Client) Events(ctx context.Context, o EventsOptions) iter.Seq2[api.Event, error] {
	return func(yield func(api.Event, error) bool) {
		s := eventStream{c: c, o: o, yield: yield, wait: reconnectFirst}
		for {
			err := s.read(ctx)
			switch {
			case s.stopped:
				return
			case ctx.Err() != nil:
				err = context.Cause(ctx)
			case err == nil && !o.Follow:
				return
			case o.Follow && s.connected && !refused(err):
				if sleep(ctx, s.wait) {
					s.wait = min(2*s.wait, reconnectMax)
					continue
				}
				err = context.Cause(ctx)
			}
			yield(api.Event{}, err)
			return
		}
	}
}

// refused reports whether err is an answer that another try would get again.
func refused(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Status/100 == 4
}

// sleep waits, unless ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// eventStream is a stream of events over all its connections.
type eventStream struct {
	c         *Client
	o         EventsOptions // After is how far it came
	yield     func(api.Event, error) bool
	connected bool // it was connected once
	stopped   bool // yield wants no more
	wait      time.Duration
}

// read reads one connection to its end.
func (s *eventStream) read(ctx context.Context) error {
	q := url.Values{"follow": {strconv.FormatBool(s.o.Follow)}}
	if s.o.After != nil {
		q.Set("after", strconv.FormatUint(*s.o.After, 10))
	}
	if s.o.Sandbox != "" {
		q.Set("sandbox", s.o.Sandbox)
	}
	if len(s.o.Types) > 0 {
		q.Set("type", strings.Join(s.o.Types, ","))
	}
	u := s.c.endpoint("events")
	u.RawQuery = q.Encode()
	resp, err := s.c.do(ctx, http.MethodGet, u, nil, "")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	s.connected = true
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEvent)
	var id, data string
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "id":
			id = value
		case "data":
			data = value // the daemon's are of one line
		case "":
			if lines.Text() != "" {
				continue // a comment
			}
			if err := s.block(id, data); err != nil || s.stopped {
				return err
			}
			id, data = "", ""
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%w at %s: the stream of events broke off: %w", ErrUnreachable, s.c.base, err)
	}
	if s.o.Follow {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// block takes one block of the stream: an event, or how far the stream is.
func (s *eventStream) block(id, data string) error {
	if data != "" {
		var e api.Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return fmt.Errorf("read an event: %w", err)
		}
		if !s.yield(e, nil) {
			s.stopped = true
			return nil
		}
	}
	if n, err := strconv.ParseUint(id, 10, 64); err == nil {
		s.o.After = &n
		s.wait = reconnectFirst
	}
	return nil
}
