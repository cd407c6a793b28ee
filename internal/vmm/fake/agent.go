package fake

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// minEntropy is the least number of random bytes that Init takes.
const minEntropy = 32

// maxRequest bounds the body of a call in bytes.
const maxRequest = 1 << 20

// agent serves the guest's ports. A call waits while the machine does not run.
type agent struct {
	machine *Machine
	server  *http.Server
	conns   chan net.Conn
	closed  chan struct{}
	once    sync.Once
	served  sync.WaitGroup
}

func newAgent(m *Machine) *agent {
	a := &agent{machine: m, conns: make(chan net.Conn), closed: make(chan struct{})}
	calls := http.NewServeMux()
	calls.HandleFunc("GET "+guestapi.HealthPath, a.call(func(*guest, *http.Request) (any, error) { return nil, nil }))
	calls.HandleFunc("POST "+guestapi.InitPath, a.call(a.init))
	calls.HandleFunc("POST "+guestapi.FreezePath, a.freeze)
	calls.HandleFunc("POST "+guestapi.ThawPath, a.call(a.thaw))
	calls.HandleFunc("POST "+guestapi.AwakePath, a.call(a.awake))
	calls.HandleFunc("POST /keep-awake", a.call(a.keepAwake))
	calls.HandleFunc("GET /{$}", a.call(func(g *guest, _ *http.Request) (any, error) { return "hello from " + g.Identity.ID, nil }))
	calls.HandleFunc("GET /counter", a.call(a.counter))
	calls.HandleFunc("GET /env", a.call(a.env))
	calls.HandleFunc("GET /memory", a.call(a.readMemory))
	calls.HandleFunc("POST /memory", a.call(a.writeMemory))
	calls.HandleFunc("POST /end", a.call(a.end))
	a.server = &http.Server{Handler: calls}
	a.served.Go(func() { a.server.Serve(a) })
	return a
}

// accept makes a connection to the guest.
func (a *agent) accept(ctx context.Context, port int) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case a.conns <- theirs:
		return ours, nil
	case <-a.closed:
	case <-ctx.Done():
	}
	ours.Close()
	theirs.Close()
	if err := a.machine.ended(); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("dial port %d of the guest: %w", port, context.Cause(ctx))
}

// cut breaks every connection and takes no more.
func (a *agent) cut() {
	a.once.Do(func() { close(a.closed) })
	a.server.Close()
}

// close waits until nothing is served any more.
func (a *agent) close() {
	a.cut()
	a.served.Wait()
}

