package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/hibernacle/hibernacle/internal/atomicfile"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// socketName is the name of the shim's socket in its folder.
const socketName = "sock"

// maxOrder bounds the body of an order in bytes.
const maxOrder = 1 << 20

// ServeOptions ties a shim to the process that runs it.
type ServeOptions struct {
	Lifeline io.Reader    // reads to its end when the parent is gone; nil: none
	Ready    func()       // called once orders are taken; nil: none
	Log      *slog.Logger // nil: silent

	limits *limits // nil: defaultLimits
	remote *remote // in place of the one that the Config names; nil: that one
}

// Serve runs a shim: it takes orders on the socket "sock" in cfg.Dir until it
// is released, until ctx ends, or until the lifeline ends before anybody
// adopted it. Then everything that belongs to its machine is gone. A machine
// that ended by itself stays visible until the release.
func Serve(ctx context.Context, cfg Config, driver vmm.Driver, opts ServeOptions) error {
	log, limits := opts.Log, defaultLimits
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if opts.limits != nil {
		limits = *opts.limits
	}
	orders, cancelOrders := context.WithCancel(context.Background())
	defer cancelOrders()
	host, err := newHost(cfg, driver, log, limits, opts.remote)
	if err != nil {
		return fmt.Errorf("shim %s: %w", cfg.VM, err)
	}
	socket := filepath.Join(cfg.Dir, socketName)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return errors.Join(fmt.Errorf("shim %s: %w", cfg.VM, err), host.close(cancelOrders))
	}
	if err := leaveHandle(cfg, socket); err != nil {
		_ = listener.Close()
		return errors.Join(fmt.Errorf("shim %s: %w", cfg.VM, err), host.close(cancelOrders))
	}
	server := &http.Server{
		Handler:           host.handler(),
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return orders },
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if opts.Lifeline != nil {
		go host.hangOn(opts.Lifeline)
	}
	if opts.Ready != nil {
		opts.Ready()
	}
	select {
	case <-ctx.Done():
	case <-host.ended:
	case err = <-served:
		err = fmt.Errorf("shim %s: take orders: %w", cfg.VM, err)
	}
	closeErr := host.close(cancelOrders)
	// Whoever ordered the release, or waits for another order, gets the answer.
	grace, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if server.Shutdown(grace) != nil {
		_ = server.Close()
	}
	host.streams.Wait()
	return errors.Join(err, closeErr)
}

func leaveHandle(cfg Config, socket string) error {
	handle, err := newHandle(cfg.VM, socket, os.Getpid())
	if err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(cfg.Dir, handleFile), 0o600, func(w io.Writer) error {
		return json.NewEncoder(w).Encode(handle)
	})
}

// hangOn ends the shim when its parent goes away before it was adopted.
func (h *host) hangOn(lifeline io.Reader) {
	_, _ = io.Copy(io.Discard, lifeline)
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.adopted {
		h.endLocked()
	}
}

// adopt makes the shim outlive its parent, unless it is ending already.
func (h *host) adopt() (err error) {
	h.update(func() {
		if h.hasEnded() {
			err = errEnding
			return
		}
		h.adopted = true
	})
	return err
}

// end makes the shim end.
func (h *host) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.endLocked()
}

func (h *host) endLocked() {
	if !h.hasEnded() {
		close(h.ended)
	}
}

func (h *host) hasEnded() bool {
	select {
	case <-h.ended:
		return true
	default:
		return false
	}
}

