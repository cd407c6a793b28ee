package shim

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/fake"
)

// The steps of a machine at which a driver's on is called: "x" before the
// machine does x, "x-done" behind it.
const (
	stepRun     = "run"
	stepPaused  = "pause-done"
	stepState   = "state-done"
	stepScanned = "scan-done"
	stepRAM     = "ram"
)

// driver is the fake driver with guests that serve more ports and machines
// that can be interfered with.
type driver struct {
	*fake.Driver
	ports map[int]func(net.Conn) // set before Start

	mu   sync.Mutex
	on   func(m *machine, step string) error
	last *machine
}

func newDriver() *driver { return &driver{Driver: fake.New()} }

// at makes the driver call on from now on; nil: nothing.
func (d *driver) at(on func(m *machine, step string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.on = on
}

func (d *driver) hit(m *machine, step string) error {
	d.mu.Lock()
	on := d.on
	d.mu.Unlock()
	if on == nil {
		return nil
	}
	return on(m, step)
}

func (d *driver) Start(ctx context.Context, spec vmm.Spec) (vmm.Machine, error) {
	m, err := d.Driver.Start(ctx, spec)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last = &machine{Machine: m.(*fake.Machine), driver: d, dir: spec.Dir}
	return d.last, nil
}

// machine returns the machine that was started last.
func (d *driver) machine() *machine {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

type machine struct {
	*fake.Machine
	driver *driver
	dir    string
	served sync.WaitGroup
	runs   atomic.Bool // the vCPUs may run
}

func (m *machine) Run(ctx context.Context) error {
	if err := m.driver.hit(m, stepRun); err != nil {
		return err
	}
	m.runs.Store(true)
	return m.Machine.Run(ctx)
}

func (m *machine) Pause(ctx context.Context) error {
	if err := m.Machine.Pause(ctx); err != nil {
		return err
	}
	m.runs.Store(false)
	return m.driver.hit(m, stepPaused)
}

func (m *machine) SaveState(ctx context.Context, w io.Writer) error {
	if err := m.Machine.SaveState(ctx, w); err != nil {
		return err
	}
	return m.driver.hit(m, stepState)
}

func (m *machine) DirtyPages(ctx context.Context) ([]page.Run, error) {
	runs, err := m.Machine.DirtyPages(ctx)
	if err != nil {
		return nil, err
	}
	return runs, m.driver.hit(m, stepScanned)
}

func (m *machine) RAM() io.ReaderAt { return readerAt(m.readRAM) }

func (m *machine) readRAM(p []byte, off int64) (int, error) {
	if err := m.driver.hit(m, stepRAM); err != nil {
		return 0, err
	}
	return m.Machine.RAM().ReadAt(p, off)
}

type readerAt func(p []byte, off int64) (int, error)

func (f readerAt) ReadAt(p []byte, off int64) (int, error) { return f(p, off) }

// Dial reaches the driver's ports besides the fake's, by connections that have
// two halves.
func (m *machine) Dial(ctx context.Context, port int) (net.Conn, error) {
	serve := m.driver.ports[port]
	if serve == nil {
		return m.Machine.Dial(ctx, port)
	}
	ours, theirs, err := connPair()
	if err != nil {
		return nil, err
	}
	done := make(chan struct{})
	m.served.Go(func() {
		defer close(done)
		defer theirs.Close()
		serve(theirs)
	})
	m.served.Go(func() {
		select {
		case <-m.Exited():
			theirs.Close()
		case <-done:
		}
	})
	return ours, nil
}

func (m *machine) Close() error {
	err := m.Machine.Close()
	m.served.Wait()
	return err
}

// connPair returns the ends of a stream.
func connPair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	conns := [2]net.Conn{}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		conns[i], err = net.FileConn(f)
		f.Close()
		if err != nil {
			return nil, nil, err
		}
	}
	return conns[0], conns[1], nil
}
