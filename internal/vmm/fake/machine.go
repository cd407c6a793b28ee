package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// stepTime is the pace of a Program.
const stepTime = 5 * time.Millisecond

// maxState bounds a device state in bytes.
const maxState = 1 << 20

// deviceState is what a machine knows outside its RAM.
type deviceState struct {
	Magic  string    `json:"magic"`
	Shape  vmm.Shape `json:"shape"`
	Pauses uint64    `json:"pauses"`
}

const stateMagic = "hib-fake-state-1"

// Machine is one fake machine. It implements vmm.Machine.
type Machine struct {
	driver  *Driver
	spec    vmm.Spec
	memory  *memory
	agent   *agent
	exited  chan struct{}
	program sync.WaitGroup // its goroutine

	mu      sync.Mutex
	exit    vmm.Exit
	state   *deviceState  // loaded and not yet run
	guest   *guest        // nil before the first Run
	running chan struct{} // closed while the vCPUs run
}

var _ vmm.Machine = (*Machine)(nil)

func newMachine(d *Driver, spec vmm.Spec, memory *memory) *Machine {
	m := &Machine{driver: d, spec: spec, memory: memory, exited: make(chan struct{}), running: make(chan struct{})}
	m.agent = newAgent(m)
	return m
}

// PID implements vmm.Machine: the process is this one.
func (m *Machine) PID() int { return os.Getpid() }

// ended returns nil while the machine lives, and then an error that wraps vmm.ErrExited.
func (m *Machine) ended() error {
	select {
	case <-m.exited:
		return fmt.Errorf("%w: %s (%s)", vmm.ErrExited, m.exit.Detail, m.exit.Reason)
	default:
		return nil
	}
}

// begin checks that an order can be carried out.
func (m *Machine) begin(ctx context.Context) error {
	if err := m.ended(); err != nil {
		return err
	}
	return ctx.Err()
}

// runs tells whether the vCPUs run. The caller holds m.mu.
func (m *Machine) runs() bool {
	select {
	case <-m.running:
		return true
	default:
		return false
	}
}

// LoadState implements vmm.Machine.
func (m *Machine) LoadState(ctx context.Context, r io.Reader) error {
	if err := m.begin(ctx); err != nil {
		return err
	}
	if err := m.loadState(ctx, r); err != nil {
		return fmt.Errorf("load the device state: %w", err)
	}
	return nil
}

