package server_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/events"
	"github.com/hibernacle/hibernacle/internal/server"
)

// hook returns the id of the last webhook that was made, or of none.
func (f *fixture) hook() string {
	if all := f.webhooks.List(); len(all) > 0 {
		return all[len(all)-1].ID
	}
	return "none"
}

// happen appends n events and waits until they are kept.
func (f *fixture) happen(kind string, n int) {
	f.Helper()
	sub := f.journal.Subscribe(0, events.Filter{})
	defer sub.Close()
	before := 0
	for _, err := sub.Ready(); err == nil; _, err = sub.Ready() {
		before++
	}
	for range n {
		f.journal.Append(events.Event{Type: kind, Sandbox: "s1", Name: "one", Data: json.RawMessage(`{"a":1}`)})
	}
	for range n {
		if _, err := sub.Next(f.Context()); err != nil {
			f.Fatal(err)
		}
	}
}

// block is one block of a stream.
type block struct{ id, event, data string }

// openEvents opens a stream.
func (f *fixture) openEvents(query string, h http.Header) (*bufio.Scanner, func()) {
	f.Helper()
	ctx, cancel := context.WithCancel(f.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", f.url+"/v1/events"+query, nil)
	if err != nil {
		f.Fatal(err)
	}
	req.Header = http.Header{"X-Api-Key": {key}}
	for k, v := range h {
		req.Header[k] = v
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		f.Fatal(err)
	}
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream" {
		f.Fatalf("%d %v", resp.StatusCode, resp.Header)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	return lines, func() { cancel(); resp.Body.Close() }
}

// next reads the next block; ok is false at the end.
func next(lines *bufio.Scanner) (b block, ok bool) {
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ": ")
		switch field {
		case "id":
			b.id = value
		case "event":
			b.event = value
		case "data":
			b.data = value
		case "":
			if lines.Text() == "" {
				return b, true
			}
		}
	}
	return b, false
}

func TestEventsOfThePast(t *testing.T) {
	f := newFixture(t)
	doc := document(t)
	f.happen("a", 100)
	f.happen("b", 2)
	for query, want := range map[string]int{"": 102, "&after=0": 102, "&after=100": 2, "&type=b": 2, "&type=a,b&sandbox=one": 102, "&sandbox=s1&type=a": 100, "&sandbox=x": 0} {
		lines, end := f.openEvents("?follow=false"+query, nil)
		n := 0
		for b, ok := next(lines); ok; b, ok = next(lines) {
			n++
			var e api.Event
			if err := json.Unmarshal([]byte(b.data), &e); err != nil || strconv.FormatUint(e.ID, 10) != b.id || e.Type != b.event || e.Name != "one" {
				t.Fatalf("%+v: %v", b, err)
			}
			if n == 1 {
				check(t, doc.Components.Schemas["Event"].Value, b.data)
			}
		}
		end()
		if n != want {
			t.Errorf("%q: %d events, want %d", query, n, want)
		}
	}
	for _, query := range []string{"?after=-1", "?after=1.5", "?after=99999999999999999999", "?follow=perhaps"} {
		resp, body := f.do("GET", "/v1/events"+query, "")
		f.wantError(resp, body, 400, api.CodeInvalid, "")
	}
}

func TestEventsFromNowOn(t *testing.T) {
	f := newFixture(t)
	f.happen("old", 3)
	lines, end := f.openEvents("", nil)
	defer end()
	if b, ok := next(lines); !ok || b != (block{id: "3"}) {
		t.Fatalf("the stream begins with %+v", b)
	}
	f.happen("new", 1)
	if b, _ := next(lines); b.id != "4" || b.event != "new" {
		t.Errorf("got %+v", b)
	}
	// Last-Event-ID is what a client adds that comes back with the same URL.
	again, end2 := f.openEvents("?after=0", http.Header{"Last-Event-Id": {"2"}})
	defer end2()
	next(again)
	if b, _ := next(again); b.id != "3" {
		t.Errorf("behind event 2 comes %+v", b)
	}
	f.server.Close()
	for _, l := range []*bufio.Scanner{lines, again} {
		for ok := true; ok; _, ok = next(l) { // until the server ends it
		}
	}
}

