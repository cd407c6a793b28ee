package proxy_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/proxy"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

func TestMatch(t *testing.T) {
	p := proxy.New(proxy.Config{Core: newCore(), Key: key, Domain: "Sandbox.Test"})
	defer p.Close()
	for _, tt := range []struct {
		host, path string
		want       bool
	}{
		{"8000-abc.sandbox.test", "/", true},
		{"8000-ABC.SANDBOX.test:7070", "/v1/sandboxes", true},
		{"8000-abc.sandbox.test.", "/", true},
		{"99999-abc.sandbox.test", "/", true}, // it answers that there is no such port
		{"8000-.sandbox.test", "/", true},
		{"8000-abc.other.test", "/", false},
		{"sandbox.test", "/", false},
		{"api.sandbox.test", "/", false},
		{"a.8000-abc.sandbox.test", "/", false},
		{"8000-a.b.sandbox.test", "/", false},
		{"8000-abcsandbox.test", "/", false},
		{"127.0.0.1:7070", "/sandboxes/abc/ports/8000/x", true},
		{"127.0.0.1:7070", "/sandboxes/abc/ports/8000", true},
		{"[::1]:7070", "/sandboxes/abc/ports/x/", true},
		{"127.0.0.1:7070", "/sandboxes/abc", false},
		{"127.0.0.1:7070", "/v1/sandboxes/abc/ports/8000/connect", false},
		{"127.0.0.1:7070", "/sandboxes/abc/portsx/8000", false},
	} {
		r := &http.Request{Host: tt.host, URL: &url.URL{Path: tt.path}}
		if got := p.Match(r); got != tt.want {
			t.Errorf("%s%s: %v, want %v", tt.host, tt.path, got, tt.want)
		}
	}
}

func TestForwards(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Hib-Resume", "tier=forged; ms=0")
		h.Set("X-Own", "1")
		h.Add("Set-Cookie", "a=1; Path=/x")
		h.Add("Set-Cookie", "b=2; Domain=sandbox.test; Path=/")
		h.Add("Set-Cookie", "hib_token=x")
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprintf(w, "%s %s host=%s xfh=%s proto=%s prefix=%s for=%v auth=%q cookie=%q token=%q own=%q", r.Method, r.RequestURI, r.Host,
			r.Header.Get("X-Forwarded-Host"), r.Header.Get("X-Forwarded-Proto"), r.Header.Get("X-Forwarded-Prefix"), r.Header.Get("X-Forwarded-For") != "",
			r.Header.Get("Authorization"), r.Header.Get("Cookie"), r.Header.Get("Hib-Access-Token"), r.Header.Get("X-Api-Key"))
	})
	for _, tt := range []struct {
		name, host, path string
		headers          []string
		want             string
	}{
		{"host", host(8000), "/a%2Fb?x=1&y=%zz", []string{pass}, "GET /a%2Fb?x=1&y=%zz host=" + host(8000) + " xfh=" + host(8000) + ` proto=http prefix= for=true auth="" cookie="" token="" own=""`},
		{"name", "8000-anna.sandbox.test", "/", []string{pass}, "GET / host=8000-anna.sandbox.test"},
		{"path", "", "/sandboxes/anna/ports/8000/a%2Fb/?q", []string{pass}, "GET /a%2Fb/?q host=127.0.0.1"},
		{"prefix", "", "/sandboxes/anna/ports/8000/", []string{pass, "X-Forwarded-Prefix: /forged"}, "prefix=/sandboxes/anna/ports/8000 "},
		{"bearer of its own", host(8000), "/", []string{pass, "Authorization: Bearer mine"}, `auth="Bearer mine"`},
		{"bearer that is the token", host(8000), "/", []string{"Authorization: Bearer " + token}, `auth=""`},
		{"basic", host(8000), "/", []string{pass, "Authorization: Basic eDp5"}, `auth="Basic eDp5"`},
		{"key", host(8000), "/", []string{"X-API-Key: " + key}, `own=""`},
		{"key of its own", host(8000), "/", []string{pass, "X-API-Key: mine"}, `own="mine"`},
		{"key behind one of its own", host(8000), "/", []string{"X-API-Key: mine", "X-API-Key: " + key}, `own="mine"`},
		{"bearer behind one of its own", host(8000), "/", []string{"Authorization: Bearer mine", "Authorization: Bearer " + token}, `auth="Bearer mine"`},
		{"twice", host(8000), "/", []string{"X-API-Key: " + key, "X-API-Key: " + key, "Authorization: Bearer " + key}, `auth="" cookie="" token="" own=""`},
		{"cookie", host(8000), "/", []string{"Cookie: a=1; hib_token=" + token + "; b=2"}, `cookie="a=1; b=2"`},
		{"query", host(8000), "/x?a=1&hib_token=" + token + "&b=%zz", nil, "GET /x?a=1&b=%zz "},
		{"proto of a proxy here", host(8000), "/", []string{pass, "X-Forwarded-Proto: https"}, "proto=https"},
		{"e2b", host(8000), "/", []string{"E2b-Traffic-Access-Token: " + token}, "GET / "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			resp, body := f.do(f.request("GET", tt.host, tt.path, nil, tt.headers...))
			if resp.StatusCode != http.StatusAccepted || !strings.Contains(body, tt.want) || resp.Header.Get("X-Own") != "1" {
				t.Errorf("%s %q, want %q", resp.Status, body, tt.want)
			}
			if h := resp.Header.Get("Hib-Resume"); h != "" {
				t.Errorf("Hib-Resume: %q of a sandbox that ran", h)
			}
			want := []string{"a=1; Path=/x", "b=2; Path=/"}
			if tt.host == "" {
				want = []string{"a=1; Path=/sandboxes/anna/ports/8000/x", "b=2; Path=/sandboxes/anna/ports/8000/"}
				if resp.Header.Get("Content-Security-Policy") == "" {
					t.Error("scripts may act in the API's name")
				}
			}
			if got := resp.Header.Values("Set-Cookie"); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("cookies %q, want %q", got, want)
			}
		})
	}
	if n := f.core.open(); n != 0 {
		t.Errorf("%d connections into the guest are kept", n)
	}
}

