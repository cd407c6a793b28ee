package guestapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// BaseURL is the agent's address for clients made over HTTPClient, for example
// processconnect.NewProcessClient(guestapi.HTTPClient(dial), guestapi.BaseURL).
// Its host is never looked up.
const BaseURL = "http://guest"

// Dial opens a byte stream to the agent's port.
type Dial func(ctx context.Context) (net.Conn, error)

var (
	// ErrUnauthorized means that the agent does not know the token.
	ErrUnauthorized = errors.New("the agent refuses the token")
	// ErrRefused means that the attempt was thawed before, by the agent or by
	// order: it cannot be frozen any more.
	ErrRefused = errors.New("the agent refuses this hibernation attempt")
)

// What of an answer is taken at most. A guest may send anything.
const (
	maxHeader   = 64 << 10
	maxAnswer   = 1 << 20
	maxText     = 512 // of one message, in bytes
	maxWarnings = 32
	maxSteps    = 64
)

// healthRetry is the wait between two attempts of Health, and healthAttempt
// the time that one may take.
const (
	healthRetry   = 20 * time.Millisecond
	healthAttempt = 10 * time.Second
)

// HTTPClient returns a client whose every request goes over a connection of
// its own from dial, whatever its URL's host. Connections are not kept: one
// that outlives its request would not survive a hibernation, and would look
// like activity.
func HTTPClient(dial Dial) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			DisableKeepAlives:      true,
			DisableCompression:     true,
			MaxResponseHeaderBytes: maxHeader,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Client makes control calls. Its methods may be called at the same time; how
// long they may take is for their contexts to say.
type Client struct{ http *http.Client }

// NewClient returns a client of the agent that dial reaches.
func NewClient(dial func(context.Context) (net.Conn, error)) *Client {
	return &Client{http: HTTPClient(dial)}
}

// Close gives back what the client holds. Calls under way go on.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Init prepares the guest for its first request. token is the control token so
// far, "" for the first init after a cold boot. Warnings in the answer name
// what could not be done.
func (c *Client) Init(ctx context.Context, token string, req InitRequest) (InitResponse, error) {
	var resp InitResponse
	if err := c.post(ctx, InitPath, token, req, &resp); err != nil {
		return InitResponse{}, err
	}
	resp.AgentVersion = printable(resp.AgentVersion)
	resp.SocketsDestroyed = max(resp.SocketsDestroyed, 0)
	resp.Steps, resp.Warnings = boundSteps(resp.Steps), boundWarnings(resp.Warnings)
	resp.Hooks = BoundHookResults(resp.Hooks)
	return resp, nil
}

// Freeze stops the user's processes. It returns ErrRefused for an attempt that
// was thawed.
func (c *Client) Freeze(ctx context.Context, token string, req FreezeRequest) (FreezeResponse, error) {
	var resp FreezeResponse
	if err := c.post(ctx, FreezePath, token, req, &resp); err != nil {
		return FreezeResponse{}, err
	}
	resp.Steps, resp.Warnings = boundSteps(resp.Steps), boundWarnings(resp.Warnings)
	resp.Hooks = BoundHookResults(resp.Hooks)
	return resp, nil
}

// Thaw lets the user's processes go on. The attempt is refused from then on,
// whether it was frozen or not.
func (c *Client) Thaw(ctx context.Context, token string, req ThawRequest) (ThawResponse, error) {
	var resp ThawResponse
	if err := c.post(ctx, ThawPath, token, req, &resp); err != nil {
		return ThawResponse{}, err
	}
	resp.Warnings, resp.Hooks = boundWarnings(resp.Warnings), BoundHookResults(resp.Hooks)
	return resp, nil
}

// Hooks returns the results of background hooks that nobody has got yet.
func (c *Client) Hooks(ctx context.Context, token string) (HooksResponse, error) {
	var resp HooksResponse
	if err := c.post(ctx, HooksPath, token, HooksRequest{}, &resp); err != nil {
		return HooksResponse{}, err
	}
	resp.Hooks = BoundHookResults(resp.Hooks)
	return resp, nil
}

// Clock sets the wall clock.
func (c *Client) Clock(ctx context.Context, token string, req ClockRequest) error {
	return c.post(ctx, ClockPath, token, req, &struct{}{})
}

// Health waits until the agent serves: it tries until ctx ends, and then
// returns ctx's error with that of the last attempt.
func (c *Client) Health(ctx context.Context) error {
	for {
		err := c.health(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the agent: %w (last attempt: %w)", ctx.Err(), err)
		case <-time.After(healthRetry):
		}
	}
}

func (c *Client) health(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healthAttempt)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, BaseURL+HealthPath, nil)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("the agent answered %d", resp.StatusCode)
	}
	return nil
}

// post makes one control call.
func (c *Client) post(ctx context.Context, path, token string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("agent call %s: %w", path, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, BaseURL+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("agent call %s: %w", path, err)
	}
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set(TokenHeader, token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("agent call %s: %w", path, err)
	}
	defer resp.Body.Close()
	if err := readAnswer(resp, out); err != nil {
		return fmt.Errorf("agent call %s: %w", path, err)
	}
	return nil
}

func readAnswer(resp *http.Response, out any) error {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return err
	}
	if len(raw) > maxAnswer {
		return fmt.Errorf("the answer is longer than %d bytes", maxAnswer)
	}
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized:
		return ErrUnauthorized
	case http.StatusConflict:
		return ErrRefused
	default:
		var answer struct {
			Message string `json:"message"`
		}
		if json.Unmarshal(raw, &answer) != nil || answer.Message == "" {
			answer.Message = string(raw)
		}
		return fmt.Errorf("the agent answered %d: %s", resp.StatusCode, printable(answer.Message))
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return errors.New("the answer is not the JSON that was expected: " + printable(err.Error()))
	}
	return nil
}

// printable makes a text of the guest fit for a log line: bounded, and quoted
// where it holds what a terminal would act on.
func printable(s string) string {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return strconv.Quote(s)
		}
	}
	return s
}

func boundWarnings(in []string) []string {
	in = in[:min(len(in), maxWarnings)]
	for i := range in {
		in[i] = printable(in[i])
	}
	return in
}

func boundSteps(in map[string]float64) map[string]float64 {
	out := make(map[string]float64, min(len(in), maxSteps))
	for name, ms := range in {
		if len(out) == maxSteps {
			break
		}
		if ms >= 0 {
			out[printable(name)] = ms
		}
	}
	return out
}
