// Package client is the Go client of Hibernacle's REST interface.
//
// A Client speaks to one daemon. Its methods return the wire types of package
// api; what the daemon refuses comes back as an *Error, and a daemon that can't
// be reached as an error that wraps ErrUnreachable. All methods may be called
// at the same time. Every id may be a sandbox's id or its name.
//
//	c, err := client.FromEnv()
//	sb, err := c.Create(ctx, api.CreateRequest{Template: "base"})
//	out, err := c.Exec(ctx, sb.ID, api.ExecRequest{Cmd: []string{"uname", "-a"}})
//	sb, err = c.Hibernate(ctx, sb.ID)
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/hibernacle/hibernacle/api"
)

// ErrUnreachable says that no daemon answered.
var ErrUnreachable = errors.New("the daemon can't be reached")

// Error is an answer of the daemon that is no success.
type Error struct {
	Status    int    // of HTTP
	Code      string // one of the Code constants of package api
	Message   string // names the object and says what is wrong
	Hint      string // what to do about it, may be ""
	RequestID string // under which the daemon logged it
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// IsNotFound tells whether err says that the object does not exist.
func IsNotFound(err error) bool { return CodeOf(err) == api.CodeNotFound }

// CodeOf returns the code of an error that the daemon answered with, "" for
// other errors.
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return ""
}

// Client calls one daemon.
type Client struct {
	base *url.URL
	key  string
	http *http.Client
}

// New returns a client of the daemon at rawURL, for example
// "http://127.0.0.1:7070", that shows the API key.
func New(rawURL, key string) (*Client, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("daemon URL %q: %w", rawURL, err)
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("daemon URL %q: it must be of the form http://HOST:PORT", rawURL)
	}
	u.Path = strings.TrimRight(u.Path, "/")
	u.RawQuery, u.Fragment = "", ""
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.DisableCompression = true
	return &Client{base: u, key: key, http: &http.Client{Transport: t}}, nil
}

// URL returns the daemon's URL.
func (c *Client) URL() string { return c.base.String() }

// Close ends the connections that are kept for later requests.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// endpoint returns the URL of a path made of segments, each escaped.
func (c *Client) endpoint(segments ...string) *url.URL {
	escaped := make([]string, len(segments))
	for i, s := range segments {
		escaped[i] = url.PathEscape(s)
	}
	return c.base.JoinPath(append([]string{"v1"}, escaped...)...)
}

// do sends a request with the key and returns the answer if it is a success.
// The caller closes its body.
func (c *Client) do(ctx context.Context, method string, u *url.URL, body io.Reader, contentType string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return nil, err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	return c.send(req)
}

// send is do for a request that is already made.
func (c *Client) send(req *http.Request) (*http.Response, error) {
	req.Header.Set("X-API-Key", c.key)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(req.Context(), err)
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return resp, nil
}

// unreachable names the daemon in an error of a connection.
func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	return fmt.Errorf("%w at %s: %w", ErrUnreachable, c.base, err)
}

// maxErrorBody bounds the body of an answer that is no success.
const maxErrorBody = 64 << 10

func readError(resp *http.Response) error {
	e := &Error{Status: resp.StatusCode, RequestID: resp.Header.Get("X-Request-Id")}
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	var wire api.Error
	if json.Unmarshal(body, &wire) == nil && wire.Code != "" {
		e.Code, e.Message, e.Hint = wire.Code, wire.Message, wire.Hint
		return e
	}
	e.Code = api.CodeInternal
	e.Message = fmt.Sprintf("unexpected answer %s from %s", resp.Status, resp.Request.URL.Host)
	e.Hint = "is that a Hibernacle daemon, of this version?"
	return e
}

// call sends in as JSON (nil: nothing) and reads the answer into out (nil:
// ignored).
func (c *Client) call(ctx context.Context, method string, u *url.URL, in, out any) error {
	var body io.Reader
	contentType := ""
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body, contentType = bytes.NewReader(b), "application/json"
	}
	resp, err := c.do(ctx, method, u, body, contentType)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("read the answer of %s: %w", u.Path, err)
	}
	return nil
}

// lines sends in as JSON and calls progress for each line of the answer but
// the last, which it returns.
func (c *Client) lines(ctx context.Context, u *url.URL, in any, progress func(api.Progress)) (api.Progress, error) {
	b, err := json.Marshal(in)
	if err != nil {
		return api.Progress{}, err
	}
	resp, err := c.do(ctx, http.MethodPost, u, bytes.NewReader(b), "application/json")
	if err != nil {
		return api.Progress{}, err
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	for {
		var p api.Progress
		if err := dec.Decode(&p); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return p, fmt.Errorf("%w: the answer of %s broke off: %w", ErrUnreachable, u.Path, err)
		}
		switch {
		case p.Error != nil:
			return p, &Error{Status: resp.StatusCode, Code: p.Error.Code, Message: p.Error.Message, Hint: p.Error.Hint, RequestID: resp.Header.Get("X-Request-Id")}
		case p.Template != nil, p.Verify != nil, p.Imported != nil, p.Drained != nil:
			return p, nil
		case progress != nil:
			progress(p)
		}
	}
}
