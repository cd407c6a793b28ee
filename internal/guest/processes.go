package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	processpb "github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

const (
	keepaliveHeader  = "Keepalive-Ping-Interval" // seconds
	defaultKeepalive = 90 * time.Second
)

// processService serves process.Process.
type processService struct {
	table    *table
	spawner  *spawner
	gate     *gate
	accounts func() (*accounts, error)
	env      func() map[string]string
	cgroup   int
	journal  int
	stall    time.Duration
}

// List returns the processes that run.
func (s *processService) List(context.Context, *connect.Request[processpb.ListRequest]) (*connect.Response[processpb.ListResponse], error) {
	resp := &processpb.ListResponse{}
	for _, p := range s.table.running() {
		resp.Processes = append(resp.Processes, p.info())
	}
	return connect.NewResponse(resp), nil
}

// Start starts a process and streams its events. The process outlives the
// stream; only a timeout given by the caller kills it.
func (s *processService) Start(ctx context.Context, req *connect.Request[processpb.StartRequest], out *connect.ServerStream[processpb.StartResponse]) error {
	l, err := s.prepare(ctx, req)
	if err != nil {
		return processError(err)
	}
	if err := s.gate.enter(ctx); err != nil {
		return processError(err)
	}
	p, first, err := startProcess(s.spawner, l, s.table.retire)
	s.gate.exit()
	if err != nil {
		return processError(fmt.Errorf("start %s: %w", l.path, err))
	}
	s.table.add(p)
	return s.stream(ctx, p, first, req.Header(), func(e *processpb.ProcessEvent) error {
		return out.Send(&processpb.StartResponse{Event: e})
	})
}

// prepare makes a launch of a request.
func (s *processService) prepare(ctx context.Context, req *connect.Request[processpb.StartRequest]) (launch, error) {
	l := launch{
		config: req.Msg.GetProcess(), tag: req.Msg.Tag, stdin: req.Msg.Stdin == nil || req.Msg.GetStdin(),
		cgroup: s.cgroup, journal: s.journal, keepAwake: req.Header().Get(guestapi.KeepAwakeHeader) == "1",
	}
	if req.Msg.GetPty() != nil {
		l.pty = req.Msg.GetPty().GetSize()
		if l.pty == nil {
			l.pty = &processpb.PTY_Size{Cols: 80, Rows: 24}
		}
	}
	if deadline, ok := ctx.Deadline(); ok {
		l.timeout = max(time.Until(deadline), time.Millisecond)
	}
	user, err := caller(req.Header(), s.accounts)
	if err != nil {
		return l, err
	}
	l.command, err = resolveCommand(l.config, user, s.env())
	return l, err
}

// caller returns the account that a request is made for.
func caller(h http.Header, accounts func() (*accounts, error)) (account, error) {
	name, err := callerName(h)
	if err != nil {
		return account{}, fmt.Errorf("%w: %w", errNoUser, err)
	}
	all, err := accounts()
	if err != nil {
		return account{}, err
	}
	return all.find(name)
}

// Connect streams the events of a process from now on, or with the replay
// header from the oldest output that is kept.
func (s *processService) Connect(ctx context.Context, req *connect.Request[processpb.ConnectRequest], out *connect.ServerStream[processpb.ConnectResponse]) error {
	p, err := s.table.find(req.Msg.GetProcess())
	if err != nil {
		return processError(err)
	}
	f := p.out.follow(req.Header().Get(guestapi.ReplayHeader) == "1")
	return s.stream(ctx, p, f, req.Header(), func(e *processpb.ProcessEvent) error {
		return out.Send(&processpb.ConnectResponse{Event: e})
	})
}

// stream sends the events of p as f reads them. A client that takes nothing
// for the stall limit is dropped.
func (s *processService) stream(ctx context.Context, p *process, f *follower, h http.Header, send func(*processpb.ProcessEvent) error) error {
	defer f.leave()
	emit := func(e *processpb.ProcessEvent) error {
		limitWrites(ctx, s.stall)
		return send(e)
	}
	interval := keepalive(h)
	start := &processpb.ProcessEvent_StartEvent{Pid: p.pid}
	if err := emit(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{Start: start}}); err != nil {
		return err
	}
	for {
		c, ok, err := readWithin(ctx, f, interval)
		var event *processpb.ProcessEvent
		switch {
		case ctx.Err() != nil:
			return processError(ctx.Err())
		case err != nil:
			event = &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Keepalive{Keepalive: &processpb.ProcessEvent_KeepAlive{}}}
		case !ok:
			<-p.done
			return emit(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: p.end}})
		default:
			event = &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: dataEvent(c)}}
		}
		if err := emit(event); err != nil {
			return err
		}
	}
}