func (h *host) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) {
		s, _ := h.status()
		writeJSON(w, s)
	})
	mux.HandleFunc("GET /v1/events", h.serveEvents)
	mux.HandleFunc("POST /v1/adopt", order(func(context.Context, struct{}) (struct{}, error) {
		return struct{}{}, h.adopt()
	}))
	mux.HandleFunc("POST /v1/prepare", order(func(ctx context.Context, r PrepareRequest) (struct{}, error) {
		return struct{}{}, h.prepare(ctx, r)
	}))
	mux.HandleFunc("POST /v1/boot", order(h.boot))
	mux.HandleFunc("POST /v1/resume", order(h.resume))
	mux.HandleFunc("POST /v1/capture", order(h.capture))
	mux.HandleFunc("POST /v1/thaw", order(func(ctx context.Context, r ThawRequest) (struct{}, error) {
		return struct{}{}, h.thaw(ctx, r)
	}))
	mux.HandleFunc("POST /v1/hooks", order(h.collectHooks))
	mux.HandleFunc("POST /v1/park", order(h.park))
	mux.HandleFunc("POST /v1/unpark", order(h.unpark))
	mux.HandleFunc("POST /v1/activity", order(h.activity))
	mux.HandleFunc("POST /v1/egress", order(h.egress))
	mux.HandleFunc("POST /v1/release", order(func(ctx context.Context, _ struct{}) (struct{}, error) {
		h.workset.learn(ctx) // a short life teaches, too
		h.end()
		return struct{}{}, nil
	}))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, errorf(CodeUnknown, "no order %s %s in version %d of the protocol", r.Method, r.URL.Path, ProtocolVersion))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodConnect {
			h.serveConnect(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// order makes a handler of a function from request to answer.
func order[Req, Resp any](do func(context.Context, Req) (Resp, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req Req
		// Only behind a body that was read to its end does the server notice that
		// the caller has gone, which cancels the order.
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxOrder))
		if err == nil {
			err = json.Unmarshal(body, &req)
		}
		if err != nil {
			writeError(w, errorf(CodeInvalid, "order %s: %v", r.URL.Path, err))
			return
		}
		resp, err := do(r.Context(), req)
		if err != nil {
			writeError(w, err)
			return
		}
		writeJSON(w, resp)
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the caller is gone: nobody to tell
}

// serveEvents sends the status now and at each change, and what the guest was
// denied, at most once in denialPause.
func (h *host) serveEvents(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	enc := json.NewEncoder(w)
	send := func(events ...Event) error {
		for _, e := range events {
			if err := enc.Encode(e); err != nil {
				return err
			}
		}
		return http.NewResponseController(w).Flush()
	}
	denied, rested := h.denials.wake, (<-chan time.Time)(nil)
	s, changed := h.status()
	err := send(Event{Status: s})
	for err == nil {
		select {
		case <-changed:
			s, changed = h.status()
			err = send(Event{Status: s})
		case <-denied:
			var events []Event
			for _, d := range h.denials.take() {
				events = append(events, Event{Status: s, Denied: &d})
			}
			err = send(events...)
			denied, rested = nil, time.After(denialPause)
		case <-rested:
			denied = h.denials.wake
		case <-h.ended:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// serveConnect makes the connection a byte stream into the guest.
func (h *host) serveConnect(w http.ResponseWriter, r *http.Request) {
	_, portText, err := net.SplitHostPort(r.Host)
	port, convErr := strconv.ParseUint(portText, 10, 16)
	if err != nil || convErr != nil || port == 0 {
		writeError(w, errorf(CodeInvalid, "CONNECT %q: want guest:PORT", r.Host))
		return
	}
	cut := h.trackStream()
	if cut == nil {
		writeError(w, errEnding)
		return
	}
	defer h.streams.Done()
	guest, err := h.dialGuest(r.Context(), uint16(port), false)
	if err != nil {
		writeError(w, dialError(port, err))
		return
	}
	defer guest.Close()
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		writeError(w, fmt.Errorf("make a stream of a connection: %w", err))
		return
	}
	defer conn.Close()
	spliced := make(chan struct{})
	defer close(spliced)
	go func() { // the request's context would end with the caller's half
		select {
		case <-h.ended:
		case <-cut:
		case <-spliced:
			return
		}
		_ = guest.Close()
		_ = conn.Close()
	}()
	if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	splice(guest, &bufferedConn{Conn: conn, r: buffered})
}

// trackStream counts a stream that the shim waits for at its end and returns
// what is closed when the stream is to end; nil if the shim is ending already.
// The caller calls streams.Done.
func (h *host) trackStream() (cut <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.hasEnded() {
		return nil
	}
	h.streams.Add(1)
	return h.cut
}

// dialError says why a port of the guest could not be reached: because of the
// guest only if there is one.
func dialError(port uint64, err error) error {
	e := classify(err)
	if e.Code != CodeInvalid && e.Code != CodeStopped {
		e.Code = CodeGuest
	}
	return errorf(e.Code, "port %d of the guest: %v", port, err)
}
