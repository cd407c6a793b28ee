package pager

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/hibernacle/hibernacle/internal/page"
)

const (
	// pushBytes is how much is read and pushed at once from a source that does
	// not fetch.
	pushBytes = 256 << 10
	// batchPages is within how many pages the order of a prefetch is given up
	// for longer reads.
	batchPages = 1024
)

// Fetcher is a source that reads ahead better than by one ReadAt after the
// other. Fetch calls yield with the bytes of runs, whole pages at offset off,
// roughly in the order of runs, one call at a time; p is valid until yield
// returns, whose error ends it.
type Fetcher interface {
	Fetch(ctx context.Context, runs []page.Run, yield func(off int64, p []byte) error) error
}

// Prefetch pushes runs ahead of faults, roughly in their order, until it is done
// or ctx ends, and returns how many bytes it pushed: pages that were read or
// pushed meanwhile are left out. The slot must be bound and its file open, see
// Push.
func (l *Slot) Prefetch(ctx context.Context, runs []page.Run) (int64, error) {
	l.mu.RLock()
	src := l.src
	l.mu.RUnlock()
	if src == nil {
		return 0, fmt.Errorf("prefetch slot %s: no source is bound", l.name)
	}
	var done int64
	push := func(off int64, p []byte) error {
		n, err := l.pushUnread(off, p, false)
		done += n
		return err
	}
	fetch := readAhead{src}.Fetch
	if f, ok := src.(Fetcher); ok {
		fetch = f.Fetch
	}
	if err := fetch(ctx, runs, push); err != nil {
		return done, fmt.Errorf("prefetch slot %s: %w", l.name, err)
	}
	return done, nil
}

// pushUnread pushes those of the pages p at off that nobody has yet, and
// returns how many bytes these were.
func (l *Slot) pushUnread(off int64, p []byte, ahead bool) (done int64, err error) {
	for n, left := uint64(off)/page.Size, uint64(len(p))/page.Size; left > 0; {
		skip, count := l.record.unread(n, left)
		n, left = n+skip, left-skip
		if count == 0 {
			return done, nil
		}
		from := int64(n)*page.Size - off
		if err := l.push(int64(n)*page.Size, p[from:from+int64(count)*page.Size], ahead); err != nil {
			return done, err
		}
		done += int64(count) * page.Size
		n, left = n+count, left-count
	}
	return done, nil
}

// readAhead is a Fetcher over any source.
type readAhead struct{ src io.ReaderAt }

func (a readAhead) Fetch(ctx context.Context, runs []page.Run, yield func(off int64, p []byte) error) error {
	buf := make([]byte, pushBytes)
	for len(runs) > 0 {
		n, batch := 0, uint64(0)
		for n < len(runs) && batch < batchPages {
			batch += runs[n].Count
			n++
		}
		part := slices.Clone(runs[:n])
		slices.SortFunc(part, func(a, b page.Run) int { return cmp.Compare(a.First, b.First) })
		for _, r := range part {
			if err := a.run(ctx, r, buf, yield); err != nil {
				return err
			}
		}
		runs = runs[n:]
	}
	return nil
}

func (a readAhead) run(ctx context.Context, r page.Run, buf []byte, yield func(off int64, p []byte) error) error {
	for off, end := r.Offset(), r.Offset()+r.Bytes(); off < end; {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := buf[:min(int64(len(buf)), end-off)]
		if n, err := a.src.ReadAt(p, off); n < len(p) {
			return fmt.Errorf("read %d bytes at %d: %w", len(p), off, err)
		}
		if err := yield(off, p); err != nil {
			return err
		}
		off += int64(len(p))
	}
	return nil
}
