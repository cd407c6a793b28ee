package bench

import (
	"bytes"
	"encoding/xml"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

// sample is a result from which every bar can be computed, all of them met.
func sampleResult() Result {
	row := func(k key, p50 float64) Row {
		return Row{Workload: k.workload, Cache: k.cache, Prefetch: k.prefetch, Concurrency: k.concurrency, MemoryMiB: k.memory, Peer: k.peer,
			Metric: k.metric, N: 15, P50: p50, P95: 1.2 * p50, P99: 1.4 * p50, Max: 1.4 * p50, SuccessRate: 1}
	}
	as := func(k key, change func(*key)) key { change(&k); return k }
	yes, no := true, false
	remote := row(first(workloadPython50, CacheRemote20, true), 230)
	remote.BytesFetched, remote.WorkingSetBytes = 12e6, 10e6
	return Result{
		Meta: Meta{Accel: "tcg", CPU: "CPU <1>", Cores: 2, Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
		Rows: []Row{
			row(selfRow(workloadPython50, CacheWarm, true, 512, MetricRunning), 9),
			row(first(workloadPython50, CacheAwake, false), 20),
			row(first(workloadPython50, CacheParked, false), 30),
			row(first(workloadPython50, CacheWarm, true), 200),
			row(first(workloadPython50, CacheWarm, false), 210),
			row(first(workloadPython50, CacheCold, true), 220),
			row(first(workloadPython50, CacheCold, false), 310),
			remote,
			row(first(workloadPython50, CacheRemote20, false), 1210),
			row(first(workloadPython300, CacheWarm, true), 205),
			row(as(first(workloadPython50, CacheWarm, true), func(k *key) { k.memory = 4096 }), 210),
			row(as(first(workloadPython50, CacheWarm, false), func(k *key) { k.peer = PeerMigrate }), 400),
			row(as(selfRow(workloadShell, CacheWarm, false, 512, MetricCreate), func(k *key) { k.peer = PeerBoot }), 5000),
			row(as(first(workloadPython50, CacheWarm, true), func(k *key) { k.concurrency = 32 }), 3000),
			row(as(first(workloadPython50, CacheWarm, true), func(k *key) { k.concurrency = 8 }), 800),
		},
		Facts: []Fact{
			{Name: factDemand, Workload: workloadPython50, Cache: CacheWarm, Prefetch: &yes, MemoryMiB: 512, Value: 20},
			{Name: factDemand, Workload: workloadPython50, Cache: CacheWarm, Prefetch: &no, MemoryMiB: 512, Value: 1000},
			{Name: factShare, Workload: workloadPython50, MemoryMiB: 512, Value: 0.7}, {Name: factShare95, Workload: workloadPython50, MemoryMiB: 512, Value: 0.9},
			{Name: factDirty, Workload: workloadPython50, MemoryMiB: 512, Value: 4},
			{Name: factShare, Workload: workloadGit, MemoryMiB: 512, Value: 0.8}, {Name: factShare95, Workload: workloadGit, MemoryMiB: 512, Value: 1.1},
			{Name: factDirty, Workload: workloadGit, MemoryMiB: 512, Value: 40},
			{Name: factDirtyBytes, Workload: workloadPython50, Value: 30e6}, {Name: factRemoteBytes, Workload: workloadPython50, Value: 10e6},
			{Name: factDirtyBytes, Workload: workloadGit, Value: 30e6}, {Name: factRemoteBytes, Workload: workloadGit, Value: 11e6},
			{Name: factCycles, Value: 300}, {Name: factPacks, Value: 30}, {Name: factStored, Value: 150}, {Name: factLive, Value: 100},
			{Name: factEarly, Value: 200}, {Name: factLate, Value: 220},
			{Name: factWake, Value: 3}, {Name: factWakePairs, Value: 20},
			{Name: factScale, Value: 1000}, {Name: factRSS, Value: 150e6}, {Name: factList, Value: 100}, {Name: factStart, Value: 900},
			{Name: factCPUEmpty, Value: 5}, {Name: factCPUFull, Value: 12}, {Name: factDisk, Value: 3e6},
		},
	}
}

// TestBars makes each bar fail by the figure that it is about, and no other.
func TestBars(t *testing.T) {
	for _, b := range bars(sampleResult(), Scenarios) {
		if b.Met == nil || !*b.Met {
			t.Errorf("%s: %s is not met: %s", b.What, b.Bar, b.Measured)
		}
	}
	at := func(k key, p50 float64) func(*Result) {
		return func(res *Result) {
			for i, r := range res.Rows {
				if k == (key{r.Workload, r.Cache, r.Prefetch, r.Concurrency, r.MemoryMiB, r.Peer, r.Metric}) {
					res.Rows[i].P50 = p50
				}
			}
		}
	}
	value := func(name, workload string, v float64) func(*Result) {
		return func(res *Result) {
			i := slices.IndexFunc(res.Facts, func(f Fact) bool { return f.Name == name && f.Workload == workload })
			res.Facts[i].Value = v
		}
	}
	large := first(workloadPython50, CacheWarm, true)
	large.memory = 4096
	for _, c := range []struct {
		what   string // begins the bar's name
		change func(*Result)
		text   string // in what was measured
	}{
		{"resume request", at(selfRow(workloadPython50, CacheWarm, true, 512, MetricRunning), 12.5), "p50 12.5 ms"},
		{"parked", at(first(workloadPython50, CacheParked, false), 51), "2.55 × (p50 51 and 20 ms)"},
		{"warm: first answer with 4 GiB", at(large, 241), "1.21 ×"},
		{"warm: first answer with 300 MB", at(first(workloadPython300, CacheWarm, true), 250), "1.25 ×"},
		{"what a cold page cache", at(first(workloadPython50, CacheCold, true), 260), "0.60 × (+60 ms and +100 ms)"},
		{"what a store", at(first(workloadPython50, CacheRemote20, false), 300), "0.33 × (+30 ms and +90 ms)"},
		{"bytes fetched", func(res *Result) { res.Rows[7].BytesFetched = 16e6 }, "1.60 × (16.0 of 10.0 MB)"},
		{"hibernate request", value(factShare, workloadGit, 1.01), "git at 512 MiB is the worst"},
		{"pages read on demand", value(factDemand, workloadPython50, 60), "0.060 × (60 and 1000 pages)"},
		{"changed pages against what the remote store takes, git", value(factRemoteBytes, workloadGit, 13e6), "2.31 ×"},
		{"packs after", value(factPacks, "", 33), "33 after 300"},
		{"stored bytes", value(factStored, "", 201), "2.01 ×"},
		{"first answer of the last ten", value(factLate, "", 250), "1.25 ×"},
		{"wake by an HTTP request", value(factWake, "", 15.5), "+15.5 ms (20 pairs)"},
		{"resumes at once", func(res *Result) { res.Rows[13].SuccessRate = 0.97 }, "32 at once: 97% succeeded"},
		{"daemon's memory", value(factRSS, "", 201e6), "201 MB (1000 sandboxes)"},
		{"hib ls", value(factList, "", 201), "201 ms"},
		{"daemon's start", value(factStart, "", 2100), "2.10 s"},
		{"daemon's processor time", value(factCPUFull, "", 16), "16 ms, with none 5 ms"},
	} {
		res := sampleResult()
		c.change(&res)
		for _, b := range bars(res, Scenarios) {
			is := strings.HasPrefix(b.What, c.what)
			if is == (b.Met != nil && *b.Met) {
				t.Errorf("%s is changed: %s: met %v: %s", c.what, b.What, *b.Met, b.Measured)
			}
			if is && !strings.Contains(b.Measured, c.text) {
				t.Errorf("%s: %q does not tell %q", b.What, b.Measured, c.text)
			}
		}
	}
	// A slow warm resume fails both of its comparisons, and one that nothing slows none.
	res := sampleResult()
	at(first(workloadPython50, CacheWarm, true), 600)(&res)
	unmet := 0
	for _, b := range bars(res, Scenarios) {
		if strings.HasPrefix(b.What, "warm: first HTTP") && !*b.Met {
			unmet++
		}
	}
	if unmet != 2 {
		t.Errorf("%d of 2 bars fail for a slow warm resume", unmet)
	}
	res = sampleResult()
	at(first(workloadPython50, CacheCold, true), 195)(&res)
	if i := slices.IndexFunc(bars(res, Scenarios), func(b Bar) bool { return strings.HasPrefix(b.What, "what a cold") && *b.Met }); i < 0 {
		t.Error("a cold page cache that adds nothing fails its bar")
	}
}

// TestMissingFigures leaves each row and fact out: no bar gets a verdict from nothing.
func TestMissingFigures(t *testing.T) {
	for i := range sampleResult().Rows {
		res := sampleResult()
		res.Rows[i].SuccessRate = 0 // no sample
		for _, b := range bars(res, Scenarios) {
			if strings.Contains(b.Measured, "NaN") || strings.Contains(b.Measured, "Inf") {
				t.Errorf("without %+v: %+v", res.Rows[i], b)
			}
		}
	}
	for _, b := range bars(Result{}, Scenarios) {
		if b.Met != nil || b.Measured != "not measured" {
			t.Errorf("%+v", b)
		}
	}
	if got := bars(sampleResult(), []string{ScenarioCycles}); len(got) != 3 {
		t.Errorf("%d bars of the scenario cycles: %+v", len(got), got)
	}
}

// TestSVG draws a result: well-formed, with every state, within the picture.
func TestSVG(t *testing.T) {
	res := sampleResult()
	res.Rows = append(res.Rows, Row{Workload: "none", Metric: MetricFirst, Peer: PeerSelf}) // no sample
	for _, r := range []Result{res, {}, {Rows: res.Rows[3:4]}} {
		var b bytes.Buffer
		if err := WriteSVG(&b, r); err != nil {
			t.Fatal(err)
		}
		for dec := xml.NewDecoder(bytes.NewReader(b.Bytes())); ; {
			if _, err := dec.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("%v in %s", err, b.String())
			}
		}
		for _, bad := range []string{"NaN", "Inf", `="-`, "none,"} {
			if strings.Contains(b.String(), bad) {
				t.Errorf("%q is in %s", bad, b.String())
			}
		}
	}
	var b bytes.Buffer
	if err := WriteSVG(&b, res); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"awake", "parked", ">cold<", "cold, no prefetch", "remote 20ms", "qemu migrate", "cold boot", "32 at once", "CPU &lt;1&gt;"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not drawn", want)
		}
	}
	if got := ticks(3, 300); !slices.Equal(got, []float64{5, 10, 20, 50, 100, 200}) {
		t.Errorf("ticks %v", got)
	}
	if x := logScale(1, 100); math.Abs(x(10)-(x(1)+x(100))/2) > 1e-9 {
		t.Errorf("the scale is not logarithmic")
	}
}
