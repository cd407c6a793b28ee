package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/internal/catalog/catalogtest"
	"github.com/hibernacle/hibernacle/internal/events"
	"github.com/hibernacle/hibernacle/internal/server"
	"github.com/hibernacle/hibernacle/internal/server/servertest"
	"github.com/hibernacle/hibernacle/internal/webhook"
)

// watched is a server with events and webhooks that can be restarted behind one
// address.
type watched struct {
	*testing.T
	journal *events.Journal
	hooks   *webhook.Manager
	front   *httptest.Server
	now     atomic.Pointer[server.Server]
}

func startWatched(t *testing.T) (*watched, *client.Client) {
	t.Helper()
	w := &watched{T: t}
	var err error
	if w.journal, err = events.Open(t.TempDir(), events.Options{}); err != nil {
		t.Fatal(err)
	}
	if w.hooks, err = webhook.New(t.Context(), webhook.Config{Journal: w.journal, Catalog: &catalogtest.Memory{}}); err != nil {
		t.Fatal(err)
	}
	w.restart()
	w.front = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { w.now.Load().ServeHTTP(rw, r) }))
	c, err := client.New(w.front.URL, key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		w.now.Load().Close()
		w.front.CloseClientConnections()
		w.front.Close()
		w.hooks.Close()
		w.journal.Close()
	})
	return w, c
}

// restart ends all streams, as a daemon that restarts does.
func (w *watched) restart() {
	core := servertest.NewCore(w, http.NotFoundHandler())
	old := w.now.Swap(server.New(server.Config{Core: core, Key: key, Events: w.journal, Webhooks: w.hooks}))
	if old != nil {
		old.Close()
	}
}

func (w *watched) happen(n int) {
	for i := range n {
		w.journal.Append(events.Event{Type: "t", Sandbox: "s", Data: json.RawMessage(fmt.Sprintf(`{"n":%d}`, i))})
	}
}

// TestEventsSurviveRestarts has the daemon restart and connections break again
// and again while events come: each comes once, in order.
func TestEventsSurviveRestarts(t *testing.T) {
	w, c := startWatched(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	const n = 2000
	connected, done := make(chan struct{}), make(chan struct{})
	w.happen(1)
	go func() {
		defer close(done)
		select {
		case <-connected:
		case <-t.Context().Done():
			return
		}
		for i := 0; i < n; i += 100 {
			w.happen(100)
			switch random.IntN(3) {
			case 0:
				w.restart()
			case 1:
				w.front.CloseClientConnections()
			}
		}
	}()
	want := uint64(0)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for e, err := range c.Events(ctx, client.EventsOptions{Follow: true, After: new(uint64)}) {
		if err != nil {
			t.Fatalf("after event %d: %v", want, err)
		}
		if want++; e.ID != want {
			t.Fatalf("event %d comes behind event %d", e.ID, want-1)
		}
		if want == 1 {
			close(connected)
		}
		if want == n+1 {
			break
		}
	}
	<-done
}

func TestEventsOfThePast(t *testing.T) {
	w, c := startWatched(t)
	w.happen(50)
	sub := w.journal.Subscribe(0, events.Filter{})
	defer sub.Close()
	for range 50 {
		if _, err := sub.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	after := uint64(40)
	for _, o := range []struct {
		client.EventsOptions
		want int
	}{{client.EventsOptions{}, 50}, {client.EventsOptions{After: &after}, 10}, {client.EventsOptions{Types: []string{"x", "t"}, Sandbox: "s"}, 50}, {client.EventsOptions{Types: []string{"x"}}, 0}} {
		n := 0
		for _, err := range c.Events(t.Context(), o.EventsOptions) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		if n != o.want {
			t.Errorf("%+v: %d events", o, n)
		}
	}
}

func TestEventsFail(t *testing.T) {
	one := func(c *client.Client, o client.EventsOptions) (last error) {
		for _, err := range c.Events(t.Context(), o) {
			last = err
		}
		return last
	}
	w, c := startWatched(t)
	wrong, err := client.New(w.front.URL, "e2b_0")
	if err != nil {
		t.Fatal(err)
	}
	defer wrong.Close()
	if err := one(wrong, client.EventsOptions{Follow: true}); client.CodeOf(err) != api.CodeUnauthorized {
		t.Errorf("with a wrong key: %v", err)
	}
	nobody, err := client.New("http://127.0.0.1:1", key)
	if err != nil {
		t.Fatal(err)
	}
	if err := one(nobody, client.EventsOptions{Follow: true}); !errors.Is(err, client.ErrUnreachable) {
		t.Errorf("without a daemon: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	for _, err := range c.Events(ctx, client.EventsOptions{Follow: true}) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	}
}

func TestWebhooks(t *testing.T) {
	w, c := startWatched(t)
	ctx := t.Context()
	secret := make(chan string, 1)
	got := make(chan string, 100)
	endpoint := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		s := <-secret
		secret <- s
		body := make([]byte, r.ContentLength)
		if _, err := r.Body.Read(body); err != nil && err.Error() != "EOF" {
			t.Error(err)
		}
		if err := client.VerifyWebhook(s, r.Header, body, time.Minute); err != nil {
			t.Error(err)
		}
		if client.VerifyWebhook(s+"x", r.Header, body, time.Minute) == nil || client.VerifyWebhook(s, r.Header, append(body, 'x'), time.Minute) == nil ||
			client.VerifyWebhook(s, http.Header{}, body, time.Minute) == nil {
			t.Error("a post that is not genuine is taken for it")
		}
		r.Header.Set("Hib-Timestamp", strconv.FormatInt(time.Now().Add(-time.Hour).Unix(), 10))
		if client.VerifyWebhook(s, r.Header, body, time.Minute) == nil {
			t.Error("an old post is taken for a new one")
		}
		got <- r.Header.Get("Hib-Event-Type")
	}))
	defer endpoint.Close()
	hook, err := c.AddWebhook(ctx, api.WebhookRequest{URL: endpoint.URL})
	if err != nil || hook.Secret == "" || hook.State != "active" {
		t.Fatalf("%+v %v", hook, err)
	}
	secret <- hook.Secret
	if tested, err := c.TestWebhook(ctx, hook.ID); err != nil || !tested.OK || tested.Status != 200 || <-got != "test" {
		t.Errorf("%+v %v", tested, err)
	}
	w.happen(3)
	for range 3 {
		if typ := <-got; typ != "t" {
			t.Errorf("got %s", typ)
		}
	}
	if all, err := c.Webhooks(ctx); err != nil || len(all) != 1 || all[0].Secret != "" {
		t.Errorf("%+v %v", all, err)
	}
	if _, err := c.ResumeWebhook(ctx, hook.ID); err != nil {
		t.Error(err)
	}
	if err := c.RemoveWebhook(ctx, hook.ID); err != nil {
		t.Error(err)
	}
	if err := c.RemoveWebhook(ctx, hook.ID); !client.IsNotFound(err) {
		t.Errorf("the second time: %v", err)
	}
}