// TestPublicPort: it needs no pass, and what looks like one stays with the daemon.
func TestPublicPort(t *testing.T) {
	f := newFixture(t)
	f.guest(9000, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%q %q %q", r.Header.Get("Hib-Access-Token"), r.Header.Get("X-Api-Key"), r.RequestURI)
	})
	f.core.hibernate()
	for _, headers := range [][]string{nil, {pass}, {pass + "x"}, {"X-API-Key: " + key}} {
		if resp, body := f.do(f.request("GET", host(9000), "/?hib_token=x", nil, headers...)); body != `"" "" "/"` {
			t.Errorf("%v: %s %s", headers, resp.Status, body)
		}
	}
}

func TestPathFormKeepsToItsFolder(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/login?x", http.StatusFound) })
	resp, _ := f.do(f.request("GET", "", "/sandboxes/anna/ports/8000?q=1", nil, pass))
	if l := resp.Header.Get("Location"); resp.StatusCode != http.StatusPermanentRedirect || l != "/sandboxes/anna/ports/8000/?q=1" {
		t.Errorf("%s to %q", resp.Status, l)
	}
	resp, _ = f.do(f.request("GET", "", "/sandboxes/anna/ports/8000/a", nil, pass))
	if l := resp.Header.Get("Location"); l != "/sandboxes/anna/ports/8000/login?x" {
		t.Errorf("it leads to %q", l)
	}
}

