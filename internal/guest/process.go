package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	processpb "github.com/hibernacle/hibernacle/api/process"
)

// copySize is how much output is read at once, in bytes.
const copySize = 32 << 10

// process is a program that was started for a user. It leads a session and a
// process group of its own.
type process struct {
	pid    uint32
	config *processpb.ProcessConfig
	tag    *string
	out    *journal

	keepAwake bool                             // it holds the sandbox awake
	done      chan struct{}                    // closed when it has ended and out is closed
	end       *processpb.ProcessEvent_EndEvent // set before done is closed

	os     *os.Process
	master *os.File // its terminal's master side, nil without a terminal
	slave  *os.File // held until it has ended: a terminal that nobody has open is hung up, and its process killed

	inputMu sync.Mutex
	input   *os.File // where its input is written: pipe or master; nil if it has none or it was closed

	killAtDeadline *time.Timer // nil without a deadline
}

var (
	errEnded     = errors.New("the process has ended")
	errNoStdin   = errors.New("the process was started without an input, or it was closed")
	errNoPTY     = errors.New("the process has no terminal")
	errHasPTY    = errors.New("the process has a terminal: send the end-of-file character (^D) to it")
	errWrongKind = errors.New("the process has a terminal: send pty data, not stdin")
)

// launch is what a process is started with.
type launch struct {
	command
	config  *processpb.ProcessConfig
	tag     *string
	stdin   bool
	pty     *processpb.PTY_Size // nil: pipes
	timeout time.Duration       // 0: none; then it is killed
	cgroup  int                 // descriptor of the cgroup to start in, or -1
	journal int                 // bytes of output to keep

	keepAwake bool
}

// pipes are a process's files: theirs go to the process, ours stay.
type pipes struct {
	theirs [3]*os.File
	input  *os.File
	output map[stream]*os.File
}

// startProcess starts a process with a first follower that misses nothing.
// ended is called once it has ended, before its followers learn of it.
func startProcess(s *spawner, l launch, ended func(*process)) (*process, *follower, error) {
	files, err := openPipes(l)
	if err != nil {
		return nil, nil, err
	}
	attr := &os.ProcAttr{
		Dir: l.dir,
		Env: l.env,
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Setctty:    l.pty != nil,
			Credential: &syscall.Credential{Uid: l.user.UID, Gid: l.user.GID, Groups: l.user.Groups},
		},
	}
	for _, f := range files.theirs {
		attr.Files = append(attr.Files, f)
	}
	if l.cgroup >= 0 {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, l.cgroup
	}
	child, err := s.start(l.path, l.argv, attr)
	if l.pty == nil {
		files.closeTheirs()
	}
	if err != nil {
		files.close()
		return nil, nil, err
	}
	p := &process{
		pid: uint32(child.Pid), config: l.config, tag: l.tag, keepAwake: l.keepAwake,
		out: newJournal(l.journal), done: make(chan struct{}),
		os: child, input: files.input, master: files.output[streamPTY],
	}
	if l.pty != nil {
		p.slave = files.theirs[0]
	}
	first := p.out.follow(false)
	if l.timeout > 0 {
		p.killAtDeadline = time.AfterFunc(l.timeout, func() { _ = p.signal(unix.SIGKILL) })
	}
	var drained sync.WaitGroup
	for kind, f := range files.output {
		drained.Add(1)
		go p.pump(kind, f, drained.Done)
	}
	go p.await(s, files.output, &drained, ended)
	return p, first, nil
}

func openPipes(l launch) (files *pipes, err error) {
	files = &pipes{output: map[stream]*os.File{}}
	defer func() {
		if err != nil {
			files.close()
		}
	}()
	if l.pty != nil {
		master, slave, err := openPTY(l.pty.GetCols(), l.pty.GetRows())
		if err != nil {
			return files, err
		}
		// The slave shows who uses the terminal; its owner may open it again.
		if err := slave.Chown(int(l.user.UID), -1); err != nil {
			return files, errors.Join(err, master.Close(), slave.Close())
		}
		files.input, files.output[streamPTY] = master, master
		files.theirs = [3]*os.File{slave, slave, slave}
		return files, nil
	}
	if l.stdin {
		files.theirs[0], files.input, err = os.Pipe()
	} else {
		files.theirs[0], err = os.Open(os.DevNull)
	}
	if err != nil {
		return files, err
	}
	if files.output[streamStdout], files.theirs[1], err = os.Pipe(); err != nil {
		return files, err
	}
	files.output[streamStderr], files.theirs[2], err = os.Pipe()
	return files, err
}

func (f *pipes) closeTheirs() {
	for _, file := range f.theirs {
		if file != nil {
			file.Close() // a terminal's stands there three times, and closes once
		}
	}
}

