// Package faultproxy stands between a client and an HTTP server in tests, and
// does to the requests what networks and overloaded services do. What it does
// can be changed at any time.
package faultproxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Kind is what happens to a request.
type Kind string

// The kinds. A request that is not mentioned to reach the server does not.
const (
	None       Kind = ""            // it is answered
	Reset      Kind = "reset"       // its connection is reset
	LostAnswer Kind = "lost answer" // it reaches the server, then its connection is reset
	Error      Kind = "error 503"   // it is answered with 503 Service Unavailable
	Throttled  Kind = "error 429"   // it is answered with 429 Too Many Requests
	Truncated  Kind = "truncated"   // it reaches the server; of the answer's body half is sent
	Slow       Kind = "slow"        // it reaches the server; the answer's body comes at 100 bytes per second
	BlackHole  Kind = "black hole"  // it is never answered
)

// Kinds are all kinds of faults.
var Kinds = []Kind{Reset, LostAnswer, Error, Throttled, Truncated, Slow, BlackHole}

const slowPace = 10 * time.Millisecond // for a byte

// Fault is what happens to a request.
type Fault struct {
	Kind    Kind
	Latency time.Duration // before anything else
}

// Count is what went through a proxy.
type Count struct {
	Requests int64
	Up, Down int64 // bytes of bodies
}

// Proxy is a running proxy.
type Proxy struct {
	Address string // host:port where it listens

	target    string
	transport http.Transport

	mu     sync.Mutex
	choose func(*http.Request) Fault

	requests, up, down atomic.Int64
}

// Start runs a proxy before the server at target, host:port, until the test
// ends. It passes everything on until Set says otherwise.
func Start(t testing.TB, target string) *Proxy {
	p := &Proxy{target: target, transport: http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}}
	server := httptest.NewServer(p)
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	p.Address = u.Host
	t.Cleanup(func() {
		server.CloseClientConnections() // some wait in the black hole
		server.Close()
		p.transport.CloseIdleConnections()
	})
	return p
}

// Set has choose say what happens to each request from now on; it is called by
// many goroutines. nil stands for nothing. Requests under way go on as they are.
func (p *Proxy) Set(choose func(*http.Request) Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.choose = choose
}

// Always does the same to every request from now on.
func (p *Proxy) Always(f Fault) { p.Set(func(*http.Request) Fault { return f }) }

// Count returns what went through by now.
func (p *Proxy) Count() Count {
	return Count{Requests: p.requests.Load(), Up: p.up.Load(), Down: p.down.Load()}
}

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.requests.Add(1)
	p.mu.Lock()
	choose := p.choose
	p.mu.Unlock()
	var f Fault
	if choose != nil {
		f = choose(r)
	}
	if !sleep(r.Context(), f.Latency) {
		return
	}
	switch f.Kind {
	case Reset:
		reset(w)
	case Error:
		p.drain(r)
		http.Error(w, "by order", http.StatusServiceUnavailable)
	case Throttled:
		p.drain(r)
		http.Error(w, "by order", http.StatusTooManyRequests)
	case BlackHole:
		p.drain(r) // else the server does not notice that the client goes
		<-r.Context().Done()
	default:
		p.forward(w, r, f.Kind)
	}
}

func (p *Proxy) drain(r *http.Request) {
	n, _ := io.Copy(io.Discard, r.Body) // a client that goes is no concern here
	p.up.Add(n)
}

// forward has the server answer, and hands on the answer or a part of it.
func (p *Proxy) forward(w http.ResponseWriter, r *http.Request, kind Kind) {
	out := r.Clone(r.Context())
	out.URL.Scheme, out.URL.Host = "http", p.target // Host stays as the client has signed it
	out.RequestURI = ""
	if r.ContentLength != 0 {
		out.Body = io.NopCloser(&counter{r.Body, &p.up})
	} else {
		out.Body = http.NoBody
	}
	resp, err := p.transport.RoundTrip(out)
	if err != nil {
		reset(w)
		return
	}
	defer resp.Body.Close()
	if kind == LostAnswer {
		io.Copy(io.Discard, resp.Body)
		reset(w)
		return
	}
	for name, values := range resp.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(resp.StatusCode)
	body := &counter{resp.Body, &p.down}
	switch kind {
	case Truncated:
		io.CopyN(w, body, resp.ContentLength/2)
		if resp.ContentLength > 0 {
			panic(http.ErrAbortHandler) // closes the connection
		}
	case Slow:
		for sleep(r.Context(), slowPace) {
			if _, err := io.CopyN(w, body, 1); err != nil {
				return
			}
			http.NewResponseController(w).Flush()
		}
	default:
		io.Copy(w, body)
	}
}

// reset ends the connection of a request the hard way.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	conn.Close()
}

// sleep returns after d, or false when ctx ends before.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// counter counts what is read.
type counter struct {
	io.Reader
	n *atomic.Int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}
