package bench

import (
	"fmt"
	"math"
	"slices"
)

// A hibernation may take hibernateBase milliseconds, and hibernatePerMB more
// for each million bytes that were found changed.
const (
	hibernateBase  = 80
	hibernatePerMB = 4
)

// Names of the facts that bars are computed from.
const (
	factDemand      = "demand_pages"
	factDirty       = "hibernate.dirty.p50"
	factDirtyMax    = "hibernate.dirty.max"
	factShare       = "hibernate.share_of_bar.p50"
	factShare95     = "hibernate.share_of_bar.p95"
	factDirtyBytes  = "compression.dirty"
	factRemoteBytes = "compression.remote"
	factCycles      = "cycles.hibernations"
	factEarly       = "cycles.resume_around_tenth"
	factLate        = "cycles.resume_last_ten"
	factPacks       = "cycles.packs"
	factStored      = "cycles.stored"
	factLive        = "cycles.live"
	factWake        = "wake.overhead.p50"
	factWakePairs   = "wake.pairs"
	factScale       = "scale.sandboxes"
	factDisk        = "scale.disk_per_sandbox"
	factRSS         = "scale.daemon_rss"
	factList        = "scale.ls"
	factStart       = "scale.daemon_start"
	factCPUEmpty    = "scale.cpu_with_none"
	factCPUFull     = "scale.cpu_with_all"
)

// measured is what a bar found: text for people and whether the bar is met.
type measured struct {
	text string
	met  bool
}

// barOf is one bar: measure returns false where its figures are missing.
type barOf struct {
	scenario string
	what     string
	bar      string
	measure  func(figures) (measured, bool)
}

// allBars are all bars, in the order in which they are shown.
var allBars = []barOf{
	{ScenarioStates, "resume request to running vCPUs, local, VMM of the pool", "p50 ≤ 12 ms, p99 ≤ 40 ms", func(f figures) (measured, bool) {
		r, ok := f.row(selfRow(workloadPython50, CacheWarm, true, 512, MetricRunning))
		return measured{fmt.Sprintf("p50 %.1f ms, p99 %.1f ms (n=%d)", r.P50, r.P99, r.N), r.P50 <= 12 && r.P99 <= 40}, ok
	}},
	{ScenarioStates, "parked: first HTTP answer against an awake sandbox's", "≤ 2.5 ×", func(f figures) (measured, bool) {
		return f.ratio(2.5, first(workloadPython50, CacheParked, false), first(workloadPython50, CacheAwake, false))
	}},
	{ScenarioStates, "warm: first HTTP answer against QEMU's own restore", "≤ 0.6 ×", func(f figures) (measured, bool) {
		migrate := first(workloadPython50, CacheWarm, false)
		migrate.peer = PeerMigrate
		return f.ratio(0.6, first(workloadPython50, CacheWarm, true), migrate)
	}},
	{ScenarioStates, "warm: first HTTP answer against a cold boot", "≤ 0.1 ×", func(f figures) (measured, bool) {
		boot := selfRow(workloadShell, CacheWarm, false, 512, MetricCreate)
		boot.peer = PeerBoot
		return f.ratio(0.1, first(workloadPython50, CacheWarm, true), boot)
	}},
	{ScenarioStates, "warm: first answer with 4 GiB of RAM against 512 MiB", "≤ 1.2 ×", func(f figures) (measured, bool) {
		large := first(workloadPython50, CacheWarm, true)
		large.memory = 4096
		return f.ratioAlike(1.2, large, first(workloadPython50, CacheWarm, true))
	}},
	{ScenarioStates, "warm: first answer with 300 MB of state against 50 MB", "≤ 1.2 ×", func(f figures) (measured, bool) {
		return f.ratioAlike(1.2, first(workloadPython300, CacheWarm, true), first(workloadPython50, CacheWarm, true))
	}},
	{ScenarioStates, "what a cold page cache adds: with prefetch against without", "≤ 0.5 ×", func(f figures) (measured, bool) {
		return f.added(0.5, CacheCold)
	}},
	{ScenarioStates, "what a store with 20 ms latency adds: with prefetch against without", "≤ 0.25 ×", func(f figures) (measured, bool) {
		return f.added(0.25, CacheRemote20)
	}},
	{ScenarioStates, "bytes fetched from the store against the working set", "≤ 1.5 ×", func(f figures) (measured, bool) {
		r, ok := f.row(first(workloadPython50, CacheRemote20, true))
		ratio := float64(r.BytesFetched) / float64(r.WorkingSetBytes)
		return measured{fmt.Sprintf("%.2f × (%.1f of %.1f MB)", ratio, float64(r.BytesFetched)/1e6, float64(r.WorkingSetBytes)/1e6), ratio <= 1.5},
			ok && r.WorkingSetBytes > 0
	}},
	{ScenarioStates, "hibernate request to durable and acknowledged", "≤ 80 ms + 4 ms per MB changed", func(f figures) (measured, bool) {
		return f.hibernations()
	}},
	{ScenarioStates, "pages read on demand until the first answer: with prefetch against without", "≤ 0.05 ×", func(f figures) (measured, bool) {
		return f.demand()
	}},
	{ScenarioCompression, "changed pages against what the remote store takes, python50", "≥ 2.5 ×", compressed(workloadPython50)},
	{ScenarioCompression, "changed pages against what the remote store takes, git", "≥ 2.5 ×", compressed(workloadGit)},
	{ScenarioCycles, "packs after many hibernations of one sandbox", "≤ 32", func(f figures) (measured, bool) {
		n, _ := f.fact(factCycles, "")
		packs, ok := f.fact(factPacks, "")
		return measured{fmt.Sprintf("%.0f after %.0f", packs, n), packs <= 32}, ok
	}},
	{ScenarioCycles, "stored bytes against live ones", "≤ 2 ×", func(f figures) (measured, bool) {
		stored, ok := f.fact(factStored, "")
		live, _ := f.fact(factLive, "")
		return measured{fmt.Sprintf("%.2f × (%.1f of %.1f MB)", stored/live, stored/1e6, live/1e6), stored <= 2*live}, ok && live > 0
	}},
	{ScenarioCycles, "first answer of the last ten against around the tenth", "≤ 1.2 ×", func(f figures) (measured, bool) {
		early, ok := f.fact(factEarly, "")
		late, _ := f.fact(factLate, "")
		return measured{fmt.Sprintf("%.2f × (p50 %.0f and %.0f ms)", late/early, late, early), late <= 1.2*early}, ok
	}},
	{ScenarioWake, "wake by an HTTP request over a resume and the same request", "p50 ≤ 15 ms", func(f figures) (measured, bool) {
		over, ok := f.fact(factWake, "")
		n, _ := f.fact(factWakePairs, "")
		return measured{fmt.Sprintf("%+.1f ms (%.0f pairs)", over, n), over <= 15}, ok
	}},
	{ScenarioBurst, "resumes at once, local", "all succeed", func(f figures) (measured, bool) { return f.burst() }},
	{ScenarioScale, "daemon's memory with all in standby", "≤ 200 MB", atMost(factRSS, 1e6, 200, "%.0f MB")},
	{ScenarioScale, "hib ls with all in standby", "≤ 200 ms", atMost(factList, 1, 200, "%.0f ms")},
	{ScenarioScale, "daemon's start with all in standby", "≤ 2 s", atMost(factStart, 1000, 2, "%.2f s")},
	{ScenarioScale, "daemon's processor time over 60 s against none in standby", "≤ 10 ms more", func(f figures) (measured, bool) {
		none, ok := f.fact(factCPUEmpty, "")
		all, _ := f.fact(factCPUFull, "")
		return measured{fmt.Sprintf("%.0f ms, with none %.0f ms", all, none), all <= none+10}, ok
	}},
	{ScenarioScale, "disk per sandbox in standby", "reported", atMost(factDisk, 1e6, math.Inf(1), "%.2f MB")},
}

