package bench

import (
	"context"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

func TestQuantile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for _, c := range []struct {
		sorted []float64
		q      float64
		want   float64
	}{
		{nil, 0.5, 0},
		{[]float64{7}, 0.5, 7}, {[]float64{7}, 0.99, 7},
		{[]float64{1, 2}, 0.5, 1}, {[]float64{1, 2}, 0.51, 2},
		{[]float64{1, 2, 3}, 0.5, 2}, {[]float64{1, 2, 3}, 0, 1}, {[]float64{1, 2, 3}, 1, 3},
		{hundred, 0.5, 50}, {hundred, 0.95, 95}, {hundred, 0.99, 99}, {hundred, 0.991, 100},
	} {
		if got := Quantile(c.sorted, c.q); got != c.want {
			t.Errorf("%v-quantile of %d samples: %v, want %v", c.q, len(c.sorted), got, c.want)
		}
	}
}

// TestCheck holds reports against the states that they may count for.
func TestCheck(t *testing.T) {
	good := map[string]api.ResumeReport{
		CacheParked:   {Tier: "parked"},
		CacheWarm:     {Tier: "local", Pooled: true, PrefetchedBytes: 1},
		CacheFresh:    {Tier: "local", PrefetchedBytes: 1},
		CacheCold:     {Tier: "local", Pooled: true, PrefetchedBytes: 1},
		CacheLongIdle: {Tier: "local", PrefetchedBytes: 1},
		CacheRemote20: {Tier: "remote", Pooled: true, PrefetchedBytes: 1, BytesFetched: 1},
	}
	for cache, report := range good {
		v := variants(cache)[0]
		if reason := v.check(report, v.pool); reason != "" {
			t.Errorf("%s: %s", cache, reason)
		}
		if cache == CacheParked {
			continue
		}
		for what, change := range map[string]func(*api.ResumeReport){
			"another tier":  func(r *api.ResumeReport) { r.Tier = "parked" },
			"no prefetch":   func(r *api.ResumeReport) { r.PrefetchedBytes = 0 },
			"pool":          func(r *api.ResumeReport) { r.Pooled = !r.Pooled },
			"bytes fetched": func(r *api.ResumeReport) { r.BytesFetched = 1 - r.BytesFetched },
		} {
			bad := report
			change(&bad)
			if v.check(bad, v.pool) == "" {
				t.Errorf("%s counts in spite of: %s", cache, what)
			}
		}
		if lazy := variants(cache)[1]; lazy.check(report, lazy.pool) == "" {
			t.Errorf("%s without prefetch counts although something was prefetched", cache)
		}
	}
}

// find returns the row of a key.
func find(res Result, k key) (Row, bool) { return figures(res).row(k) }

func measureAll(t *testing.T, d *fakeDaemon, o Options) Result {
	t.Helper()
	peer := &fakePeer{}
	o.Host = d
	o.NewPeer = func(context.Context, int, []string, int) (Peer, error) { return peer, nil }
	res, err := Run(t.Context(), d, o)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.boxes) != 0 {
		t.Errorf("%d sandboxes are left", len(d.boxes))
	}
	if peer.restored && !peer.closed {
		t.Error("the peer is left")
	}
	return res
}

func small() Options {
	o := Full()
	o.Sparse = false
	o.N, o.Burst, o.Cycles, o.Scale, o.IdleFor = 4, []int{3}, 40, 5, time.Second
	return o
}

