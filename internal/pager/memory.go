package pager

import (
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// ProcessMemory returns a reader of length bytes of process pid's memory, of
// which offset 0 is the byte at addr. Its ReadAt may be called at the same
// time. It returns io.EOF behind the end, and an error that wraps ErrNoProcess
// once the process has ended, ErrNotMapped where nothing is mapped or a page
// cannot be had.
func ProcessMemory(pid int, addr uintptr, length int64) io.ReaderAt {
	return &processMemory{pid: pid, addr: addr, length: length}
}

type processMemory struct {
	pid    int
	addr   uintptr
	length int64
}

// maxTransfer bounds one system call, in bytes: enough to hide its cost, little
// enough to keep a thread from being held for long.
const maxTransfer = 1 << 20

func (m *processMemory) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read memory of process %d: negative offset %d", m.pid, off)
	}
	if off >= m.length {
		return 0, io.EOF
	}
	short := int64(len(p)) > m.length-off
	if short {
		p = p[:m.length-off]
	}
	done := 0
	for done < len(p) {
		n, err := m.transfer(p[done:min(len(p), done+maxTransfer)], off+int64(done))
		done += n
		if err != nil {
			return done, fmt.Errorf("read memory of process %d at offset %d: %w", m.pid, off+int64(done), err)
		}
	}
	if short {
		return done, io.EOF
	}
	return done, nil
}

// transfer reads at least one byte, or returns an error.
func (m *processMemory) transfer(p []byte, off int64) (int, error) {
	local := []unix.Iovec{{Base: &p[0]}}
	local[0].SetLen(len(p))
	remote := []unix.RemoteIovec{{Base: m.addr + uintptr(off), Len: len(p)}}
	for {
		n, err := unix.ProcessVMReadv(m.pid, local, remote, 0)
		switch {
		case err == nil && n > 0:
			return n, nil
		case err == unix.EINTR:
			continue
		case err == nil || errors.Is(err, unix.ESRCH):
			return 0, ErrNoProcess
		case errors.Is(err, unix.EFAULT):
			return 0, fmt.Errorf("%w (%w)", ErrNotMapped, err)
		}
		return 0, err
	}
}
