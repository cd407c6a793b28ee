package shim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/hibernacle/hibernacle/internal/pager"
)

// Client gives orders to one shim. Its methods may be called at the same time.
// They return *Error for what the shim answered and ErrGone (wrapped) where
// there is no shim any more.
type Client struct {
	handle Handle
	http   *http.Client
	reaped <-chan struct{} // closed when a shim that this process started has been waited for; nil for an adopted one
}

func newClient(handle Handle, reaped <-chan struct{}) *Client {
	c := &Client{handle: handle, reaped: reaped}
	c.http = &http.Client{Transport: &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return c.connect(ctx) },
		MaxIdleConnsPerHost: 2,
		IdleConnTimeout:     30 * time.Second,
	}}
	return c
}

// Adopt returns a client for a shim that another daemon started: ErrGone
// (wrapped) if its process has ended, ErrProtocol if it is too old or too new.
func Adopt(ctx context.Context, handle Handle) (*Client, error) {
	if !handle.Alive() {
		return nil, fmt.Errorf("shim of machine %s (pid %d): %w", handle.VM, handle.PID, ErrGone)
	}
	if handle.Protocol > ProtocolVersion || handle.Protocol < ProtocolVersion-1 {
		return nil, fmt.Errorf("shim of machine %s speaks version %d, this daemon %d: %w", handle.VM, handle.Protocol, ProtocolVersion, ErrProtocol)
	}
	c := newClient(handle, nil)
	if _, err := c.Status(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// Handle returns what finds this shim again.
func (c *Client) Handle() Handle { return c.handle }

// Close drops the client's connections. The shim goes on.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Status asks how the machine is.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	return s, c.call(ctx, http.MethodGet, "status", nil, &s)
}

// Adopt makes the shim outlive its parent. Idempotent.
func (c *Client) Adopt(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "adopt", struct{}{}, &struct{}{})
}

// Prepare starts the VMM.
func (c *Client) Prepare(ctx context.Context, req PrepareRequest) error {
	return c.call(ctx, http.MethodPost, "prepare", req, &struct{}{})
}

// Boot lets a machine that was prepared with Boot start.
func (c *Client) Boot(ctx context.Context, req BootRequest) (StartReport, error) {
	var r StartReport
	return r, c.call(ctx, http.MethodPost, "boot", req, &r)
}

// Resume lets a prepared machine go on from a snapshot.
func (c *Client) Resume(ctx context.Context, req ResumeRequest) (StartReport, error) {
	var r StartReport
	return r, c.call(ctx, http.MethodPost, "resume", req, &r)
}

// Capture takes a snapshot and leaves the guest sealed. Ending ctx before the
// seal cancels it and the guest goes on.
func (c *Client) Capture(ctx context.Context, req CaptureRequest) (CaptureReport, error) {
	var r CaptureReport
	return r, c.call(ctx, http.MethodPost, "capture", req, &r)
}

// Thaw gives a capture up, sealed or not, and lets the guest go on.
func (c *Client) Thaw(ctx context.Context, req ThawRequest) error {
	return c.call(ctx, http.MethodPost, "thaw", req, &struct{}{})
}

// Hooks returns the results of hooks that no report had so far, each once. A
// shim of before hooks answers with none.
func (c *Client) Hooks(ctx context.Context, req HooksRequest) (HooksReport, error) {
	var r HooksReport
	err := c.added(ctx, "hooks", req, &r)
	if errors.Is(err, ErrUnknown) {
		return HooksReport{}, nil
	}
	return r, err
}

// Park keeps a sealed machine as a cache.
func (c *Client) Park(ctx context.Context, req ParkRequest) (ParkReport, error) {
	var r ParkReport
	return r, c.call(ctx, http.MethodPost, "park", req, &r)
}

// Unpark lets a parked machine go on.
func (c *Client) Unpark(ctx context.Context, req UnparkRequest) (StartReport, error) {
	var r StartReport
	return r, c.call(ctx, http.MethodPost, "unpark", req, &r)
}

// Activity asks how busy a running guest is: ErrUnknown (wrapped) if the shim is
// too old to know.
func (c *Client) Activity(ctx context.Context, req ActivityRequest) (Activity, error) {
	var a Activity
	return a, c.added(ctx, "activity", req, &a)
}

// SetEgress puts an egress policy in force: ErrUnknown (wrapped) if the shim is
// too old to know. After an error of code CodeInvalid the one before still is.
func (c *Client) SetEgress(ctx context.Context, req EgressRequest) error {
	return c.added(ctx, "egress", req, &struct{}{})
}

