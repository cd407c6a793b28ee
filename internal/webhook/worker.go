package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/events"
)

// hook is a hook and its worker.
type hook struct {
	m  *Manager
	id string

	cancel context.CancelFunc // ends the worker; nil if there is none
	ended  chan struct{}      // closed when it has ended

	mu       sync.Mutex
	rec      record
	revision uint64
	failures int       // in a row
	next     time.Time // of the next attempt
}

// start begins a hook's worker unless it is paused. m.mu is held, or nobody
// else knows of m yet.
func (m *Manager) start(h *hook) {
	if m.closed || h.rec.Paused {
		return
	}
	ctx, cancel := context.WithCancel(m.ctx)
	h.cancel, h.ended = cancel, make(chan struct{})
	m.work.Go(func() {
		defer close(h.ended)
		defer cancel()
		h.run(ctx)
	})
}

// stop ends a hook's worker and waits for it. m.mu is held.
func (h *hook) stop() {
	if h.cancel != nil {
		h.cancel()
		<-h.ended
		h.cancel = nil
	}
}

func (h *hook) view() Hook {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := Hook{
		ID: h.id, URL: h.rec.URL, Sandbox: h.rec.Sandbox, Types: h.rec.Types, CreatedAt: h.rec.CreatedAt,
		State: StateActive, Cursor: h.rec.Cursor, Failures: h.failures, Error: h.rec.Error, NextTry: h.next,
	}
	switch {
	case h.rec.Paused:
		v.State = StatePaused
	case !h.rec.Failing.IsZero():
		v.State = StateRetrying
	}
	return v
}

// save writes the hook's record.
func (h *hook) save(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	value, err := json.Marshal(h.rec)
	if err != nil {
		return fmt.Errorf("encode webhook %s: %w", h.id, err)
	}
	revision, err := h.m.cfg.Catalog.Put(ctx, kind, h.id, value, h.revision)
	if err != nil {
		return fmt.Errorf("record webhook %s: %w", h.id, err)
	}
	h.revision = revision
	return nil
}

// keep is save for what a worker learned. If it fails, a restart delivers some
// events again.
func (h *hook) keep() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(h.m.ctx), h.m.cfg.Timeout)
	defer cancel()
	if err := h.save(ctx); err != nil {
		h.m.cfg.Log.Warn("the progress of a webhook is not recorded", "webhook", h.id, "error", err)
	}
}

// run delivers events until ctx ends or the hook is paused.
func (h *hook) run(ctx context.Context) {
	sub := h.m.cfg.Journal.Subscribe(h.rec.Cursor, events.Filter{Sandbox: h.rec.Sandbox, Types: h.rec.Types})
	defer sub.Close()
	saved := h.rec.Cursor
	defer func() {
		if h.cursor() != saved {
			h.keep()
		}
	}()
	due := time.Now().Add(h.m.cfg.SaveEvery)
	for {
		wait, cancel := context.WithTimeout(ctx, h.m.cfg.SaveEvery)
		e, err := sub.Next(wait)
		cancel()
		switch {
		case err == nil && !h.deliver(ctx, e):
			return
		case err == nil, ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded):
			h.advance(sub.After())
		case ctx.Err() != nil, errors.Is(err, io.EOF):
			return
		default:
			h.m.cfg.Log.Error("a webhook ends: the journal of events can't be read", "webhook", h.id, "error", err)
			return
		}
		if now := time.Now(); now.After(due) && h.cursor() != saved {
			h.keep()
			saved, due = h.cursor(), now.Add(h.m.cfg.SaveEvery)
		}
	}
}

func (h *hook) cursor() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rec.Cursor
}

// advance notes that events up to id need not be looked at again.
func (h *hook) advance(id uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rec.Cursor = id
}

// minTries is how often a worker tries before it pauses its hook.
const minTries = 3

// deliver posts an event until it is taken; false: ctx ended or the hook is
// paused.
func (h *hook) deliver(ctx context.Context, e events.Event) bool {
	for {
		_, err := h.post(ctx, e)
		if ctx.Err() != nil {
			return false
		}
		h.m.cfg.Observe(err == nil)
		if err == nil {
			h.succeeded()
			return true
		}
		delay, paused := h.failed(err)
		if paused {
			h.m.cfg.Log.Warn("a webhook is paused: nothing was delivered for too long", "webhook", h.id, "error", clip(err.Error()))
			return false
		}
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false
		}
	}
}

// succeeded notes that an event was taken.
func (h *hook) succeeded() {
	h.mu.Lock()
	recovered := !h.rec.Failing.IsZero()
	h.rec.Failing, h.rec.Error, h.failures, h.next = time.Time{}, "", 0, time.Time{}
	h.mu.Unlock()
	if recovered {
		h.keep()
	}
}

// failed notes that an event was not taken and returns how long to wait, or
// that the hook is paused.
func (h *hook) failed(err error) (delay time.Duration, paused bool) {
	now, c := time.Now(), &h.m.cfg
	h.mu.Lock()
	first := h.rec.Failing.IsZero()
	if first {
		h.rec.Failing = now.UTC()
	}
	delay = c.MaxRetry
	if h.failures < 20 {
		delay = min(c.MaxRetry, c.FirstRetry<<h.failures)
	}
	delay = time.Duration(float64(delay) * (0.8 + 0.4*rand.Float64())) // hooks of one endpoint do not come back together
	h.failures++
	// A daemon that was stopped for long did not try all the while.
	paused = now.Sub(h.rec.Failing) >= c.GiveUp && h.failures >= minTries
	h.rec.Error, h.rec.Paused, h.next = clip(err.Error()), paused, now.Add(delay)
	if paused {
		h.next = time.Time{}
	}
	h.mu.Unlock()
	if first || paused {
		h.keep()
	}
	return delay, paused
}

// maxError bounds what is kept of an error, which an endpoint may have worded.
const maxError = 500

func clip(s string) string {
	if len(s) > maxError {
		s = strings.ToValidUTF8(s[:maxError], "") + "…"
	}
	return s
}

// maxAnswer bounds how much of an answer is read, so that the connection can be
// used again.
const maxAnswer = 4 << 10

// post sends an event once. An error says why it was not taken.
func (h *hook) post(ctx context.Context, e events.Event) (status int, err error) {
	body, err := json.Marshal(e)
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.rec.URL, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	now := strconv.FormatInt(time.Now().Unix(), 10)
	for name, value := range map[string]string{
		"Content-Type": "application/json", "User-Agent": "hibernacle",
		HeaderID: strconv.FormatUint(e.ID, 10), HeaderType: e.Type, HeaderTimestamp: now,
		HeaderSignature: "v1=" + Sign(h.rec.Secret, now, body),
	} {
		req.Header.Set(name, value)
	}
	resp, err := h.m.client.Do(req)
	if err != nil {
		if ue, ok := errors.AsType[*url.Error](err); ok {
			err = ue.Err // without the URL, whose query may be private
		}
		return 0, fmt.Errorf("no answer: %w", err)
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, maxAnswer)
	switch resp.StatusCode / 100 {
	case 2:
		return resp.StatusCode, nil
	case 3:
		return resp.StatusCode, fmt.Errorf("the endpoint answered %d: redirects are not followed, give the webhook the URL that it leads to", resp.StatusCode)
	}
	return resp.StatusCode, fmt.Errorf("the endpoint answered %d", resp.StatusCode)
}