// TestRefusalsDoNotWake: what shows no pass is answered at once and leaves the
// sandbox asleep.
func TestRefusalsDoNotWake(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) { t.Error("a request came through") })
	f.guest(guestapi.Port, func(w http.ResponseWriter, r *http.Request) { t.Error("a call came through") })
	f.guest(guestapi.CallPort, func(w http.ResponseWriter, r *http.Request) { t.Error("an order came through") })
	f.core.hibernate()
	for _, tt := range []struct {
		name, host, path string
		headers          []string
		status           int
	}{
		{"nothing", host(8000), "/", nil, 401},
		{"wrong", host(8000), "/", []string{pass + "x"}, 403},
		{"empty", host(8000), "/", []string{"Hib-Access-Token: "}, 403},
		{"wrong key", host(8000), "/", []string{"X-API-Key: " + key + "0"}, 401},
		{"wrong bearer", host(8000), "/", []string{"Authorization: Bearer x"}, 401},
		{"wrong cookie", host(8000), "/", []string{"Cookie: hib_token=x"}, 403},
		{"wrong query", host(8000), "/?hib_token=x", []string{"Accept: text/html"}, 403},
		{"cookie by path", "", "/sandboxes/anna/ports/8000/", []string{"Cookie: hib_token=" + token}, 401},
		{"websocket", host(8000), "/", []string{"Connection: Upgrade", "Upgrade: websocket"}, 401},
		{"unknown", "8000-nobody.sandbox.test", "/", []string{pass}, 404},
		{"malformed id", "8000-a_b.sandbox.test", "/", []string{pass}, 404},
		{"no port", "0-anna.sandbox.test", "/", []string{pass}, 404},
		{"too large a port", "65536-anna.sandbox.test", "/", []string{pass}, 404},
		{"no port in the path", "", "/sandboxes/anna/ports/x/", []string{pass}, 404},
		{"agent, no token", host(guestapi.Port), "/health", nil, 401},
		{"agent, traffic token", host(guestapi.Port), "/health", []string{pass}, 401},
		{"agent, control call", host(guestapi.Port), "/x/..//INIT", []string{"X-Access-Token: " + agent}, 403},
		{"agent, unknown", "49983-nobody.sandbox.test", "/health", nil, 502},
		{"orders of the host", host(guestapi.CallPort), "/", []string{pass, "X-API-Key: " + key}, 403},
	} {
		t.Run(tt.name, func(t *testing.T) {
			resp, body := f.do(f.request("GET", tt.host, tt.path, nil, tt.headers...))
			if resp.StatusCode != tt.status {
				t.Errorf("%s, want %d: %s", resp.Status, tt.status, body)
			}
			if state, wakes := f.core.now(); state != sandbox.StateStandby || wakes != 0 {
				t.Fatalf("it is %s after %d resumes", state, wakes)
			}
			if strings.Contains(resp.Header.Get("Content-Type"), "html") {
				if !strings.Contains(body, "<h1") {
					t.Errorf("no page: %q", body)
				}
				return
			}
			var e api.Error
			if err := json.Unmarshal([]byte(body), &e); err != nil || e.Code == "" || e.Message == "" || e.Hint == "" {
				t.Errorf("%v: %q", err, body)
			}
		})
	}
}

func TestAgent(t *testing.T) {
	f := newFixture(t)
	f.guest(guestapi.Port, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %q %q", r.Header.Get("X-Access-Token"), r.Header.Get("X-Api-Key"), r.Header.Get("Authorization"))
	})
	for _, h := range []string{"X-Access-Token: " + agent, "X-API-Key: " + key} {
		resp, body := f.do(f.request("GET", host(guestapi.Port), "/health", nil, h, "Authorization: Basic dXNlcjo="))
		if want := agent + ` "" "Basic dXNlcjo="`; resp.StatusCode != 200 || body != want {
			t.Errorf("%s: %s %q, want %q", h, resp.Status, body, want)
		}
	}
	for _, path := range []string{"/freeze", "/x/../INIT", "/%66reeze", "//clock/x"} {
		for at, prefix := range map[string]string{host(guestapi.Port): "", "": "/sandboxes/" + boxID + "/ports/" + fmt.Sprint(guestapi.Port)} {
			if resp, body := f.do(f.request("POST", at, prefix+path, nil, "X-API-Key: "+key)); resp.StatusCode != http.StatusForbidden {
				t.Errorf("%s%s: %s %q", prefix, path, resp.Status, body)
			}
		}
	}
}

// TestBrowserGetsACookie: the token in an address becomes a cookie of that host
// alone, and leaves the address.
func TestBrowserGetsACookie(t *testing.T) {
	f := newFixture(t)
	f.core.hibernate()
	resp, _ := f.do(f.request("GET", host(8000), "//evil.test/a%20b?x=1&hib_token="+token, nil, "Accept: text/html,*/*"))
	if l := resp.Header.Get("Location"); resp.StatusCode != http.StatusSeeOther || l != "/evil.test/a%20b?x=1" {
		t.Errorf("%s to %q", resp.Status, l)
	}
	c := resp.Cookies()
	if len(c) != 1 || c[0].Value != token || !c[0].HttpOnly || c[0].Domain != "" || c[0].SameSite != http.SameSiteLaxMode {
		t.Errorf("cookies %v", c)
	}
	if _, wakes := f.core.now(); wakes != 0 {
		t.Error("the redirect woke it")
	}
}

