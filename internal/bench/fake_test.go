package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// fakeDaemon is a Target and a Host in memory whose operations take the times
// that cost names, on the clock of the test.
type fakeDaemon struct {
	parks, pools, evicts, remote, restarts bool // what it has
	failResume                             func(n int) error
	flickers                               bool             // its pool shrinks all the time
	poolEmpty                              func(n int) bool // nil: never

	mu      sync.Mutex
	boxes   map[string]*fakeBox
	made    int
	resumes int
	asked   int // for the host
}

type fakeBox struct {
	api.Sandbox
	cold, gone bool // since the hibernation: page cache dropped, local packs deleted
	lazy       bool // it was resumed without prefetch
	sleeps     int
	leaves     time.Time // when its VMM is parked or released, zero: that is done
	park       bool      // it is to be parked
	fetched    int64     // since the last resume, in bytes
}

// What the fake's operations take in milliseconds.
const (
	costCreate    = 300
	costBoot      = 5000
	costHibernate = 60
	costLeave     = 30 // behind the answer
	costUnpark    = 1
	costPooled    = 8
	costFresh     = 50
	costAnswer    = 20  // of a guest that runs
	costFirst     = 200 // of a guest that was resumed from a snapshot
	costCold      = 100 // on top of that, without prefetch
	costStore     = 10  // requests to the store, without prefetch
)

// whole is a daemon that has everything.
func whole() *fakeDaemon {
	return &fakeDaemon{parks: true, pools: true, evicts: true, remote: true, restarts: true, boxes: map[string]*fakeBox{}}
}

func take(ms int) { time.Sleep(time.Duration(ms) * time.Millisecond) }

func (d *fakeDaemon) box(id string) (*fakeBox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	b, ok := d.boxes[id]
	if !ok {
		return nil, fmt.Errorf("no sandbox %s", id)
	}
	return b, nil
}

func (d *fakeDaemon) Version(context.Context) (api.Version, error) {
	return api.Version{Version: "test", VMM: "fake 1", Accel: "tcg"}, nil
}

