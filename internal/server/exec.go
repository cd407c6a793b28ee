package server

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

const (
	maxOutput    = 4 << 20         // bytes of each stream that an exec keeps
	maxMessage   = 4 << 20         // bytes of one message of the agent
	stdinChunk   = 64 << 10        // bytes of one input message
	killPatience = 5 * time.Second // for a killed process to be reported
)

// exec runs a command to its end. A client that goes away does not end it: the
// process is the agent's and can be found there. A time-out kills it.
func (s *Server) exec(w http.ResponseWriter, r *http.Request) {
	var req api.ExecRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	if len(req.Cmd) == 0 || req.Cmd[0] == "" {
		s.fail(w, r, requestError{"the field \"cmd\" is missing", `it is an array, for example ["ls", "-l"]`})
		return
	}
	if req.TimeoutMS < 0 {
		s.fail(w, r, requestError{"the field \"timeout_ms\" must not be negative", "0 means no limit"})
		return
	}
	g, err := s.guest(w, r, "exec")
	if err != nil {
		s.fail(w, r, err)
		return
	}
	release, err := s.hold(r, g.id, sandbox.LeaseExec, commandLine(req.Cmd[0], req.Cmd[1:]))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer release()
	ctx, done := s.stream(r.Context())
	defer done()
	resp, err := s.run(ctx, g, req)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, resp)
}

// run starts the command of req and collects what it prints until it ends.
func (s *Server) run(ctx context.Context, g guest, req api.ExecRequest) (api.ExecResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	start := &process.StartRequest{
		Process: &process.ProcessConfig{Cmd: req.Cmd[0], Args: req.Cmd[1:], Envs: req.Env},
		Stdin:   new(req.Stdin != ""),
	}
	if req.Cwd != "" {
		start.Process.Cwd = new(req.Cwd)
	}
	e := &execution{procs: s.processes(g, req.User), started: make(chan struct{})}
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer cancel()
	if req.TimeoutMS > 0 {
		helpers.Go(func() { e.limit(ctx, cancel, time.Duration(req.TimeoutMS)*time.Millisecond) })
	}
	if req.Stdin != "" {
		helpers.Go(func() { e.feed(ctx, []byte(req.Stdin)) })
	}
	call := connect.NewRequest(start)
	if req.KeepAwake {
		call.Header().Set(guestapi.KeepAwakeHeader, "1")
	}
	events, err := e.procs.Start(ctx, call)
	if err == nil {
		defer events.Close()
		for events.Receive() {
			if resp, ended := e.take(events.Msg().GetEvent()); ended {
				return resp, nil
			}
		}
		err = events.Err()
	}
	switch {
	case e.timedOut.Load():
		return e.response(128 + int(process.Signal_SIGNAL_SIGKILL)), nil
	case err != nil:
		return api.ExecResponse{}, g.callError(err)
	}
	return api.ExecResponse{}, g.unanswered(errors.New("its stream ended before the process did"))
}

// processes returns a client of the agent's process service for a user, "" for
// the default one.
func (s *Server) processes(g guest, user string) processconnect.ProcessClient {
	client := &http.Client{Transport: agentRoundTripper{s, g, user}}
	return processconnect.NewProcessClient(client, g.url("").String(), connect.WithReadMaxBytes(maxMessage))
}

// agentRoundTripper sends requests to one agent on behalf of a user.
type agentRoundTripper struct {
	s    *Server
	g    guest
	user string
}

func (t agentRoundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if t.user != "" {
		r.SetBasicAuth(t.user, "")
	}
	return t.s.callAgent(t.g, r)
}

// execution is one command under way.
type execution struct {
	procs   processconnect.ProcessClient
	started chan struct{} // closed once pid is known
	pid     uint32

	stdout, stderr bytes.Buffer
	truncated      bool
	timedOut       atomic.Bool
}

// take handles one event. If it was the last, the response is whole.
func (e *execution) take(ev *process.ProcessEvent) (_ api.ExecResponse, ended bool) {
	switch ev := ev.GetEvent().(type) {
	case *process.ProcessEvent_Start:
		if e.pid == 0 && ev.Start.GetPid() != 0 {
			e.pid = ev.Start.GetPid()
			close(e.started)
		}
	case *process.ProcessEvent_Data:
		e.keep(&e.stdout, ev.Data.GetStdout())
		e.keep(&e.stderr, ev.Data.GetStderr())
	case *process.ProcessEvent_End:
		return e.response(api.ExitCode(ev.End.GetExitCode(), ev.End.GetExited(), ev.End.GetStatus())), true
	}
	return api.ExecResponse{}, false
}

func (e *execution) keep(buf *bytes.Buffer, p []byte) {
	if room := maxOutput - buf.Len(); len(p) > room {
		p = p[:room]
		e.truncated = true
	}
	buf.Write(p)
}

func (e *execution) response(code int) api.ExecResponse {
	return api.ExecResponse{
		ExitCode: code, Stdout: e.stdout.String(), Stderr: e.stderr.String(),
		Truncated: e.truncated, TimedOut: e.timedOut.Load(),
	}
}

// selector names the process; it is known once started is closed.
func (e *execution) selector() *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: e.pid}}
}

// limit kills the process after d, and gives up on it if the agent does not
// report its end.
func (e *execution) limit(ctx context.Context, cancel context.CancelFunc, d time.Duration) {
	if !sleep(ctx, d) {
		return
	}
	e.timedOut.Store(true)
	select {
	case <-e.started:
		_, _ = e.procs.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{
			Process: e.selector(), Signal: process.Signal_SIGNAL_SIGKILL,
		}))
		sleep(ctx, killPatience)
	default:
	}
	cancel()
}

// sleep waits for d and tells whether ctx lasted that long.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// feed gives the process its input. A process that does not read it to the end
// is no error.
func (e *execution) feed(ctx context.Context, input []byte) {
	select {
	case <-e.started:
	case <-ctx.Done():
		return
	}
	for chunk := range slices.Chunk(input, stdinChunk) {
		_, err := e.procs.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{
			Process: e.selector(),
			Input:   &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: chunk}},
		}))
		if err != nil {
			return
		}
	}
	_, _ = e.procs.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: e.selector()}))
}

// callError turns an error of a connect call into one of ours: what the agent
// said is told as its word, what the core said is passed on.
func (g guest) callError(err error) error {
	var ce *connect.Error
	if errors.As(err, &ce) && connect.IsWireError(err) {
		return agentError{statusOf(ce.Code()), "sandbox " + g.id + ": " + printable(ce.Message())}
	}
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	return g.unanswered(err)
}

// statusOf returns the HTTP status nearest to a connect code.
func statusOf(c connect.Code) int {
	switch c {
	case connect.CodeInvalidArgument, connect.CodeOutOfRange, connect.CodeUnauthenticated:
		return http.StatusBadRequest
	case connect.CodeNotFound:
		return http.StatusNotFound
	case connect.CodeAlreadyExists, connect.CodeFailedPrecondition, connect.CodeAborted, connect.CodePermissionDenied:
		return http.StatusConflict
	case connect.CodeResourceExhausted:
		return http.StatusInsufficientStorage
	case connect.CodeUnimplemented:
		return http.StatusNotImplemented
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeCanceled:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}