// TestEverything measures a daemon that has everything: every figure is what
// its operations take, and every bar gets a verdict.
func TestEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		res := measureAll(t, whole(), small())
		for _, c := range []struct {
			cache    string
			prefetch bool
			running  float64 // 0: not measured
			first    float64
		}{
			{CacheAwake, false, 0, costAnswer},
			{CacheParked, false, costUnpark + 2, costUnpark + costAnswer},
			{CacheWarm, true, costPooled + 2, costPooled + costFirst},
			{CacheWarm, false, costPooled + 2, costPooled + costFirst},
			{CacheFresh, true, costFresh + 2, costFresh + costFirst},
			{CacheCold, true, costPooled + 2, costPooled + costFirst + costCold/10},
			{CacheCold, false, costPooled + 2, costPooled + costFirst + costCold},
			{CacheLongIdle, false, costFresh + 2, costFresh + costFirst + costCold},
			{CacheRemote0, true, costPooled + 2, costPooled + costFirst + costStore/10},
			{CacheRemote50, false, costPooled + 2, costPooled + costFirst + 51*costStore},
		} {
			k := selfRow(workloadPython50, c.cache, c.prefetch, 512, MetricFirst)
			r, ok := find(res, k)
			if !ok || r.P50 != c.first || r.Max != c.first || r.N != 4 || r.SuccessRate != 1 {
				t.Errorf("%s, prefetch %v: %+v, want 4 × %v ms", c.cache, c.prefetch, r, c.first)
			}
			k.metric = MetricRunning
			if r, _ := find(res, k); r.P50 != c.running {
				t.Errorf("%s, prefetch %v: vCPUs ran after %v ms, want %v", c.cache, c.prefetch, r.P50, c.running)
			}
		}
		if r, _ := find(res, selfRow(workloadPython50, CacheAwake, false, 512, MetricHibernate)); r.P50 != costHibernate {
			t.Errorf("hibernate: %+v", r)
		}
		if r, _ := find(res, selfRow(workloadPython50, CacheWarm, true, 512, MetricRunning)); r.N != 4*(1+runningOnly) {
			t.Errorf("resumes from the pool: %+v", r)
		}
		// What was fetched after the resume's report counts, too.
		if r, _ := find(res, first(workloadPython50, CacheRemote20, true)); r.BytesFetched != 6<<20 || r.WorkingSetBytes != 4<<20 {
			t.Errorf("fetched: %+v", r)
		}
		for name, want := range map[string]float64{
			"hibernate.phase.write.p50": 40, "hibernate.phase.commit.p50": 10, "hibernate.phase.release.p50": costLeave, factDirty: 4,
			"vcpus_running.phase.vmm.p50": costUnpark, "vcpus_running.phase.state.p50": 2,
		} {
			if got, ok := figures(res).fact(name, workloadPython50); !ok || got != want {
				t.Errorf("%s is %v, want %v", name, got, want)
			}
		}
		boot := selfRow(workloadShell, CacheWarm, false, 512, MetricCreate)
		boot.peer = PeerBoot
		if r, _ := find(res, boot); r.P50 != costBoot+costAnswer || r.N != 1 {
			t.Errorf("cold boot: %+v", r)
		}
		burst := first(workloadPython50, CacheWarm, true)
		burst.concurrency = 3
		if r, _ := find(res, burst); r.N != 6 {
			t.Errorf("burst: %+v", r)
		}
		if len(res.Bars) != len(allBars) {
			t.Errorf("%d bars, want %d", len(res.Bars), len(allBars))
		}
		for _, b := range res.Bars {
			switch {
			case b.Met == nil:
				t.Errorf("%s: not measured", b.What)
			case strings.Contains(b.What, "processor time"), strings.Contains(b.What, "memory"): // this process's
			case !*b.Met:
				t.Errorf("%s: %s is not met: %s", b.What, b.Bar, b.Measured)
			}
		}
		if !slices.ContainsFunc(res.Notes, func(n string) bool { return strings.HasPrefix(n, "node: skipped") }) {
			t.Errorf("nothing tells that node is absent: %q", res.Notes)
		}
	})
}

// TestNothingIsMadeUp measures a daemon that has none of the caches: no row
// claims a state that was not there, and notes say what is missing.
func TestNothingIsMadeUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := whole()
		d.parks, d.pools, d.evicts, d.remote, d.restarts = false, false, false, false, false
		res := measureAll(t, d, small())
		for _, r := range res.Rows {
			alone := r.Concurrency == 1 && r.Resumed()
			if alone && r.Cache != CacheFresh {
				t.Errorf("a row claims to be %s: %+v", r.Cache, r)
			}
		}
		if _, ok := find(res, first(workloadPython50, CacheFresh, true)); !ok {
			t.Error("what could be measured was not")
		}
		for _, want := range []string{"512 MiB: no VMM came from the pool", "did not park", "eviction: not supported", "no remote store", "daemon's start is not measured"} {
			if !slices.ContainsFunc(res.Notes, func(n string) bool { return strings.Contains(n, want) }) {
				t.Errorf("no note tells %q: %q", want, res.Notes)
			}
		}
		for _, b := range res.Bars {
			if strings.HasPrefix(b.What, "parked") && b.Met != nil {
				t.Errorf("a bar has a verdict without figures: %+v", b)
			}
		}
	})
}