// TestTenAtOnce: requests at the same time share one resume, each is served
// once, and each is told that it waited.
func TestTenAtOnce(t *testing.T) {
	f := newFixture(t)
	var served atomic.Int64
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) { served.Add(1) })
	f.core.need = 10
	f.core.hibernate()
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			resp, body := f.do(f.request("GET", host(8000), "/", nil, pass))
			if h := resp.Header.Get("Hib-Resume"); resp.StatusCode != 200 || h != "tier=local; ms=41" {
				t.Errorf("%s, Hib-Resume %q: %s", resp.Status, h, body)
			}
		})
	}
	wg.Wait()
	if _, wakes := f.core.now(); wakes != 1 || served.Load() != 10 || f.core.by[0] != "http 8000" {
		t.Errorf("%d resumes by %q, %d requests served", wakes, f.core.by, served.Load())
	}
	if resp, _ := f.do(f.request("GET", host(8000), "/", nil, pass)); resp.Header.Get("Hib-Resume") != "" {
		t.Error("a request that did not wait is told that it did")
	}
}

// TestRaces: requests and hibernations by the thousand. A request is answered
// by the guest, or is told that the sandbox fell asleep under it; none is
// carried out twice.
func TestRaces(t *testing.T) {
	f := newFixture(t)
	var mu sync.Mutex
	served := map[string]int{}
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil { // it was cut off on its way
			return
		}
		mu.Lock()
		served[string(b)]++
		mu.Unlock()
		w.Write(b)
	})
	done := make(chan struct{})
	var sleeping, wg sync.WaitGroup
	sleeping.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(time.Duration(rand.IntN(4000)) * time.Microsecond):
				if state, _ := f.core.now(); state == sandbox.StateRunning {
					f.core.hibernate()
				}
			}
		}
	})
	var answered, cut atomic.Int64
	for worker := range 8 {
		wg.Go(func() {
			for n := range 250 {
				id := fmt.Sprintf("%d/%d", worker, n)
				resp, err := f.http.Do(f.request("POST", host(8000), "/", strings.NewReader(id), pass))
				if err != nil {
					cut.Add(1)
					continue
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				switch {
				case resp.StatusCode == 200 && err == nil && string(body) == id:
					answered.Add(1)
				case resp.StatusCode == 503 && resp.Header.Get("Retry-After") != "", resp.StatusCode == 502, err != nil:
					cut.Add(1)
				default:
					t.Errorf("%s: %s %q", id, resp.Status, body)
				}
			}
		})
	}
	wg.Wait()
	close(done)
	sleeping.Wait()
	for id, n := range served {
		if n != 1 {
			t.Errorf("request %s was carried out %d times", id, n)
		}
	}
	_, wakes := f.core.now()
	t.Logf("%d answered, %d cut off by one of %d hibernations", answered.Load(), cut.Load(), wakes)
	if answered.Load() < 500 {
		t.Error("too few came through")
	}
	eventually(t, "no connection is left", func() bool { return f.core.open() == 0 })
}

// TestUploadWakes: a large body arrives whole at a sandbox that it woke.
func TestUploadWakes(t *testing.T) {
	body := make([]byte, 20<<20)
	r := rand.NewChaCha8([32]byte{1})
	r.Read(body)
	for _, chunked := range []bool{false, true} {
		t.Run(fmt.Sprintf("chunked %v", chunked), func(t *testing.T) {
			f := newFixture(t)
			f.guest(8000, func(w http.ResponseWriter, r *http.Request) {
				h := sha256.New()
				n, err := io.Copy(h, r.Body)
				fmt.Fprintf(w, "%d %x %v %s", n, h.Sum(nil), err, r.Trailer.Get("X-Sum"))
			})
			f.core.resume, f.core.opens = 20*time.Millisecond, 100*time.Millisecond
			f.core.hibernate()
			req := f.request("PUT", host(8000), "/", bytes.NewReader(body), pass)
			if chunked {
				req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(body)), -1
				req.Trailer = http.Header{"X-Sum": {"kept"}}
			}
			resp, got := f.do(req)
			want := fmt.Sprintf("%d %x <nil> ", len(body), sha256.Sum256(body))
			if chunked {
				want += "kept"
			}
			if resp.StatusCode != 200 || got != want {
				t.Errorf("%s %q, want %q", resp.Status, got, want)
			}
		})
	}
}