// close closes both sides.
func (f *pipes) close() {
	f.closeTheirs()
	if f.input != nil {
		f.input.Close()
	}
	for _, out := range f.output {
		if out != nil {
			out.Close()
		}
	}
}

// pump moves output into the journal. It calls drained when all that the
// process itself wrote is there. Afterwards it goes on to read, for the
// process's children may hold the pipe and must not die of a closed one.
func (p *process) pump(kind stream, f *os.File, drained func()) {
	defer f.Close()
	buf := make([]byte, copySize)
	var err error
	for err == nil {
		err = p.copyOnce(kind, f, buf)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) { // the process has ended
		_ = f.SetReadDeadline(time.Time{})
		for left := buffered(f); left > 0; {
			n, err := f.Read(buf[:min(left, len(buf))])
			p.record(kind, buf[:n])
			left -= n
			if err != nil {
				break
			}
		}
	}
	drained()
	for err = nil; err == nil; {
		_, err = f.Read(buf)
	}
}

func (p *process) copyOnce(kind stream, f *os.File, buf []byte) error {
	n, err := f.Read(buf)
	p.record(kind, buf[:n])
	return err
}

func (p *process) record(kind stream, data []byte) {
	if len(data) > 0 {
		p.out.write(chunk{kind, append([]byte(nil), data...)})
	}
}

// buffered returns how many bytes can be read from f at once.
func buffered(f *os.File) (n int) {
	_ = control(f, func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.TIOCINQ)
		return err
	})
	return n
}

// terminalDrain is how long output of a terminal whose process has ended may
// still be on its way through the kernel.
const terminalDrain = time.Second

// await waits for the process's end and then ends its journal.
func (p *process) await(s *spawner, output map[stream]*os.File, drained *sync.WaitGroup, ended func(*process)) {
	state, err := s.wait(p.os)
	if p.slave != nil {
		p.slave.Close()
	}
	if p.killAtDeadline != nil {
		p.killAtDeadline.Stop()
	}
	now := time.Now()
	for kind, f := range output {
		if kind == streamPTY {
			// Its session's end hangs the terminal up, and the read ends.
			_ = f.SetReadDeadline(now.Add(terminalDrain))
		} else {
			_ = f.SetReadDeadline(now)
		}
	}
	drained.Wait()
	_ = p.closeInput()
	p.end = endEvent(state, err)
	ended(p)
	p.out.close()
	close(p.done)
}

func endEvent(state *os.ProcessState, err error) *processpb.ProcessEvent_EndEvent {
	if err != nil {
		msg := fmt.Sprintf("wait for the process: %v", err)
		return &processpb.ProcessEvent_EndEvent{ExitCode: -1, Status: "unknown", Error: &msg}
	}
	end := &processpb.ProcessEvent_EndEvent{
		ExitCode: int32(state.ExitCode()), Exited: state.Exited(), Status: state.String(),
	}
	if !state.Success() {
		end.Error = &end.Status
	}
	return end
}

// signal sends a signal to the process and its group.
func (p *process) signal(sig unix.Signal) error {
	select {
	case <-p.done:
		return errEnded
	default:
	}
	err := unix.Kill(-int(p.pid), sig)
	if errors.Is(err, unix.ESRCH) {
		return errEnded
	}
	return err
}

// write feeds the process's input and waits as long as ctx allows for the
// process to take it.
func (p *process) write(ctx context.Context, in *processpb.ProcessInput) error {
	data := in.GetStdin()
	if pty, ok := in.GetInput().(*processpb.ProcessInput_Pty); ok {
		if p.master == nil {
			return errNoPTY
		}
		data = pty.Pty
	} else if p.master != nil {
		return errWrongKind
	}
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if p.input == nil {
		return errNoStdin
	}
	if err := p.input.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	f := p.input
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := f.Write(data)
	switch {
	case ctx.Err() != nil && err != nil:
		return ctx.Err()
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO), errors.Is(err, os.ErrClosed):
		return errNoStdin
	}
	return err
}

// closeStdin ends the input of a process without a terminal.
func (p *process) closeStdin() error {
	if p.master != nil {
		return errHasPTY
	}
	return p.closeInput()
}

// closeInput closes the input pipe; the master of a terminal is closed by its pump.
func (p *process) closeInput() error {
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	input := p.input
	p.input = nil
	if input == nil || p.master != nil {
		return nil
	}
	return input.Close()
}

func (p *process) resize(size *processpb.PTY_Size) error {
	if p.master == nil {
		return errNoPTY
	}
	err := resizePTY(p.master, size.GetCols(), size.GetRows())
	if errors.Is(err, os.ErrClosed) {
		return errEnded
	}
	return err
}

func (p *process) info() *processpb.ProcessInfo {
	return &processpb.ProcessInfo{Config: p.config, Pid: p.pid, Tag: p.tag}
}