// TestPoolThatIsOftenEmpty: what came from the pool is measured as that, if it is less than
// was asked for, and a note says so.
func TestPoolThatIsOftenEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := whole()
		d.poolEmpty = func(n int) bool { return n%7 != 0 }
		o := Quick()
		o.N, o.Scenarios, o.Workloads, o.Caches = 4, []string{ScenarioStates}, []string{workloadPython50}, []string{CacheWarm}
		res := measureAll(t, d, o)
		r, ok := find(res, selfRow(workloadPython50, CacheWarm, true, 512, MetricRunning))
		if !ok || r.N == 0 || r.N >= 4*(1+runningOnly) || r.P50 != costPooled+2 {
			t.Errorf("%+v", r)
		}
		if !slices.ContainsFunc(res.Notes, func(n string) bool { return strings.Contains(n, "of 4 samples") && strings.Contains(n, notPooled) }) {
			t.Errorf("no note tells of samples that are missing: %q", res.Notes)
		}
	})
}

// TestRestlessDaemon is measured all the same, and not waited for long.
func TestRestlessDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := whole()
		d.flickers = true
		o := Quick()
		o.N, o.Scenarios, o.Workloads, o.Caches = 5, []string{ScenarioStates}, []string{workloadShell}, []string{CacheWarm}
		begun := time.Now()
		res := measureAll(t, d, o)
		if took := time.Since(begun); took > 2*time.Minute {
			t.Errorf("it took %s", took)
		}
		if r, _ := find(res, first(workloadShell, CacheWarm, true)); r.N != 5 {
			t.Errorf("%+v", r)
		}
		if !slices.ContainsFunc(res.Notes, func(n string) bool { return strings.Contains(n, "did not come to rest") }) {
			t.Errorf("no note tells: %q", res.Notes)
		}
	})
}

// TestSparse takes fewer samples of what no bar is about, and says how far it is.
func TestSparse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := Full()
		o.Scenarios, o.Workloads, o.MemoryMiB = []string{ScenarioStates}, []string{workloadPython50, workloadShell}, []int{512}
		var said []string
		o.Progress = func(line string) { said = append(said, line) }
		res := measureAll(t, whole(), o)
		for k, want := range map[key]int{
			first(workloadPython50, CacheCold, false): 10, first(workloadPython50, CacheRemote50, true): 3, first(workloadPython50, CacheFresh, true): 5, first(workloadShell, CacheWarm, true): 5,
			selfRow(workloadPython50, CacheWarm, true, 512, MetricRunning): 30,
		} {
			if r, _ := find(res, k); r.N != want {
				t.Errorf("%+v: %d samples, want %d", k, r.N, want)
			}
		}
		if !strings.Contains(said[len(said)/2], " left] ") || !strings.Contains(said[len(said)-1], "about 0s left] states took ") {
			t.Errorf("it said %q and ended with %q", said[len(said)/2], said[len(said)-1])
		}
	})
}

func TestFailuresCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := whole()
		d.failResume = func(n int) error {
			if n > warmups && n%3 == 0 {
				return errors.New("no luck")
			}
			return nil
		}
		o := Quick()
		o.N, o.Scenarios, o.Workloads, o.Caches = 12, []string{ScenarioStates}, []string{workloadShell}, []string{CacheCold}
		res := measureAll(t, d, o)
		r, _ := find(res, first(workloadShell, CacheCold, true))
		if r.N != 12 || r.SuccessRate <= 0.3 || r.SuccessRate >= 1 {
			t.Errorf("%+v", r)
		}
		if !slices.ContainsFunc(res.Notes, func(n string) bool { return strings.Contains(n, "no luck") }) {
			t.Errorf("no note tells why: %q", res.Notes)
		}
	})
}

// TestCancel stops in the middle: what was made is deleted.
func TestCancel(t *testing.T) {
	for _, scenario := range Scenarios {
		t.Run(scenario, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := whole()
				o := small()
				o.Scenarios, o.Host = []string{scenario}, d
				ctx, cancel := context.WithCancel(t.Context())
				d.failResume = func(n int) error {
					if n == 5 {
						cancel()
					}
					return ctx.Err()
				}
				time.AfterFunc(8*time.Second, cancel)
				if _, err := Run(ctx, d, o); !errors.Is(err, context.Canceled) {
					t.Errorf("%v", err)
				}
				if len(d.boxes) != 0 {
					t.Errorf("%d sandboxes are left", len(d.boxes))
				}
				take(2 * costAnswer) // the fake's last answer ends
			})
		})
	}
}

