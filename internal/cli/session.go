package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/term"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// execSession is one process in a sandbox as hib exec follows it. Its helpers
// (input, signals) begin to act once the process's pid is known.
type execSession struct {
	*app
	o       execOptions
	procs   processconnect.ProcessClient
	pid     uint32
	started chan struct{} // closed once pid is known
	cancel  context.CancelCauseFunc
}

var (
	errInterrupted = errors.New("interrupted")
	errAbandoned   = errors.New("interrupted")
)

// run starts the process, or attaches to one, and follows it to its end.
func (s *execSession) run(ctx context.Context, env map[string]string) error {
	ctx, s.cancel = context.WithCancelCause(ctx)
	defer s.cancel(nil)
	s.started = make(chan struct{})
	defer s.forwardSignals(ctx)()
	if s.o.attach != 0 {
		s.pid = s.o.attach
		req := connect.NewRequest(&process.ConnectRequest{Process: s.selector()})
		req.Header().Set(guestapi.ReplayHeader, "1") // what it printed meanwhile comes first
		stream, err := s.procs.Connect(ctx, req)
		if err != nil {
			return s.lost(ctx, err)
		}
		return s.follow(ctx, stream, func() *process.ProcessEvent { return stream.Msg().GetEvent() })
	}
	req := connect.NewRequest(s.startRequest(env))
	if s.o.keepAwake {
		req.Header().Set(guestapi.KeepAwakeHeader, "1")
	}
	stream, err := s.procs.Start(ctx, req)
	if err != nil {
		return s.lost(ctx, err)
	}
	return s.follow(ctx, stream, func() *process.ProcessEvent { return stream.Msg().GetEvent() })
}

func (s *execSession) startRequest(env map[string]string) *process.StartRequest {
	req := &process.StartRequest{
		Process: &process.ProcessConfig{Cmd: s.o.cmd[0], Args: s.o.cmd[1:], Envs: env},
		Stdin:   new(s.o.interactive),
	}
	if s.o.cwd != "" {
		req.Process.Cwd = new(s.o.cwd)
	}
	if s.o.tty {
		req.Pty = &process.PTY{Size: s.windowSize()}
		if t := os.Getenv("TERM"); t != "" && env["TERM"] == "" {
			env["TERM"] = t
		}
	}
	return req
}

// selector names the process.
func (s *execSession) selector() *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: s.pid}}
}

// eventStream is what the streams of Start and Connect have in common.
type eventStream interface {
	Receive() bool
	Err() error
	Close() error
}

// follow shows what the process prints until it ends.
func (s *execSession) follow(ctx context.Context, stream eventStream, event func() *process.ProcessEvent) error {
	defer stream.Close()
	for stream.Receive() {
		switch ev := event().GetEvent().(type) {
		case *process.ProcessEvent_Start:
			if s.begun() {
				continue
			}
			s.pid = ev.Start.GetPid()
			close(s.started)
			if s.o.detach {
				return s.printPID()
			}
			restore, err := s.openInput(ctx)
			if err != nil {
				return err
			}
			defer restore()
		case *process.ProcessEvent_Data:
			if err := s.show(ev.Data); err != nil {
				return err
			}
		case *process.ProcessEvent_End:
			if code := api.ExitCode(ev.End.GetExitCode(), ev.End.GetExited(), ev.End.GetStatus()); code != 0 {
				return commandExit(code)
			}
			return nil
		}
	}
	return s.lost(ctx, stream.Err())
}

func (s *execSession) begun() bool {
	select {
	case <-s.started:
		return true
	default:
		return false
	}
}

func (s *execSession) printPID() error {
	if s.json {
		return s.printJSON(map[string]uint32{"pid": s.pid})
	}
	_, err := fmt.Fprintln(s.Out, s.pid)
	return err
}

func (s *execSession) show(d *process.ProcessEvent_DataEvent) error {
	for _, out := range []struct {
		w io.Writer
		p []byte
	}{{s.Out, d.GetStdout()}, {s.Err, d.GetStderr()}, {s.Out, d.GetPty()}} {
		if len(out.p) == 0 {
			continue
		}
		if _, err := out.w.Write(out.p); err != nil {
			return fmt.Errorf("print what the command printed: %w", err)
		}
	}
	return nil
}

// lost explains the end of a stream that came before the end of the process.
func (s *execSession) lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	if !s.begun() {
		return err
	}
	return hintError{
		fmt.Sprintf("the connection to process %d was lost", s.pid), err,
		fmt.Sprintf("it may go on: hib exec --attach %d %s", s.pid, s.o.id),
	}
}

// forwardSignals passes signals on to the process. Before it has started, and
// when it does not end, they end this command. The caller calls stop.
func (s *execSession) forwardSignals(ctx context.Context) (stop func()) {
	ch := make(chan os.Signal, 16)
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	if s.o.tty {
		signal.Notify(ch, syscall.SIGWINCH)
	}
	go func() {
		passed := 0
		for {
			select {
			case <-ctx.Done():
				return
			case sig := <-ch:
				if sig == syscall.SIGWINCH {
					s.resize(ctx)
					continue
				}
				passed++
				s.signal(ctx, sig.(syscall.Signal), passed)
			}
		}
	}()
	return func() { signal.Stop(ch) }
}