// added gives an order that came with version 2 of the protocol or later.
func (c *Client) added(ctx context.Context, name string, in, out any) error {
	if c.handle.Protocol < 2 {
		return fmt.Errorf("%s machine %s: %w", name, c.handle.VM, ErrUnknown)
	}
	err := c.call(ctx, http.MethodPost, name, in, out)
	if Code(err) == CodeUnknown {
		err = fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return err
}

// Dial opens a byte stream to a TCP port of the guest: ErrRefused (wrapped) if
// the guest cannot be reached there.
func (c *Client) Dial(ctx context.Context, port int) (net.Conn, error) {
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	stream, err := handshake(conn, port)
	if !stop() {
		err = ctx.Err() // conn is closed, whatever came of it
	}
	if err == nil {
		return stream, nil
	}
	_ = conn.Close()
	var answered *Error
	if !errors.As(err, &answered) && ctx.Err() == nil && c.isGone(ctx) {
		err = ErrGone
	}
	return nil, fmt.Errorf("dial port %d of machine %s: %w", port, c.handle.VM, err)
}

func handshake(conn net.Conn, port int) (net.Conn, error) {
	if _, err := fmt.Fprintf(conn, "CONNECT guest:%d HTTP/1.1\r\nHost: guest:%d\r\n\r\n", port, port); err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		err := decodeError(resp)
		if Code(err) == CodeGuest {
			err = fmt.Errorf("%w: %w", ErrRefused, err)
		}
		return nil, err
	}
	return &bufferedConn{Conn: conn, r: r}, nil
}

// Watch calls f with each event until ctx ends or the shim does (ErrGone).
func (c *Client) Watch(ctx context.Context, f func(Event)) error {
	for {
		err := c.watchOnce(ctx, f)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !c.handle.Alive() {
			return fmt.Errorf("shim of machine %s: %w", c.handle.VM, ErrGone)
		}
		if err != nil {
			select { // the stream broke but the process lives: it is ending, or over-busy
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

func (c *Client) watchOnce(ctx context.Context, f func(Event)) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://shim/v1/events", nil)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	for {
		var e Event
		if err := dec.Decode(&e); err != nil {
			return err
		}
		f(e)
	}
}

// Release ends the machine, the shim and all that they left behind, and
// returns when they are gone. It works on a shim that is hung, dead or gone too.
func (c *Client) Release(ctx context.Context) error {
	defer c.Close()
	if c.handle.Alive() {
		asked, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := c.call(asked, http.MethodPost, "release", struct{}{}, &struct{}{})
		if err == nil {
			err = c.waitGone(asked)
		}
		cancel()
		if err != nil && c.handle.Alive() {
			// The handle names this very process, so no other one is hit.
			_ = syscall.Kill(c.handle.PID, syscall.SIGKILL)
		}
	}
	if err := c.waitDead(ctx); err != nil {
		return fmt.Errorf("release machine %s: %w", c.handle.VM, err)
	}
	return cleanUp(c.handle.Dir())
}

// dyingGrace is how long a killed process takes to end, unless something holds it.
const dyingGrace = time.Second

// waitDead waits until the shim's process, which was killed or ends by itself,
// has ended. A thread of it that waits for its own pager, which no one serves
// any more, lives until the mount is gone.
func (c *Client) waitDead(ctx context.Context) error {
	soon, cancel := context.WithTimeout(ctx, dyingGrace)
	defer cancel()
	if c.waitGone(soon) == nil {
		return nil
	}
	cleanErr := pager.CleanStale(memDir(c.handle.Dir()))
	if err := c.waitGone(ctx); err != nil {
		return errors.Join(err, cleanErr)
	}
	return nil
}

// cleanUp removes what a machine left in its folder, and the folder.
func cleanUp(dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := pager.CleanStale(memDir(dir)); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// waitGone waits until the shim's process has ended.
func (c *Client) waitGone(ctx context.Context) error {
	if c.reaped != nil {
		select {
		case <-c.reaped:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for pause := time.Millisecond; c.handle.Alive(); pause = min(2*pause, 20*time.Millisecond) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
	return nil
}

func (c *Client) connect(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.handle.Socket)
	if err != nil && c.isGone(ctx) {
		return nil, fmt.Errorf("shim of machine %s: %w", c.handle.VM, ErrGone)
	}
	return conn, err
}

// goneGrace is how long a process may take to end after its socket did.
const goneGrace = 500 * time.Millisecond

// isGone tells whether a call failed because the shim is no more.
func (c *Client) isGone(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, goneGrace)
	defer cancel()
	return c.waitGone(ctx) == nil
}

func (c *Client) call(ctx context.Context, method, name string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://shim/v1/"+name, body)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() == nil && c.isGone(ctx) {
			err = ErrGone
		}
		return fmt.Errorf("%s machine %s: %w", name, c.handle.VM, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s machine %s: %w", name, c.handle.VM, decodeError(resp))
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxOrder)).Decode(out); err != nil {
		return fmt.Errorf("%s machine %s: answer: %w", name, c.handle.VM, err)
	}
	return nil
}

func decodeError(resp *http.Response) error {
	e := &Error{}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxOrder)).Decode(e); err != nil || e.Code == "" {
		return errorf(CodeFailed, "the shim answered %s", resp.Status)
	}
	return e
}