func (m *Machine) loadState(ctx context.Context, r io.Reader) error {
	if err := inject(ctx, m.driver.currentFaults().LoadState); err != nil {
		return err
	}
	text, err := io.ReadAll(io.LimitReader(r, maxState))
	if err != nil {
		return err
	}
	state := new(deviceState)
	if err := json.Unmarshal(text, state); err != nil || state.Magic != stateMagic {
		return errors.New("it is not the state of a fake machine")
	}
	if state.Shape != m.spec.Shape {
		return fmt.Errorf("it is of a machine of shape %s, not %s", state.Shape, m.spec.Shape)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.spec.Boot != nil || m.state != nil || m.guest != nil {
		return errors.New("the machine does not wait for one")
	}
	m.state = state
	return nil
}

// SaveState implements vmm.Machine.
func (m *Machine) SaveState(ctx context.Context, w io.Writer) error {
	if err := m.begin(ctx); err != nil {
		return err
	}
	if err := m.saveState(ctx, w); err != nil {
		return fmt.Errorf("save the device state: %w", err)
	}
	return nil
}

func (m *Machine) saveState(ctx context.Context, w io.Writer) error {
	if err := inject(ctx, m.driver.currentFaults().SaveState); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.mustBePaused(); err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(deviceState{Magic: stateMagic, Shape: m.spec.Shape, Pauses: m.guest.Pauses})
}

func (m *Machine) mustBePaused() error {
	if m.guest == nil || m.runs() {
		return errors.New("the machine is not paused")
	}
	return nil
}

// Run implements vmm.Machine. A guest that its memory does not hold, or that is
// not of the loaded state's moment, ends the machine a moment later.
func (m *Machine) Run(ctx context.Context) error {
	if err := m.begin(ctx); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.runs() {
		return nil
	}
	if m.guest == nil {
		if m.spec.Boot == nil && m.state == nil {
			return errors.New("the machine waits for a state to be loaded")
		}
		if exit := m.wake(); exit != nil {
			m.finish(*exit)
			return nil
		}
		if m.driver.Program != nil {
			m.program.Go(m.runProgram)
		}
	}
	m.guest.since = time.Now()
	close(m.running)
	return nil
}

// wake makes the guest of a machine that runs for the first time, or says how
// that ends it. The caller holds m.mu.
func (m *Machine) wake() *vmm.Exit {
	if m.spec.Boot != nil {
		m.guest = &guest{Cmdline: m.spec.Boot.Cmdline}
		return nil
	}
	g, err := loadGuest(m.memory)
	switch {
	case errors.Is(err, errNoGuest):
		return &vmm.Exit{Reason: vmm.ReasonPanic, Detail: err.Error()}
	case err != nil:
		return busError(err)
	case g.Pauses != m.state.Pauses:
		return &vmm.Exit{Reason: vmm.ReasonPanic, Detail: "memory and device state are of different moments"}
	}
	m.guest = g
	return nil
}

// busError is the end of a machine whose memory cannot be read: the process of a
// real one would take SIGBUS.
func busError(err error) *vmm.Exit {
	return &vmm.Exit{Reason: vmm.ReasonCrashed, Detail: "signal: bus error: " + err.Error()}
}

// Pause implements vmm.Machine.
func (m *Machine) Pause(ctx context.Context) error {
	if err := m.begin(ctx); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.runs() {
		return nil
	}
	m.running = make(chan struct{})
	m.guest.advance(time.Now())
	m.guest.Pauses++
	if err := m.guest.store(m.memory); err != nil {
		m.finish(*busError(err))
		return m.ended()
	}
	return nil
}

// DirtyPages implements vmm.Machine.
func (m *Machine) DirtyPages(ctx context.Context) ([]page.Run, error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.mustBePaused(); err != nil {
		return nil, fmt.Errorf("find dirty pages: %w", err)
	}
	return m.memory.dirty(), nil
}

// PresentPages implements vmm.Machine: a fake guest touches everything.
func (m *Machine) PresentPages(context.Context) ([]page.Run, error) {
	if err := m.ended(); err != nil {
		return nil, err
	}
	return []page.Run{{Count: uint64(m.spec.Shape.MemoryBytes() / page.Size)}}, nil
}

// RAM implements vmm.Machine.
func (m *Machine) RAM() io.ReaderAt { return ram{m} }

type ram struct{ m *Machine }

// ReadAt implements io.ReaderAt.
func (r ram) ReadAt(p []byte, off int64) (int, error) {
	if err := r.m.ended(); err != nil {
		return 0, err
	}
	return r.m.memory.ReadAt(p, off)
}

// Exited implements vmm.Machine.
func (m *Machine) Exited() <-chan struct{} { return m.exited }

// Exit implements vmm.Machine.
func (m *Machine) Exit() vmm.Exit {
	if m.ended() == nil {
		return vmm.Exit{}
	}
	return m.exit
}

// Close implements vmm.Machine. It waits for a Write to the console under way.
func (m *Machine) Close() error {
	m.Crash(vmm.ReasonClosed)
	m.agent.close()
	m.program.Wait()
	return nil
}

// Crash ends the machine at once, for a reason of the caller's.
func (m *Machine) Crash(reason vmm.Reason) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.finish(vmm.Exit{Reason: reason, Detail: "ended from outside"})
}

// finish ends the machine unless it has ended. The caller holds m.mu.
func (m *Machine) finish(exit vmm.Exit) {
	if m.ended() != nil {
		return
	}
	m.running = make(chan struct{})
	m.exit = exit
	close(m.exited)
	m.agent.cut()
	m.memory.close()
}

// runProgram takes a step of the program at each tick while the vCPUs run.
func (m *Machine) runProgram() {
	ticker := time.NewTicker(stepTime)
	defer ticker.Stop()
	for {
		select {
		case <-m.exited:
			return
		case <-ticker.C:
			if line := m.takeStep(); line != "" && m.spec.Console != nil {
				io.WriteString(m.spec.Console, line+"\r\n")
			}
		}
	}
}

func (m *Machine) takeStep() (line string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.runs() {
		return ""
	}
	m.guest.advance(time.Now())
	if m.guest.Frozen {
		return ""
	}
	data := make([]byte, ProgramBytes)
	_, err := m.memory.ReadAt(data, programPage*page.Size)
	var end vmm.Reason
	if err == nil {
		m.guest.Step++
		line, end = m.driver.Program(data, m.guest.Cmdline, m.guest.Step)
		err = m.memory.writePages(programPage, data)
	}
	switch {
	case err != nil:
		m.finish(*busError(err))
		return ""
	case end != "":
		m.finish(vmm.Exit{Reason: end, Detail: "ended by the guest"})
		return ""
	}
	return line
}

// Dial connects to a TCP port of the guest. As the packets of a real one would,
// it waits while the machine does not run. The connection breaks with the machine.
func (m *Machine) Dial(ctx context.Context, port int) (net.Conn, error) {
	m.mu.Lock()
	running := m.running
	m.mu.Unlock()
	select {
	case <-running:
	case <-m.exited:
		return nil, m.ended()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if port != guestapi.Port && port != UserPort {
		return nil, fmt.Errorf("dial port %d of the guest: %w", port, syscall.ECONNREFUSED)
	}
	return m.agent.accept(ctx, port)
}
