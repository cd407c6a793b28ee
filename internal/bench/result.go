package bench

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// The metrics of rows.
const (
	MetricRunning   = "vcpus_running"       // resume request → the guest's vCPUs run, by the daemon's report
	MetricFirst     = "first_answer"        // request → answer of the workload
	MetricHibernate = "hibernate"           // request → durable and acknowledged
	MetricResumeAsk = "resume_then_request" // resume request → answer of an HTTP request that follows
	MetricWake      = "wake_by_request"     // HTTP request that wakes → its answer
	MetricCreate    = "create"              // create request → answer of the first exec
)

// metrics are all metrics in the order of rows.
var metrics = []string{MetricCreate, MetricHibernate, MetricRunning, MetricFirst, MetricResumeAsk, MetricWake}

// Who a row is about.
const (
	PeerSelf    = "hib"
	PeerBoot    = "cold_boot"    // the same guest booted, not resumed
	PeerMigrate = "qemu_migrate" // the same guest restored by QEMU's own means
)

// Row is the distribution of one metric. The fields are stable.
type Row struct {
	Workload    string  `json:"workload"`
	Cache       string  `json:"cache"`       // state of the caches, see Caches
	Prefetch    bool    `json:"prefetch"`    // of the working set
	Concurrency int     `json:"concurrency"` // operations at once
	MemoryMiB   int     `json:"memory_mib"`
	Peer        string  `json:"peer"`  // "hib", or what it is compared with
	Accel       string  `json:"accel"` // "kvm" or "tcg"
	Metric      string  `json:"metric"`
	N           int     `json:"n"` // tries, failed ones included
	P50         float64 `json:"p50_ms"`
	P95         float64 `json:"p95_ms"`
	P99         float64 `json:"p99_ms"`
	Max         float64 `json:"max_ms"`
	SuccessRate float64 `json:"success_rate"` // of the tries

	BytesFetched    int64 `json:"bytes_fetched"`     // from the remote store, median
	WorkingSetBytes int64 `json:"working_set_bytes"` // median
}

// Resumed tells whether the row is about resumes.
func (r Row) Resumed() bool {
	return r.Metric == MetricRunning || r.Metric == MetricFirst && r.Cache != CacheAwake && r.Peer == PeerSelf
}

// Fact is a figure that is no distribution of times. What it is about stands in
// the fields that apply.
type Fact struct {
	Name      string  `json:"name"`
	Workload  string  `json:"workload,omitempty"`
	Cache     string  `json:"cache,omitempty"`
	Prefetch  *bool   `json:"prefetch,omitempty"`
	MemoryMiB int     `json:"memory_mib,omitempty"`
	Value     float64 `json:"value"`
	Unit      string  `json:"unit"`
}

// Meta says where and when a result was measured.
type Meta struct {
	Accel   string    `json:"accel"`
	VMM     string    `json:"vmm"`
	Version string    `json:"version"` // of the daemon
	CPU     string    `json:"cpu"`
	Cores   int       `json:"cores"`
	Memory  int64     `json:"memory_bytes"`
	Kernel  string    `json:"kernel"`
	Date    time.Time `json:"date"`
}

// Bar is a figure and what it is held against.
type Bar struct {
	What     string `json:"what"`
	Measured string `json:"measured"`
	Bar      string `json:"bar"`
	Met      *bool  `json:"met"` // null: not measured, the notes say why
}

// Result is all that a run found.
type Result struct {
	Meta  Meta     `json:"meta"`
	Rows  []Row    `json:"rows"`
	Facts []Fact   `json:"facts"`
	Bars  []Bar    `json:"bars"`
	Notes []string `json:"notes"` // what was left out or went wrong, a line each
}

// key is what tells rows apart.
type key struct {
	workload    string
	cache       string
	prefetch    bool
	concurrency int
	memory      int
	peer        string
	metric      string
}