func TestTrailersAndEvents(t *testing.T) {
	f := newFixture(t)
	next := make(chan struct{})
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		io.WriteString(w, "first\n")
		http.NewResponseController(w).Flush()
		<-next
		io.WriteString(w, "second\n")
		w.Header().Set("X-Sum", "3")
	})
	resp, err := f.http.Do(f.request("GET", host(8000), "/", nil, pass))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	if l, err := lines.ReadString('\n'); l != "first\n" { // it comes before the rest is there
		t.Fatalf("%q, %v", l, err)
	}
	close(next)
	rest, err := io.ReadAll(lines)
	if string(rest) != "second\n" || err != nil || resp.Trailer.Get("X-Sum") != "3" {
		t.Errorf("%q, %v, trailer %v", rest, err, resp.Trailer)
	}
}

// TestBothWaysAtOnce: an answer begins before the request has ended, and both go on.
func TestBothWaysAtOnce(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.EnableFullDuplex()
		w.WriteHeader(200)
		_ = rc.Flush()
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			fmt.Fprintf(w, "echo %s\n", lines.Text())
			_ = rc.Flush()
		}
	})
	for _, version := range []int{1, 2} {
		t.Run(fmt.Sprint("HTTP/", version), func(t *testing.T) {
			client := f.http
			if version == 2 {
				client = f.h2c()
			}
			pr, pw := io.Pipe()
			req := f.request("POST", host(8000), "/", pr, pass)
			go io.WriteString(pw, "one\n")
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			answers := bufio.NewReader(resp.Body)
			if l, err := answers.ReadString('\n'); l != "echo one\n" {
				t.Fatalf("%q, %v", l, err)
			}
			go func() { io.WriteString(pw, "two\n"); pw.Close() }()
			if rest, err := io.ReadAll(answers); string(rest) != "echo two\n" || err != nil {
				t.Errorf("%q, %v", rest, err)
			}
		})
	}
}

// h2c returns a client that speaks HTTP/2 without encryption.
func (f *fixture) h2c() *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	f.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func TestHTTP2(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
		fmt.Fprintf(w, "%s %s %s", r.Proto, r.Host, b)
	})
	f.core.hibernate()
	client := f.h2c()
	for _, tt := range []struct{ contentType, proto string }{{"text/plain", "HTTP/1.1"}, {"application/grpc+proto", "HTTP/2.0"}} {
		resp, err := client.Do(f.request("POST", host(8000), "/", strings.NewReader("body"), pass, "Content-Type: "+tt.contentType, "Te: trailers"))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if want := tt.proto + " " + host(8000) + " body"; resp.ProtoMajor != 2 || string(b) != want || err != nil || resp.Trailer.Get("Grpc-Status") != "0" {
			t.Errorf("%s %q, want %q; trailer %v, %v", resp.Proto, b, want, resp.Trailer, err)
		}
	}
	eventually(t, "no connection is left", func() bool { return f.core.open() == 0 })
}

func TestExpectContinue(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			w.WriteHeader(http.StatusForbidden) // without a look at the body
			return
		}
		io.Copy(w, r.Body)
	})
	f.core.hibernate()
	for path, want := range map[string]int{"/yes": 200, "/no": 403} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nHib-Access-Token: %s\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n", path, host(8000), token)
		br := bufio.NewReader(conn)
		resp, err := http.ReadResponse(br, nil)
		if err == nil && resp.StatusCode == http.StatusContinue {
			io.WriteString(conn, "body")
			resp, err = http.ReadResponse(br, nil)
		}
		if err != nil || resp.StatusCode != want {
			t.Errorf("%s: %v, %v", path, resp, err)
		}
	}
}

// dialWS opens a WebSocket to a port.
func (f *fixture) dialWS(port int, headers http.Header) (*websocket.Conn, *http.Response, error) {
	return websocket.Dial(f.Context(), f.url+"/ws", &websocket.DialOptions{Host: host(port), HTTPHeader: headers, HTTPClient: f.http})
}

func echoWS(t *testing.T) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			t.Error(err)
			return
		}
		defer c.CloseNow()
		for {
			kind, b, err := c.Read(context.Background())
			if err != nil {
				return
			}
			if string(b) == "bye" {
				c.Close(websocket.StatusNormalClosure, "bye")
				return
			}
			if c.Write(context.Background(), kind, b) != nil {
				return
			}
		}
	}
}