func readWithin(ctx context.Context, f *follower, d time.Duration) (chunk, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return f.read(ctx)
}

func dataEvent(c chunk) *processpb.ProcessEvent_DataEvent {
	switch c.stream {
	case streamStderr:
		return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stderr{Stderr: c.data}}
	case streamPTY:
		return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Pty{Pty: c.data}}
	default:
		return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stdout{Stdout: c.data}}
	}
}

// keepalive returns how often a silent stream shows that it lives.
func keepalive(h http.Header) time.Duration {
	seconds, err := strconv.Atoi(h.Get(keepaliveHeader))
	if err != nil || seconds < 1 || seconds > 24*3600 {
		return defaultKeepalive
	}
	return time.Duration(seconds) * time.Second
}

// Update changes the size of a process's terminal.
func (s *processService) Update(_ context.Context, req *connect.Request[processpb.UpdateRequest]) (*connect.Response[processpb.UpdateResponse], error) {
	p, err := s.table.findRunning(req.Msg.GetProcess())
	if err == nil && req.Msg.GetPty().GetSize() != nil {
		err = p.resize(req.Msg.GetPty().GetSize())
	}
	return connect.NewResponse(&processpb.UpdateResponse{}), processError(err)
}

// SendInput feeds a process's input once.
func (s *processService) SendInput(ctx context.Context, req *connect.Request[processpb.SendInputRequest]) (*connect.Response[processpb.SendInputResponse], error) {
	p, err := s.table.findRunning(req.Msg.GetProcess())
	if err == nil {
		err = p.write(ctx, req.Msg.GetInput())
	}
	return connect.NewResponse(&processpb.SendInputResponse{}), processError(err)
}

// StreamInput feeds a process's input for as long as the client sends.
func (s *processService) StreamInput(ctx context.Context, in *connect.ClientStream[processpb.StreamInputRequest]) (*connect.Response[processpb.StreamInputResponse], error) {
	var p *process
	for in.Receive() {
		var err error
		switch event := in.Msg().GetEvent().(type) {
		case *processpb.StreamInputRequest_Start:
			p, err = s.table.findRunning(event.Start.GetProcess())
		case *processpb.StreamInputRequest_Data:
			if p == nil {
				err = errNoSelector
			} else {
				err = p.write(ctx, event.Data.GetInput())
			}
		}
		if err != nil {
			return nil, processError(err)
		}
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.StreamInputResponse{}), nil
}

// SendSignal signals a process and its group.
func (s *processService) SendSignal(_ context.Context, req *connect.Request[processpb.SendSignalRequest]) (*connect.Response[processpb.SendSignalResponse], error) {
	sig := req.Msg.GetSignal()
	if sig < 1 || sig > 64 {
		return nil, processError(fmt.Errorf("%w: signal %d", errBadRequest, sig))
	}
	p, err := s.table.findRunning(req.Msg.GetProcess())
	if err == nil {
		err = p.signal(unix.Signal(sig))
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), processError(err)
}

// CloseStdin ends a process's input.
func (s *processService) CloseStdin(_ context.Context, req *connect.Request[processpb.CloseStdinRequest]) (*connect.Response[processpb.CloseStdinResponse], error) {
	p, err := s.table.findRunning(req.Msg.GetProcess())
	if err == nil {
		err = p.closeStdin()
	}
	return connect.NewResponse(&processpb.CloseStdinResponse{}), processError(err)
}

// processError gives an error the code that SDKs know it by. nil stays nil.
func processError(err error) error {
	if err == nil {
		return nil
	}
	code := connect.CodeInternal
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		code = connect.CodeDeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = connect.CodeCanceled
	case errors.Is(err, errNoUser):
		code = connect.CodeUnauthenticated
	case errors.Is(err, errBadCommand), errors.Is(err, errBadRequest), errors.Is(err, errNoSelector):
		code = connect.CodeInvalidArgument
	case errors.Is(err, errNoCommand), errors.Is(err, errNoProcess), errors.Is(err, errEnded):
		code = connect.CodeNotFound
	case errors.Is(err, errNoStdin), errors.Is(err, errNoPTY), errors.Is(err, errHasPTY), errors.Is(err, errWrongKind):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, fs.ErrNotExist): // a script whose interpreter is missing
		code = connect.CodeNotFound
	case errors.Is(err, fs.ErrPermission):
		code = connect.CodePermissionDenied
	case errors.Is(err, syscall.ENOEXEC), errors.Is(err, syscall.E2BIG):
		code = connect.CodeInvalidArgument
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE):
		code = connect.CodeResourceExhausted
	}
	return connect.NewError(code, err)
}
