package metrics

import (
	"context"
	"errors"
	"flag"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

var update = flag.Bool("update", false, "write the golden file anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// core answers the gauges.
type core struct{ err error }

func (c core) Host(context.Context) (sandbox.Host, error) {
	return sandbox.Host{Guests: 2, MemoryPromised: 4 << 30, MemoryLimit: 8 << 30, Parked: 1, ParkedBytes: 1 << 20, PoolBytes: 1, FreeBytes: 2, DiskReserve: 3}, c.err
}

func (c core) List(context.Context) ([]sandbox.Sandbox, error) {
	return []sandbox.Sandbox{
		{ID: "secretid1", State: sandbox.StateRunning, Usage: sandbox.Usage{StoredBytes: 5}},
		{ID: "secretid2", State: sandbox.StateStandby, Usage: sandbox.Usage{StoredBytes: 7}},
	}, c.err
}

func (c core) Tiers(context.Context) ([]sandbox.TierStatus, error) {
	return []sandbox.TierStatus{{Tier: "local", Bytes: 10}, {Tier: "remote", Bytes: 20, Pending: 3, Error: "down"}}, c.err
}

// feed counts something of everything.
func feed(m *Metrics) {
	m.Event(sandbox.Event{Type: sandbox.EventCreated, Sandbox: "secretid1", Resume: &sandbox.ResumeReport{Tier: "local", TotalMS: 600}})
	m.Event(sandbox.Event{Type: sandbox.EventResumed, Resume: &sandbox.ResumeReport{Tier: "remote", TotalMS: 40, BytesFetched: 100, Phases: map[string]float64{"vmm": 10, "odd": 1}}})
	m.Event(sandbox.Event{Type: sandbox.EventResumed, Resume: &sandbox.ResumeReport{Tier: "odd", TotalMS: 40}})
	m.Event(sandbox.Event{Type: sandbox.EventHibernated, Bytes: 1000, Hibernate: &sandbox.HibernateReport{Trigger: sandbox.TriggerIdle, TotalMS: 114, Phases: map[string]float64{"freeze": 10, "write": 30}}})
	m.Event(sandbox.Event{Type: sandbox.EventHibernated, Hibernate: &sandbox.HibernateReport{TotalMS: 100}})
	m.Event(sandbox.Event{Type: sandbox.EventDenied, Denied: &sandbox.Denied{Count: 5}})
	m.Event(sandbox.Event{Type: sandbox.EventHook, Hook: &sandbox.HookRun{ExitCode: 1}})
	m.Event(sandbox.Event{Type: sandbox.EventCheckpointed, Bytes: 24})
	m.Event(sandbox.Event{Type: "from the future"})
	for _, ty := range sandbox.EventTypes { // without their details
		m.Event(sandbox.Event{Type: ty})
	}
	m.Delivery(true)
	m.Delivery(false)
	m.Request("GET /v1/sandboxes/{id}", 200, time.Millisecond)
	m.Request("", 404, time.Millisecond)
	m.Request("", 999, time.Millisecond)
}

func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// settled scrapes until the tiers were asked.
func settled(t *testing.T, m *Metrics) string {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if text := scrape(t, m); strings.Contains(text, "hib_store_bytes{") {
			return text
		}
	}
	t.Fatal("the sizes of the tiers never came")
	return ""
}

func TestFigures(t *testing.T) {
	m := New()
	stop := m.Watch(core{})
	defer stop()
	feed(m)
	text := settled(t, m)
	for _, line := range []string{
		`hib_resume_seconds_count{tier="remote"} 1`,
		`hib_resume_seconds_count{tier="other"} 1`,
		`hib_resume_phase_seconds_sum{phase="vmm",tier="remote"} 0.01`,
		`hib_resume_phase_seconds_count{phase="other",tier="remote"} 1`,
		`hib_hibernate_seconds_count{trigger="idle"} 1`,
		`hib_hibernate_phase_seconds_sum{phase="write"} 0.03`,
		`hib_create_seconds_bucket{tier="local",le="1"} 1`,
		`hib_stored_bytes_total 1024`,
		`hib_resume_fetched_bytes_total 100`,
		`hib_denied_total 5`,
		`hib_hook_failures_total 1`,
		`hib_events_total{type="other"} 1`,
		`hib_events_total{type="failed"} 1`,
		`hib_webhook_deliveries_total{outcome="failed"} 1`,
		`hib_http_request_seconds_count{code="2xx",route="GET /v1/sandboxes/{id}"} 1`,
		`hib_http_request_seconds_count{code="4xx",route="other"} 1`,
		`hib_sandboxes{state="standby"} 1`,
		`hib_sandboxes{state="failed"} 0`,
		`hib_sandbox_stored_bytes 12`,
		`hib_guests 2`,
		`hib_store_bytes{tier="remote"} 20`,
		`hib_store_up{tier="remote"} 0`,
		`hib_replication_pending 3`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("missing: %s", line)
		}
	}
	if strings.Contains(text, "secretid") {
		t.Error("there is an id of a sandbox in the metrics")
	}
}

var nameLine = regexp.MustCompile(`(?m)^# TYPE (hib_\S+ \S+)$`)

// TestNames holds the names against a golden file, and that against the
// documentation: dashboards depend on them.
func TestNames(t *testing.T) {
	m := New()
	stop := m.Watch(core{})
	defer stop()
	feed(m)
	var names []string
	for _, match := range nameLine.FindAllStringSubmatch(settled(t, m), -1) {
		names = append(names, match[1])
	}
	slices.Sort(names)
	got := strings.Join(names, "\n") + "\n"
	path := filepath.Join("testdata", "names")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the names are\n%s\nnot\n%s", got, want)
	}
	doc, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		name, _, _ := strings.Cut(n, " ")
		if !strings.Contains(string(doc), "`"+name) {
			t.Errorf("docs/operating.md does not have %s", name)
		}
	}
	for _, name := range regexp.MustCompile(`hib_[a-z_]+`).FindAllString(string(doc), -1) {
		name = strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_count"), "_sum")
		if !slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, name+" ") }) {
			t.Errorf("docs/operating.md has %s, which is no metric", name)
		}
	}
}

func TestCoreThatFails(t *testing.T) {
	m := New()
	stop := m.Watch(core{errors.New("no")})
	if text := scrape(t, m); strings.Contains(text, "hib_guests") || !strings.Contains(text, "go_goroutines") {
		t.Error(text)
	}
	stop()
	if text := scrape(t, m); !strings.Contains(text, "hib_denied_total 0") {
		t.Errorf("after the end of the core: %s", text)
	}
}