// TestWebSocket: it wakes, echoes, ends when the guest ends it, and ends when
// the sandbox hibernates; the next one wakes again.
func TestWebSocket(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, echoWS(t))
	auth := http.Header{"Hib-Access-Token": {token}}
	echo := func(c *websocket.Conn, text string) {
		t.Helper()
		if err := c.Write(t.Context(), websocket.MessageText, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if _, b, err := c.Read(t.Context()); string(b) != text {
			t.Fatalf("%q came back as %q, %v", text, b, err)
		}
	}
	for round := range 3 {
		f.core.hibernate()
		c, resp, err := f.dialWS(8000, auth)
		if err != nil {
			t.Fatal(err)
		}
		if h := resp.Header.Get("Hib-Resume"); h != "tier=local; ms=41" {
			t.Errorf("Hib-Resume %q", h)
		}
		echo(c, "hello")
		if n := f.core.session(0); n != 1 {
			t.Errorf("%d sessions while it is open", n)
		}
		if round == 0 {
			c.Write(t.Context(), websocket.MessageText, []byte("bye"))
		} else {
			f.core.hibernate()
		}
		_, _, err = c.Read(t.Context())
		if err == nil || (websocket.CloseStatus(err) == websocket.StatusNormalClosure) != (round == 0) {
			t.Errorf("round %d: %v", round, err)
		}
		c.CloseNow()
	}
	eventually(t, "no connection is left", func() bool { return f.core.open() == 0 })
	eventually(t, "no session is left", func() bool { return f.core.session(0) == 0 })
	c, _, err := f.dialWS(8000, auth)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	echo(c, "hello")
	f.proxy.Close() // a stopping daemon does not wait for it
	if _, _, err := c.Read(t.Context()); err == nil {
		t.Error("the stopping daemon kept it")
	}
	if _, resp, err := f.dialWS(8000, auth); err == nil || resp == nil || resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("%v, %v", resp, err)
	}
}

// TestHungClient: one that never reads is in nobody's way, and is cut off once
// the sandbox sleeps.
func TestHungClient(t *testing.T) {
	for _, upgrade := range []bool{false, true} {
		t.Run(fmt.Sprintf("upgrade %v", upgrade), func(t *testing.T) {
			f := newFixture(t)
			f.guest(8000, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/flood" {
					io.WriteString(w, "fine")
					return
				}
				var out io.Writer = w
				if upgrade {
					conn, _, err := http.NewResponseController(w).Hijack()
					if err != nil {
						t.Error(err)
						return
					}
					defer conn.Close()
					io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: flood\r\n\r\n")
					out = conn
				}
				for chunk := make([]byte, 64<<10); ; {
					if _, err := out.Write(chunk); err != nil {
						return
					}
				}
			})
			conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			head := ""
			if upgrade {
				head = "Connection: Upgrade\r\nUpgrade: flood\r\n"
			}
			fmt.Fprintf(conn, "GET /flood HTTP/1.1\r\nHost: %s\r\nHib-Access-Token: %s\r\n%s\r\n", host(8000), token, head)
			if _, err := conn.Read(make([]byte, 1)); err != nil { // it has begun
				t.Fatal(err)
			}
			for range 3 {
				if resp, body := f.do(f.request("GET", host(8000), "/", nil, pass)); body != "fine" {
					t.Errorf("%s %q", resp.Status, body)
				}
			}
			f.core.hibernate()
			for range 3 {
				if resp, body := f.do(f.request("GET", host(8000), "/", nil, pass)); body != "fine" {
					t.Errorf("%s %q", resp.Status, body)
				}
			}
			// It is cut off although it never reads: what it reads now has an end.
			eventually(t, "the connection ends", func() bool {
				_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
				time.Sleep(3 * time.Second) // longer than the grace
				_, err := io.Copy(io.Discard, conn)
				return err == nil || !errors.Is(err, context.DeadlineExceeded)
			})
		})
	}
}

