package snapshot

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func TestChooseVictims(t *testing.T) {
	full := func(n int, pages int64) []packUse {
		return slices.Repeat([]packUse{{pages: pages, live: pages}}, n)
	}
	base := packUse{pages: 40000, live: 30000, fixed: true}
	for name, tt := range map[string]struct {
		packs []packUse
		want  []int
	}{
		"nothing there":                   {},
		"a pack alone":                    {packs: full(1, 100)},
		"few small ones":                  {packs: full(tierPacks-1, 100)},
		"a tier that is full":             {packs: full(tierPacks, 100), want: []int{0, 1, 2, 3, 4, 5, 6, 7}},
		"fixed ones are not counted":      {packs: append(full(tierPacks-1, 100), packUse{pages: 100, live: 100, fixed: true})},
		"sizes of two tiers":              {packs: append(full(tierPacks/2, 100), full(tierPacks/2, 5000)...)},
		"what is merged fills the next":   {packs: slices.Concat(full(tierPacks, 900), full(tierPacks-1, 2000), full(1, 100_000)), want: ints(0, 15)},
		"what is merged does not fill it": {packs: slices.Concat(full(tierPacks, 900), full(tierPacks-2, 2000)), want: ints(0, 8)},
		"live pages make the size":        {packs: append([]packUse{{pages: 1100, live: 1000}}, full(tierPacks-1, 100)...), want: ints(0, 8)},

		"a few dead pages":                  {packs: []packUse{{pages: 1000, live: 700}}},
		"many dead pages":                   {packs: []packUse{{pages: 1000, live: 600}}, want: []int{0}},
		"too few pages to matter":           {packs: []packUse{{pages: deadFloor, live: 1}}},
		"the emptiest, as many as it takes": {packs: []packUse{{pages: 1000, live: 900}, {pages: 1000, live: 100}, {pages: 1000, live: 800}}, want: []int{1}},
		"dead pages of others":              {packs: []packUse{base, {pages: 100, live: 100}}},
		"dead pages that merging drops":     {packs: slices.Repeat([]packUse{{pages: 1000, live: 100}}, tierPacks), want: ints(0, 8)},

		"too many packs": {packs: slices.Concat(full(7, 100), full(7, 2000), full(7, 10_000), full(5, 100_000)), want: ints(0, 11)},
		"too many packs, which others use": {packs: append(slices.Repeat([]packUse{base}, packsLimit+1),
			packUse{pages: 10, live: 10})},
	} {
		t.Run(name, func(t *testing.T) {
			var got []int
			for i, is := range chooseVictims(tt.packs) {
				if is {
					got = append(got, i)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// ints returns the numbers from first to before end.
func ints(first, end int) []int {
	var out []int
	for n := first; n < end; n++ {
		out = append(out, n)
	}
	return out
}

func TestLeastUsed(t *testing.T) {
	live := []int64{5, 0, 3, 9, 1}
	for name, tt := range map[string]struct {
		limit int
		stays []int
		want  []int
	}{
		"few enough":            {limit: 4},
		"one too many":          {limit: 3, want: []int{4}},
		"two too many":          {limit: 2, want: []int{2, 4}},
		"the smallest stays":    {limit: 3, stays: []int{4}, want: []int{2}},
		"more stay than are ok": {limit: 0, stays: []int{0, 2, 4}, want: []int{3}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []int
			for i, is := range leastUsed(live, tt.limit, func(pack int) bool { return slices.Contains(tt.stays, pack) }) {
				if is {
					got = append(got, i)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// simulation is a memory whose captures and compactions are only counted.
type simulation struct {
	packs              []packUse
	home               []int // of each page: its pack, -1 for none
	written, rewritten int64
}

// store writes pages into a new pack.
func (s *simulation) store(pages []int) {
	n := len(s.packs)
	s.packs = append(s.packs, packUse{})
	for _, p := range pages {
		if s.home[p] == n {
			continue
		}
		s.free(p)
		s.home[p] = n
		s.packs[n].pages++
		s.packs[n].live++
	}
}

func (s *simulation) free(page int) {
	if h := s.home[page]; h >= 0 {
		s.packs[h].live--
		s.home[page] = -1
	}
}

// compact does what the policy wants, and drops packs without live pages.
func (s *simulation) compact() {
	if victims := chooseVictims(s.packs); victims != nil {
		var pages []int
		for p, h := range s.home {
			if h >= 0 && victims[h] {
				pages = append(pages, p)
			}
		}
		s.store(pages)
		s.rewritten += int64(len(pages))
	}
	number := make([]int, len(s.packs))
	var kept []packUse
	for i, p := range s.packs {
		if number[i] = len(kept); p.live > 0 {
			kept = append(kept, p)
		}
	}
	s.packs = kept
	for p, h := range s.home {
		if h >= 0 {
			s.home[p] = number[h]
		}
	}
}

// histories say which pages a capture finds changed.
var histories = map[string]func(rnd *rand.Rand, step, memory int) []int{
	"anywhere": func(rnd *rand.Rand, _, memory int) []int { return some(rnd, 0, memory, 200) },
	"hot and cold": func(rnd *rand.Rand, _, memory int) []int {
		return append(some(rnd, 0, memory/50, 300), some(rnd, 0, memory, 20)...)
	},
	"a log that wraps": func(_ *rand.Rand, step, memory int) []int {
		at := step * 150 % (memory - 150)
		return ints(at, at+150)
	},
	"bursts": func(rnd *rand.Rand, step, memory int) []int {
		if step%40 == 0 {
			return ints(0, memory/2)
		}
		return some(rnd, 0, memory, 50)
	},
	"everything": func(_ *rand.Rand, _, memory int) []int { return ints(0, memory) },
	"all but a page of each": func(_ *rand.Rand, step, memory int) []int {
		return append(ints(0, step%memory), ints(step%memory+1, memory)...)
	},
	"one page": func(rnd *rand.Rand, _, memory int) []int { return some(rnd, 0, memory, 1) },
	"any size": func(rnd *rand.Rand, _, memory int) []int { return some(rnd, 0, memory, 1<<rnd.IntN(14)) },
}

func some(rnd *rand.Rand, first, end, n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = first + rnd.IntN(end-first)
	}
	return out
}

// TestPolicyBounds plays long histories: after each compaction packs and
// dead pages are bounded, and in the long run so is what is rewritten.
func TestPolicyBounds(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for name, history := range histories {
		t.Run(name, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 0))
			const memory, steps = 20_000, 1000
			s := simulation{home: slices.Repeat([]int{-1}, memory)}
			most := 0
			for step := range steps {
				pages := history(rnd, step, memory)
				s.store(pages)
				s.written += s.packs[len(s.packs)-1].pages
				for _, p := range some(rnd, 0, memory, rnd.IntN(3)) {
					s.free(p) // it became zero
				}
				s.compact()
				var live, dead int64
				for _, p := range s.packs {
					live += p.live
					dead += p.dead()
				}
				if most = max(most, len(s.packs)); most > packsLimit {
					t.Fatalf("step %d: %d packs", step, most)
				}
				if dead > deadFloor && dead > live/deadLimit {
					t.Fatalf("step %d: %d pages are live, %d dead", step, live, dead)
				}
			}
			t.Logf("at most %d packs, %.2f pages rewritten for each written", most, float64(s.rewritten)/float64(s.written))
			// Within the lowest tier, whose packs are small, sizes do not matter.
			if s.rewritten > 4*s.written+steps*tierPages/(tierPacks-1) {
				t.Errorf("%d pages were written, %d rewritten", s.written, s.rewritten)
			}
		})
	}
}
