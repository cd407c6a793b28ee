package snapshot

import (
	"cmp"
	"slices"
	"sort"

	"github.com/hibernacle/hibernacle/internal/page"
)

// run maps count guest pages from page first on to pages of a pack from
// packPage on. pack is an index into the manifest's pack table, or zeroPack.
type run struct {
	first, count   uint32
	pack, packPage uint32
}

// zeroPack marks a run whose pages are zero; its packPage is 0.
const zeroPack = 1<<32 - 1

func (r run) end() uint32 { return r.first + r.count }

// skip returns r without its first n pages.
func (r run) skip(n uint32) run {
	r.first += n
	r.count -= n
	if r.pack != zeroPack {
		r.packPage += n
	}
	return r
}

// appendRun adds r, which begins where the last run of runs ends or later, and
// joins the two if they can be one.
func appendRun(runs []run, r run) []run {
	if r.count == 0 {
		return runs
	}
	if k := len(runs) - 1; k >= 0 && joins(runs[k], r) {
		runs[k].count += r.count
		return runs
	}
	return append(runs, r)
}

// joins reports whether a and b, side by side, can be one run.
func joins(a, b run) bool {
	return a.end() == b.first && a.pack == b.pack && (a.pack == zeroPack || a.packPage+a.count == b.packPage)
}

// joined sorts runs, which do not overlap, and joins those that can be one.
func joined(runs []run) []run {
	slices.SortFunc(runs, func(a, b run) int { return cmp.Compare(a.first, b.first) })
	out := runs[:0]
	for _, r := range runs {
		out = appendRun(out, r)
	}
	return out
}

// overlay returns base, which tiles the memory, with the pages of over in place
// of its own. over is sorted and does not overlap; neither is changed.
func overlay(base, over []run) []run {
	out := make([]run, 0, len(base)+2*len(over))
	var cur run // rest of the base run that is being copied
	// take drops base pages up to page to, and copies them if keep is set.
	take := func(to uint32, keep bool) {
		for {
			if cur.count == 0 {
				if len(base) == 0 {
					return
				}
				cur, base = base[0], base[1:]
			}
			if cur.first >= to {
				return
			}
			part := cur
			part.count = min(cur.count, to-cur.first)
			if keep {
				out = appendRun(out, part)
			}
			cur = cur.skip(part.count)
		}
	}
	for _, r := range over {
		take(r.first, true)
		out = appendRun(out, r)
		take(r.end(), false)
	}
	take(zeroPack, true) // no page has so high a number
	return out
}

// find returns the index of the run that holds guest page n.
func find(runs []run, n uint32) int {
	return sort.Search(len(runs), func(i int) bool { return runs[i].end() > n })
}

// livePages counts, for each of n packs, the pages that runs use.
func livePages(runs []run, n int) []int64 {
	live := make([]int64, n)
	for _, r := range runs {
		if r.pack != zeroPack {
			live[r.pack] += int64(r.count)
		}
	}
	return live
}

// dropUnused returns the packs that runs use, in the order of first use, and
// renumbers the runs accordingly.
func dropUnused(runs []run, packs []packRef) []packRef {
	number := make([]uint32, len(packs))
	for i := range number {
		number[i] = zeroPack
	}
	var used []packRef
	for i, r := range runs {
		if r.pack == zeroPack {
			continue
		}
		if number[r.pack] == zeroPack {
			number[r.pack] = uint32(len(used))
			used = append(used, packs[r.pack])
		}
		runs[i].pack = number[r.pack]
	}
	return used
}

// pagesOf returns the number of pages in bytes.
func pagesOf(bytes int64) uint32 { return uint32(bytes / page.Size) }

// leastUsed returns which packs must go so that at most limit of those in use
// are left, the ones with the fewest live pages but for those that stay; nil if none must.
func leastUsed(live []int64, limit int, stays func(pack int) bool) []bool {
	var list []int
	excess := -limit
	for i, n := range live {
		if n == 0 {
			continue
		}
		if excess++; !stays(i) {
			list = append(list, i)
		}
	}
	if excess <= 0 {
		return nil
	}
	sort.Slice(list, func(i, j int) bool { return live[list[i]] < live[list[j]] })
	out := make([]bool, len(live))
	for _, i := range list[:min(excess, len(list))] {
		out[i] = true
	}
	return out
}
