package guestapi_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clientOf returns a client of a guest that answers as handler does.
func clientOf(t *testing.T, handler http.HandlerFunc) *guestapi.Client {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	client := guestapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", server.Listener.Addr().String())
	})
	t.Cleanup(client.Close)
	return client
}

func answer(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}
}

func TestCallsCarryTokenAndBody(t *testing.T) {
	c := clientOf(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.URL.Path != guestapi.InitPath || r.Header.Get(guestapi.TokenHeader) != "secret" {
			t.Errorf("%s %s %v", r.Method, r.URL, r.Header)
		}
		fmt.Fprint(w, `{"agent_version":"1","sockets_destroyed":2,"steps":{"clock":0.5}}`)
	})
	resp, err := c.Init(t.Context(), "secret", guestapi.InitRequest{Reason: guestapi.ReasonResume})
	if err != nil || resp.AgentVersion != "1" || resp.SocketsDestroyed != 2 || resp.Steps["clock"] != 0.5 {
		t.Errorf("%+v, %v", resp, err)
	}
}

func TestHostileAnswersAreBounded(t *testing.T) {
	huge := strings.Repeat("x", 2<<20)
	for _, c := range []struct {
		name   string
		status int
		body   string
		want   string
	}{
		{"long", 200, `{"warnings":["` + huge + `"]}`, "longer than"},
		{"long error", 500, huge, "longer than"},
		{"not JSON", 200, "<html>", "not the JSON"},
		{"wrong type", 200, `{"steps":7}`, "not the JSON"},
		{"error text", 500, `{"message":"no\u001b[2J"}`, `500: "no\x1b[2J"`},
		{"other error", 418, "teapot", "418: teapot"},
		{"redirect", 302, "", "302"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := clientOf(t, answer(c.status, c.body)).Freeze(t.Context(), "t", guestapi.FreezeRequest{})
			if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 2000 {
				t.Errorf("got %v, want %s", err, c.want)
			}
		})
	}
	many := `{"sockets_destroyed":-5,"warnings":["` + strings.Repeat(`a\n","`, 500) + `"],"steps":{"x":-1`
	for i := range 500 {
		many += fmt.Sprintf(`,"s%d":1`, i)
	}
	resp, err := clientOf(t, answer(200, many+"}}")).Init(t.Context(), "t", guestapi.InitRequest{})
	if err != nil || len(resp.Warnings) > 32 || len(resp.Steps) > 64 || resp.SocketsDestroyed != 0 || resp.Warnings[0] != `"a\n"` {
		t.Errorf("%+v, %v", resp, err)
	}
}

func TestHostileKeepAwakeIsBounded(t *testing.T) {
	one := `{"pid":1,"command":"` + strings.Repeat(`\u001b`, 300) + `"}`
	body := `{"processes":[` + strings.Repeat(one+",", guestapi.MaxKeepAwake) + one + `]}`
	resp, err := clientOf(t, answer(200, body)).Awake(t.Context(), "t")
	if err != nil || len(resp.Processes) != guestapi.MaxKeepAwake {
		t.Fatalf("%d processes, %v", len(resp.Processes), err)
	}
	for _, p := range resp.Processes {
		if len(p.Command) > guestapi.MaxCommand || !strings.HasPrefix(p.Command, "???") {
			t.Errorf("command %q", p.Command)
		}
	}
}

func TestRefusalsAreKnown(t *testing.T) {
	for status, want := range map[int]error{401: guestapi.ErrUnauthorized, 409: guestapi.ErrRefused} {
		if _, err := clientOf(t, answer(status, "{}")).Thaw(t.Context(), "t", guestapi.ThawRequest{}); !errors.Is(err, want) {
			t.Errorf("%d: %v", status, err)
		}
	}
}

func TestHealthWaitsForTheAgent(t *testing.T) {
	var calls atomic.Int32
	c := clientOf(t, func(w http.ResponseWriter, _ *http.Request) {
		if calls.Add(1) < 3 {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := c.Health(ctx); err != nil {
		t.Error(err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := clientOf(t, answer(502, "")).Health(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "502") {
		t.Errorf("got %v", err)
	}
}

func ExampleHTTPClient() {
	dial := func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", "127.0.0.1:49983")
	}
	client := guestapi.HTTPClient(dial)
	req, _ := http.NewRequest(http.MethodGet, guestapi.BaseURL+"/files?path=notes.txt", nil)
	req.Header.Set(guestapi.AccessHeader, "the sandbox's access token")
	_ = client // client.Do(req); processconnect.NewProcessClient(client, guestapi.BaseURL)
}

func TestIsControl(t *testing.T) {
	for p, want := range map[string]bool{
		"/init": true, "/INIT": true, "init/": true, "/x/../freeze": true, "//thaw/more": true, "/clock": true, "/awake": true,
		"/health": false, "/files": false, "/initial": false, "/": false, "/process.Process/Start": false, "/x/init": false,
	} {
		if got := guestapi.IsControl(p); got != want {
			t.Errorf("%s: %v", p, got)
		}
	}
}
