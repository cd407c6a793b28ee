package pager

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/hibernacle/hibernacle/internal/page"
)

// maxRecorded bounds the pages that a slot's record holds: 256 MiB of them.
const maxRecorded = 1 << 16

// record lists the pages that READs were answered with, each once, in the order
// of the first time.
type record struct {
	mu    sync.Mutex
	seen  map[uint64]struct{}
	runs  []page.Run
	pages int
}

func (r *record) add(off int64, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen == nil {
		r.seen = map[uint64]struct{}{}
	}
	for p := uint64(off) / page.Size; p < (uint64(off)+uint64(n)+page.Size-1)/page.Size; p++ {
		if _, twice := r.seen[p]; twice || r.pages == maxRecorded {
			continue
		}
		r.seen[p] = struct{}{}
		r.pages++
		r.runs = page.Append(r.runs, p)
	}
}

// Touched returns the pages that were read so far, in the order in which they
// were first read, the kernel's readahead included. What was pushed and not
// read is not among them. Beyond 256 MiB nothing is recorded.
func (l *Slot) Touched() []page.Run {
	l.touched.mu.Lock()
	defer l.touched.mu.Unlock()
	return slices.Clone(l.touched.runs)
}

const (
	// pushBytes is how much is pushed at once.
	pushBytes = 256 << 10
	// batchPages is within how many pages the order of a prefetch is given up
	// for longer reads.
	batchPages = 1024
)

// Prefetch pushes runs ahead of faults, roughly in their order, until it is done
// or ctx ends, and returns how many bytes it pushed. The slot must be bound and
// its file open, see Push.
func (l *Slot) Prefetch(ctx context.Context, runs []page.Run) (int64, error) {
	l.mu.RLock()
	src := l.src
	l.mu.RUnlock()
	if src == nil {
		return 0, fmt.Errorf("prefetch slot %s: no source is bound", l.name)
	}
	buf := make([]byte, pushBytes)
	var done int64
	for len(runs) > 0 {
		n, batch := 0, uint64(0)
		for n < len(runs) && batch < batchPages {
			batch += runs[n].Count
			n++
		}
		part := slices.Clone(runs[:n])
		slices.SortFunc(part, func(a, b page.Run) int { return cmp.Compare(a.First, b.First) })
		for _, r := range part {
			pushed, err := l.pushRun(ctx, src, r, buf)
			done += pushed
			if err != nil {
				return done, err
			}
		}
		runs = runs[n:]
	}
	return done, nil
}

func (l *Slot) pushRun(ctx context.Context, src io.ReaderAt, r page.Run, buf []byte) (int64, error) {
	var done int64
	for off, end := r.Offset(), r.Offset()+r.Bytes(); off < end; {
		if err := ctx.Err(); err != nil {
			return done, err
		}
		p := buf[:min(int64(len(buf)), end-off)]
		if n, err := src.ReadAt(p, off); n < len(p) {
			return done, fmt.Errorf("prefetch slot %s: read %d bytes at %d: %w", l.name, len(p), off, err)
		}
		if err := l.Push(off, p); err != nil {
			return done, err
		}
		off += int64(len(p))
		done += int64(len(p))
	}
	return done, nil
}
