package daemon

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/events"
	"github.com/hibernacle/hibernacle/internal/metrics"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/webhook"
)

// TestDocumentedTypes compares the table of docs/events.md with the types that
// the core knows.
func TestDocumentedTypes(t *testing.T) {
	doc, err := os.ReadFile("../../docs/events.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(doc), "## Types")
	section, _, _ = strings.Cut(section, "\n## ")
	var documented []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|").FindAllStringSubmatch(section, -1) {
		documented = append(documented, m[1])
	}
	want := []string{events.TypeGap}
	for _, ty := range sandbox.EventTypes {
		want = append(want, string(ty))
	}
	slices.Sort(want)
	slices.Sort(documented)
	if !slices.Equal(documented, want) {
		t.Errorf("docs/events.md has %v, the code %v", documented, want)
	}
	if events.TypeGap != api.EventGap || !strings.Contains(section, "`"+webhook.TypeTest+"`") {
		t.Error("the types that are no sandbox's are not documented as they are")
	}
}

func TestJournalledEvents(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		event sandbox.Event
		data  string
	}{
		{sandbox.Event{Type: sandbox.EventState, To: "creating"}, `{"to":"creating"}`},
		{sandbox.Event{Type: sandbox.EventIdle}, ``},
		{sandbox.Event{Type: sandbox.EventWoken, By: "http"}, `{"by":"http"}`},
		{sandbox.Event{Type: sandbox.EventResumed, Resume: &sandbox.ResumeReport{Tier: "local", TotalMS: 2, Phases: map[string]float64{"vmm": 1}}},
			`{"tier":"local","total_ms":2,"phases":{"vmm":1},"bytes_read":0,"prefetched_bytes":0,"faults":0}`},
		{sandbox.Event{Type: sandbox.EventHibernated, Bytes: 7, Hibernate: &sandbox.HibernateReport{Trigger: sandbox.TriggerIdle, TotalMS: 2, PauseMS: 1}},
			`{"bytes":7,"trigger":"idle","total_ms":2,"pause_ms":1,"phases":null}`},
		{sandbox.Event{Type: sandbox.EventDenied, Denied: &sandbox.Denied{Proto: "tcp", Addr: "10.0.0.1", Port: 80, Count: 3}},
			`{"denied":{"proto":"tcp","addr":"10.0.0.1","port":80,"count":3}}`},
		{sandbox.Event{Type: sandbox.EventForked, Checkpoint: "c", Forks: []string{"a", "b"}}, `{"checkpoint":"c","forks":["a","b"]}`},
		{sandbox.Event{Type: sandbox.EventExpiring, Due: at, Action: sandbox.ActionDelete}, `{"due":"2026-01-02T03:04:05Z","action":"delete"}`},
		{sandbox.Event{Type: sandbox.EventFailed, Reason: "why"}, `{"reason":"why"}`},
	} {
		c.event.Sandbox, c.event.Name, c.event.At = "id", "name", at
		got, err := journalled(c.event, 0)
		if err != nil || string(got.Data) != c.data || got.Type != string(c.event.Type) || got.Sandbox != "id" || got.Name != "name" || !got.Time.Equal(at) {
			t.Errorf("%s: %+v %s %v, want %s", c.event.Type, got, got.Data, err, c.data)
		}
	}
}

// TestGuestsHaveAQuota: what a guest causes is bounded, told of, and nobody
// else's loss.
func TestGuestsHaveAQuota(t *testing.T) {
	j, err := events.Open(t.TempDir(), events.Options{})
	if err != nil {
		t.Fatal(err)
	}
	o := &observers{metrics: metrics.New(), journal: j}
	tell := o.sink(slog.New(slog.DiscardHandler)).OnEvent
	at := time.Now()
	denied := func(id string) {
		tell(sandbox.Event{Type: sandbox.EventDenied, Sandbox: id, At: at, Denied: &sandbox.Denied{Proto: "tcp", Count: 1}})
	}
	for range 1000 {
		denied("noisy")
	}
	denied("quiet")
	at = at.Add(guestEventEvery)
	denied("noisy")
	j.Close()
	sub := j.Subscribe(0, events.Filter{})
	defer sub.Close()
	got := map[string]int{}
	var last events.Event
	for e, err := sub.Ready(); err == nil; e, err = sub.Ready() {
		got[e.Sandbox]++
		last = e
	}
	if got["noisy"] != guestEventBurst+1 || got["quiet"] != 1 || !strings.Contains(string(last.Data), `"suppressed":950`) {
		t.Errorf("kept %v, the last %s", got, last.Data)
	}
	tell(sandbox.Event{Type: sandbox.EventDeleted, Sandbox: "noisy"})
	if len(o.quotas.of) != 1 {
		t.Error("the quota of a deleted sandbox is kept")
	}
}

// TestEventGoesEverywhereOnce tells one event and looks at the log, the metrics
// and the journal.
func TestEventGoesEverywhereOnce(t *testing.T) {
	var text bytes.Buffer
	log, err := NewLog(&text, LogJSON, slog.LevelDebug)
	if err != nil {
		t.Fatal(err)
	}
	j, err := events.Open(t.TempDir(), events.Options{})
	if err != nil {
		t.Fatal(err)
	}
	o := &observers{metrics: metrics.New(), journal: j}
	o.sink(log).OnEvent(sandbox.Event{Type: sandbox.EventFailed, Sandbox: "id", Reason: "why", At: time.Now()})
	sub := j.Subscribe(0, events.Filter{})
	defer sub.Close()
	if e, err := sub.Next(t.Context()); err != nil || e.Type != "failed" {
		t.Errorf("%+v %v", e, err)
	}
	j.Close()
	if _, err := sub.Ready(); err == nil {
		t.Error("it is there twice")
	}
	var line map[string]any
	if err := json.Unmarshal(text.Bytes(), &line); err != nil || line["type"] != "failed" || line["sandbox"] != "id" {
		t.Errorf("%v: the log is %q, which is not one line about it", err, text.String())
	}
}
