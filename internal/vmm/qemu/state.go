package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/pager"
)

const (
	// maxState bounds a device state in bytes; usual are about 100 KB.
	maxState = 64 << 20
	// orderTime bounds what QEMU does without the guest's help.
	orderTime = time.Minute
)

// LoadState implements vmm.Machine. A state that QEMU cannot read ends QEMU; the
// error then holds what QEMU said about it.
func (m *machine) LoadState(ctx context.Context, r io.Reader) error {
	if err := m.ended(); err != nil {
		return err
	}
	if err := m.loadState(ctx, r); err != nil {
		return fmt.Errorf("load the device state: %w", err)
	}
	return nil
}

func (m *machine) loadState(ctx context.Context, r io.Reader) error {
	m.mu.Lock()
	fits := m.incoming && !m.loaded
	m.mu.Unlock()
	if !fits {
		return errors.New("the machine does not wait for one")
	}
	if err := m.fillState(r); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, orderTime)
	defer cancel()
	// A QEMU that is stuck in a state cannot be asked to stop.
	unwatch := context.AfterFunc(ctx, func() { m.abort("killed while it loaded a state: " + context.Cause(ctx).Error()) })
	err := m.readState(ctx)
	unwatch()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err == nil {
		m.mu.Lock()
		m.loaded = true
		m.mu.Unlock()
	}
	return err
}

// loadOrder are the arguments of the order to read the state from the file that
// QEMU was started with.
var loadOrder = map[string]string{"uri": "fd:" + strconv.Itoa(stateFD)}

// expectState says to QEMU beforehand most of what LoadState will.
func (m *machine) expectState() error {
	return m.explain(m.monitor.begin("migrate-incoming", loadOrder))
}

// readState has QEMU read its state. While it does so it is told most of what
// Run will say.
func (m *machine) readState(ctx context.Context) error {
	err := m.execute(ctx, "migrate-incoming", loadOrder, nil)
	if err == nil {
		err = m.explain(m.monitor.begin("cont", nil))
	}
	if err != nil {
		return err
	}
	if err := m.migrated(ctx); err != nil {
		return err
	}
	return m.state.Truncate(0) // QEMU needs it no more, and has closed it
}

// migrate has QEMU read ("migrate-incoming") or write ("migrate") an open file
// and waits until it has.
func (m *machine) migrate(ctx context.Context, command string, file *os.File) error {
	const name = "state"
	err := m.monitor.executeWithFile(ctx, "getfd", map[string]string{"fdname": name}, nil, file)
	if err != nil {
		return m.explain(err)
	}
	if err := m.execute(ctx, command, map[string]string{"uri": "fd:" + name}, nil); err != nil {
		return err
	}
	return m.migrated(ctx)
}

// migrated waits for the end of a migration.
func (m *machine) migrated(ctx context.Context) error {
	for {
		select {
		case status := <-m.migration:
			switch status {
			case "completed":
				return nil
			case "failed", "cancelled":
				return m.failure()
			}
		case <-m.exited:
			return m.ended()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// failure returns what QEMU said about a state that it could not load or write,
// before it ended itself.
func (m *machine) failure() error {
	select {
	case <-m.exited:
	case <-time.After(drainTime):
		m.abort("it could not load or write its state and did not end")
		<-m.exited
	}
	return m.ended()
}

// fillState reads r to its end into the file that QEMU will read from, without
// anybody feeding it. QEMU shares the file's offset, so that stays.
func (m *machine) fillState(r io.Reader) error {
	n, err := io.Copy(io.NewOffsetWriter(m.state, 0), io.LimitReader(r, maxState+1))
	if err == nil && n > maxState {
		err = fmt.Errorf("it is longer than %d bytes", maxState)
	}
	return err
}

// SaveState implements vmm.Machine.
func (m *machine) SaveState(ctx context.Context, w io.Writer) error {
	if err := m.ended(); err != nil {
		return err
	}
	if err := m.saveState(ctx, w); err != nil {
		return fmt.Errorf("save the device state: %w", err)
	}
	return nil
}

func (m *machine) saveState(ctx context.Context, w io.Writer) error {
	if err := m.mustBePaused(); err != nil {
		return err
	}
	defer os.Remove(m.statePath)
	// The name is history: the command works with every accelerator.
	err := m.execute(ctx, "xen-save-devices-state", map[string]any{"filename": m.statePath, "live": false}, nil)
	if err != nil {
		return err
	}
	f, err := os.Open(m.statePath)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(w, f)
	return err
}

func (m *machine) mustBePaused() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.runs {
		return errors.New("the machine is not paused")
	}
	return nil
}

// memoryMapping is where the guest's RAM lies in the QEMU process.
type memoryMapping struct {
	address uintptr
	length  int64
	reader  io.ReaderAt
}

// mapped finds the mapping of the memory file. QEMU keeps it for its whole life.
func (m *machine) mapped() (*memoryMapping, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mapping != nil {
		return m.mapping, nil
	}
	address, length, err := pager.Mapping(m.PID(), m.memoryPath)
	if err != nil {
		return nil, err
	}
	if length != m.memoryBytes {
		return nil, fmt.Errorf("%d bytes of memory file %s are mapped, not %d", length, m.memoryPath, m.memoryBytes)
	}
	m.mapping = &memoryMapping{address, length, pager.ProcessMemory(m.PID(), address, length)}
	return m.mapping, nil
}

// DirtyPages implements vmm.Machine.
func (m *machine) DirtyPages(ctx context.Context) ([]page.Run, error) {
	if err := m.ended(); err != nil {
		return nil, err
	}
	runs, err := m.dirtyPages(ctx)
	if err != nil {
		if ended := m.ended(); ended != nil {
			return nil, ended
		}
		return nil, fmt.Errorf("find dirty pages: %w", err)
	}
	return runs, nil
}

func (m *machine) dirtyPages(ctx context.Context) ([]page.Run, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := m.mustBePaused(); err != nil {
		return nil, err
	}
	mapping, err := m.mapped()
	if err != nil {
		return nil, err
	}
	return pager.Dirty(m.PID(), mapping.address, mapping.length)
}

// PresentPages implements vmm.Machine.
func (m *machine) PresentPages(context.Context) ([]page.Run, error) {
	if err := m.ended(); err != nil {
		return nil, err
	}
	mapping, err := m.mapped()
	if err != nil {
		return nil, err
	}
	return pager.Present(m.PID(), mapping.address, mapping.length)
}

// RAM implements vmm.Machine.
func (m *machine) RAM() io.ReaderAt { return ram{m} }

// ram reads the guest's memory out of the QEMU process.
type ram struct{ m *machine }

// ReadAt implements io.ReaderAt.
func (r ram) ReadAt(p []byte, off int64) (int, error) {
	if err := r.m.ended(); err != nil {
		return 0, err
	}
	mapping, err := r.m.mapped()
	if err != nil {
		return 0, fmt.Errorf("read guest memory: %w", err)
	}
	n, err := mapping.reader.ReadAt(p, off)
	if err != nil && !errors.Is(err, io.EOF) {
		if ended := r.m.ended(); ended != nil {
			return n, ended
		}
	}
	return n, err
}
