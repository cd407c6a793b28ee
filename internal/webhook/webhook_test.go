package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/catalog/catalogtest"
	"github.com/hibernacle/hibernacle/internal/events"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// post is one that a receiver took.
type post struct {
	id   uint64
	kind string
}

// receiver is an endpoint that checks what it gets.
type receiver struct {
	t      *testing.T
	url    string
	secret string // set before something is posted

	mu     sync.Mutex
	answer func(w http.ResponseWriter, r *http.Request) bool // false: not taken
	got    []post
	tries  int
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{t: t}
	s := httptest.NewServer(r)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	r.url = s.URL + "/hook"
	return r
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		r.t.Error(err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tries++
	stamp := req.Header.Get(HeaderTimestamp)
	if want := "v1=" + Sign(r.secret, stamp, body); req.Header.Get(HeaderSignature) != want {
		r.t.Errorf("signature %q, want %q", req.Header.Get(HeaderSignature), want)
	}
	sec, err := strconv.ParseInt(stamp, 10, 64)
	if age := time.Since(time.Unix(sec, 0)); err != nil || age < -time.Minute || age > 10*time.Minute {
		r.t.Errorf("timestamp %q", stamp)
	}
	var e events.Event
	if err := json.Unmarshal(body, &e); err != nil || strconv.FormatUint(e.ID, 10) != req.Header.Get(HeaderID) || e.Type != req.Header.Get(HeaderType) {
		r.t.Errorf("body %s with headers %v", body, req.Header)
	}
	if r.answer != nil && !r.answer(w, req) {
		return
	}
	r.got = append(r.got, post{e.ID, e.Type})
}

func (r *receiver) set(answer func(http.ResponseWriter, *http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = answer
}

func (r *receiver) taken() []post {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

func (r *receiver) tried() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tries
}

func status(code int) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(code); return false }
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// rig is a manager with what it works on.
type rig struct {
	*testing.T
	journal *events.Journal
	catalog *catalogtest.Memory
	log     bytes.Buffer
	cfg     Config
	m       *Manager
}

func newRig(t *testing.T) *rig {
	r := &rig{T: t, catalog: &catalogtest.Memory{}}
	var err error
	if r.journal, err = events.Open(t.TempDir(), events.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.journal.Close)
	r.cfg = Config{Journal: r.journal, Catalog: r.catalog, Types: []string{"a", "b"}, Log: slog.New(slog.NewTextHandler(&r.log, nil)),
		Timeout: 5 * time.Second, FirstRetry: time.Millisecond, MaxRetry: 4 * time.Millisecond, SaveEvery: time.Millisecond}
	r.open()
	return r
}

func (r *rig) open() {
	r.Helper()
	m, err := New(r.Context(), r.cfg)
	if err != nil {
		r.Fatal(err)
	}
	r.m = m
	r.Cleanup(m.Close)
}

func (r *rig) add(s Spec) Hook {
	r.Helper()
	h, _, err := r.m.Add(r.Context(), s)
	if err != nil {
		r.Fatal(err)
	}
	return h
}

// happen appends n events of a type and returns the id of the last.
func (r *rig) happen(kind string, n int) uint64 {
	r.Helper()
	after := r.journal.Last()
	s := r.journal.Subscribe(after, events.Filter{})
	defer s.Close()
	for range n {
		r.journal.Append(events.Event{Type: kind, Sandbox: "s1"})
	}
	for range n {
		if _, err := s.Next(r.Context()); err != nil {
			r.Fatal(err)
		}
	}
	return s.After()
}

func (r *rig) hook(id string) Hook {
	for _, h := range r.m.List() {
		if h.ID == id {
			return h
		}
	}
	return Hook{}
}

// wantIDs checks that just these ids came, in order and once.
func wantIDs(t *testing.T, got []post, first, last uint64) {
	t.Helper()
	if len(got) != int(last-first+1) {
		t.Fatalf("%d posts, want those of %d to %d: %v", len(got), first, last, got)
	}
	for i, p := range got {
		if p.id != first+uint64(i) {
			t.Fatalf("post %d is of event %d: %v", i, p.id, got)
		}
	}
}

func TestDeliversInOrder(t *testing.T) {
	r := newRig(t)
	to := newReceiver(t)
	r.happen("a", 3) // before the hook was there
	h, secret, err := r.m.Add(t.Context(), Spec{URL: to.url})
	if err != nil {
		t.Fatal(err)
	}
	if h.State != StateActive || len(secret) < 16 {
		t.Errorf("%+v with secret %q", h, secret)
	}
	to.secret = secret
	last := r.happen("a", 200)
	eventually(t, "all are delivered", func() bool { return len(to.taken()) == 200 })
	wantIDs(t, to.taken(), 4, last)
	r.m.Close()
	if strings.Contains(r.log.String(), secret) {
		t.Error("the secret is in the log")
	}
}

func TestFilters(t *testing.T) {
	r := newRig(t)
	to := newReceiver(t)
	to.secret = "a secret-of-16-or-more"[2:]
	r.add(Spec{URL: to.url, Types: []string{"b"}, Sandbox: "s1", Secret: to.secret})
	r.happen("a", 2)
	r.happen("b", 1)
	eventually(t, "the one is delivered", func() bool { return len(to.taken()) == 1 })
	if got := to.taken(); got[0].kind != "b" {
		t.Errorf("got %v", got)
	}
}

func TestRetriesUntilItIsTaken(t *testing.T) {
	r := newRig(t)
	to := newReceiver(t)
	to.secret = "0123456789abcdef"
	to.set(status(500))
	var mu sync.Mutex
	outcomes := map[bool]int{}
	r.m.Close()
	r.cfg.Observe = func(ok bool) { mu.Lock(); outcomes[ok]++; mu.Unlock() }
	r.open()
	h := r.add(Spec{URL: to.url, Secret: to.secret})
	first := r.happen("a", 1)
	eventually(t, "it is tried some times", func() bool { return to.tried() >= 5 })
	v := r.hook(h.ID)
	if v.State != StateRetrying || !strings.Contains(v.Error, "500") || v.Failures == 0 || v.NextTry.IsZero() {
		t.Errorf("%+v", v)
	}
	last := r.happen("b", 5)
	to.set(nil)
	eventually(t, "all are delivered", func() bool { return len(to.taken()) == 6 })
	wantIDs(t, to.taken(), first, last)
	eventually(t, "it is active again", func() bool { v := r.hook(h.ID); return v.State == StateActive && v.Error == "" })
	mu.Lock()
	defer mu.Unlock()
	if outcomes[true] != 6 || outcomes[false] < 5 {
		t.Errorf("outcomes %v", outcomes)
	}
}

func TestRedirectIsNotFollowed(t *testing.T) {
	r := newRig(t)
	to, elsewhere := newReceiver(t), newReceiver(t)
	to.secret = "0123456789abcdef"
	to.set(func(w http.ResponseWriter, req *http.Request) bool {
		http.Redirect(w, req, elsewhere.url, http.StatusTemporaryRedirect)
		return false
	})
	h := r.add(Spec{URL: to.url, Secret: to.secret})
	tested, err := r.m.Test(t.Context(), h.ID)
	if err != nil || tested.Status != 307 || !strings.Contains(tested.Error, "redirect") || elsewhere.tried() != 0 {
		t.Errorf("%+v %v, the other was called %d times", tested, err, elsewhere.tried())
	}
}

// TestDeadAndSlowEndpoints have a hook that is in order beside one whose port
// is closed and one that never answers.
func TestDeadAndSlowEndpoints(t *testing.T) {
	r := newRig(t)
	r.m.Close()
	r.cfg.Timeout, r.cfg.GiveUp = time.Second, 30*time.Millisecond // a good one that is only slow is in time
	r.open()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	hang := make(chan struct{})
	slow := newReceiver(t)
	slow.secret = "0123456789abcdef"
	slow.set(func(_ http.ResponseWriter, req *http.Request) bool {
		select {
		case <-hang:
		case <-req.Context().Done():
		}
		return false
	})
	good := newReceiver(t)
	good.secret = "0123456789abcdef"
	dead := r.add(Spec{URL: "http://" + ln.Addr().String() + "/private?token=hush", Secret: good.secret})
	hung := r.add(Spec{URL: slow.url, Secret: slow.secret})
	r.add(Spec{URL: good.url, Secret: good.secret})
	first := r.journal.Last() + 1
	last := r.happen("a", 500)
	eventually(t, "the good one gets all", func() bool { return len(good.taken()) == 500 })
	wantIDs(t, good.taken(), first, last)
	for _, id := range []string{dead.ID, hung.ID} {
		eventually(t, "it is paused", func() bool { return r.hook(id).State == StatePaused })
		if v := r.hook(id); v.Cursor != first-1 || v.Error == "" || strings.Contains(v.Error, "hush") || !v.NextTry.IsZero() {
			t.Errorf("%+v", v)
		}
	}
	r.m.Close()
	r.open()
	if v := r.hook(hung.ID); v.State != StatePaused {
		t.Errorf("after a restart: %+v", v)
	}
	close(hang)
	slow.set(nil)
	if v, err := r.m.Resume(t.Context(), hung.ID); err != nil || v.State == StatePaused {
		t.Fatalf("%+v %v", v, err)
	}
	eventually(t, "what was missed comes", func() bool { return len(slow.taken()) == 500 })
	wantIDs(t, slow.taken(), first, last)
	r.m.Close()
	if strings.Contains(r.log.String(), "hush") {
		t.Error("a URL is in the log")
	}
}

func TestRestartGoesOn(t *testing.T) {
	r := newRig(t)
	to := newReceiver(t)
	to.secret = "0123456789abcdef"
	r.add(Spec{URL: to.url, Secret: to.secret})
	first := r.happen("a", 20)
	eventually(t, "the first are delivered", func() bool { return len(to.taken()) == 20 })
	r.m.Close()
	last := r.happen("b", 20) // while no manager is there
	r.open()
	eventually(t, "the rest is delivered", func() bool { return len(to.taken()) >= 40 })
	wantIDs(t, to.taken(), first-19, last) // an orderly restart repeats nothing
}

func TestRemove(t *testing.T) {
	r := newRig(t)
	to := newReceiver(t)
	to.secret = "0123456789abcdef"
	to.set(status(500))
	h := r.add(Spec{URL: to.url, Secret: to.secret})
	r.happen("a", 1)
	eventually(t, "it is tried", func() bool { return to.tried() > 0 })
	if err := r.m.Remove(t.Context(), h.ID); err != nil {
		t.Fatal(err)
	}
	if err := r.m.Remove(t.Context(), h.ID); !errors.Is(err, ErrNotFound) {
		t.Errorf("the second time: %v", err)
	}
	n := to.tried()
	r.happen("a", 1)
	r.m.Close()
	r.open()
	if len(r.m.List()) != 0 || to.tried() != n {
		t.Errorf("%v, %d more tries", r.m.List(), to.tried()-n)
	}
}

func TestSpecsAreChecked(t *testing.T) {
	r := newRig(t)
	for _, s := range []Spec{
		{}, {URL: "example.com/x"}, {URL: "ftp://example.com"}, {URL: "http://"}, {URL: "http://:80/"}, {URL: "https://u:p@example.com"},
		{URL: "https://example.com/#x"}, {URL: "https://example.com/" + strings.Repeat("x", maxURL)}, {URL: "https://exa mple.com"},
		{URL: "https://example.com", Secret: "short"}, {URL: "https://example.com", Secret: "with a space in the middle"},
		{URL: "https://example.com", Types: []string{"c"}},
	} {
		if h, _, err := r.m.Add(t.Context(), s); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: %+v %v", s, h, err)
		}
	}
	for i := range maxHooks {
		r.add(Spec{URL: fmt.Sprintf("http://127.0.0.1:1/%d", i)})
	}
	if _, _, err := r.m.Add(t.Context(), Spec{URL: "http://127.0.0.1:1/"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("one too many: %v", err)
	}
}

func TestCatalogFailure(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := r.m.Add(ctx, Spec{URL: "http://127.0.0.1:1/"}); err == nil || len(r.m.List()) != 0 {
		t.Errorf("a hook that is not recorded is there: %v", err)
	}
}

// TestDocumentedCheck runs the program that the documentation gives to
// receivers.
func TestDocumentedCheck(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	doc, err := os.ReadFile("../../docs/events.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```python\n(.*?)```").FindSubmatch(doc)
	if m == nil {
		t.Fatal("docs/events.md has no program")
	}
	const secret, body = "0123456789abcdef", `{"id":7,"type":"resumed"}`
	now := strconv.FormatInt(time.Now().Unix(), 10)
	old := strconv.FormatInt(time.Now().Add(-time.Hour).Unix(), 10)
	for _, c := range []struct {
		name, timestamp, signature, body string
		want                             string
	}{
		{"right", now, "v1=" + Sign(secret, now, []byte(body)), body, "True"},
		{"other body", now, "v1=" + Sign(secret, now, []byte(body)), body + " ", "False"},
		{"other secret", now, "v1=" + Sign(secret+"0", now, []byte(body)), body, "False"},
		{"old", old, "v1=" + Sign(secret, old, []byte(body)), body, "False"},
	} {
		script := string(m[1]) + fmt.Sprintf("\nprint(genuine(%q, {%q: %q, %q: %q}, %q.encode()))\n",
			secret, HeaderTimestamp, c.timestamp, HeaderSignature, c.signature, c.body)
		out, err := exec.Command(python, "-c", script).CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != c.want {
			t.Errorf("%s: %v %s, want %s", c.name, err, out, c.want)
		}
	}
}

// TestWordyEndpoint answers with one long line that is no HTTP: the error that
// is kept and shown has an end.
func TestWordyEndpoint(t *testing.T) {
	r := newRig(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte(strings.Repeat("ä", 100<<10) + "\r\n\r\n")) // the client may leave before the end
			conn.Close()
		}
	}()
	h := r.add(Spec{URL: "http://" + ln.Addr().String()})
	tested, err := r.m.Test(t.Context(), h.ID)
	if err != nil || tested.Error == "" || len(tested.Error) > 600 {
		t.Errorf("%d bytes, %v", len(tested.Error), err)
	}
	r.happen("a", 1)
	eventually(t, "it is tried", func() bool { return r.hook(h.ID).Failures > 0 })
	if text := r.hook(h.ID).Error; len(text) > 600 {
		t.Errorf("%d bytes are kept", len(text))
	}
}