func TestHeartbeatsTellHowFarTheStreamIs(t *testing.T) {
	f := newFixture(t)
	f.server.SetHeartbeat(time.Millisecond)
	lines, end := f.openEvents("?sandbox=other", nil)
	defer end()
	f.happen("a", 5)
	for b, ok := next(lines); b.id != "5"; b, ok = next(lines) {
		if !ok || b.data != "" {
			t.Fatalf("got %+v", b)
		}
	}
}

func TestGapIsTold(t *testing.T) {
	f := newFixture(t)
	f.happen("a", 1)
	lines, end := f.openEvents("?follow=false&after=77", nil)
	defer end()
	if b, _ := next(lines); b.event != api.EventGap || !strings.Contains(b.data, "77") {
		t.Errorf("got %+v", b)
	}
}

// TestReaderThatHangs has one client that never reads beside one that does.
func TestReaderThatHangs(t *testing.T) {
	f := newFixture(t)
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET /v1/events?after=0 HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\n\r\n", key)
	if _, err := io.ReadFull(conn, make([]byte, 12)); err != nil {
		t.Fatal(err)
	}
	lines, end := f.openEvents("?after=0", nil)
	defer end()
	next(lines)
	big := json.RawMessage(`"` + strings.Repeat("x", 30_000) + `"`)
	const n = 600 // more than sockets take
	for range n {
		f.journal.Append(events.Event{Type: "big", Data: big})
	}
	for i := range n {
		if b, ok := next(lines); !ok || b.id != strconv.Itoa(i+1) {
			t.Fatalf("event %d: %+v", i, b.id)
		}
	}
}

func TestMetricsNeedTheKey(t *testing.T) {
	f := newFixture(t)
	resp, body := f.doWith("GET", "/metrics", "", nil)
	f.wantError(resp, body, 401, api.CodeUnauthorized, "")
	if resp, body := f.doWith("GET", "/metrics", "", http.Header{"Authorization": {"Bearer " + key}}); resp.StatusCode != 200 || body != "hib_up 1\n" {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	open := server.New(server.Config{Core: f.core, Key: key, MetricsOpen: true, Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(200) })})
	defer open.Close()
	for path, want := range map[string]int{"/metrics": 200, "/metrics/x": 401, "/v1/host": 401} {
		if w := serve(open, path); w != want {
			t.Errorf("%s: %d, want %d", path, w, want)
		}
	}
	none := server.New(server.Config{Core: f.core, Key: key, MetricsOpen: true})
	defer none.Close()
	if w := serve(none, "/metrics"); w != 501 {
		t.Errorf("without metrics: %d", w)
	}
}

// serve returns the status of a request without a key.
func serve(h http.Handler, path string) int {
	w := &statusWriter{header: http.Header{}}
	req, _ := http.NewRequest("GET", path, nil)
	h.ServeHTTP(w, req)
	return w.status
}

type statusWriter struct {
	header http.Header
	status int
}

func (s *statusWriter) Header() http.Header { return s.header }
func (s *statusWriter) WriteHeader(code int) {
	if s.status == 0 {
		s.status = code
	}
}
func (s *statusWriter) Write(p []byte) (int, error) { s.WriteHeader(200); return len(p), nil }

func TestRoutesAreCounted(t *testing.T) {
	f := newFixture(t)
	f.do("GET", "/v1/sandboxes/none-such", "")
	f.do("GET", "/v1/nothing", "")
	f.do("GET", "/v1/host", "")
	f.close()
	f.mu.Lock()
	defer f.mu.Unlock()
	if want := []string{"GET /v1/sandboxes/{id} 404", " 404", "GET /v1/host 200"}; !slices.Equal(f.routes, want) {
		t.Errorf("%q, want %q", f.routes, want)
	}
}

func TestSecretIsShownOnce(t *testing.T) {
	f := newFixture(t)
	resp, body := f.do("POST", "/v1/webhooks", `{"url":"http://127.0.0.1:1/x"}`)
	var w api.Webhook
	if err := json.Unmarshal([]byte(body), &w); err != nil || resp.StatusCode != 201 || len(w.Secret) < 16 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	for _, path := range []string{"/v1/webhooks", "/v1/webhooks/" + w.ID + "/resume"} {
		method := "GET"
		if strings.HasSuffix(path, "resume") {
			method = "POST"
		}
		if resp, body := f.do(method, path, ""); resp.StatusCode != 200 || strings.Contains(body, w.Secret) || !strings.Contains(body, w.ID) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	f.close()
	if strings.Contains(f.log.String(), w.Secret) {
		t.Error("the secret is in the log")
	}
}
