package metrics

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// Core is what the gauges are asked of.
type Core interface {
	Host(ctx context.Context) (sandbox.Host, error)
	List(ctx context.Context) ([]sandbox.Sandbox, error)
	Tiers(ctx context.Context) ([]sandbox.TierStatus, error)
}

const (
	// scrapePatience bounds what a scrape waits for.
	scrapePatience = 5 * time.Second
	// tiersEvery is how old the sizes of the tiers may be: to find them out the
	// objects of a remote store are listed, page by page.
	tiersEvery = 5 * time.Minute
)

var (
	sandboxesDesc = prometheus.NewDesc("hib_sandboxes", "Sandboxes by state.", []string{"state"}, nil)
	usageDesc     = prometheus.NewDesc("hib_sandbox_stored_bytes", "Bytes that snapshots and checkpoints of all sandboxes hold.", nil, nil)
	guestsDesc    = prometheus.NewDesc("hib_guests", "Guests that run.", nil, nil)
	promisedDesc  = prometheus.NewDesc("hib_memory_promised_bytes", "Memory promised to guests that run.", nil, nil)
	limitDesc     = prometheus.NewDesc("hib_memory_limit_bytes", "Memory that may be promised, 0 for any.", nil, nil)
	parkedDesc    = prometheus.NewDesc("hib_parked", "Parked machines.", nil, nil)
	parkedMemDesc = prometheus.NewDesc("hib_parked_bytes", "Memory of parked machines.", nil, nil)
	poolDesc      = prometheus.NewDesc("hib_pool_bytes", "Memory of machines that were started beforehand.", nil, nil)
	freeDesc      = prometheus.NewDesc("hib_disk_free_bytes", "Free space where snapshots are kept.", nil, nil)
	reserveDesc   = prometheus.NewDesc("hib_disk_reserve_bytes", "Of the free space, kept for hibernations.", nil, nil)
	storeDesc     = prometheus.NewDesc("hib_store_bytes", "Bytes in the store by tier, as of the last minutes.", []string{"tier"}, nil)
	pendingDesc   = prometheus.NewDesc("hib_replication_pending", "Snapshots that wait for their upload.", nil, nil)
	upDesc        = prometheus.NewDesc("hib_store_up", "Whether the tier could be asked.", []string{"tier"}, nil)
)

// Watch has the gauges asked of core from now on. Call it once. The returned
// function waits for what asks core at this moment; nothing does so after it.
func (m *Metrics) Watch(core Core) (stop func()) {
	g := &gauges{core: core}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	m.registry.MustRegister(g)
	return g.stop
}

// gauges is a collector that asks the core.
type gauges struct {
	core   Core
	ctx    context.Context
	cancel context.CancelFunc

	mu      sync.Mutex
	stopped bool
	asking  bool // the tiers are being asked
	asked   time.Time
	tiers   []sandbox.TierStatus
	work    sync.WaitGroup
}

func (g *gauges) stop() {
	g.mu.Lock()
	g.stopped = true
	g.mu.Unlock()
	g.cancel()
	g.work.Wait()
}

// Describe sends all descriptions.
func (g *gauges) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sandboxesDesc, usageDesc, guestsDesc, promisedDesc, limitDesc, parkedDesc, parkedMemDesc,
		poolDesc, freeDesc, reserveDesc, storeDesc, pendingDesc, upDesc} {
		out <- d
	}
}

// Collect asks the core. What it does not answer is left out.
func (g *gauges) Collect(out chan<- prometheus.Metric) {
	g.mu.Lock()
	if g.stopped {
		g.mu.Unlock()
		return
	}
	g.work.Add(1)
	defer g.work.Done()
	g.mu.Unlock()
	ctx, cancel := context.WithTimeout(g.ctx, scrapePatience)
	defer cancel()
	send := func(d *prometheus.Desc, v int64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	if h, err := g.core.Host(ctx); err == nil {
		send(guestsDesc, int64(h.Guests))
		send(promisedDesc, h.MemoryPromised)
		send(limitDesc, h.MemoryLimit)
		send(parkedDesc, int64(h.Parked))
		send(parkedMemDesc, h.ParkedBytes)
		send(poolDesc, h.PoolBytes)
		send(freeDesc, h.FreeBytes)
		send(reserveDesc, h.DiskReserve)
	}
	if all, err := g.core.List(ctx); err == nil {
		states, stored := map[sandbox.State]int64{}, int64(0)
		for _, s := range all {
			states[s.State]++
			stored += s.Usage.StoredBytes
		}
		for _, state := range sandbox.States {
			send(sandboxesDesc, states[state], string(state))
		}
		send(usageDesc, stored)
	}
	for _, t := range g.sizes() {
		up := int64(1)
		if t.Error != "" {
			up = 0
		}
		tier := oneOf(t.Tier, tiers)
		send(upDesc, up, tier)
		send(storeDesc, t.Bytes, tier)
		if t.Tier == "remote" {
			send(pendingDesc, int64(t.Pending))
		}
	}
}

// sizes returns what was found out of the tiers last, and has it found out
// anew where that is too old. No scrape waits for it.
func (g *gauges) sizes() []sandbox.TierStatus {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.asking && !g.stopped && time.Since(g.asked) > tiersEvery {
		g.asking = true
		g.work.Go(func() {
			found, err := g.core.Tiers(g.ctx)
			g.mu.Lock()
			defer g.mu.Unlock()
			g.asking, g.asked = false, time.Now()
			if err == nil {
				g.tiers = found
			}
		})
	}
	return g.tiers
}
