package qemu

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm"
	"golang.org/x/sys/unix"
)

const (
	// stderrTail bounds what is kept of QEMU's standard error, in bytes.
	stderrTail = 8 << 10
	// drainTime is how long the end of a process waits for its last output.
	drainTime = time.Second
	// stateFile is where QEMU leaves its device state in Spec.Dir for a moment.
	stateFile = "state.tmp"
)

// Start implements vmm.Driver.
func (d *Driver) Start(ctx context.Context, spec vmm.Spec) (vmm.Machine, error) {
	m, err := d.start(ctx, spec, true)
	if err == nil && m.incoming {
		if err = m.expectState(); err != nil {
			m.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	return m, nil
}

// start starts QEMU, without huge pages if its memory is a file's.
func (d *Driver) start(ctx context.Context, spec vmm.Spec, fromFile bool) (*machine, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := checkShape(spec.Shape); err != nil {
		return nil, err
	}
	if _, err := net.ParseMAC(spec.MAC); err != nil {
		return nil, err
	}
	files, err := checkFiles(spec, fromFile)
	if err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(spec.Dir)
	if err != nil {
		return nil, err
	}
	links, err := connect(spec)
	if err != nil {
		return nil, err
	}
	stderr := &tail{max: stderrTail}
	cmd := d.command(arguments(d.config, d.hardware(), spec, files), links.theirs, stderr)
	ended, err := startChild(cmd, fromFile)
	links.closeTheirs()
	if err != nil {
		links.closeOurs()
		return nil, fmt.Errorf("%w; is it installed? %s", err, howToInstall)
	}
	m := newMachine(cmd.Process, stderr, links, machineConfig{
		memoryPath:  files.memory,
		memoryBytes: spec.Shape.MemoryBytes(),
		statePath:   filepath.Join(dir, stateFile),
		incoming:    spec.Boot == nil,
		console:     spec.Console,
		log:         d.config.Log,
	}, ended)
	if err := m.greet(ctx); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// command returns the process to be: with nothing of the caller's environment,
// killed when its parent dies.
func (d *Driver) command(args []string, files []*os.File, stderr io.Writer) *exec.Cmd {
	line := append(append([]string{}, d.config.WrapCommand...), d.config.Binary)
	line = append(line, args...)
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Env = environment()
	cmd.Dir = "/" // QEMU looks for its firmware in the working directory first
	cmd.Stderr = stderr
	cmd.ExtraFiles = files
	cmd.WaitDelay = drainTime
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// links are the connections of a machine: our ends, and theirs in the order of
// the descriptors that the command line names. state is an anonymous file that
// both have open, for a machine that waits for a state.
type links struct {
	monitor, console *net.UnixConn
	state            *os.File
	theirs           []*os.File
}

// connect makes the connections, that of the network card to the socket at
// spec.NetSocket.
func connect(spec vmm.Spec) (l links, err error) {
	defer func() {
		if err != nil {
			l.closeTheirs()
			l.closeOurs()
		}
	}()
	for _, end := range []**net.UnixConn{&l.monitor, &l.console} {
		ours, theirs, err := socketPair()
		if err != nil {
			return l, err
		}
		*end, l.theirs = ours, append(l.theirs, theirs)
	}
	card, err := dialUnix(spec.NetSocket)
	if err != nil {
		return l, fmt.Errorf("connect the network card to %s: %w", spec.NetSocket, err)
	}
	l.theirs = append(l.theirs, card)
	if spec.Boot != nil {
		return l, nil
	}
	fd, err := unix.MemfdCreate("state", unix.MFD_CLOEXEC)
	if err != nil {
		return l, fmt.Errorf("make an anonymous file: %w", err)
	}
	l.state = os.NewFile(uintptr(fd), "state")
	if fd, err = unix.FcntlInt(l.state.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return l, fmt.Errorf("duplicate a descriptor: %w", err)
	}
	l.theirs = append(l.theirs, os.NewFile(uintptr(fd), "state"))
	return l, nil
}

func (l *links) closeTheirs() {
	for _, f := range l.theirs {
		f.Close()
	}
	l.theirs = nil
}

func (l *links) closeOurs() {
	for _, c := range []*net.UnixConn{l.monitor, l.console} {
		if c != nil {
			c.Close()
		}
	}
	if l.state != nil {
		l.state.Close()
	}
}

func socketPair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close() // FileConn duplicates it
	conn, err := net.FileConn(ours)
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	return conn.(*net.UnixConn), theirs, nil
}

// dialUnix connects to the Unix socket at path, which may be longer than a
// socket address: then it is reached through its folder's descriptor.
func dialUnix(path string) (*os.File, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: name}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}
