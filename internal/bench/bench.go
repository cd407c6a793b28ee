// Package bench measures a running daemon the way its users meet it: every
// figure is the time between a request and its answer, taken on the user's own
// machine, next to the reports of the daemon about the same operations.
package bench

import (
	"context"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// Target is the daemon that is measured; *client.Client is one.
type Target interface {
	Version(ctx context.Context) (api.Version, error)
	Create(ctx context.Context, req api.CreateRequest) (api.Sandbox, error)
	Get(ctx context.Context, id string) (api.Sandbox, error)
	Hibernate(ctx context.Context, id string) (api.Sandbox, error)
	Delete(ctx context.Context, id string) error
	Exec(ctx context.Context, id string, req api.ExecRequest) (api.ExecResponse, error)
	DialPort(ctx context.Context, id string, port int) (net.Conn, error)
}

// Options chooses what is measured.
type Options struct {
	Template  string
	N         int      // samples of each metric
	Boots     int      // samples of cold boots; 0: a quarter of N, at least 3
	MemoryMiB []int    // shapes, one after the other
	StateMiB  int      // that the Python server holds
	Metrics   []string // which metrics; empty: all
	Progress  func(string)
}

// The metrics.
const (
	MetricRunning   = "vcpus_running" // resume request → the guest's vCPUs run, by the daemon's report
	MetricFirst     = "first_answer"  // request to the sleeping sandbox's HTTP server → its answer
	MetricHibernate = "hibernate"     // request → durable and acknowledged
	MetricCreate    = "create"        // create request → answer of the first exec
	MetricBoot      = "boot"          // the same with a cold boot, for comparison
)

var metrics = []string{MetricRunning, MetricFirst, MetricHibernate, MetricCreate, MetricBoot}

// CheckMetrics returns an error for a name that is no metric.
func CheckMetrics(names []string) error {
	for _, n := range names {
		if !slices.Contains(metrics, n) {
			return fmt.Errorf("unknown metric %q: there are %v", n, metrics)
		}
	}
	return nil
}

// Who a row is about.
const (
	PeerSelf = "hib"
	PeerBoot = "cold_boot" // the same guest booted, not resumed
)

// Row is one line of the result; the fields are stable.
type Row struct {
	Workload    string  `json:"workload"`    // "shell" or "python"
	Cache       string  `json:"cache"`       // "warm": the host's page cache was left alone
	Prefetch    bool    `json:"prefetch"`    // of the working set
	Concurrency int     `json:"concurrency"` // operations at once
	MemoryMiB   int     `json:"memory_mib"`
	Peer        string  `json:"peer"`  // "hib", or what it is compared with: "cold_boot"
	Accel       string  `json:"accel"` // "kvm" or "tcg"
	Metric      string  `json:"metric"`
	N           int     `json:"n"`
	P50         float64 `json:"p50_ms"`
	P95         float64 `json:"p95_ms"`
	P99         float64 `json:"p99_ms"`
	Max         float64 `json:"max_ms"`
	SuccessRate float64 `json:"success_rate"`
}

// Run measures and returns a row for each metric and shape. The sandboxes that
// it makes are deleted again, also when it fails.
func Run(ctx context.Context, target Target, opts Options) ([]Row, error) {
	version, err := target.Version(ctx)
	if err != nil {
		return nil, err
	}
	var rows []Row
	for _, memory := range opts.MemoryMiB {
		r := &runner{target: target, opts: opts, memory: memory, accel: version.Accel}
		if err := r.run(ctx); err != nil {
			return rows, fmt.Errorf("measure %d MiB: %w", memory, err)
		}
		rows = append(rows, r.rows...)
	}
	return rows, nil
}

// runner measures one shape.
type runner struct {
	target Target
	opts   Options
	memory int
	accel  string
	rows   []Row
}

func (r *runner) run(ctx context.Context) error {
	// The first sandbox of a shape boots its base snapshot: that is not the subject.
	r.say("preparing the shape")
	sb, err := r.create(ctx, false)
	if err != nil {
		return err
	}
	if err := r.delete(ctx, sb.ID); err != nil {
		return err
	}
	if r.wants(MetricBoot) {
		r.collect("shell", PeerBoot, MetricBoot, r.boots(), func() (float64, error) { return r.timeCreate(ctx, true) })
	}
	if r.wants(MetricCreate) {
		r.collect("shell", PeerSelf, MetricCreate, r.opts.N, func() (float64, error) { return r.timeCreate(ctx, false) })
	}
	if r.wants(MetricHibernate) || r.wants(MetricRunning) || r.wants(MetricFirst) {
		return r.cycles(ctx)
	}
	return ctx.Err()
}

func (r *runner) wants(metric string) bool {
	return len(r.opts.Metrics) == 0 || slices.Contains(r.opts.Metrics, metric)
}

func (r *runner) say(format string, args ...any) {
	if r.opts.Progress != nil {
		r.opts.Progress(fmt.Sprintf("%d MiB: ", r.memory) + fmt.Sprintf(format, args...))
	}
}

func (r *runner) create(ctx context.Context, cold bool) (api.Sandbox, error) {
	return r.target.Create(ctx, api.CreateRequest{
		Template: r.opts.Template, MemoryMiB: r.memory, ColdBoot: cold, Labels: map[string]string{"hib": "bench"},
	})
}

func (r *runner) boots() int {
	if r.opts.Boots > 0 {
		return r.opts.Boots
	}
	return max(3, r.opts.N/4)
}

// delete works after ctx has ended, too: nothing is left behind.
func (r *runner) delete(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	return r.target.Delete(ctx, id)
}

// collect takes n samples of do, in milliseconds, and adds their row.
func (r *runner) collect(workload, peer, metric string, n int, do func() (float64, error)) {
	var samples []float64
	var last error
	for i := range n {
		r.say("%s %d of %d", metric, i+1, n)
		ms, err := do()
		if err != nil {
			last = err
			continue
		}
		samples = append(samples, ms)
	}
	if last != nil {
		r.say("%s: %d of %d failed, the last with: %v", metric, n-len(samples), n, last)
	}
	r.add(workload, peer, metric, samples, n)
}

func (r *runner) add(workload, peer, metric string, samples []float64, tried int) {
	row := Row{
		Workload: workload, Cache: "warm", Prefetch: true, Concurrency: 1, MemoryMiB: r.memory, Peer: peer, Accel: r.accel,
		Metric: metric, N: tried, SuccessRate: float64(len(samples)) / float64(max(tried, 1)),
	}
	slices.Sort(samples)
	row.P50, row.P95, row.P99 = Quantile(samples, 0.50), Quantile(samples, 0.95), Quantile(samples, 0.99)
	row.Max = Quantile(samples, 1)
	r.rows = append(r.rows, row)
}

// Quantile returns the q-quantile of sorted samples by nearest rank; 0 if there are none.
func Quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(q*float64(len(sorted))+0.999999) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// timeCreate measures from the create request to the answer of a first exec.
func (r *runner) timeCreate(ctx context.Context, cold bool) (float64, error) {
	start := time.Now()
	sb, err := r.create(ctx, cold)
	if err != nil {
		return 0, err
	}
	_, err = r.target.Exec(ctx, sb.ID, api.ExecRequest{Cmd: []string{"/bin/true"}})
	took := since(start)
	if delErr := r.delete(ctx, sb.ID); err == nil {
		err = delErr
	}
	return took, err
}

func since(start time.Time) float64 { return float64(time.Since(start).Microseconds()) / 1000 }
