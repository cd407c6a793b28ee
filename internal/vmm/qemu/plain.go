package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// Plain is a machine that is saved and restored as QEMU does it by itself:
// its RAM is anonymous memory, which QEMU's migration writes to a file and
// reads back whole. It is what this project is compared with.
type Plain struct{ *machine }

// StartPlain is Start for such a machine: the same processor and devices. The
// file Spec.MemoryPath is not used. Without Spec.Boot the machine waits for
// Restore. DirtyPages, PresentPages and RAM of a Plain fail.
func (d *Driver) StartPlain(ctx context.Context, spec vmm.Spec) (*Plain, error) {
	spec.MemoryPath = ""
	m, err := d.start(ctx, spec, false)
	if err != nil {
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	if err := m.ignoreShared(ctx); err != nil {
		m.Close()
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	return &Plain{m}, nil
}

// ignoreShared keeps the base image, which is mapped shared, out of what is
// saved and restored.
func (m *machine) ignoreShared(ctx context.Context) error {
	return m.execute(ctx, "migrate-set-capabilities", map[string]any{"capabilities": []map[string]any{
		{"capability": "events", "state": true},
		{"capability": "x-ignore-shared", "state": true},
	}}, nil)
}

// unthrottled is a rate in bytes a second that no disk reaches.
const unthrottled = 1 << 40

// SaveAll pauses the machine and writes RAM and state to f, from its present
// offset. The machine can only be closed afterwards.
func (p *Plain) SaveAll(ctx context.Context, f *os.File) error {
	err := p.Pause(ctx)
	if err == nil {
		err = p.execute(ctx, "migrate-set-parameters", map[string]any{"max-bandwidth": int64(unthrottled)}, nil)
	}
	if err == nil {
		err = p.migrate(ctx, "migrate", f)
	}
	if err != nil {
		return fmt.Errorf("save the machine: %w", err)
	}
	return nil
}

// RestoreAll reads what SaveAll wrote from f, from its present offset. The vCPUs
// stay stopped: Run follows.
func (p *Plain) RestoreAll(ctx context.Context, f *os.File) error {
	p.mu.Lock()
	fits := p.incoming && !p.loaded
	p.mu.Unlock()
	if !fits {
		return errors.New("restore the machine: it does not wait for that")
	}
	if err := p.migrate(ctx, "migrate-incoming", f); err != nil {
		return fmt.Errorf("restore the machine: %w", err)
	}
	p.mu.Lock()
	p.loaded = true
	p.mu.Unlock()
	return nil
}