// Accept implements net.Listener.
func (a *agent) Accept() (net.Conn, error) {
	select {
	case c := <-a.conns:
		return c, nil
	case <-a.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (a *agent) Close() error { return nil }

// Addr implements net.Listener.
func (a *agent) Addr() net.Addr { return &net.UnixAddr{Name: "fake", Net: "unix"} }

// refusal is an error with an HTTP status.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return r.message }

func refuse(status int, format string, args ...any) error {
	return &refusal{status, fmt.Sprintf(format, args...)}
}

// call makes a handler of what the guest does once it runs. A nil answer is 204.
func (a *agent) call(do func(*guest, *http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, maxRequest)
		var answer any
		err := a.machine.whenRunning(r.Context(), func(g *guest) (err error) {
			answer, err = do(g, r)
			return err
		})
		if err != nil {
			status := http.StatusInternalServerError
			if refused, ok := err.(*refusal); ok {
				status = refused.status
			}
			http.Error(w, err.Error(), status)
			return
		}
		if answer == nil {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(answer)
	}
}

// whenRunning waits until the machine runs and does something with its guest.
func (m *Machine) whenRunning(ctx context.Context, do func(*guest) error) error {
	for {
		m.mu.Lock()
		running := m.running
		if m.runs() {
			defer m.mu.Unlock()
			m.guest.advance(time.Now())
			return do(m.guest)
		}
		m.mu.Unlock()
		select {
		case <-running:
		case <-m.exited:
			return m.ended()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func decode(r *http.Request, request any) error {
	if err := json.NewDecoder(r.Body).Decode(request); err != nil {
		return refuse(http.StatusBadRequest, "decode the request: %v", err)
	}
	return nil
}

func checkToken(g *guest, r *http.Request) error {
	if want := g.Identity.ControlToken; want != "" && r.Header.Get(guestapi.TokenHeader) != want {
		return refuse(http.StatusUnauthorized, "wrong control token")
	}
	return nil
}

func (a *agent) init(g *guest, r *http.Request) (any, error) {
	var req guestapi.InitRequest
	if err := decode(r, &req); err != nil {
		return nil, err
	}
	token := r.Header.Get(guestapi.TokenHeader)
	repeated := g.Init.Generation == req.Generation && g.Init.Reason != "" && token == g.PreviousToken
	if err := checkToken(g, r); err != nil && !repeated {
		return nil, err
	}
	if len(req.Entropy) < minEntropy {
		return nil, refuse(http.StatusBadRequest, "%d bytes of entropy: must be at least %d", len(req.Entropy), minEntropy)
	}
	if !repeated {
		g.PreviousToken = token
	}
	if req.Identity != nil {
		g.Identity = *req.Identity
	}
	req.Entropy = nil
	g.Init = req
	g.Frozen = false
	resp := guestapi.InitResponse{AgentVersion: "fake", Steps: map[string]float64{}}
	resp.Hooks, resp.Warnings = runHooks(req.Hooks, guestapi.EventPostResume, req.Reason)
	return resp, nil
}

func (a *agent) freeze(w http.ResponseWriter, r *http.Request) {
	// Once its body is read, the request's context ends with the connection.
	var req guestapi.FreezeRequest
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(&req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if err := inject(r.Context(), a.machine.driver.currentFaults().Freeze); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	a.call(func(g *guest, r *http.Request) (any, error) {
		if err := checkToken(g, r); err != nil {
			return nil, err
		}
		if req.Attempt <= g.Refused {
			return nil, refuse(http.StatusConflict, "attempt %d was thawed", req.Attempt)
		}
		g.Frozen, g.Attempt, g.ThawAt = true, req.Attempt, g.Clock+req.Deadline
		resp := guestapi.FreezeResponse{Steps: map[string]float64{}}
		resp.Hooks, resp.Warnings = runHooks(req.Hooks, guestapi.EventPreHibernate, guestapi.ReasonHibernate)
		return resp, nil
	})(w, r)
}

// runHooks pretends to run the hooks of an event: "false" fails, all else prints
// its command and succeeds.
func runHooks(hooks []guestapi.Hook, event, reason string) (results []guestapi.HookResult, warnings []string) {
	for _, h := range hooks {
		if h.Event != event {
			continue
		}
		r := guestapi.HookResult{Name: h.Name, Event: event, Reason: reason, Background: h.Background, Output: strings.Join(h.Command, " ") + "\n", StartedAt: time.Now()}
		if h.Command[0] == "false" {
			r.ExitCode = 1
			warnings = append(warnings, fmt.Sprintf("%s hook %s: %s", event, h.Name, r.Describe()))
		}
		results = append(results, r)
	}
	return results, warnings
}

func (a *agent) thaw(g *guest, r *http.Request) (any, error) {
	var req guestapi.ThawRequest
	if err := decode(r, &req); err != nil {
		return nil, err
	}
	if err := checkToken(g, r); err != nil {
		return nil, err
	}
	g.thaw(req.Attempt)
	return struct{}{}, nil
}

func (a *agent) awake(g *guest, r *http.Request) (any, error) {
	if err := checkToken(g, r); err != nil {
		return nil, err
	}
	return guestapi.AwakeResponse{Processes: g.KeepAwake}, nil
}

// keepAwake begins a process that holds the sandbox awake, or with an empty
// command ends them all.
func (a *agent) keepAwake(g *guest, r *http.Request) (any, error) {
	command := r.URL.Query().Get("command")
	if command == "" {
		g.KeepAwake = nil
		return nil, nil
	}
	g.KeepAwake = append(g.KeepAwake, guestapi.KeepAwake{PID: uint32(len(g.KeepAwake) + 100), Command: command})
	return nil, nil
}

func (a *agent) counter(g *guest, _ *http.Request) (any, error) { return g.counter(), nil }

// Env is the answer to GET /env: who the guest is and how it came to run.
type Env struct {
	Identity guestapi.Identity    `json:"identity"`
	Init     guestapi.InitRequest `json:"init"` // the last one, without entropy
	Frozen   bool                 `json:"frozen"`
	Counter  uint64               `json:"counter"` // milliseconds that the guest ran, neither paused nor frozen
}

func (a *agent) env(g *guest, _ *http.Request) (any, error) {
	return Env{Identity: g.Identity, Init: g.Init, Frozen: g.Frozen, Counter: g.counter()}, nil
}

// pageNumber returns the query's page, which must be one that the guest does not use.
func (a *agent) pageNumber(r *http.Request) (uint64, error) {
	n, err := strconv.ParseUint(r.URL.Query().Get("page"), 10, 64)
	last := uint64(a.machine.memory.size)/page.Size - 1
	if err != nil || n < FreePage || n > last {
		return 0, refuse(http.StatusBadRequest, "page must be a number from %d to %d", FreePage, last)
	}
	return n, nil
}

// readMemory answers the value of the page's first byte.
func (a *agent) readMemory(_ *guest, r *http.Request) (any, error) {
	n, err := a.pageNumber(r)
	if err != nil {
		return nil, err
	}
	var b [1]byte
	if _, err := a.machine.memory.ReadAt(b[:], int64(n)*page.Size); err != nil {
		a.machine.finish(*busError(err))
		return nil, err
	}
	return b[0], nil
}

// writeMemory fills a page with one value.
func (a *agent) writeMemory(_ *guest, r *http.Request) (any, error) {
	n, err := a.pageNumber(r)
	if err != nil {
		return nil, err
	}
	value, err := strconv.ParseUint(r.URL.Query().Get("value"), 10, 8)
	if err != nil {
		return nil, refuse(http.StatusBadRequest, "value must be a number from 0 to 255")
	}
	data := make([]byte, page.Size)
	for i := range data {
		data[i] = byte(value)
	}
	if err := a.machine.memory.writePages(n, data); err != nil {
		a.machine.finish(*busError(err))
		return nil, err
	}
	return nil, nil
}

// end ends the machine from within, for the query's reason.
func (a *agent) end(_ *guest, r *http.Request) (any, error) {
	a.machine.finish(vmm.Exit{Reason: vmm.Reason(r.URL.Query().Get("reason")), Detail: "ended by the guest"})
	return nil, a.machine.ended()
}
