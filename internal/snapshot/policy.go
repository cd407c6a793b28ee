package snapshot

import (
	"cmp"
	"slices"
)

// packUse is what the policy of compaction sees of a pack.
type packUse struct {
	pages, live int64 // in the pack, and those of them that the manifest names
	fixed       bool  // it stays where it is
}

func (p packUse) dead() int64 { return p.pages - p.live }

// The policy's figures. Packs are in tiers by their live pages: tier 0 is below
// tierPages, each further one reaches tierGrowth times as far.
const (
	tierPages  = 1024 // 4 MiB
	tierGrowth = 8
	tierPacks  = 8 // so many of a tier are merged into one of the next

	deadFloor  = 256 // dead pages (1 MiB) that are never worth a compaction
	deadLimit  = 2   // more than 1/deadLimit of the live pages dead: a reason,
	deadTarget = 4   // until no more than 1/deadTarget are

	packsLimit  = 24 // more packs than that: a reason, whatever their sizes,
	packsTarget = 16 // until there are no more than that
)

// tierOf returns the tier of a pack with so many live pages.
func tierOf(live int64) int {
	t := 0
	for top := int64(tierPages); live >= top; top *= tierGrowth {
		t++
	}
	return t
}

// chooseVictims returns which packs a compaction rewrites into one, nil if none
// is worth it. It is the policy of log-structured stores:
//
//   - Of each tier eight packs are merged into one of the next, so that a page is
//     rewritten once a tier at most, however many captures there are.
//   - Where dead pages are more than half as many as live ones, the packs with the smallest
//     share of live pages are rewritten until they are a quarter. Each dead
//     page was paid for by the page that replaced it.
//   - A bound on the number of packs holds whatever the sizes.
func chooseVictims(packs []packUse) []bool {
	c := choice{packs: packs, victim: make([]bool, len(packs))}
	c.mergeTiers()
	c.dropDead()
	c.boundPacks()
	if c.count == 0 || c.count == 1 && c.freed == 0 {
		return nil
	}
	return c.victim
}

// choice is a choice of victims in the making.
type choice struct {
	packs  []packUse
	victim []bool
	count  int   // of victims
	live   int64 // pages in them, which the new pack will have
	freed  int64 // dead pages in them
}

func (c *choice) take(i int) {
	c.victim[i] = true
	c.count++
	c.live += c.packs[i].live
	c.freed += c.packs[i].dead()
}

// rest returns the packs that may be chosen and are not, sorted by order.
func (c *choice) rest(order func(a, b packUse) int) []int {
	var list []int
	for i, p := range c.packs {
		if !p.fixed && !c.victim[i] {
			list = append(list, i)
		}
	}
	slices.SortStableFunc(list, func(i, j int) int { return order(c.packs[i], c.packs[j]) })
	return list
}

func bySize(a, b packUse) int { return cmp.Compare(a.live, b.live) }

// byShare puts the packs first of which the smallest share is live.
func byShare(a, b packUse) int {
	return cmp.Compare(float64(a.live)/float64(a.pages), float64(b.live)/float64(b.pages))
}

// mergeTiers takes tiers that are full, beginning with the lowest; what comes
// out of one counts in the tier in which it lands.
func (c *choice) mergeTiers() {
	rest := c.rest(bySize)
	for t := 0; len(rest) > 0; t++ {
		n := 0
		for n < len(rest) && tierOf(c.packs[rest[n]].live) == t {
			n++
		}
		merged := 0
		if c.count > 0 && tierOf(c.live) == t {
			merged = 1
		}
		if n > 0 && n+merged >= tierPacks {
			for _, i := range rest[:n] {
				c.take(i)
			}
		}
		rest = rest[n:]
	}
}

// dropDead takes packs of dead pages.
func (c *choice) dropDead() {
	live, dead := c.live, int64(0)
	rest := c.rest(byShare)
	for _, i := range rest {
		live += c.packs[i].live
		dead += c.packs[i].dead()
	}
	if dead <= deadFloor || dead <= live/deadLimit {
		return
	}
	for _, i := range rest {
		if dead <= live/deadTarget {
			return
		}
		dead -= c.packs[i].dead()
		c.take(i)
	}
}

// boundPacks takes the smallest packs where there are too many.
func (c *choice) boundPacks() {
	left := len(c.packs) - c.count
	if c.count > 0 {
		left++
	}
	if left <= packsLimit {
		return
	}
	for _, i := range c.rest(bySize) {
		if left <= packsTarget {
			return
		}
		if c.count > 0 {
			left-- // the first victim only makes room for the new pack
		}
		c.take(i)
	}
}
