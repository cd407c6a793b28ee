package fake

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"

	"github.com/hibernacle/hibernacle/internal/page"
)

// memory is RAM mapped privately from a file: what was never written is read
// from the file at that moment, what was written is kept here.
type memory struct {
	file *os.File
	size int64

	mu      sync.Mutex
	written map[uint64][]byte // by page number
}

func openMemory(path string, size int64) (*memory, error) {
	// os.Open would have the runtime poll the file, which it does not take for a
	// system call that blocks: a pager of this process could not answer.
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("memory file: open %s: %w", path, err)
	}
	file := os.NewFile(uintptr(fd), path)
	info, err := file.Stat()
	if err == nil && info.Size() != size {
		err = fmt.Errorf("memory file %s is %d bytes long: must be %d as the machine's memory is", path, info.Size(), size)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return &memory{file: file, size: size, written: make(map[uint64][]byte)}, nil
}

// ReadAt implements io.ReaderAt. An error of the file is what a real machine
// would die of.
func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if off < 0 || off > m.size {
		return 0, fmt.Errorf("offset %d is outside the machine's memory", off)
	}
	done := 0
	for done < len(p) && off < m.size {
		n, within := off/page.Size, off%page.Size
		part := p[done:min(int64(len(p)), int64(done)+page.Size-within)]
		if data, ok := m.written[uint64(n)]; ok {
			copy(part, data[within:])
		} else if _, err := m.file.ReadAt(part, off); err != nil {
			return done, err
		}
		done += len(part)
		off += int64(len(part))
	}
	if done < len(p) {
		return done, io.EOF
	}
	return done, nil
}

// writePages writes data, whole pages, from page first on. A page that already
// holds its data is not made dirty.
func (m *memory) writePages(first uint64, data []byte) error {
	if len(data)%page.Size != 0 || int64(first)*page.Size+int64(len(data)) > m.size {
		return fmt.Errorf("%d bytes at page %d are not pages of the machine's memory", len(data), first)
	}
	old := make([]byte, page.Size)
	for i := 0; i < len(data); i += page.Size {
		n, fresh := first+uint64(i/page.Size), data[i:i+page.Size]
		if _, err := m.ReadAt(old, int64(n)*page.Size); err != nil {
			return err
		}
		if !bytes.Equal(old, fresh) {
			m.mu.Lock()
			m.written[n] = bytes.Clone(fresh)
			m.mu.Unlock()
		}
	}
	return nil
}

func (m *memory) dirty() []page.Run {
	m.mu.Lock()
	defer m.mu.Unlock()
	var runs []page.Run
	for _, n := range slices.Sorted(maps.Keys(m.written)) {
		runs = page.Append(runs, n)
	}
	return runs
}

func (m *memory) close() error { return m.file.Close() }
