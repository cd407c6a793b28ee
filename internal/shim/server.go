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
	Lifeline io.Reader // reads to its end when the parent is gone; nil: none
	Ready    func()    // called once orders are taken; nil: none
	Log      *slog.Logger
}

// Serve runs a shim: it takes orders on the socket "sock" in cfg.Dir until it
// is released, until ctx ends, or until the lifeline ends before anybody
// adopted it. Then everything that belongs to its machine is gone. A machine
// that ended by itself stays visible until the release.
func Serve(ctx context.Context, cfg Config, driver vmm.Driver, opts ServeOptions) error {
	host, err := newHost(cfg, driver, opts.Log)
	if err != nil {
		return fmt.Errorf("shim %s: %w", cfg.VM, err)
	}
	socket := filepath.Join(cfg.Dir, socketName)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return errors.Join(fmt.Errorf("shim %s: %w", cfg.VM, err), host.close())
	}
	if err := leaveHandle(cfg, socket); err != nil {
		_ = listener.Close()
		return errors.Join(err, host.close())
	}
	if opts.Lifeline != nil {
		go host.hangOn(opts.Lifeline)
	}
	if opts.Ready != nil {
		opts.Ready()
	}
	server := &http.Server{Handler: host.handler(), ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case <-ctx.Done():
	case <-host.ended:
	case err = <-served:
	}
	closeErr := host.close()
	// Whoever ordered the release gets the answer; streams into the guest end.
	grace, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if server.Shutdown(grace) != nil {
		_ = server.Close()
	}
	if errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
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
	adopted := h.adopted
	h.mu.Unlock()
	if !adopted {
		h.end()
	}
}

func (h *host) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.ended:
	default:
		close(h.ended)
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
		h.update(func() { h.adopted = true })
		return struct{}{}, nil
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
	mux.HandleFunc("POST /v1/release", order(func(context.Context, struct{}) (struct{}, error) {
		h.end()
		return struct{}{}, nil
	}))
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
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxOrder)).Decode(&req); err != nil {
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

// serveEvents sends the status now and at each change.
func (h *host) serveEvents(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	flush := http.NewResponseController(w).Flush
	enc := json.NewEncoder(w)
	for {
		s, changed := h.status()
		if enc.Encode(Event{Status: s}) != nil || flush() != nil {
			return
		}
		select {
		case <-changed:
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
	guest, err := h.dialGuest(r.Context(), uint16(port), false)
	if err != nil {
		writeError(w, errorf(CodeGuest, "port %d of the guest: %v", port, err))
		return
	}
	defer guest.Close()
	w.WriteHeader(http.StatusOK)
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		h.log.Error("hijack a stream", "error", err)
		return
	}
	defer conn.Close()
	if err := buffered.Flush(); err != nil {
		return
	}
	splice(guest, &bufferedConn{Conn: conn, r: buffered})
}