// series are the samples of a row.
type series struct {
	key
	ms         []float64
	tried      int
	fetched    []float64 // bytes
	workingSet []float64 // bytes
	demand     []float64 // pages read on demand
	phases     phases    // of resumes
}

// phases are the milliseconds of each phase, a figure for each report.
type phases map[string][]float64

// add adds the phases of one report, without those within others.
func (p phases) add(report map[string]float64) {
	for name, ms := range report {
		if !strings.Contains(name, ".") {
			p[name] = append(p[name], ms)
		}
	}
}

// facts returns the median of each phase as a fact like f, whose name it is added to.
func (p phases) facts(f Fact) []Fact {
	var facts []Fact
	for _, name := range slices.Sorted(maps.Keys(p)) {
		one := f
		one.Name, one.Value, one.Unit = f.Name+".phase."+name+".p50", median(p[name]), "ms"
		facts = append(facts, one)
	}
	return facts
}

// collector gathers samples, facts and notes. Its methods may be called at the
// same time.
type collector struct {
	mu     sync.Mutex
	series []*series // in the order in which they came up
	slept  []hibernation
	facts  []Fact
	notes  []string
}

func newCollector() *collector { return &collector{} }

// of returns the series of k. The caller holds mu.
func (c *collector) of(k key) *series {
	for _, s := range c.series {
		if s.key == k {
			return s
		}
	}
	s := &series{key: k, phases: phases{}}
	c.series = append(c.series, s)
	return s
}

// add adds a sample in milliseconds.
func (c *collector) add(k key, ms float64) {
	c.with(k, func(s *series) { s.tried, s.ms = s.tried+1, append(s.ms, ms) })
}

// fail adds a try that gave no sample, and notes why.
func (c *collector) fail(k key, err error) {
	c.with(k, func(s *series) { s.tried++ })
	c.note("%s %s %s failed: %v", k.workload, k.cache, k.metric, err)
}

// with changes the series of k.
func (c *collector) with(k key, change func(*series)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(c.of(k))
}

func (c *collector) fact(f Fact) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.facts = append(c.facts, f)
}

// hibernation is what one hibernation took and found.
type hibernation struct {
	workload string
	memory   int
	ms       float64
	dirtyMB  float64 // millions of bytes
	phases   map[string]float64
}

// share returns what the hibernation took of what it may take.
func (h hibernation) share() float64 { return h.ms / (hibernateBase + hibernatePerMB*h.dirtyMB) }

// hibernated keeps what a hibernation of ms milliseconds found.
func (c *collector) hibernated(workload string, memory int, ms float64, sb api.Sandbox) {
	if sb.Snapshot == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h := hibernation{workload: workload, memory: memory, ms: ms, dirtyMB: float64(sb.Snapshot.DirtyBytes) / 1e6}
	if sb.LastHibernate != nil {
		h.phases = sb.LastHibernate.Phases
	}
	c.slept = append(c.slept, h)
}

// hibernations returns facts about the hibernations of each workload and size.
func (c *collector) hibernations() []Fact {
	type of struct {
		workload string
		memory   int
	}
	var order []of
	shares, dirty, steps := map[of][]float64{}, map[of][]float64{}, map[of]phases{}
	for _, h := range c.slept {
		k := of{h.workload, h.memory}
		if !slices.Contains(order, k) {
			order, steps[k] = append(order, k), phases{}
		}
		steps[k].add(h.phases)
		shares[k], dirty[k] = append(shares[k], h.share()), append(dirty[k], h.dirtyMB)
	}
	var facts []Fact
	for _, k := range order {
		sorted := slices.Sorted(slices.Values(shares[k]))
		add := func(name string, value float64, unit string) {
			facts = append(facts, Fact{Name: name, Workload: k.workload, MemoryMiB: k.memory, Value: value, Unit: unit})
		}
		add(factDirty, median(dirty[k]), "MB")
		add(factDirtyMax, slices.Max(dirty[k]), "MB")
		add(factShare, Quantile(sorted, 0.5), "of the bar")
		add(factShare95, Quantile(sorted, 0.95), "of the bar")
		facts = append(facts, steps[k].facts(Fact{Name: MetricHibernate, Workload: k.workload, MemoryMiB: k.memory})...)
	}
	return facts
}

