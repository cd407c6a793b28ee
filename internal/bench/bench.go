// Package bench measures a running daemon the way its users meet it: every
// figure is the time between a request and its answer, taken on the user's own
// machine, next to the reports of the daemon about the same operations.
//
// # Nouns
//
//   - A workload is what runs in a sandbox, with its first useful request.
//   - A cache state is where the bytes are that a resume needs: see Caches. A
//     sample counts for a state only if the daemon's report of the resume shows
//     that it was in place.
//   - A subject is one sandbox with its workload. The samples of all subjects and
//     states of a scenario are taken in turns, so that what drifts on the machine
//     meets all of them alike.
//   - A peer is another way to get the same guest to answer: a cold boot, and
//     QEMU's own migration to a file and back.
//   - A row is the distribution of one metric, a fact any other figure, a bar what
//     a figure is held against.
package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// Target is the daemon that is measured; *client.Client is one.
type Target interface {
	Version(ctx context.Context) (api.Version, error)
	Create(ctx context.Context, req api.CreateRequest) (api.Sandbox, error)
	Get(ctx context.Context, id string) (api.Sandbox, error)
	HibernateWith(ctx context.Context, id string, req api.HibernateRequest) (api.Sandbox, error)
	ResumeWith(ctx context.Context, id string, req api.ResumeRequest) (api.Sandbox, error)
	Evict(ctx context.Context, id string, req api.EvictRequest) (api.Evicted, error)
	Delete(ctx context.Context, id string) error
	Exec(ctx context.Context, id string, req api.ExecRequest) (api.ExecResponse, error)
	DialPort(ctx context.Context, id string, port int) (net.Conn, error)
	Port(id string, port int) (hc *http.Client, baseURL string)
	StoreStatus(ctx context.Context) (api.StoreStatus, error)
	Host(ctx context.Context) (api.Host, error)
}

// Peer is a guest with a server that something else than the daemon saved.
type Peer interface {
	// Restore brings the guest back and returns how long it took until its
	// server answered a GET of path.
	Restore(ctx context.Context, path string) (time.Duration, error)
	Close() error
}

// Host is the machine that the daemon runs on.
type Host interface {
	// PID returns the daemon's process id.
	PID() (int, error)
	// List runs "hib ls" and returns how long it took.
	List(ctx context.Context) (time.Duration, error)
	// Restart ends the daemon and returns how long it took from there until one
	// answers. It wraps errors.ErrUnsupported where that is not allowed.
	Restart(ctx context.Context) (time.Duration, error)
}

// Options chooses what is measured. Quick and Full return useful ones.
type Options struct {
	Template  string
	N         int           // samples of each row; slow workloads and cold boots get less
	Sparse    bool          // fewer of rows that no bar needs, and no burst of cold sandboxes without prefetch
	Scenarios []string      // of Scenarios
	Workloads []string      // of Workloads
	Caches    []string      // of Caches
	MemoryMiB []int         // sizes of sandboxes
	Burst     []int         // how many sandboxes are resumed at once
	Cycles    int           // hibernations of one sandbox
	Scale     int           // sandboxes in standby
	IdleFor   time.Duration // over which the processor time of an idle daemon is measured

	// NewPeer boots a guest of the template, runs the command server, which starts
	// an HTTP server at port, and saves the guest by QEMU's own means. Nil: not compared.
	NewPeer func(ctx context.Context, memoryMiB int, server []string, port int) (Peer, error)
	Host    Host // nil: the daemon runs on another one
	// Progress hears what is going on. It may be called by several goroutines. May be nil.
	Progress func(string)
}

// The scenarios.
const (
	ScenarioCreate      = "create"      // create a sandbox, from its template and by a cold boot
	ScenarioStates      = "states"      // hibernate and resume in every cache state, one at a time
	ScenarioWake        = "wake"        // wake a sandbox by a request, and by an order before it
	ScenarioBurst       = "burst"       // resume many sandboxes at once
	ScenarioCycles      = "cycles"      // hibernate one sandbox again and again
	ScenarioCompression = "compression" // what the remote store takes
	ScenarioScale       = "scale"       // many sandboxes in standby
)

// Scenarios are the names of all scenarios, in the order in which they run.
var Scenarios = []string{ScenarioCreate, ScenarioStates, ScenarioWake, ScenarioBurst, ScenarioCompression, ScenarioCycles, ScenarioScale}

// Quick returns what gives a picture in a few minutes.
func Quick() Options {
	return Options{
		N: 5, Scenarios: []string{ScenarioCreate, ScenarioStates, ScenarioWake, ScenarioBurst, ScenarioCompression},
		Workloads: []string{workloadShell, workloadPython50}, Caches: judgedCaches, MemoryMiB: []int{512},
		Burst: []int{8}, Cycles: 30, Scale: 50, IdleFor: 10 * time.Second,
	}
}

// Full returns everything.
func Full() Options {
	return Options{
		N: 10, Sparse: true, Scenarios: Scenarios, Workloads: Workloads, Caches: Caches, MemoryMiB: []int{512, 4096},
		Burst: []int{8, 32}, Cycles: 300, Scale: 1000, IdleFor: time.Minute,
	}
}

// Check returns an error for what is no possible choice.
func (o Options) Check() error {
	for _, list := range []struct {
		what         string
		chosen, have []string
	}{{"scenario", o.Scenarios, Scenarios}, {"workload", o.Workloads, Workloads}, {"cache state", o.Caches, Caches}} {
		for _, name := range list.chosen {
			if !slices.Contains(list.have, name) {
				return fmt.Errorf("unknown %s %q: there are %s", list.what, name, strings.Join(list.have, ", "))
			}
		}
		if len(list.chosen) == 0 {
			return fmt.Errorf("no %s is chosen: there are %s", list.what, strings.Join(list.have, ", "))
		}
	}
	if o.N < 1 || o.Cycles < minCycles || o.Scale < 1 || len(o.MemoryMiB) == 0 {
		return fmt.Errorf("there must be at least 1 sample, %d cycles, 1 sandbox and 1 size of memory", minCycles)
	}
	return nil
}