func (d *fakeDaemon) Create(_ context.Context, req api.CreateRequest) (api.Sandbox, error) {
	if req.ColdBoot {
		take(costBoot)
	} else {
		take(costCreate)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.made++
	b := &fakeBox{Sandbox: api.Sandbox{ID: fmt.Sprintf("box%d", d.made), State: api.StateRunning, MemoryMiB: req.MemoryMiB}}
	d.boxes[b.ID] = b
	return b.Sandbox, nil
}

func (d *fakeDaemon) Get(_ context.Context, id string) (api.Sandbox, error) {
	b, err := d.box(id)
	if err != nil {
		return api.Sandbox{}, err
	}
	d.leave(b, false)
	return b.Sandbox, nil
}

// leave parks or releases the VMM of a box that hibernated when it is time for
// that, or waits for that time.
func (d *fakeDaemon) leave(b *fakeBox, wait bool) {
	d.mu.Lock()
	left := time.Until(b.leaves)
	d.mu.Unlock()
	if wait {
		time.Sleep(left)
	} else if left > 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if b.leaves.IsZero() {
		return
	}
	b.leaves, b.Parked = time.Time{}, b.park
	step, report := "release", *b.LastHibernate
	if b.park {
		step = "park"
	}
	report.Phases = maps.Clone(report.Phases)
	report.Phases[step] = costLeave
	b.LastHibernate = &report
}

func (d *fakeDaemon) HibernateWith(_ context.Context, id string, req api.HibernateRequest) (api.Sandbox, error) {
	b, err := d.box(id)
	if err != nil || b.State == api.StateStandby {
		return b.Sandbox, err
	}
	take(costHibernate)
	w := &api.WorkingSetReport{BytesFetched: b.fetched, Pages: 1000, Prefetched: 1000, Late: 10, Missed: 20}
	if b.lazy {
		w.Prefetched, w.Late, w.Missed = 0, 980, 20
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	b.sleeps++
	b.State, b.cold = api.StateStandby, false // old packs that are gone stay away
	b.leaves, b.park = time.Now().Add(costLeave*time.Millisecond), d.parks && !req.NoPark
	b.Snapshot = &api.Snapshot{ID: fmt.Sprint(b.sleeps), DirtyBytes: 4e6}
	b.LastHibernate = &api.HibernateReport{WorkingSet: w, Phases: map[string]float64{"freeze": 10, "write": 40, "commit": 10}}
	if d.remote {
		b.Replication = &api.Replication{State: "replicated", SentBytes: 1e6}
	}
	return b.Sandbox, nil
}

func (d *fakeDaemon) Evict(_ context.Context, id string, req api.EvictRequest) (api.Evicted, error) {
	b, err := d.box(id)
	if err != nil {
		return api.Evicted{}, err
	}
	if !d.evicts {
		return api.Evicted{}, errors.New("not supported")
	}
	d.leave(b, true)
	b.Parked = b.Parked && !req.Parked
	b.cold, b.gone = b.cold || req.PageCache, b.gone || req.Local
	if req.Local {
		return api.Evicted{Packs: 2, Bytes: 1e6}, nil
	}
	return api.Evicted{}, nil
}

func (d *fakeDaemon) ResumeWith(_ context.Context, id string, req api.ResumeRequest) (api.Sandbox, error) {
	b, err := d.box(id)
	if err != nil || b.State == api.StateRunning {
		return b.Sandbox, err
	}
	d.leave(b, true)
	d.mu.Lock()
	d.resumes++
	n := d.resumes
	d.mu.Unlock()
	if d.failResume != nil {
		if err := d.failResume(n); err != nil {
			return b.Sandbox, err
		}
	}
	r := &api.ResumeReport{Tier: "local", Phases: map[string]float64{"guest_init": 5, "state": 2}, WorkingSetBytes: 4 << 20}
	first, vmm := costFirst, costFresh
	switch {
	case b.Parked && !req.NoParked:
		r.Tier, first, vmm = "parked", costAnswer, costUnpark
	case d.pools && !req.NoPool && (d.poolEmpty == nil || !d.poolEmpty(n)):
		r.Pooled, vmm = true, costPooled
	}
	if r.Tier == "local" && !req.NoPrefetch {
		r.PrefetchedBytes = 4 << 20
	}
	penalty := 0
	if b.cold {
		penalty = costCold
	}
	if b.gone && r.Tier == "local" {
		r.Tier, r.BytesFetched = "remote", 5<<20
		penalty = costStore * (1 + req.StoreDelayMS)
	}
	if !req.NoPrefetch {
		penalty /= 10
	}
	b.fetched = r.BytesFetched + r.BytesFetched/5 // some of it after the report
	r.Phases["vmm"] = float64(vmm)
	take(vmm + first - costAnswer + penalty) // the guest's part comes before the answer; it is the same to the caller
	b.State, b.Parked, b.LastResume, b.lazy = api.StateRunning, false, r, req.NoPrefetch
	return b.Sandbox, nil
}

func (d *fakeDaemon) Delete(_ context.Context, id string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.boxes, id)
	return nil
}

func (d *fakeDaemon) Exec(ctx context.Context, id string, req api.ExecRequest) (api.ExecResponse, error) {
	if _, err := d.ResumeWith(ctx, id, api.ResumeRequest{}); err != nil {
		return api.ExecResponse{}, err
	}
	take(costAnswer)
	if strings.Contains(strings.Join(req.Cmd, " "), "command -v node") {
		return api.ExecResponse{ExitCode: absentCode}, nil
	}
	return api.ExecResponse{}, nil
}

func (d *fakeDaemon) DialPort(ctx context.Context, id string, _ int) (net.Conn, error) {
	if _, err := d.ResumeWith(ctx, id, api.ResumeRequest{}); err != nil {
		return nil, err
	}
	ours, theirs := net.Pipe()
	go func() {
		defer theirs.Close()
		if _, err := http.ReadRequest(bufio.NewReader(theirs)); err != nil {
			return
		}
		take(costAnswer)
		fmt.Fprint(theirs, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
	}()
	return ours, nil
}

// Port returns a client that reaches the server as DialPort does.
func (d *fakeDaemon) Port(id string, port int) (*http.Client, string) {
	return &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
		conn, err := d.DialPort(r.Context(), id, port)
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		if err := r.Write(conn); err != nil {
			return nil, err
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), r)
		if err != nil {
			return nil, err
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body = io.NopCloser(bytes.NewReader(body))
		return resp, err
	})}, "http://sandbox"
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (d *fakeDaemon) Host(context.Context) (api.Host, error) {
	if !d.pools {
		return api.Host{}, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked++
	if d.flickers {
		return api.Host{PoolBytes: 1<<40 - int64(d.asked)}, nil
	}
	return api.Host{PoolBytes: 32 << 20}, nil
}

func (d *fakeDaemon) StoreStatus(context.Context) (api.StoreStatus, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := api.StoreStatus{PackBytes: 3e6 * int64(len(d.boxes))}
	if d.remote {
		s.Tiers = append(s.Tiers, api.TierStatus{Tier: "remote"})
	}
	for id, b := range d.boxes {
		s.Sandboxes = append(s.Sandboxes, api.StoreSandbox{ID: id, Packs: min(b.sleeps, 20), LiveBytes: 100, StoredBytes: 150})
	}
	return s, nil
}

func (d *fakeDaemon) PID() (int, error) { return os.Getpid(), nil }

func (d *fakeDaemon) List(context.Context) (time.Duration, error) { return 30 * time.Millisecond, nil }

func (d *fakeDaemon) Restart(context.Context) (time.Duration, error) {
	if !d.restarts {
		return 0, errors.ErrUnsupported
	}
	return 400 * time.Millisecond, nil
}

// fakePeer restores in a second.
type fakePeer struct{ restored, closed bool }

func (p *fakePeer) Restore(context.Context, string) (time.Duration, error) {
	p.restored = true
	take(1000)
	return time.Second, nil
}

func (p *fakePeer) Close() error { p.closed = true; return nil }
