package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// machineConfig is what a machine keeps of its Spec.
type machineConfig struct {
	memoryPath  string
	memoryBytes int64
	statePath   string
	incoming    bool // waits for LoadState
	console     io.Writer
	log         *slog.Logger
}

// machine is one QEMU process. It implements vmm.Machine.
type machine struct {
	machineConfig
	process   *os.Process
	stderr    *tail
	monitor   *monitor
	state     *os.File    // that LoadState fills and QEMU reads; nil: it waits for none
	migration chan string // statuses of the incoming migration, in order
	exited    chan struct{}
	exit      vmm.Exit // set before exited is closed

	mu      sync.Mutex
	cause   vmm.Exit // what was found out so far about the end to come
	runs    bool     // whether the vCPUs were last ordered to run
	loaded  bool     // LoadState succeeded
	mapping *memoryMapping
}

var _ vmm.Machine = (*machine)(nil)

// newMachine takes over a process that just started, its connections and the
// channel that tells of its end.
func newMachine(process *os.Process, stderr *tail, links links, config machineConfig, ended <-chan error) *machine {
	m := &machine{
		machineConfig: config,
		process:       process,
		stderr:        stderr,
		state:         links.state,
		migration:     make(chan string, 16),
		exited:        make(chan struct{}),
	}
	m.monitor = newMonitor(links.monitor, m.onEvent)
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		copyConsole(m.console, links.console)
	}()
	go m.supervise(ended, printed, links.console)
	return m
}

// greet waits until QEMU takes orders.
func (m *machine) greet(ctx context.Context) error {
	if err := m.monitor.handshake(ctx); err != nil {
		return m.explain(err)
	}
	if !m.incoming {
		return nil
	}
	return m.execute(ctx, "migrate-set-capabilities", map[string]any{
		"capabilities": []map[string]any{{"capability": "events", "state": true}},
	}, nil)
}

// copyConsole hands what the guest prints to w until the connection ends. The
// guest waits where w is slow; where w fails the rest is dropped.
func copyConsole(w io.Writer, console net.Conn) {
	if w != nil {
		io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{console}, make([]byte, 4096))
	}
	io.Copy(io.Discard, console)
}

// supervise waits for the end of the process, and for what it and its guest
// said last, and publishes the end.
func (m *machine) supervise(ended <-chan error, printed <-chan struct{}, console net.Conn) {
	var failure error
	select {
	case failure = <-ended:
	case <-m.monitor.done: // it ends, or can take no orders any more
		select {
		case failure = <-ended:
		case <-time.After(drainTime):
			m.process.Kill()
			failure = <-ended
		}
	}
	// A process that the wrapper left behind may still hold the other end.
	stop := time.AfterFunc(drainTime, func() { m.monitor.conn.Close() })
	<-m.monitor.done
	stop.Stop()
	select {
	case <-printed:
	case <-time.After(drainTime): // the console's writer blocks
	}
	console.Close()
	os.Remove(m.statePath)
	if m.state != nil {
		m.state.Close()
	}

	if failure == nil {
		failure = errors.New("exit status 0")
	}
	detail := failure.Error()
	if said := strings.TrimSpace(m.stderr.String()); said != "" {
		detail += ": " + said
	}
	m.mu.Lock()
	m.blame(vmm.ReasonCrashed, detail)
	m.exit = m.cause
	m.mu.Unlock()
	close(m.exited)
}

// blame records why the machine ends, unless an earlier reason is known. The
// caller holds m.mu.
func (m *machine) blame(reason vmm.Reason, detail string) {
	if m.cause.Reason == "" {
		m.cause = vmm.Exit{Reason: reason, Detail: detail}
	}
}

// onEvent learns from QEMU's events. It runs on the monitor's reading goroutine.
func (m *machine) onEvent(e qmpEvent) {
	switch e.Name {
	case "MIGRATION":
		var data struct{ Status string }
		if json.Unmarshal(e.Data, &data) == nil {
			select {
			case m.migration <- data.Status:
			default: // more than any migration reports
			}
		}
	case "GUEST_PANICKED":
		m.mu.Lock()
		defer m.mu.Unlock()
		m.blame(vmm.ReasonPanic, "the guest's kernel panicked, see the console")
	case "SHUTDOWN":
		var data struct{ Reason string }
		if json.Unmarshal(e.Data, &data) == nil {
			m.onShutdown(data.Reason)
		}
	case "STOP":
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.runs {
			go m.checkStop()
		}
	}
}

func (m *machine) onShutdown(reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch reason {
	case "guest-shutdown":
		m.blame(vmm.ReasonShutdown, "the guest powered off")
	case "guest-reset":
		m.blame(vmm.ReasonReset, "the guest rebooted")
	case "guest-panic":
		m.blame(vmm.ReasonPanic, "the guest's kernel panicked, see the console")
	}
}

// checkStop ends a machine whose vCPUs stopped without order because of an
// error that they cannot go on from.
func (m *machine) checkStop() {
	var state struct{ Status string }
	ctx, cancel := context.WithTimeout(context.Background(), orderTime)
	defer cancel()
	if err := m.monitor.execute(ctx, "query-status", nil, &state); err != nil {
		return // it ends anyway, or is busy with an order whose caller will notice
	}
	if state.Status == "internal-error" {
		m.abort("QEMU reports an internal error of the virtual CPU")
	}
}

// abort kills the process for a reason of the driver's own.
func (m *machine) abort(detail string) {
	m.mu.Lock()
	m.blame(vmm.ReasonCrashed, detail)
	m.mu.Unlock()
	m.process.Kill()
}

// execute is the monitor's, with ErrExited for a machine that ended meanwhile.
func (m *machine) execute(ctx context.Context, command string, args, result any) error {
	return m.explain(m.monitor.execute(ctx, command, args, result))
}

// explain returns err, or the machine's end where that is behind it.
func (m *machine) explain(err error) error {
	if !errors.Is(err, errDisconnected) {
		return err
	}
	<-m.exited // a lost monitor ends the process within moments
	return m.ended()
}

// ended returns nil while the machine lives, and after its end an error that
// wraps vmm.ErrExited.
func (m *machine) ended() error {
	select {
	case <-m.exited:
		return fmt.Errorf("%w: %s (%s)", vmm.ErrExited, m.exit.Detail, m.exit.Reason)
	default:
		return nil
	}
}

// PID implements vmm.Machine.
func (m *machine) PID() int { return m.process.Pid }

// Run implements vmm.Machine.
func (m *machine) Run(ctx context.Context) error {
	if err := m.ended(); err != nil {
		return err
	}
	m.mu.Lock()
	waits := m.incoming && !m.loaded
	m.runs = !waits
	m.mu.Unlock()
	if waits {
		return errors.New("the machine waits for a state to be loaded")
	}
	return m.execute(ctx, "cont", nil, nil)
}

// Pause implements vmm.Machine.
func (m *machine) Pause(ctx context.Context) error {
	m.mu.Lock()
	m.runs = false
	m.mu.Unlock()
	return m.execute(ctx, "stop", nil, nil)
}

// Exited implements vmm.Machine.
func (m *machine) Exited() <-chan struct{} { return m.exited }

// Exit implements vmm.Machine.
func (m *machine) Exit() vmm.Exit {
	if m.ended() == nil {
		return vmm.Exit{}
	}
	return m.exit
}

// Close implements vmm.Machine.
func (m *machine) Close() error {
	m.mu.Lock()
	m.blame(vmm.ReasonClosed, "")
	m.mu.Unlock()
	if m.ended() == nil {
		m.process.Kill() // fails only where the process has ended
	}
	<-m.exited
	return nil
}
