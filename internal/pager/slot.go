package pager

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/hibernacle/hibernacle/internal/page"
)

// Zero is a source of endless zeros: the RAM of a machine that boots.
var Zero io.ReaderAt = zeros{}

type zeros struct{}

func (zeros) ReadAt(p []byte, _ int64) (int, error) {
	clear(p)
	return len(p), nil
}

// Stats counts what a slot was asked for, and what was there before it was
// asked for. Pages count once.
type Stats struct {
	Reads       int64 // READ requests answered with bytes
	BytesRead   int64 // bytes of those answers
	DemandPages int64 // pages in them that were not pushed before
	LatePages   int64 // of these, those that were expected
	PushedPages int64 // pages pushed before they were read
	ZeroPages   int64 // beside these, zeros pushed behind reads of zeros
}

// Slot is one file of a server: the RAM of one VMM. Its methods may be called
// at the same time.
type Slot struct {
	name, path string
	size       int64
	node       uint64
	store      func(node uint64, off int64, p []byte) fuse.Status

	reads, bytesRead atomic.Int64
	record           *record
	ahead            atomic.Bool // zeros are being pushed behind a read

	mu     sync.RWMutex
	closed bool
	src    io.ReaderAt
	err    error
	failed chan struct{} // closed once err is set
}

func newSlot(name string, size int64, node uint64) *Slot {
	return &Slot{name: name, size: size, node: node, record: newRecord(size / page.Size), failed: make(chan struct{})}
}

// Path returns the absolute path of the slot's file.
func (l *Slot) Path() string { return l.path }

// Bind gives the slot its source, which must hold as many bytes as the slot,
// serve concurrent reads and stay open until the server is closed. It returns
// ErrBound if the slot has one, and an error that wraps ErrUnbound if the slot
// was read before: such a slot is spoiled, since a reader saw an error.
func (l *Slot) Bind(src io.ReaderAt) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return fmt.Errorf("bind slot %s: %w", l.name, ErrClosed)
	case l.err != nil:
		return fmt.Errorf("bind slot: %w", l.err)
	case l.src != nil:
		return fmt.Errorf("bind slot %s: %w", l.name, ErrBound)
	}
	l.src = src
	return nil
}

// Push puts p into the kernel's page cache at offset off, so that faults
// there need no READ. Both must be multiples of the page size. Bytes that a
// process sees are not changed by it, as long as p equals the source there.
// It fails while no process has opened the file. It waits for READs of the
// same pages to be answered, so the answer of a READ must never wait for a
// Push; a process that is killed meanwhile ends only with its mount, see
// CleanStale.
func (l *Slot) Push(off int64, p []byte) error { return l.push(off, p, false) }

// push is Push; ahead says that p are zeros that nobody asked for.
func (l *Slot) push(off int64, p []byte, ahead bool) error {
	if off < 0 || off%page.Size != 0 || len(p)%page.Size != 0 || off > l.size-int64(len(p)) {
		return fmt.Errorf("push to slot %s: bytes %d+%d are not pages of its %d bytes", l.name, off, len(p), l.size)
	}
	l.mu.RLock()
	closed, bound := l.closed, l.src != nil
	l.mu.RUnlock()
	switch {
	case closed:
		return fmt.Errorf("push to slot %s: %w", l.name, ErrClosed)
	case !bound:
		return fmt.Errorf("push to slot %s: no source is bound", l.name)
	}
	if status := l.store(l.node, off, p); !status.Ok() {
		return fmt.Errorf("push to slot %s (is its file open?): %v", l.name, status)
	}
	l.record.wasPushed(uint64(off)/page.Size, uint64(len(p))/page.Size, ahead)
	return nil
}

// Stats returns the counts since the slot was made.
func (l *Slot) Stats() Stats {
	l.record.mu.Lock()
	defer l.record.mu.Unlock()
	return Stats{
		Reads: l.reads.Load(), BytesRead: l.bytesRead.Load(),
		DemandPages: l.record.demand, LatePages: l.record.late, PushedPages: l.record.push, ZeroPages: l.record.zeros,
	}
}

// Failed is closed when a READ could not be answered, or none will be any more.
// Err then says why.
func (l *Slot) Failed() <-chan struct{} { return l.failed }

// Err returns the first failure of the slot, nil if there was none.
func (l *Slot) Err() error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.err
}

// read fills p with the bytes at off, all of them up to the end of the slot.
func (l *Slot) read(p []byte, off int64) (int, error) {
	src, err := l.source(off)
	if err != nil {
		return 0, err
	}
	if off >= l.size {
		return 0, nil
	}
	p = p[:min(int64(len(p)), l.size-off)]
	n, err := src.ReadAt(p, off)
	if n < len(p) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF // the source is shorter than the slot
		}
		err = fmt.Errorf("slot %s: read %d bytes at %d: %w", l.name, len(p), off, err)
		l.mu.Lock()
		defer l.mu.Unlock()
		return 0, l.fail(err)
	}
	l.reads.Add(1)
	l.bytesRead.Add(int64(n))
	l.record.answered(off, n)
	l.pushZeros(src, uint64(off+int64(n))/page.Size)
	return n, nil
}

// Sparse is a source that knows where it is zero. Zeros returns how many pages
// from page first on are known to be zero, n at most.
type Sparse interface {
	Zeros(first, n uint64) uint64
}

// zerosAhead is how many pages of zeros are pushed behind a read that ended in
// zeros: a guest that takes memory which it never used goes on with the next page,
// and zeros cost no more than the push.
const zerosAhead = 32

var zeroPages [zerosAhead * page.Size]byte

// pushZeros pushes zeros from page next on, if the page before is zero, too. It
// does not wait for that, and does nothing while another push of zeros is under way.
func (l *Slot) pushZeros(src io.ReaderAt, next uint64) {
	s, ok := src.(Sparse)
	if !ok || next == 0 || !l.ahead.CompareAndSwap(false, true) {
		return
	}
	if n := s.Zeros(next-1, 1+zerosAhead); n > 1 {
		go func() {
			defer l.ahead.Store(false)
			_, _ = l.pushUnread(int64(next)*page.Size, zeroPages[:(n-1)*page.Size], true) // a page that is not pushed is read
		}()
		return
	}
	l.ahead.Store(false)
}

// source returns the slot's source. Without one the slot fails.
func (l *Slot) source(off int64) (io.ReaderAt, error) {
	l.mu.RLock()
	src := l.src
	l.mu.RUnlock()
	if src != nil {
		return src, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.src != nil { // bound in between
		return l.src, nil
	}
	return nil, l.fail(fmt.Errorf("slot %s: %w at %d", l.name, ErrUnbound, off))
}

// fail keeps err if it is the first, and returns it. l.mu is held.
func (l *Slot) fail(err error) error {
	if l.err == nil {
		l.err = err
		close(l.failed)
	}
	return err
}

func (l *Slot) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}