const (
	maxSignals    = 3 // that are passed on before this command gives up
	signalTimeout = 10 * time.Second
)

// signal passes one signal on, the passed-th.
func (s *execSession) signal(ctx context.Context, sig syscall.Signal, passed int) {
	if !s.begun() {
		s.cancel(errInterrupted)
		return
	}
	if passed > maxSignals {
		s.cancel(errAbandoned)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	_, err := s.procs.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{
		Process: s.selector(), Signal: process.Signal(sig),
	}))
	switch {
	case sig == syscall.SIGHUP: // nobody looks any more
		s.cancel(errAbandoned)
	case err != nil && connect.CodeOf(err) != connect.CodeNotFound: // it may have ended
		s.cancel(fmt.Errorf("pass the signal on: %w", err))
	}
}

// resize gives the process's terminal the size of the one here.
func (s *execSession) resize(ctx context.Context) {
	if !s.begun() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	_, _ = s.procs.Update(ctx, connect.NewRequest(&process.UpdateRequest{
		Process: s.selector(), Pty: &process.PTY{Size: s.windowSize()},
	}))
}

// windowSize returns the size of the terminal here, or a common one.
func (s *execSession) windowSize() *process.PTY_Size {
	for _, stream := range []any{s.Out, s.In, s.Err} {
		if fd, ok := terminal(stream); ok {
			if cols, rows, err := term.GetSize(fd); err == nil && cols > 0 && rows > 0 {
				return &process.PTY_Size{Cols: uint32(cols), Rows: uint32(rows)}
			}
		}
	}
	return &process.PTY_Size{Cols: 80, Rows: 24}
}

// openInput begins to pass input on. With a terminal at both ends the one here
// becomes raw until restore is called.
func (s *execSession) openInput(ctx context.Context) (restore func(), err error) {
	restore = func() {}
	if !s.o.interactive {
		return restore, nil
	}
	if fd, ok := terminal(s.In); ok && s.o.tty {
		old, err := term.MakeRaw(fd)
		if err != nil {
			return restore, fmt.Errorf("make the terminal raw: %w", err)
		}
		restore = func() { _ = term.Restore(fd, old) }
	}
	// Reading the input can't be broken off: the goroutine may outlive this
	// command's work, and ends with the program.
	go s.pumpInput(ctx)
	return restore, nil
}

// pumpInput passes the input on to its end. A process that stops reading it is
// no error: the stream of events says what became of the process.
func (s *execSession) pumpInput(ctx context.Context) {
	if feedInput(ctx, s.procs, s.selector(), s.In, s.o.tty) != nil {
		return
	}
	if s.o.tty {
		s.endTerminal(ctx)
		return
	}
	_, _ = s.procs.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: s.selector()}))
}

// endTerminal tells a process with a terminal that no input follows. A program
// that is just setting its terminal up loses what comes then, as a shell that
// starts does: it is told again a few times, unless it has ended.
func (s *execSession) endTerminal(ctx context.Context) {
	for wait := endPause; wait < endPause<<endTries; wait *= 2 {
		_, err := s.procs.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{
			Process: s.selector(), Input: inputOf([]byte{endOfTransmission}, true),
		}))
		if err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// How often the end of a terminal's input is told, and the first pause between,
// which doubles.
const (
	endTries = 6
	endPause = 250 * time.Millisecond
)

// endOfTransmission is what Ctrl-D sends: it ends the input of a terminal.
const endOfTransmission = 4

// inputChunk is the most that one message of input carries, in bytes.
const inputChunk = 64 << 10

// feedInput streams r to a process's input. It does not end that input.
func feedInput(ctx context.Context, procs processconnect.ProcessClient, to *process.ProcessSelector, r io.Reader, pty bool) error {
	stream := procs.StreamInput(ctx)
	err := stream.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Start{
		Start: &process.StreamInputRequest_StartEvent{Process: to},
	}})
	buf := make([]byte, inputChunk)
	for err == nil {
		n, readErr := r.Read(buf)
		if n > 0 {
			err = stream.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Data{
				Data: &process.StreamInputRequest_DataEvent{Input: inputOf(buf[:n], pty)},
			}})
		}
		if readErr != nil {
			_, closeErr := stream.CloseAndReceive()
			if readErr == io.EOF {
				readErr = nil
			}
			return errors.Join(err, readErr, closeErr)
		}
	}
	// The reason for a failed Send is in the answer.
	if _, closeErr := stream.CloseAndReceive(); closeErr != nil {
		err = closeErr
	}
	return err
}

func inputOf(p []byte, pty bool) *process.ProcessInput {
	if pty {
		return &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: p}}
	}
	return &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: p}}
}