// Run measures what o chooses. The sandboxes that it makes are deleted again,
// also when it fails. The result holds what was measured until an error.
func Run(ctx context.Context, target Target, o Options) (Result, error) {
	if err := o.Check(); err != nil {
		return Result{}, err
	}
	r, err := newRunner(ctx, target, o)
	if err != nil {
		return Result{}, err
	}
	scenarios := map[string]func(context.Context) error{
		ScenarioCreate: r.creations, ScenarioStates: r.states, ScenarioWake: r.wakes, ScenarioBurst: r.bursts,
		ScenarioCompression: r.compression, ScenarioCycles: r.cycles, ScenarioScale: r.scale,
	}
	for _, name := range Scenarios {
		if !slices.Contains(o.Scenarios, name) {
			continue
		}
		begun := time.Now()
		r.enter(o.weight(name))
		if err := r.settle(ctx); err != nil {
			return r.result(), err
		}
		if err := scenarios[name](ctx); err != nil {
			return r.result(), fmt.Errorf("%s: %w", name, err)
		}
		r.done(1)
		r.say("%s took %s", name, time.Since(begun).Round(time.Second))
		r.fact(Fact{Name: name + ".duration", Value: time.Since(begun).Seconds(), Unit: "s"})
	}
	return r.result(), nil
}

// runner measures.
type runner struct {
	*collector
	target Target
	opts   Options
	meta   Meta

	own      sync.Mutex
	mine     map[string]struct{} // sandboxes that were made and not deleted
	pools    map[int]bool        // sizes of memory for which a VMM came from the pool
	poolMost int64               // bytes that the pool was seen to hold
	restless bool                // the daemon did not come to rest when it was waited for last
	pace     pace
}

func newRunner(ctx context.Context, target Target, o Options) (*runner, error) {
	version, err := target.Version(ctx)
	if err != nil {
		return nil, err
	}
	return &runner{collector: newCollector(), target: target, opts: o, meta: newMeta(version),
		mine: map[string]struct{}{}, pools: map[int]bool{}, pace: newPace(o)}, nil
}

func (r *runner) result() Result {
	rows, facts := r.collector.rows(r.meta.Accel)
	res := Result{Meta: r.meta, Rows: rows, Facts: facts, Notes: append([]string{}, r.notes...)}
	res.Bars = bars(res, r.opts.Scenarios)
	return res
}

// enter begins a scenario of a weight.
func (r *runner) enter(weight float64) {
	r.own.Lock()
	defer r.own.Unlock()
	r.pace.enter(weight)
}

// say tells what is going on, how long the run has taken and how long it will take.
func (r *runner) say(format string, args ...any) {
	if r.opts.Progress == nil {
		return
	}
	r.own.Lock()
	pace := r.pace.String()
	r.own.Unlock()
	r.opts.Progress(fmt.Sprintf("[%s] %s", pace, fmt.Sprintf(format, args...)))
}

// done tells how much of the scenario is over, from 0 to 1.
func (r *runner) done(part float64) {
	r.own.Lock()
	defer r.own.Unlock()
	r.pace.part = part
}

func (r *runner) wantsCache(name string) bool { return slices.Contains(r.opts.Caches, name) }

// pooled notes that a sandbox of a size got its VMM from the pool.
func (r *runner) pooled(memory int) {
	r.own.Lock()
	defer r.own.Unlock()
	r.pools[memory] = true
}

// hasPool tells whether the daemon keeps VMMs for sandboxes of a size.
func (r *runner) hasPool(memory int) bool {
	r.own.Lock()
	defer r.own.Unlock()
	return r.pools[memory]
}

// create makes a sandbox that is deleted at the end, at the latest.
func (r *runner) create(ctx context.Context, memory int, cold bool) (api.Sandbox, error) {
	sb, err := r.target.Create(ctx, api.CreateRequest{
		Template: r.opts.Template, MemoryMiB: memory, ColdBoot: cold, Labels: map[string]string{"hib": "bench"},
		Policy: &api.PolicyPatch{IdleTimeout: new(api.Duration)}, // it sleeps when the benchmark says so
	})
	if err == nil {
		r.own.Lock()
		r.mine[sb.ID] = struct{}{}
		r.own.Unlock()
	}
	return sb, err
}

// delete works after ctx has ended, too: nothing is left behind.
func (r *runner) delete(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	err := r.target.Delete(ctx, id)
	if err == nil {
		r.own.Lock()
		delete(r.mine, id)
		r.own.Unlock()
	}
	return err
}

// deleteAll deletes every sandbox that is left of those that were made.
func (r *runner) deleteAll(ctx context.Context) error {
	r.own.Lock()
	ids := make([]string, 0, len(r.mine))
	for id := range r.mine {
		ids = append(ids, id)
	}
	r.own.Unlock()
	return parallel(ids, deleters, func(id string) error { return r.delete(ctx, id) })
}

// deleters is how many sandboxes are deleted at once.
const deleters = 4

// parallel calls do for each item, at most limit at once, and returns all errors.
func parallel[T any](items []T, limit int, do func(T) error) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	room := make(chan struct{}, limit)
	for _, item := range items {
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			if err := do(item); err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// until polls cond every pause until it is true or ctx ends, and tells which.
func until(ctx context.Context, pause time.Duration, cond func() bool) bool {
	for !cond() {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
	return true
}

func since(start time.Time) float64 { return ms(time.Since(start)) }

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