// note keeps a line for the reader, once.
func (c *collector) note(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Contains(c.notes, line) {
		c.notes = append(c.notes, line)
	}
}

// rows returns the rows of all samples, and all facts.
func (c *collector) rows(accel string) ([]Row, []Fact) {
	c.mu.Lock()
	defer c.mu.Unlock()
	rows, facts := []Row{}, append([]Fact{}, c.facts...)
	for _, s := range slices.SortedStableFunc(slices.Values(c.series), compareSeries) {
		rows = append(rows, s.row(accel))
		if s.explained() {
			facts = append(facts, s.phases.facts(Fact{Name: MetricRunning, Workload: s.workload, Cache: s.cache, MemoryMiB: s.memory})...)
		}
		if len(s.demand) > 0 {
			facts = append(facts, Fact{Name: factDemand, Workload: s.workload, Cache: s.cache, Prefetch: &s.prefetch,
				MemoryMiB: s.memory, Value: mean(s.demand), Unit: "pages"})
		}
	}
	return rows, append(facts, c.hibernations()...)
}

// compareSeries orders rows by workload, size, how many at once, metric and state.
func compareSeries(a, b *series) int {
	prefetchFirst := func(s *series) int {
		if s.prefetch {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(slices.Index(Workloads, a.workload), slices.Index(Workloads, b.workload)),
		cmp.Compare(a.memory, b.memory),
		cmp.Compare(a.concurrency, b.concurrency),
		cmp.Compare(slices.Index(metrics, a.metric), slices.Index(metrics, b.metric)),
		cmp.Compare(slices.Index(Caches, strings.TrimSuffix(a.cache, noPool)), slices.Index(Caches, strings.TrimSuffix(b.cache, noPool))),
		-cmp.Compare(a.peer, b.peer),
		cmp.Compare(prefetchFirst(a), prefetchFirst(b)),
	)
}

// explained tells whether the phases of the series are told: of a workload's
// resumes, one at a time, parked and warm.
func (s *series) explained() bool {
	warm := s.cache == CacheWarm || s.cache == CacheWarm+noPool
	return s.metric == MetricRunning && s.concurrency == 1 && (s.cache == CacheParked || warm && s.prefetch)
}

func (s *series) row(accel string) Row {
	sorted := slices.Sorted(slices.Values(s.ms))
	return Row{
		Workload: s.workload, Cache: s.cache, Prefetch: s.prefetch, Concurrency: s.concurrency, MemoryMiB: s.memory,
		Peer: s.peer, Accel: accel, Metric: s.metric, N: s.tried,
		P50: Quantile(sorted, 0.50), P95: Quantile(sorted, 0.95), P99: Quantile(sorted, 0.99), Max: Quantile(sorted, 1),
		SuccessRate:  float64(len(s.ms)) / float64(max(s.tried, 1)),
		BytesFetched: int64(median(s.fetched)), WorkingSetBytes: int64(median(s.workingSet)),
	}
}

// Quantile returns the q-quantile of sorted samples by nearest rank: the
// smallest sample that at least the share q of all is not above; 0 if there
// are none.
func Quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(q * float64(len(sorted)))
	if float64(rank) < q*float64(len(sorted))-1e-9 {
		rank++
	}
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// median returns the 0.5-quantile of samples in any order.
func median(samples []float64) float64 {
	return Quantile(slices.Sorted(slices.Values(samples)), 0.5)
}

func mean(samples []float64) float64 {
	var sum float64
	for _, v := range samples {
		sum += v
	}
	return sum / float64(max(len(samples), 1))
}