func TestAnswersOfFailures(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	for _, tt := range []struct {
		name    string
		err     error
		port    int
		status  int
		retry   bool
		message string
	}{
		{"the server breaks off", nil, 8000, 502, false, "broke the connection off"},
		{"no server", nil, 8001, 502, false, "nothing answers at port 8001"},
		{"failed", &sandbox.Error{Kind: sandbox.ErrFailed, Message: "sandbox x has failed: <its memory is lost>", Hint: "hib resume x"}, 8000, 503, false, "its memory is lost"},
		{"a failing resume", &sandbox.Error{Kind: sandbox.ErrUnavailable, Message: "sandbox x did not resume", Cause: errBroken}, 8000, 503, true, "it is broken"},
		{"no room", &sandbox.Error{Kind: sandbox.ErrUnavailable, Message: "there is no memory for sandbox x", Hint: "hibernate others"}, 8000, 503, true, "no memory"},
		{"being deleted", &sandbox.Error{Kind: sandbox.ErrConflict, Message: "sandbox x is being deleted"}, 8000, 503, true, "deleted"},
		{"something odd", errBroken, 8000, 500, false, "broken"},
	} {
		for _, accept := range []string{"*/*", "text/html,*/*"} {
			t.Run(tt.name+" "+accept, func(t *testing.T) {
				f.core.fail = tt.err
				resp, body := f.do(f.request("GET", host(tt.port), "/", nil, pass, "Accept: "+accept))
				if resp.StatusCode != tt.status || !strings.Contains(body, tt.message) || (resp.Header.Get("Retry-After") != "") != tt.retry {
					t.Errorf("%s, Retry-After %q: %s", resp.Status, resp.Header.Get("Retry-After"), body)
				}
				if page := strings.HasPrefix(body, "<!doctype"); page != (accept != "*/*") || page && strings.Contains(body, "<its") {
					t.Errorf("it got %s", body)
				}
			})
		}
	}
	f.core.fail = nil
	f.core.mu.Lock()
	f.core.state = sandbox.StateDeleting
	f.core.mu.Unlock()
	if resp, body := f.do(f.request("GET", host(8000), "/", nil, pass)); resp.StatusCode != http.StatusGone {
		t.Errorf("%s: %s", resp.Status, body)
	}
}

// TestServerThatStarts: a port that opens a moment after a resume is waited
// for; one of a sandbox that ran is not.
func TestServerThatStarts(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "here") })
	f.core.opens = 200 * time.Millisecond
	f.core.hibernate()
	if resp, body := f.do(f.request("GET", host(8000), "/", nil, pass)); body != "here" {
		t.Errorf("%s %q", resp.Status, body)
	}
	f.core.mu.Lock()
	before := f.core.dials
	f.core.mu.Unlock()
	f.do(f.request("GET", host(8001), "/", nil, pass))
	f.core.mu.Lock()
	defer f.core.mu.Unlock()
	if n := f.core.dials - before; n != 1 {
		t.Errorf("%d tries", n)
	}
}

// TestClientThatLeaves: its request goes no further than its resume.
func TestClientThatLeaves(t *testing.T) {
	f := newFixture(t)
	f.guest(8000, func(w http.ResponseWriter, r *http.Request) { t.Error("it came through") })
	f.core.resume = 200 * time.Millisecond
	f.core.hibernate()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		eventually(t, "a resume begins", func() bool { _, wakes := f.core.now(); return wakes == 1 })
		cancel()
	}()
	if resp, err := f.http.Do(f.request("GET", host(8000), "/", nil, pass).WithContext(ctx)); err == nil {
		t.Errorf("%s", resp.Status)
	}
	eventually(t, "it runs", func() bool { state, _ := f.core.now(); return state == sandbox.StateRunning })
}

func FuzzTarget(f *testing.F) {
	f.Add("8000-abc.sandbox.test:80", "/")
	f.Add("127.0.0.1", "/sandboxes/a/ports/8000/x%2F..%2F")
	f.Add("127.0.0.1", "/sandboxes/a%2Fb/ports/8000/")
	core := newCore()
	p := proxy.New(proxy.Config{Core: core, Key: key, Domain: "sandbox.test"})
	f.Fuzz(func(t *testing.T, host, path string) {
		u, err := url.ParseRequestURI(path)
		if err != nil {
			return
		}
		r := (&http.Request{Method: "GET", Host: host, URL: u, Header: http.Header{}}).WithContext(t.Context())
		if !p.Match(r) {
			return
		}
		w := recorder{h: http.Header{}}
		p.ServeHTTP(&w, r)
		if w.status < 400 {
			t.Errorf("%q %q without a pass: %d", host, path, w.status)
		}
	})
}

type recorder struct {
	h      http.Header
	status int
}

func (r *recorder) Header() http.Header         { return r.h }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(b []byte) (int, error) { return len(b), nil }
