package snapshot

import (
	"slices"

	"github.com/hibernacle/hibernacle/internal/page"
)

const (
	// orderGroup is the number of pages (4 MiB) of a working set that go by
	// address among themselves: so much is fetched at once anyway, and runs stay long.
	orderGroup = 1024

	// orderHole is the largest hole in a group that is filled with what else there
	// is: two more runs in the manifest would cost more than a few pages that
	// lie in between.
	orderHole = 4
)

// workingSetFirst returns the pages in sorted, each once, in the order in which a
// pack should hold them: those of the working set first, roughly in its order, then the
// others by address. The arguments are not changed.
func workingSetFirst(sorted, set []page.Run) []page.Run {
	var out, first []page.Run
	rest, set := sorted, slices.Clone(set)
	for len(set) > 0 {
		var group []page.Run
		for room := uint64(orderGroup); room > 0 && len(set) > 0; {
			r := &set[0]
			part := page.Run{First: r.First, Count: min(r.Count, room)}
			group = append(group, part)
			room -= part.Count
			if r.First, r.Count = part.End(), r.Count-part.Count; r.Count == 0 {
				set = set[1:]
			}
		}
		first, rest = split(rest, withoutHoles(page.Normalize(group)))
		out = append(out, first...)
	}
	return append(out, rest...)
}

// withoutHoles joins sorted runs that lie close together.
func withoutHoles(sorted []page.Run) []page.Run {
	out := sorted[:0]
	for _, r := range sorted {
		if k := len(out) - 1; k >= 0 && r.First-out[k].End() <= orderHole {
			out[k].Count = r.End() - out[k].First
		} else {
			out = append(out, r)
		}
	}
	return out
}

// split returns the pages of sorted that lie in mask, and the others. Both
// arguments are sorted and without overlaps.
func split(sorted, mask []page.Run) (in, out []page.Run) {
	for _, r := range sorted {
		for r.Count > 0 {
			for len(mask) > 0 && mask[0].End() <= r.First {
				mask = mask[1:]
			}
			part, inside := r, false
			if len(mask) > 0 && mask[0].First < r.End() {
				if inside = mask[0].First <= r.First; inside {
					part.Count = min(r.End(), mask[0].End()) - r.First
				} else {
					part.Count = mask[0].First - r.First
				}
			}
			if inside {
				in = append(in, part)
			} else {
				out = append(out, part)
			}
			r = page.Run{First: part.End(), Count: r.Count - part.Count}
		}
	}
	return in, out
}
