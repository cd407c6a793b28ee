// Package page owns the unit in which guest memory is counted: the 4 KiB
// page, and the run of consecutive pages. Pages are numbered from the start of
// the guest's RAM as its memory image holds it (page n covers the bytes
// [n·Size, (n+1)·Size)), not by guest-physical address.
package page

import "slices"

// Size is the length of a page in bytes.
const Size = 4096

// Run is Count consecutive pages, the first of which is number First.
type Run struct {
	First uint64 `json:"first"`
	Count uint64 `json:"count"`
}

// End returns the number of the page just behind the run.
func (r Run) End() uint64 { return r.First + r.Count }

// Offset returns the byte offset of the run's first page.
func (r Run) Offset() int64 { return int64(r.First) * Size }

// Bytes returns the length of the run in bytes.
func (r Run) Bytes() int64 { return int64(r.Count) * Size }

// Total returns the number of pages in runs.
func Total(runs []Run) uint64 {
	var n uint64
	for _, r := range runs {
		n += r.Count
	}
	return n
}

// Split cuts runs behind their first n pages. The argument is not changed.
func Split(runs []Run, n uint64) (head, rest []Run) {
	for i, r := range runs {
		if r.Count <= n {
			n -= r.Count
			continue
		}
		head, rest = slices.Clone(runs[:i]), slices.Clone(runs[i:])
		if n > 0 {
			head = append(head, Run{r.First, n})
			rest[0] = Run{r.First + n, r.Count - n}
		}
		return head, rest
	}
	return runs, nil
}

// Append adds page n to runs, whose last run it extends where it is adjacent,
// and returns the result. Pages must be added in ascending order.
func Append(runs []Run, n uint64) []Run {
	if k := len(runs); k > 0 && runs[k-1].End() == n {
		runs[k-1].Count++
		return runs
	}
	return append(runs, Run{First: n, Count: 1})
}

// Normalize returns runs sorted, without empty ones, and with overlapping and
// adjacent ones joined. The argument is not changed.
func Normalize(runs []Run) []Run {
	sorted := slices.Clone(runs)
	slices.SortFunc(sorted, func(a, b Run) int {
		switch {
		case a.First < b.First:
			return -1
		case a.First > b.First:
			return 1
		}
		return 0
	})
	out := sorted[:0]
	for _, r := range sorted {
		if r.Count == 0 {
			continue
		}
		if k := len(out); k > 0 && r.First <= out[k-1].End() {
			if r.End() > out[k-1].End() {
				out[k-1].Count = r.End() - out[k-1].First
			}
			continue
		}
		out = append(out, r)
	}
	return out
}
