package proxy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/proxy"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

const (
	key     = "e2b_00112233445566778899aabbccddeeff00112233"
	boxID   = "abcdefghij0123456789"
	boxName = "anna"
	token   = "the-traffic-token"
	agent   = "the-agent-token"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// guestCore is a Core with one sandbox whose ports lead to servers of the test.
type guestCore struct {
	mu      sync.Mutex
	state   sandbox.State
	ports   map[int]string // where they really lead
	wakes   int            // resumes
	by      []string
	dials   int
	fail    error         // of Wake
	waking  chan struct{} // open while a resume goes on; nil otherwise
	resume  time.Duration // how long one takes
	waiting int           // requests that wait for one
	need    int           // so many must wait before one ends
	opens   time.Duration // after a resume until ports are listened at
	resumed time.Time
	slept   chan struct{}
	conns   map[*guestConn]struct{}

	sessions int // that are open
}

func newCore() *guestCore {
	return &guestCore{state: sandbox.StateRunning, ports: map[int]string{}, slept: make(chan struct{}), conns: map[*guestConn]struct{}{}}
}

func (c *guestCore) Get(_ context.Context, id string) (sandbox.Sandbox, error) {
	if id != boxID && id != boxName {
		return sandbox.Sandbox{}, &sandbox.Error{Kind: sandbox.ErrNotFound, Message: "sandbox " + id + " not found", Hint: "hib ls"}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return sandbox.Sandbox{ID: boxID, Name: boxName, State: c.state, TrafficToken: token, Policy: sandbox.Policy{Public: []int{9000}}}, nil
}

func (c *guestCore) AgentToken(context.Context, string) (string, error) { return agent, nil }

func (c *guestCore) Session(id, kind string) (end func(), err error) {
	c.session(+1)
	return func() { c.session(-1) }, nil
}

// session counts the sessions that are open, and returns how many there are.
func (c *guestCore) session(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sessions += n
	return c.sessions
}

func (c *guestCore) Wake(ctx context.Context, id, by string) (sandbox.Woken, error) {
	woken := sandbox.Woken{ID: boxID}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return woken, c.fail
	}
	for c.state != sandbox.StateRunning {
		woken.Resumed, woken.Report = true, &sandbox.ResumeReport{Tier: "local", TotalMS: 41.4, By: by}
		if c.waking == nil {
			c.wakes++
			c.by = append(c.by, by)
			done := make(chan struct{})
			c.waking = done
			go func() {
				time.Sleep(c.resume)
				c.mu.Lock()
				defer c.mu.Unlock()
				for c.waiting < c.need {
					c.mu.Unlock()
					time.Sleep(time.Millisecond)
					c.mu.Lock()
				}
				c.state, c.waking, c.resumed = sandbox.StateRunning, nil, time.Now()
				close(done)
			}()
		}
		waking := c.waking
		c.waiting++
		c.mu.Unlock()
		select {
		case <-waking:
		case <-ctx.Done():
		}
		c.mu.Lock()
		c.waiting--
		if ctx.Err() != nil {
			return woken, ctx.Err()
		}
	}
	return woken, nil
}

func (c *guestCore) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	if _, err := c.Wake(ctx, id, "port"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	addr, ok := c.ports[port]
	ok = ok && time.Since(c.resumed) >= c.opens
	slept := c.slept
	c.dials++
	c.mu.Unlock()
	if !ok {
		return nil, &sandbox.Error{Kind: sandbox.ErrRefused, Message: fmt.Sprintf("nothing answers at port %d of sandbox %s", port, id), Hint: "start a server"}
	}
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	g := &guestConn{Conn: conn, core: c, slept: slept}
	c.mu.Lock()
	c.conns[g] = struct{}{}
	c.mu.Unlock()
	return g, nil
}

// hibernate cuts the connections and takes the sandbox to standby.
func (c *guestCore) hibernate() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state = sandbox.StateStandby
	close(c.slept)
	c.slept = make(chan struct{})
	for g := range c.conns {
		g.Conn.Close()
	}
	clear(c.conns)
}

func (c *guestCore) open() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.conns)
}

func (c *guestCore) now() (sandbox.State, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state, c.wakes
}

type guestConn struct {
	net.Conn
	core  *guestCore
	slept chan struct{}
}

func (g *guestConn) Asleep() <-chan struct{} { return g.slept }
func (g *guestConn) CloseWrite() error       { return g.Conn.(*net.TCPConn).CloseWrite() }
func (g *guestConn) Close() error {
	g.core.mu.Lock()
	delete(g.core.conns, g)
	g.core.mu.Unlock()
	return g.Conn.Close()
}

// fixture is a proxy over a guestCore, behind a real server that speaks both
// versions of HTTP.
type fixture struct {
	*testing.T
	core  *guestCore
	proxy *proxy.Proxy
	url   string // of the server
	http  *http.Client
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{T: t, core: newCore()}
	f.proxy = proxy.New(proxy.Config{Core: f.core, Key: key, Domain: "sandbox.test"})
	hs := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !f.proxy.Match(r) {
			w.WriteHeader(http.StatusTeapot) // the API's
			return
		}
		f.proxy.ServeHTTP(w, r)
	}))
	hs.Config.Protocols = new(http.Protocols)
	hs.Config.Protocols.SetHTTP1(true)
	hs.Config.Protocols.SetUnencryptedHTTP2(true)
	hs.Start()
	f.url = hs.URL
	tr := &http.Transport{DisableCompression: true}
	f.http = &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(func() {
		f.proxy.Close()
		tr.CloseIdleConnections()
		hs.CloseClientConnections()
		hs.Close()
	})
	return f
}

// guest runs h in the sandbox at a port.
func (f *fixture) guest(port int, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	f.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	f.core.mu.Lock()
	defer f.core.mu.Unlock()
	f.core.ports[port] = s.Listener.Addr().String()
	return s
}

func host(port int) string { return strconv.Itoa(port) + "-" + boxID + ".sandbox.test" }

// request makes a request to a host with headers "Name: value".
func (f *fixture) request(method, host, path string, body io.Reader, headers ...string) *http.Request {
	f.Helper()
	req, err := http.NewRequestWithContext(f.Context(), method, f.url+path, body)
	if err != nil {
		f.Fatal(err)
	}
	if host != "" {
		req.Host = host
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	return req
}

// do sends a request and returns the answer and its whole body.
func (f *fixture) do(req *http.Request) (*http.Response, string) {
	f.Helper()
	resp, err := f.http.Do(req)
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.Fatal(err)
	}
	return resp, string(b)
}

const pass = "Hib-Access-Token: " + token

// eventually waits for a condition.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came to: %s", what)
		}
	}
}

var errBroken = errors.New("it is broken")
