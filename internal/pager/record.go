package pager

import (
	"math/bits"
	"slices"
	"sync"

	"github.com/hibernacle/hibernacle/internal/page"
)

// maxRecorded bounds the pages of which a slot keeps the order in which they
// were read: 256 MiB of them.
const maxRecorded = 1 << 16

// record follows what becomes of a slot's pages: three bits for each.
type record struct {
	mu       sync.Mutex
	expected bitmap // by Expect
	pushed   bitmap // before they were read
	ahead    bitmap // of these, zeros that nobody asked to push
	read     bitmap // by READs, the kernel's readahead included

	order              []page.Run // of the first reads
	recorded           int        // pages in it
	demand, late, push int64      // pages
	zeros              int64      // pages in ahead
}

func newRecord(pages int64) *record {
	return &record{expected: newBitmap(pages), pushed: newBitmap(pages), ahead: newBitmap(pages), read: newBitmap(pages)}
}

func (r *record) expect(runs []page.Run) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, run := range runs {
		for p := run.First; p < run.End(); p++ {
			r.expected.set(p)
		}
	}
}

// answered records that n bytes at off answered a READ.
func (r *record) answered(off int64, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := uint64(off) / page.Size; p < uint64(off+int64(n)+page.Size-1)/page.Size; p++ {
		if r.read.has(p) || r.pushed.has(p) { // the kernel dropped it meanwhile
			continue
		}
		r.read.set(p)
		r.demand++
		if r.expected.has(p) {
			r.late++
		}
		if r.recorded < maxRecorded {
			r.recorded++
			r.order = page.Append(r.order, p)
		}
	}
}

// unread returns the number of pages from p on, n at most, that were neither
// read nor pushed, and skip, the number of others before them.
func (r *record) unread(p, n uint64) (skip, count uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for skip < n && (r.read.has(p+skip) || r.pushed.has(p+skip)) {
		skip++
	}
	for skip+count < n && !r.read.has(p+skip+count) && !r.pushed.has(p+skip+count) {
		count++
	}
	return skip, count
}

// wasPushed records that n pages from p on were pushed; ahead says that they are
// zeros that nobody asked to push.
func (r *record) wasPushed(p, n uint64, ahead bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for ; n > 0; p, n = p+1, n-1 {
		if !r.read.has(p) && !r.pushed.has(p) {
			r.pushed.set(p)
			if ahead {
				r.ahead.set(p)
				r.zeros++
			} else {
				r.push++
			}
		}
	}
}

// Expect names the pages that the slot's reader will want: Stats then tells
// those that it read before they were pushed from the others that it read.
func (l *Slot) Expect(runs []page.Run) { l.record.expect(runs) }

// Touched returns the pages that were read without having been pushed before,
// in the order in which they were first read, the kernel's readahead included.
// Beyond 256 MiB nothing is added to it.
func (l *Slot) Touched() []page.Run {
	l.record.mu.Lock()
	defer l.record.mu.Unlock()
	return slices.Clone(l.record.order)
}

// Pushed returns the pages that were pushed before anybody read them, zeros
// ahead left out, sorted and joined.
func (l *Slot) Pushed() []page.Run {
	l.record.mu.Lock()
	defer l.record.mu.Unlock()
	asked := slices.Clone(l.record.pushed)
	for i, word := range l.record.ahead {
		asked[i] &^= word
	}
	return asked.runs()
}

// bitmap is a set of pages. Pages beyond its end are never in it.
type bitmap []uint64

func newBitmap(pages int64) bitmap { return make(bitmap, (pages+63)/64) }

func (b bitmap) has(p uint64) bool {
	return p/64 < uint64(len(b)) && b[p/64]&(1<<(p%64)) != 0
}

func (b bitmap) set(p uint64) {
	if p/64 < uint64(len(b)) {
		b[p/64] |= 1 << (p % 64)
	}
}

func (b bitmap) runs() []page.Run {
	var out []page.Run
	for i, word := range b {
		for ; word != 0; word &= word - 1 {
			out = page.Append(out, uint64(i)*64+uint64(bits.TrailingZeros64(word)))
		}
	}
	return out
}
