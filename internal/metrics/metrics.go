// Package metrics keeps the figures that Prometheus scrapes.
//
// Counters and histograms are fed by the core's events, by requests and by
// deliveries; gauges are asked of the core when somebody scrapes. Labels have
// few values that are known beforehand, never the id of a sandbox: whatever is
// not known counts as "other". docs/operating.md lists the metrics.
package metrics

import (
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// other stands for the values of a label that are not known.
const other = "other"

// The values that labels may have.
var (
	tiers        = []string{"parked", "local", "remote", "boot"}
	triggers     = []sandbox.Trigger{sandbox.TriggerCall, sandbox.TriggerIdle, sandbox.TriggerSession, sandbox.TriggerTimeout, sandbox.TriggerDrain}
	resumePhases = []string{"record", "vmm", "bind", "state", "unpause", "guest_init", "unpark", "hooks", "base_image"}
	// detect is how long idleness was there before it was noticed, freeze the
	// guest's hooks and processes, pause the vCPUs; state and scan serialise; write
	// and commit store; park or release lets go of the machine.
	hibernatePhases = []string{"detect", "freeze", "hooks", "pause", "state", "scan", "write", "commit", "park", "release"}
)

// seconds are the buckets of all durations: from an un-pause to a cold boot.
var seconds = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}

// Metrics are the figures of one daemon. Its methods may be called at the same
// time.
type Metrics struct {
	registry *prometheus.Registry

	events         *prometheus.CounterVec
	create         *prometheus.HistogramVec
	resume         *prometheus.HistogramVec
	resumePhase    *prometheus.HistogramVec
	hibernate      *prometheus.HistogramVec
	hibernatePhase *prometheus.HistogramVec
	denied         prometheus.Counter
	hookFailures   prometheus.Counter
	stored         prometheus.Counter
	fetched        prometheus.Counter
	deliveries     *prometheus.CounterVec
	requests       *prometheus.HistogramVec
}

// New returns metrics that count from zero, with those of the Go runtime and
// of this process.
func New() *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	histogram := func(name, help string, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: seconds}, labels)
		m.registry.MustRegister(h)
		return h
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		m.registry.MustRegister(c)
		return c
	}
	m.events = counters("hib_events_total", "Events by type.", "type")
	m.create = histogram("hib_create_seconds", "From the request for a sandbox until it runs.", "tier")
	m.resume = histogram("hib_resume_seconds", "From the beginning of a resume until the guest is ready for requests.", "tier")
	m.resumePhase = histogram("hib_resume_phase_seconds", "Phases of a resume.", "tier", "phase")
	m.hibernate = histogram("hib_hibernate_seconds", "From the beginning of a hibernation until its snapshot is committed.", "trigger")
	m.hibernatePhase = histogram("hib_hibernate_phase_seconds", "Phases of a hibernation.", "phase")
	m.denied = counters("hib_denied_total", "Outbound flows that an egress policy stopped.").WithLabelValues()
	m.hookFailures = counters("hib_hook_failures_total", "Hooks that failed or timed out.").WithLabelValues()
	m.stored = counters("hib_stored_bytes_total", "Bytes that hibernations and checkpoints wrote.").WithLabelValues()
	m.fetched = counters("hib_resume_fetched_bytes_total", "Bytes that resumes read from the remote store before the guest was ready.").WithLabelValues()
	m.deliveries = counters("hib_webhook_deliveries_total", "Posts to webhooks by outcome.", "outcome")
	m.requests = histogram("hib_http_request_seconds", "Requests to the API; streams last as long as their client likes.", "route", "code")
	m.zero()
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// zero makes the counters that alerts look at exist before anything is counted.
func (m *Metrics) zero() {
	for _, t := range sandbox.EventTypes {
		m.events.WithLabelValues(string(t))
	}
	for _, outcome := range []bool{true, false} {
		m.deliveries.WithLabelValues(outcomeOf(outcome))
	}
}

// Handler answers scrapes.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, EnableOpenMetrics: true})
}

// Event counts an event of the core. It does not block.
func (m *Metrics) Event(e sandbox.Event) {
	m.events.WithLabelValues(oneOf(e.Type, sandbox.EventTypes)).Inc()
	switch e.Type {
	case sandbox.EventCreated:
		if r := e.Resume; r != nil {
			m.create.WithLabelValues(oneOf(r.Tier, tiers)).Observe(inSeconds(r.TotalMS))
		}
	case sandbox.EventResumed:
		m.resumed(e.Resume)
	case sandbox.EventHibernated:
		m.hibernated(e)
		m.stored.Add(float64(max(0, e.Bytes)))
	case sandbox.EventCheckpointed:
		m.stored.Add(float64(max(0, e.Bytes)))
	case sandbox.EventDenied:
		if e.Denied != nil {
			m.denied.Add(float64(max(1, e.Denied.Count)))
		}
	case sandbox.EventHook:
		if e.Hook != nil && e.Hook.Failed() {
			m.hookFailures.Inc()
		}
	}
}

func (m *Metrics) resumed(r *sandbox.ResumeReport) {
	if r == nil {
		return
	}
	tier := oneOf(r.Tier, tiers)
	m.resume.WithLabelValues(tier).Observe(inSeconds(r.TotalMS))
	for phase, ms := range r.Phases {
		m.resumePhase.WithLabelValues(tier, oneOf(phase, resumePhases)).Observe(inSeconds(ms))
	}
	m.fetched.Add(float64(max(0, r.BytesFetched)))
}

func (m *Metrics) hibernated(e sandbox.Event) {
	r := e.Hibernate
	if r == nil {
		return
	}
	m.hibernate.WithLabelValues(oneOf(r.Trigger, triggers)).Observe(inSeconds(r.TotalMS))
	for phase, ms := range r.Phases {
		m.hibernatePhase.WithLabelValues(oneOf(phase, hibernatePhases)).Observe(inSeconds(ms))
	}
}

// Delivery counts an attempt to deliver an event to a webhook.
func (m *Metrics) Delivery(success bool) { m.deliveries.WithLabelValues(outcomeOf(success)).Inc() }

func outcomeOf(success bool) string {
	if success {
		return "delivered"
	}
	return "failed"
}

// Request counts an answered request; route is the pattern of the router that
// it matched, "" for none.
func (m *Metrics) Request(route string, status int, d time.Duration) {
	if route == "" {
		route = other
	}
	m.requests.WithLabelValues(route, codeClass(status)).Observe(d.Seconds())
}

// codeClass bounds the values of the label: "2xx" and the like.
func codeClass(status int) string {
	if status < 100 || status > 599 {
		return other
	}
	return strconv.Itoa(status/100) + "xx"
}

// oneOf returns s if it is a known value, else other.
func oneOf[S ~string](s S, known []S) string {
	if slices.Contains(known, s) {
		return string(s)
	}
	return other
}

func inSeconds(ms float64) float64 { return ms / 1000 }