// TestOwnSandboxStaysAsItWas measures sandboxes of the user's.
func TestOwnSandboxStaysAsItWas(t *testing.T) {
	for _, state := range []api.State{api.StateRunning, api.StateStandby} {
		synctest.Test(t, func(t *testing.T) {
			d := whole()
			sb, err := d.Create(t.Context(), api.CreateRequest{MemoryMiB: 512})
			if err == nil && state == api.StateStandby {
				_, err = d.HibernateWith(t.Context(), sb.ID, api.HibernateRequest{})
			}
			if err != nil {
				t.Fatal(err)
			}
			o := Quick()
			o.N, o.Caches = 3, Caches
			res, err := RunOwn(t.Context(), d, o, Own{sb.ID, 8000, "/"})
			if err != nil {
				t.Fatal(err)
			}
			for _, cache := range Caches {
				v := variants(cache)[0]
				if r, ok := find(res, first(workloadOwn, cache, v.prefetch)); !ok || r.N != 3 {
					t.Errorf("%s: %+v", cache, r)
				}
			}
			if now, err := d.Get(t.Context(), sb.ID); err != nil || now.State != state {
				t.Errorf("it was %s and is %s: %v", state, now.State, err)
			}
			d.boxes[sb.ID].State = api.StateFailed
			if _, err := RunOwn(t.Context(), d, o, Own{sb.ID, 8000, "/"}); err == nil {
				t.Error("a failed sandbox is measured")
			}
		})
	}
}

func TestChoices(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(*Options)
		want   string // in the error, "" for none
	}{
		{"quick", func(o *Options) { *o = Quick() }, ""},
		{"full", func(*Options) {}, ""},
		{"scenario", func(o *Options) { o.Scenarios = []string{"x"} }, `unknown scenario "x"`},
		{"workload", func(o *Options) { o.Workloads = []string{"x"} }, `unknown workload "x"`},
		{"cache", func(o *Options) { o.Caches = []string{"x"} }, `unknown cache state "x"`},
		{"nothing", func(o *Options) { o.Caches = []string{} }, "no cache state"},
		{"no samples", func(o *Options) { o.N = 0 }, "at least"},
		{"few cycles", func(o *Options) { o.Cycles = 3 }, "at least"},
	} {
		o := Full()
		c.change(&o)
		err := o.Check()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
	o := Full()
	o.Workloads, o.Caches, o.MemoryMiB = []string{workloadPython50, workloadGit}, []string{CacheAwake, CacheCold}, []int{512}
	got := o.chosen()
	if len(got) != 2 || len(got[0]) != 1 || strings.Join(got[0][0].caches, " ") != "awake cold" || strings.Join(got[1][0].caches, " ") != CacheAwake {
		t.Errorf("%+v", got)
	}
}

func TestThisMachine(t *testing.T) {
	m := newMeta(api.Version{Accel: "tcg"})
	if m.Accel != "tcg" || m.Cores < 1 || m.Memory < 1<<20 || m.Kernel == "" || m.Date.IsZero() {
		t.Errorf("%+v", m)
	}
	if got := cpuName("processor : 0\nmodel name\t: Some CPU @ 2\nmodel name : other\n"); got != "Some CPU @ 2" {
		t.Errorf("%q", got)
	}
	if n, err := residentBytes(os.Getpid()); err != nil || n < 1<<20 {
		t.Errorf("%d %v", n, err)
	}
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	x := 1.0
	for begun := time.Now(); time.Since(begun) < 20*time.Millisecond; {
		x = math.Sqrt(x + 1)
	}
	if after, err := cpuTime(os.Getpid()); err != nil || after <= before {
		t.Errorf("%v, then %v: %v", before, after, err)
	}
	if _, err := cpuTime(0); err == nil {
		t.Error("a process that does not exist has processor time")
	}
	if _, err := residentBytes(0); err == nil {
		t.Error("a process that does not exist has memory")
	}
}
