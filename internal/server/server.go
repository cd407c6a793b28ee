// Package server adapts the core to HTTP: the native REST interface under /v1
// (its document is api.OpenAPI). An adapter decodes and checks a request,
// calls the core, and encodes the answer; it decides nothing else. Every error
// passes through one map (errors.go) from the core's sentinels to a status and
// a code.
//
// Nouns: a route is a method and a path with its handler; a stream is a
// request that lasts as long as its client likes (agent calls, port
// connections, followed logs). Streams are what a stopping daemon breaks off.
package server

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/events"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/webhook"
)

// Core is what the server needs of the core. Its errors wrap the sentinels of
// package sandbox. Every id may be a sandbox's id or its name.
type Core interface {
	Create(ctx context.Context, o sandbox.CreateOptions) (sandbox.Sandbox, error)
	Get(ctx context.Context, id string) (sandbox.Sandbox, error)
	List(ctx context.Context) ([]sandbox.Sandbox, error)
	// Inspect is Get with the sandbox's activity.
	Inspect(ctx context.Context, id string) (sandbox.Sandbox, error)

	// Hold takes a lease for the time of a request, SetHold one that is recorded.
	Hold(ctx context.Context, id string, l sandbox.Lease) (release func(), err error)
	SetHold(ctx context.Context, id string, until time.Time, reason string) (sandbox.Sandbox, error)
	ReleaseHold(ctx context.Context, id string) (sandbox.Sandbox, error)
	// Session notes the begin of an interactive session.
	Session(id, kind string) (end func(), err error)

	Update(ctx context.Context, id string, mutate func(*sandbox.Settings) error) (sandbox.Sandbox, error)
	Hibernate(ctx context.Context, id string, o sandbox.HibernateOptions) (sandbox.Sandbox, error)
	Resume(ctx context.Context, id string, o sandbox.ResumeOptions) (sandbox.Sandbox, error)
	Evict(ctx context.Context, id string, o sandbox.EvictOptions) (sandbox.Evicted, error)
	Delete(ctx context.Context, id string) error

	Checkpoints(ctx context.Context, id string) ([]sandbox.Checkpoint, error)
	Checkpoint(ctx context.Context, id, name string) (sandbox.Checkpoint, error)
	RemoveCheckpoint(ctx context.Context, id, name string) error
	Restore(ctx context.Context, id, name string) (s sandbox.Sandbox, kept string, err error)
	Fork(ctx context.Context, id string, o sandbox.ForkOptions) ([]sandbox.Sandbox, error)
	CreateTemplateFrom(ctx context.Context, id, checkpoint, name string) (sandbox.Template, error)

	// Wake makes sure that the guest takes requests, and says whether it had to be
	// resumed for that; by tells who asks.
	Wake(ctx context.Context, id, by string) (sandbox.Woken, error)
	// Dial connects to a TCP port in the guest and wakes it for that.
	Dial(ctx context.Context, id string, port int) (net.Conn, error)
	// AgentToken returns the token that the agent's process and file calls need.
	AgentToken(ctx context.Context, id string) (string, error)
	// HookRuns returns how the sandbox's hooks ran, oldest first. It wakes nothing.
	HookRuns(ctx context.Context, id string) ([]sandbox.HookRun, error)
	// Logs opens what the guest printed on its console.
	Logs(ctx context.Context, id string) (io.ReadCloser, error)

	Templates(ctx context.Context) ([]sandbox.Template, error)
	Template(ctx context.Context, name string) (sandbox.Template, error)
	BuildTemplate(ctx context.Context, o sandbox.BuildOptions, progress func(sandbox.Progress)) (sandbox.Template, error)
	RemoveTemplate(ctx context.Context, name string) error

	StoreStatus(ctx context.Context) (sandbox.StoreStatus, error)
	Collect(ctx context.Context, o sandbox.CollectOptions) (sandbox.Collected, error)
	Import(ctx context.Context, takeOver bool, progress func(done, total int64)) (sandbox.Imported, error)
	// Drain hibernates everything and lets nothing start until Undrain.
	Drain(ctx context.Context, progress func(done, total int64)) (sandbox.Drained, error)
	Undrain()
	Host(ctx context.Context) (sandbox.Host, error)
	StoreVerify(ctx context.Context, o sandbox.VerifyOptions, progress func(done, total int64)) (sandbox.Verify, error)
}

// Config is what a server is made of.
type Config struct {
	Core    Core
	Key     string       // the API key that every request but /v1/health must show
	Version api.Version  // answer to /v1/version
	PortURL string       // URL of a port of a sandbox, with {port} and {id} in it; "" if there is none
	Log     *slog.Logger // nil discards

	Events   *events.Journal  // what /v1/events shows; nil: nothing is
	Webhooks *webhook.Manager // nil: there are none

	Metrics     http.Handler                                           // answers /metrics; nil: there are none
	MetricsOpen bool                                                   // without the key
	Answered    func(route string, status int, duration time.Duration) // is told of each request; may be nil
}

// Server is an http.Handler for the whole interface.
type Server struct {
	core    Core
	version api.Version
	portURL string
	log     *slog.Logger
	guests  *http.Transport
	handler http.Handler

	events    *events.Journal
	heartbeat time.Duration
	webhooks  *webhook.Manager
	metrics   http.Handler
	answered  func(route string, status int, duration time.Duration)

	mu       sync.Mutex
	stopped  bool
	stopping chan struct{}
	streams  sync.WaitGroup
}

// New returns a server. Close it to end its streams.
func New(c Config) *Server {
	s := &Server{core: c.Core, version: c.Version, portURL: c.PortURL, log: c.Log, stopping: make(chan struct{}),
		events: c.Events, heartbeat: heartbeatEvery, webhooks: c.Webhooks, metrics: c.Metrics, answered: c.Answered}
	open := []string{healthPath}
	if c.MetricsOpen {
		open = append(open, metricsPath)
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.guests = newGuestTransport(c.Core)
	s.handler = s.observe(s.authenticate(c.Key, open, s.router()))
	return s
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Close breaks off the streams, now and from now on, and waits for them to
// end. Other requests go on: http.Server.Shutdown waits for those. Idempotent.
func (s *Server) Close() {
	s.mu.Lock()
	if !s.stopped {
		s.stopped = true
		close(s.stopping)
	}
	s.mu.Unlock()
	s.streams.Wait()
	s.guests.CloseIdleConnections()
}

// stream returns a context for a request that lasts as long as its client
// likes: it ends with ctx, with done and with the server. The caller must call
// done once.
func (s *Server) stream(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		cancel(errStopping)
		return ctx, func() {}
	}
	s.streams.Add(1)
	go func() {
		select {
		case <-s.stopping:
			cancel(errStopping)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil); s.streams.Done() }
}

// NewHTTPServer returns an http.Server for h with the limits of time and size
// that suit it: headers are bounded, bodies and answers may last. It speaks
// HTTP/1.1 and, to clients that begin with it, HTTP/2 without encryption.
func NewHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Protocols:         protocols,
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}