// bars computes the bars of the scenarios that ran. Those whose figures are
// missing are there without a verdict.
func bars(res Result, scenarios []string) []Bar {
	out := []Bar{}
	for _, b := range allBars {
		if !slices.Contains(scenarios, b.scenario) {
			continue
		}
		bar := Bar{What: b.what, Bar: b.bar, Measured: "not measured"}
		if m, ok := b.measure(figures(res)); ok {
			bar.Measured, bar.Met = m.text, &m.met
		}
		out = append(out, bar)
	}
	return out
}

// selfRow is the key of a row of the daemon's, one at a time.
func selfRow(workload, cache string, prefetch bool, memory int, metric string) key {
	return key{workload: workload, cache: cache, prefetch: prefetch, concurrency: 1, memory: memory, peer: PeerSelf, metric: metric}
}

// first is the key of a first answer at 512 MiB.
func first(workload, cache string, prefetch bool) key {
	return selfRow(workload, cache, prefetch, 512, MetricFirst)
}

// figures answers questions about a result.
type figures Result

// row returns the row of a key if it has samples.
func (f figures) row(k key) (Row, bool) {
	for _, r := range f.Rows {
		if k == (key{r.Workload, r.Cache, r.Prefetch, r.Concurrency, r.MemoryMiB, r.Peer, r.Metric}) {
			return r, r.SuccessRate > 0
		}
	}
	return Row{}, false
}

// either returns the row of a key, or of the same without a pool. The text says so.
func (f figures) either(k key) (r Row, without string, ok bool) {
	if r, ok = f.row(k); ok {
		return r, "", true
	}
	k.cache += noPool
	r, ok = f.row(k)
	return r, ", no pool", ok
}

// fact returns the value of a fact about a workload ("": none).
func (f figures) fact(name, workload string) (float64, bool) {
	for _, x := range f.Facts {
		if x.Name == name && x.Workload == workload {
			return x.Value, true
		}
	}
	return 0, false
}

