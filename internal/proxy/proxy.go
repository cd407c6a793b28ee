// Package proxy lets HTTP requests through to servers in sandboxes and wakes
// the sandboxes for that.
//
// Nouns: a target is a port of a sandbox, as a request names it: by its host
// (PORT-ID.DOMAIN) or, where there is no such name, by its path
// (/sandboxes/ID/ports/PORT/…). A pass is what a request shows to reach a port
// that is private: the sandbox's traffic token or the API key. The agent's port
// has a pass of its own, the agent's access token.
//
// The rules:
//
//   - A request that shows no pass where one is needed never wakes a sandbox.
//   - The connection into the guest stands before a byte of the request's body
//     is read, and a request is sent once: what follows the first byte is never
//     repeated.
//   - Each request has a connection of its own. One that is kept idle would look
//     like use of the sandbox, and would be dead after a hibernation.
//   - The guest never sees a pass, and what it answers is marked as no word of
//     the daemon's.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// DefaultDomain is the domain of hosts where none is given: programs find
// every name in it at the loopback address.
const DefaultDomain = "localhost"

// Core is what the proxy needs of the core. Every id may be a name.
type Core interface {
	Get(ctx context.Context, id string) (sandbox.Sandbox, error)
	Wake(ctx context.Context, id, by string) (sandbox.Woken, error)
	Dial(ctx context.Context, id string, port int) (net.Conn, error)
	Session(id, kind string) (end func(), err error)
	AgentToken(ctx context.Context, id string) (string, error)
}

// Config is what a Proxy is made of.
type Config struct {
	Core   Core
	Key    string       // the API key: a pass for every port
	Domain string       // of hosts; "" is DefaultDomain
	Log    *slog.Logger // nil discards
}

// Proxy is an http.Handler for the requests that Match picks.
type Proxy struct {
	core   Core
	key    string
	domain string // in lower case, with a dot before it
	log    *slog.Logger
	http1  *http.Transport

	mu       sync.Mutex
	stopped  bool
	stopping chan struct{} // closed by Close
	streams  sync.WaitGroup
}

// CheckDomain returns an error for what cannot be the domain of hosts.
func CheckDomain(domain string) error {
	for label := range strings.SplitSeq(domain, ".") {
		if !domainLabel.MatchString(label) {
			return fmt.Errorf("domain %q: it must be a DNS name such as sandboxes.example.com", domain)
		}
	}
	return nil
}

// New returns a proxy. Close it to end its streams.
func New(c Config) *Proxy {
	if c.Domain == "" {
		c.Domain = DefaultDomain
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Proxy{
		core: c.Core, key: c.Key, domain: "." + strings.ToLower(c.Domain), log: c.Log,
		http1: newTransport(), stopping: make(chan struct{}),
	}
}

// Close breaks off the streams, now and from now on, and waits for them to
// end: upgraded connections and answers that have no end of their own. Other
// requests go on: http.Server.Shutdown waits for those. Idempotent.
func (p *Proxy) Close() {
	p.mu.Lock()
	if !p.stopped {
		p.stopped = true
		close(p.stopping)
	}
	p.mu.Unlock()
	p.streams.Wait()
}

var errStopping = errors.New("the daemon is stopping")

// stream has cancel called when the proxy stops, until ctx ends, which the
// caller sees to. It returns false if the proxy stops already.
func (p *Proxy) stream(ctx context.Context, cancel context.CancelCauseFunc) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		cancel(errStopping)
		return false
	}
	p.streams.Go(func() {
		select {
		case <-p.stopping:
			cancel(errStopping)
		case <-ctx.Done():
		}
	})
	return true
}

// Match tells whether a request is for a port of a sandbox. What it leaves is
// for the API.
func (p *Proxy) Match(r *http.Request) bool {
	if _, ok := p.hostLabel(r.Host); ok {
		return true
	}
	_, ok := strings.CutPrefix(r.URL.Path, pathPrefix)
	return ok && pathForm.MatchString(r.URL.Path)
}

// ServeHTTP lets one request through, or says why not.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begun, aw := time.Now(), newAnswerWriter(w)
	defer func() {
		p.log.Debug("proxied", "method", r.Method, "host", r.Host, "status", aw.status, "ms", time.Since(begun).Milliseconds())
	}()
	var woken sandbox.Woken
	t, err := p.target(r)
	if err == nil {
		woken, err = p.serve(aw, r, t)
	}
	if err != nil {
		p.fail(aw, r, t, woken, err)
	}
}

// serve checks the request, wakes the sandbox and lets the request through. An
// error says that nothing was answered yet.
func (p *Proxy) serve(w *answerWriter, r *http.Request, t target) (woken sandbox.Woken, err error) {
	sb, err := p.core.Get(r.Context(), t.id)
	if err != nil {
		return woken, err
	}
	if sb.State == sandbox.StateDeleting {
		return woken, goneError{sb.ID}
	}
	if answered, err := p.admit(w, r, t, sb); err != nil || answered {
		return woken, err
	}
	if t.byPath && t.rest == "" { // links of a page are relative to its folder
		redirect(w, r, http.StatusPermanentRedirect, t.prefix()+"/", r.URL.RawQuery)
		return woken, nil
	}
	conn, woken, err := p.open(r.Context(), sb.ID, t.port)
	if err != nil {
		return woken, err
	}
	defer conn.Close()
	return woken, p.forward(w, r, t, sb.ID, conn, woken)
}
