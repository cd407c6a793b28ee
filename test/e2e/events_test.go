package e2e

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// freeAddress returns an address of this host that nobody listens at.
func freeAddress(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// listener notes what it is told of one sandbox, but for changes of state.
type listener struct {
	mu   sync.Mutex
	got  []api.Event
	last uint64
}

// take notes an event; one that came before is dropped if it may come again.
func (l *listener) take(t *testing.T, e api.Event, mayRepeat bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e.ID <= l.last {
		if !mayRepeat {
			t.Errorf("event %d comes behind event %d", e.ID, l.last)
		}
		return
	}
	l.last = e.ID
	if e.Type != "state" {
		l.got = append(l.got, e)
	}
}

// types returns the types of the events of a sandbox.
func (l *listener) types(id string) (list []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.got {
		if e.Sandbox == id {
			list = append(list, e.Type)
		}
	}
	return list
}

// TestLifeIsTold: who follows the events of a sandbox, and an endpoint that has
// them posted, hear of its life in order and once, though the daemon is killed and
// restarted in between. Metrics and usage tell the same.
func TestLifeIsTold(t *testing.T) {
	d := hibtest.StartWith(t, []string{"--listen", freeAddress(t)}) // the same after a restart
	c, err := client.New(d.URL, d.Key)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const secret = "a-secret-of-the-test"
	var posted, followed listener
	endpoint := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var e api.Event
		if err != nil || client.VerifyWebhook(secret, r.Header, body, time.Minute) != nil || json.Unmarshal(body, &e) != nil {
			t.Errorf("a post that is not genuine: %s %v", body, r.Header)
		}
		posted.take(t, e, true)
	}))
	defer endpoint.Close()
	hook := d.Hib("webhook", "add", endpoint.URL, "--secret", secret)

	first := d.Create("--memory", "512", "--idle-timeout", "never") // so that there is an event to begin behind
	hibtest.Eventually(t, "the first one was posted", func() bool { return slices.Contains(posted.types(first), "created") })
	after := posted.last
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for e, err := range c.Events(ctx, client.EventsOptions{Follow: true, After: &after}) {
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				t.Error(err)
				return
			}
			followed.take(t, e, false)
		}
	}()
	defer func() { stop(); <-ended }()

	id := d.Create("--memory", "512", "--idle-timeout", "never")
	d.Shell(id, "head -c 4000000 /dev/urandom > blob")
	d.Hib("hibernate", id)
	hibtest.Eventually(t, "it was told", func() bool { return slices.Contains(followed.types(id), "hibernated") })
	d.Kill()
	d.Run()
	d.Shell(id, "true") // wakes it
	d.Hib("hibernate", id)
	d.Hib("resume", id)
	d.Hib("update", id, "--label", "a=b")

	usage := d.Inspect(id).Usage
	if usage.AwakeS <= 0 || usage.StandbyS <= 0 || usage.CPUS <= 0 || usage.StoredBytes < 4_000_000 {
		t.Errorf("usage %+v", usage)
	}
	req, _ := http.NewRequestWithContext(ctx, "GET", d.URL+"/metrics", nil)
	req.Header.Set("Authorization", "Bearer "+d.Key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("metrics: %d %v", resp.StatusCode, err)
	}
	for _, line := range []string{"hib_hibernate_seconds_count{trigger=\"call\"} 1\n", "hib_events_total{type=\"resumed\"} 2\n", "hib_events_total{type=\"created\"} 0\n", "hib_hibernate_phase_seconds_count{phase=\"commit\"} 1\n"} {
		if !strings.Contains(string(text), line) { // since the restart
			t.Errorf("metrics lack %q", line)
		}
	}
	d.Hib("rm", id)
	want := []string{"created", "hibernated", "woken", "resumed", "hibernated", "resumed", "updated", "deleted"}
	for _, l := range []*listener{&followed, &posted} {
		hibtest.Eventually(t, "the end was told", func() bool { return slices.Contains(l.types(id), "deleted") })
		if got := l.types(id); !slices.Equal(got, want) {
			t.Errorf("told was %v, want %v", got, want)
		}
	}
	if out := d.Hib("events", "--sandbox", id, "--type", "created,deleted"); len(strings.Split(strings.TrimSpace(out), "\n")) != 2 {
		t.Errorf("hib events prints\n%s", out)
	}
	if out := d.Hib("webhook", "ls"); !strings.Contains(out, hook) || !strings.Contains(out, "active") {
		t.Errorf("hib webhook ls prints\n%s", out)
	}
}