// ratio holds the median of one row against that of another.
func (f figures) ratio(bar float64, of, against key) (measured, bool) {
	a, without, okA := f.either(of)
	b, _, okB := f.either(against)
	return quotient(bar, a, b, without), okA && okB
}

// ratioAlike is ratio for rows that must both have a pool, or both have none.
func (f figures) ratioAlike(bar float64, of, against key) (measured, bool) {
	a, okA := f.row(of)
	b, okB := f.row(against)
	if okA && okB {
		return quotient(bar, a, b, ""), true
	}
	of.cache += noPool
	against.cache += noPool
	a, okA = f.row(of)
	b, okB = f.row(against)
	return quotient(bar, a, b, ", no pool"), okA && okB
}

func quotient(bar float64, a, b Row, without string) measured {
	ratio := a.P50 / b.P50
	return measured{fmt.Sprintf("%.2f × (p50 %.0f and %.0f ms%s)", ratio, a.P50, b.P50, without), ratio <= bar}
}

// added compares what a state adds to a warm first answer, with prefetch and without.
func (f figures) added(bar float64, cache string) (measured, bool) {
	var added [2]float64
	for i, prefetch := range []bool{true, false} {
		state, without, okState := f.either(first(workloadPython50, cache, prefetch))
		warm, withoutWarm, okWarm := f.either(first(workloadPython50, CacheWarm, prefetch))
		if !okState || !okWarm || without != withoutWarm {
			return measured{}, false
		}
		added[i] = state.P50 - warm.P50
	}
	with, without := added[0], added[1]
	text := fmt.Sprintf("%+.0f ms and %+.0f ms", with, without)
	if without > 0 {
		text = fmt.Sprintf("%.2f × (%s)", with/without, text)
	}
	return measured{text, with <= bar*without || with <= 0}, true
}

// hibernations finds the workload whose hibernations come closest to the bar, or go beyond it.
func (f figures) hibernations() (m measured, ok bool) {
	worst := Fact{Value: -1}
	for _, x := range f.Facts {
		if x.Name == factShare && x.Value > worst.Value {
			worst = x
		}
	}
	if worst.Value < 0 {
		return m, false
	}
	of := func(name string) float64 {
		i := slices.IndexFunc(f.Facts, func(x Fact) bool {
			return x.Name == name && x.Workload == worst.Workload && x.MemoryMiB == worst.MemoryMiB
		})
		return f.Facts[i].Value
	}
	return measured{fmt.Sprintf("p50 %.2f, p95 %.2f of that (%s at %d MiB is the worst, p50 of changed %.1f MB)",
		worst.Value, of(factShare95), worst.Workload, worst.MemoryMiB, of(factDirty)), worst.Value <= 1}, true
}

// demand compares the pages that were read on demand after a warm resume.
func (f figures) demand() (measured, bool) {
	of := func(prefetch bool) (float64, bool) {
		for _, cache := range []string{CacheWarm, CacheWarm + noPool} {
			for _, x := range f.Facts {
				if x.Name == factDemand && x.Workload == workloadPython50 && x.Cache == cache && x.MemoryMiB == 512 && *x.Prefetch == prefetch {
					return x.Value, true
				}
			}
		}
		return 0, false
	}
	with, okWith := of(true)
	without, okWithout := of(false)
	return measured{fmt.Sprintf("%.3f × (%.0f and %.0f pages)", with/without, with, without), with <= 0.05*without}, okWith && okWithout && without > 0
}

// compressed compares the bytes that were found changed with those in the remote store.
func compressed(workload string) func(figures) (measured, bool) {
	return func(f figures) (measured, bool) {
		dirty, ok := f.fact(factDirtyBytes, workload)
		remote, _ := f.fact(factRemoteBytes, workload)
		return measured{fmt.Sprintf("%.2f × (%.1f and %.1f MB)", dirty/remote, dirty/1e6, remote/1e6), dirty >= 2.5*remote}, ok && remote > 0
	}
}

// burst looks at the largest burst of warm resumes with prefetch.
func (f figures) burst() (measured, bool) {
	var most Row
	for _, r := range f.Rows {
		if r.Metric == MetricFirst && r.Cache == CacheWarm && r.Prefetch && r.Concurrency > max(1, most.Concurrency) {
			most = r
		}
	}
	return measured{fmt.Sprintf("%d at once: %.0f%% succeeded, p50 %.0f ms, p99 %.0f ms (n=%d)",
		most.Concurrency, 100*most.SuccessRate, most.P50, most.P99, most.N), most.SuccessRate == 1}, most.N > 0
}

// atMost holds a fact, in units of scale, against a bar.
func atMost(name string, scale, bar float64, format string) func(figures) (measured, bool) {
	return func(f figures) (measured, bool) {
		v, ok := f.fact(name, "")
		n, _ := f.fact(factScale, "")
		return measured{fmt.Sprintf(format+" (%.0f sandboxes)", v/scale, n), v/scale <= bar}, ok
	}
}
