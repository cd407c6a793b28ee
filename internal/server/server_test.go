package server_test

import (
	"bufio"
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
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/catalog/catalogtest"
	"github.com/hibernacle/hibernacle/internal/events"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/server"
	"github.com/hibernacle/hibernacle/internal/server/servertest"
	"github.com/hibernacle/hibernacle/internal/webhook"
)

const key = "e2b_00112233445566778899aabbccddeeff00112233"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a server over a core in memory.
type fixture struct {
	*testing.T
	core   *servertest.Core
	server *server.Server
	url    string
	home   string
	log    *bytes.Buffer // of the server; read it after the server is closed
	close  func()

	journal  *events.Journal
	webhooks *webhook.Manager

	mu     sync.Mutex
	routes []string // of the requests that were answered
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{T: t, home: t.TempDir(), log: &bytes.Buffer{}}
	f.core = servertest.NewCore(t, servertest.NewAgent(t, f.home))
	log := slog.New(slog.NewTextHandler(f.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var err error
	if f.journal, err = events.Open(t.TempDir(), events.Options{}); err != nil {
		t.Fatal(err)
	}
	if f.webhooks, err = webhook.New(t.Context(), webhook.Config{Journal: f.journal, Catalog: &catalogtest.Memory{}}); err != nil {
		t.Fatal(err)
	}
	f.server = server.New(server.Config{
		Core: f.core, Key: key, Version: api.Version{Version: "test", API: 1, VMM: "none", Accel: "tcg"}, Log: log,
		Events: f.journal, Webhooks: f.webhooks, Answered: f.answered,
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain; version=0.0.4")
			fmt.Fprintln(w, "hib_up 1")
		}),
	})
	hs := httptest.NewUnstartedServer(f.server)
	hs.Config = server.NewHTTPServer(f.server, slog.New(slog.DiscardHandler))
	hs.Start()
	f.url = hs.URL
	closed := false
	f.close = func() {
		if !closed {
			closed = true
			f.server.Close()
			hs.CloseClientConnections()
			hs.Close()
			f.webhooks.Close()
			f.journal.Close()
			http.DefaultClient.CloseIdleConnections()
		}
	}
	t.Cleanup(f.close)
	return f
}

// answered notes the route and the status of an answer.
func (f *fixture) answered(route string, status int, _ time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.routes = append(f.routes, fmt.Sprint(route, " ", status))
}

// do sends a request with the key and returns the answer and its whole body.
func (f *fixture) do(method, path, body string) (*http.Response, string) {
	f.Helper()
	return f.doWith(method, path, body, http.Header{"X-API-Key": {key}})
}

func (f *fixture) doWith(method, path, body string, h http.Header) (*http.Response, string) {
	f.Helper()
	req, err := http.NewRequest(method, f.url+path, strings.NewReader(body))
	if err != nil {
		f.Fatal(err)
	}
	for k, v := range h {
		req.Header[http.CanonicalHeaderKey(k)] = v
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.Fatal(err)
	}
	return resp, string(b)
}

// create makes a sandbox and returns its id.
func (f *fixture) create() string {
	f.Helper()
	resp, body := f.do("POST", "/v1/sandboxes", "")
	if resp.StatusCode != http.StatusCreated {
		f.Fatalf("create: %d %s", resp.StatusCode, body)
	}
	var sb api.Sandbox
	if err := json.Unmarshal([]byte(body), &sb); err != nil {
		f.Fatal(err)
	}
	return sb.ID
}

// wantError checks an answer's status, code and a part of its message.
func (f *fixture) wantError(resp *http.Response, body string, status int, code, message string) api.Error {
	f.Helper()
	var e api.Error
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		f.Fatalf("the error is no JSON: %q", body)
	}
	if resp.StatusCode != status || e.Code != code || !strings.Contains(e.Message, message) {
		f.Errorf("answer %d %s, want %d %s with %q", resp.StatusCode, body, status, code, message)
	}
	return e
}

func TestAuthentication(t *testing.T) {
	f := newFixture(t)
	for name, c := range map[string]struct {
		path   string
		header http.Header
		status int
	}{
		"bearer":                {"/v1/version", http.Header{"Authorization": {"Bearer " + key}}, 200},
		"bearer in lower case":  {"/v1/version", http.Header{"Authorization": {"bearer " + key}}, 200},
		"api key":               {"/v1/version", http.Header{"X-API-Key": {key}}, 200},
		"none":                  {"/v1/version", nil, 401},
		"empty":                 {"/v1/version", http.Header{"X-API-Key": {""}}, 401},
		"wrong":                 {"/v1/version", http.Header{"X-API-Key": {key[:len(key)-1] + "4"}}, 401},
		"prefix":                {"/v1/version", http.Header{"X-API-Key": {key[:len(key)-1]}}, 401},
		"basic":                 {"/v1/version", http.Header{"Authorization": {"Basic " + key}}, 401},
		"unknown route, no key": {"/v1/nothing", nil, 401},
		"document":              {"/v1/openapi.json", nil, 401},
		"health needs none":     {"/v1/health", nil, 204},
	} {
		t.Run(name, func(t *testing.T) {
			resp, body := f.doWith("GET", c.path, "", c.header)
			if resp.StatusCode != c.status {
				t.Errorf("status %d, want %d: %s", resp.StatusCode, c.status, body)
			}
			if c.status == 401 {
				f.wantError(resp, body, 401, api.CodeUnauthorized, "key")
			}
		})
	}
}

func TestUnknownRoutesAndMethods(t *testing.T) {
	f := newFixture(t)
	resp, body := f.do("GET", "/v1/nothing", "")
	f.wantError(resp, body, 404, api.CodeNotFound, "/v1/nothing")
	resp, body = f.do("GET", "/", "")
	f.wantError(resp, body, 404, api.CodeNotFound, "no such route")
	resp, body = f.do("PUT", "/v1/sandboxes/x", "")
	e := f.wantError(resp, body, 405, api.CodeInvalid, "PUT")
	if allow := resp.Header.Get("Allow"); !strings.Contains(allow, "DELETE") || !strings.Contains(e.Hint, allow) {
		t.Errorf("Allow %q, hint %q", allow, e.Hint)
	}
}

func TestBodies(t *testing.T) {
	f := newFixture(t)
	for name, c := range map[string]struct {
		body, message string
		status        int
	}{
		"empty":           {"", "", 201},
		"empty object":    {"{}", "", 201},
		"unknown field":   {`{"template":"base","memroy_mib":3}`, `unknown field "memroy_mib"`, 400},
		"unknown nested":  {`{"policy":{"egress":{"alow":[]}}}`, `unknown field "alow"`, 400},
		"syntax":          {"{\n  \"name\": x}", "line 2, column 11", 400},
		"cut off":         {`{"name":`, "ends too early", 400},
		"wrong type":      {`{"memory_mib":"2048"}`, `"memory_mib" at line 1`, 400},
		"no object":       {`[1]`, "must be a JSON object", 400},
		"something after": {`{} {}`, "something follows", 400},
		"too large":       {`{"name":"` + strings.Repeat("x", 1<<20) + `"}`, "too large", 413},
	} {
		t.Run(name, func(t *testing.T) {
			resp, body := f.do("POST", "/v1/sandboxes", c.body)
			if c.status == 201 {
				if resp.StatusCode != 201 {
					t.Errorf("status %d: %s", resp.StatusCode, body)
				}
				return
			}
			code := api.CodeInvalid
			if c.status == 413 {
				code = api.CodeTooLarge
			}
			f.wantError(resp, body, c.status, code, c.message)
		})
	}
}

func TestErrorsOfTheCore(t *testing.T) {
	f := newFixture(t)
	for _, c := range []struct {
		err    error
		status int
		code   string
	}{
		{sandbox.ErrNotFound, 404, api.CodeNotFound},
		{sandbox.ErrConflict, 409, api.CodeConflict},
		{sandbox.ErrInvalid, 400, api.CodeInvalid},
		{sandbox.ErrFailed, 409, api.CodeFailed},
		{sandbox.ErrNoSpace, 507, api.CodeNoSpace},
		{sandbox.ErrUnavailable, 503, api.CodeUnavailable},
		{&sandbox.Error{Kind: sandbox.ErrFailed, Message: "it is broken", Cause: sandbox.ErrNotFound}, 409, api.CodeFailed},
		{errors.ErrUnsupported, 501, api.CodeNotSupported},
		{context.Canceled, 503, api.CodeUnavailable},
		{errors.New("something odd"), 500, api.CodeInternal},
	} {
		t.Run(c.err.Error(), func(t *testing.T) {
			f.core.Fail = func(string) error { return fmt.Errorf("sandbox x: %w", c.err) }
			resp, body := f.do("GET", "/v1/sandboxes/x", "")
			f.wantError(resp, body, c.status, c.code, c.err.Error())
		})
	}
	f.core.Fail = func(string) error {
		return &sandbox.Error{Kind: sandbox.ErrConflict, Message: "x is busy", Hint: "wait for it"}
	}
	resp, body := f.do("POST", "/v1/sandboxes/x/resume", "")
	if e := f.wantError(resp, body, 409, api.CodeConflict, "x is busy"); e.Hint != "wait for it" {
		t.Errorf("hint %q", e.Hint)
	}
}

func TestPanicsTellNothing(t *testing.T) {
	f := newFixture(t)
	f.core.Fail = func(string) error { panic("a secret") }
	resp, body := f.do("GET", "/v1/sandboxes/x", "")
	f.wantError(resp, body, 500, api.CodeInternal, "internal error")
	if strings.Contains(body, "secret") {
		t.Errorf("the answer tells details: %s", body)
	}
	id := resp.Header.Get("X-Request-Id")
	f.close()
	if log := f.log.String(); id == "" || !strings.Contains(log, id) || !strings.Contains(log, "a secret") {
		t.Errorf("request %q is not in the log: %s", id, log)
	}
}

func TestLogHasNoSecrets(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	f.do("POST", "/v1/sandboxes/"+id+"/exec", `{"cmd":["true"],"env":{"PASSWORD":"hunter2"}}`)
	f.do("GET", "/v1/sandboxes/"+id+"/files?path=/hunter2", "")
	f.close()
	for _, secret := range []string{key, servertest.Token, "hunter2"} {
		if strings.Contains(f.log.String(), secret) {
			t.Errorf("the log tells %q", secret)
		}
	}
}

func TestExec(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	for name, c := range map[string]struct {
		req  api.ExecRequest
		want api.ExecResponse
	}{
		"output":  {api.ExecRequest{Cmd: []string{"sh", "-c", "echo out; echo err >&2; exit 3"}}, api.ExecResponse{ExitCode: 3, Stdout: "out\n", Stderr: "err\n"}},
		"env":     {api.ExecRequest{Cmd: []string{"sh", "-c", "echo $A"}, Env: map[string]string{"A": "b c"}}, api.ExecResponse{Stdout: "b c\n"}},
		"cwd":     {api.ExecRequest{Cmd: []string{"pwd"}, Cwd: "/"}, api.ExecResponse{Stdout: "/\n"}},
		"input":   {api.ExecRequest{Cmd: []string{"wc", "-c"}, Stdin: strings.Repeat("x", 300000)}, api.ExecResponse{Stdout: "300000\n"}},
		"signal":  {api.ExecRequest{Cmd: []string{"sh", "-c", "kill -TERM $$"}}, api.ExecResponse{ExitCode: 143}},
		"timeout": {api.ExecRequest{Cmd: []string{"sh", "-c", "echo begun; exec sleep 600"}, TimeoutMS: 1500}, api.ExecResponse{ExitCode: 137, Stdout: "begun\n", TimedOut: true}},
		"unread":  {api.ExecRequest{Cmd: []string{"true"}, Stdin: strings.Repeat("x", 1000)}, api.ExecResponse{}},
	} {
		t.Run(name, func(t *testing.T) {
			in, _ := json.Marshal(c.req)
			resp, body := f.do("POST", "/v1/sandboxes/"+id+"/exec", string(in))
			var got api.ExecResponse
			if err := json.Unmarshal([]byte(body), &got); err != nil || resp.StatusCode != 200 || got != c.want {
				t.Errorf("%d %s, want %+v", resp.StatusCode, body, c.want)
			}
		})
	}
	for name, c := range map[string]struct {
		body, message string
		status        int
		code          string
	}{
		"no command":   {`{}`, "cmd", 400, api.CodeInvalid},
		"not found":    {`{"cmd":["/no/such/program"]}`, "program", 404, api.CodeNotFound},
		"no such user": {`{"cmd":["true"],"user":"nobody-here"}`, "user", 400, api.CodeInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			resp, body := f.do("POST", "/v1/sandboxes/"+id+"/exec", c.body)
			var e api.Error
			if json.Unmarshal([]byte(body), &e) != nil || resp.StatusCode/100 != 4 || !strings.Contains(e.Message, c.message) {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
}

func TestExecCutsOutput(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	_, body := f.do("POST", "/v1/sandboxes/"+id+"/exec", `{"cmd":["head","-c","5000000","/dev/zero"]}`)
	var got api.ExecResponse
	if err := json.Unmarshal([]byte(body), &got); err != nil || len(got.Stdout) != 4<<20 || !got.Truncated {
		t.Errorf("%d bytes, truncated %v, %v", len(got.Stdout), got.Truncated, err)
	}
}

func TestFiles(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	content := strings.Repeat("0123456789abcdef", 1<<18) // 4 MiB
	path := filepath.Join(f.home, "some", "folder", "a b.bin")
	url := "/v1/sandboxes/" + id + "/files?path=" + strings.ReplaceAll(path, " ", "%20")
	if resp, body := f.do("PUT", url, content); resp.StatusCode != 204 {
		t.Fatalf("upload: %d %s", resp.StatusCode, body)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != content {
		t.Fatalf("the file has %d bytes: %v", len(b), err)
	}
	resp, body := f.do("GET", url, "")
	if resp.StatusCode != 200 || body != content || resp.ContentLength != int64(len(content)) {
		t.Errorf("download: %d, %d bytes of %d", resp.StatusCode, len(body), resp.ContentLength)
	}
	resp, body = f.do("GET", "/v1/sandboxes/"+id+"/files?path=/no/such/file", "")
	f.wantError(resp, body, 404, api.CodeNotFound, "/no/such/file")
	resp, body = f.do("GET", "/v1/sandboxes/"+id+"/files", "")
	f.wantError(resp, body, 400, api.CodeInvalid, "path")
	resp, body = f.do("GET", "/v1/sandboxes/none/files?path=/x", "")
	f.wantError(resp, body, 404, api.CodeNotFound, "none")
}

func TestAgentProxyHidesOurKey(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	f.core.Hibernate(t.Context(), id, sandbox.HibernateOptions{})
	resp, body := f.doWith("POST", "/v1/sandboxes/"+id+"/agent/process.Process/List", "{}", http.Header{
		"X-API-Key": {key}, "Content-Type": {"application/json"}, "Authorization": {"Basic dXNlcjo="},
		"Hib-Control-Token": {"guess"}, "X-Access-Token": {"guess"}, "Cookie": {"a=b"},
	})
	if resp.StatusCode != 200 || resp.Header.Get(api.GuestHeader) == "" {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	seen := <-f.core.Headers
	for _, h := range []string{"X-Api-Key", "Hib-Control-Token", "Cookie"} {
		if v := seen.Get(h); v != "" {
			t.Errorf("the guest sees %s: %s", h, v)
		}
	}
	if seen.Get("Authorization") != "Basic dXNlcjo=" || seen.Get("X-Access-Token") != servertest.Token {
		t.Errorf("the guest sees %v", seen)
	}
	if f.core.Wakes() != 1 {
		t.Errorf("%d wakes", f.core.Wakes())
	}

	f.doWith("GET", "/v1/sandboxes/"+id+"/agent/envs", "", http.Header{"Authorization": {"Bearer " + key}})
	if v := (<-f.core.Headers).Get("Authorization"); v != "" {
		t.Errorf("the guest sees %s", v)
	}
}

func TestControlCallsAreRefused(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	for _, p := range []string{"init", "freeze", "thaw", "INIT", "init/", "%2finit", "a/../init", "a/%2e%2e/init", "./thaw"} {
		req, err := http.NewRequest("POST", f.url, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		req.URL.Opaque = "/v1/sandboxes/" + id + "/agent/" + p // as it is
		req.Header.Set("X-API-Key", key)
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode < 300 || resp.Header.Get(api.GuestHeader) != "" {
			t.Errorf("%s: %d, from the guest: %q", p, resp.StatusCode, resp.Header.Get(api.GuestHeader))
		}
	}
}

func TestAgentErrors(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	f.core.Break(id, "the guest's kernel panicked")
	resp, body := f.do("POST", "/v1/sandboxes/"+id+"/agent/process.Process/List", "{}")
	f.wantError(resp, body, 409, api.CodeFailed, "panicked")
	resp, body = f.do("POST", "/v1/sandboxes/"+id+"/exec", `{"cmd":["true"]}`)
	f.wantError(resp, body, 409, api.CodeFailed, "panicked")

	id = f.create()
	ln, err := net.Listen("tcp", "127.0.0.1:0") // an agent that hangs up
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	f.core.Ports[49983] = ln.Addr().String()
	for _, call := range []struct{ path, body string }{{"agent/process.Process/List", "{}"}, {"exec", `{"cmd":["true"]}`}} {
		resp, body := f.do("POST", "/v1/sandboxes/"+id+"/"+call.path, call.body)
		f.wantError(resp, body, 503, api.CodeUnavailable, "did not answer")
	}
}

// TestAgentStreamsFlushAtOnce reads the start event of a process that then
// stays silent.
func TestAgentStreamsFlushAtOnce(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	message := `{"process":{"cmd":"sleep","args":["600"]},"stdin":false}`
	frame := append([]byte{0, 0, 0, 0, byte(len(message))}, message...)
	req, err := http.NewRequestWithContext(ctx, "POST", f.url+"/v1/sandboxes/"+id+"/agent/process.Process/Start", bytes.NewReader(frame))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", key)
	req.Header.Set("Content-Type", "application/connect+json")
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var pid int
	first := make([]byte, 256)
	n, err := io.ReadAtLeast(resp.Body, first, 20)
	if m := regexp.MustCompile(`"pid":\s*(\d+)`).FindSubmatch(first[:n]); m != nil {
		pid, _ = strconv.Atoi(string(m[1]))
	}
	if err != nil || pid == 0 {
		t.Fatalf("first event %q: %v", first[:n], err)
	}
	defer syscall.Kill(pid, syscall.SIGKILL)
	// A server that stops breaks the stream off.
	closed := make(chan struct{})
	go func() { f.server.Close(); close(closed) }()
	_, err = io.Copy(io.Discard, resp.Body)
	<-closed
	if err == nil {
		t.Error("the stream ended as if it were whole")
	}
	f.do("POST", "/v1/sandboxes/"+id+"/exec", `{"cmd":["true"]}`) // answered, if only with an error
}

func TestPorts(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() { // reads to the end, then answers with what it read
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			b, _ := io.ReadAll(c)
			c.Write(b)
			c.Close()
		}
	}()
	f.core.Ports[8000] = echo.Addr().String()

	conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	// The first bytes of the stream come with the request.
	fmt.Fprintf(conn, "GET /v1/sandboxes/%s/ports/8000/connect HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\nConnection: keep-alive, Upgrade\r\nUpgrade: tcp\r\n\r\nhello ", id, key)
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v %v", resp, err)
	}
	io.WriteString(conn, "guest")
	conn.(*net.TCPConn).CloseWrite()
	if b, err := io.ReadAll(br); err != nil || string(b) != "hello guest" {
		t.Errorf("got %q: %v", b, err)
	}

	for path, want := range map[string]int{"8000": 426, "0": 400, "65536": 400, "x": 400} {
		resp, body := f.do("GET", "/v1/sandboxes/"+id+"/ports/"+path+"/connect", "")
		f.wantError(resp, body, want, api.CodeInvalid, "")
	}
	resp, body := f.doWith("GET", "/v1/sandboxes/"+id+"/ports/81/connect", "", http.Header{"X-API-Key": {key}, "Connection": {"Upgrade"}, "Upgrade": {"tcp"}})
	f.wantError(resp, body, 503, api.CodeUnavailable, "port 81")
}

// TestAnswersTellOfResumes: what waited for a resume is told so, and the report
// names the request.
func TestAnswersTellOfResumes(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	if err := os.WriteFile(filepath.Join(f.home, "f"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ method, path, body, by string }{
		{"POST", "/exec", `{"cmd":["true"]}`, "exec"},
		{"GET", "/files?path=f", "", "files"},
		{"PUT", "/files?path=g", "x", "files"},
		{"GET", "/agent/health", "", "agent"},
		{"GET", "/ports/82/connect", "", "port-forward 82"},
	} {
		for _, asleep := range []bool{true, false} {
			if asleep {
				f.do("POST", "/v1/sandboxes/"+id+"/hibernate", "")
			}
			h := http.Header{"X-Api-Key": {key}}
			if strings.Contains(c.path, "ports") {
				h["Connection"], h["Upgrade"] = []string{"Upgrade"}, []string{"tcp"}
			}
			resp, body := f.doWith(c.method, "/v1/sandboxes/"+id+c.path, c.body, h)
			if got := resp.Header.Get(api.ResumeHeader); (got == "tier=local; ms=30") != asleep || !asleep && got != "" {
				t.Errorf("%s %s, asleep %v: %s, %s %q: %s", c.method, c.path, asleep, resp.Status, api.ResumeHeader, got, body)
			}
			_, body = f.do("GET", "/v1/sandboxes/"+id, "")
			if !strings.Contains(body, `"by":"`+c.by+`"`) {
				t.Errorf("%s %s: it was not woken by %q: %s", c.method, c.path, c.by, body)
			}
		}
	}
	f.core.Fail = func(string) error { return &sandbox.Error{Kind: sandbox.ErrUnavailable, Message: "there is no room"} }
	resp, body := f.do("POST", "/v1/sandboxes/"+id+"/exec", `{"cmd":["true"]}`)
	f.wantError(resp, body, 503, api.CodeUnavailable, "no room")
	if resp.Header.Get("Retry-After") == "" {
		t.Error("it does not say when to try again")
	}
}

func TestLogs(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	f.core.LogFile = filepath.Join(t.TempDir(), "console")
	if err := os.WriteFile(f.core.LogFile, []byte("booted\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, body := f.do("GET", "/v1/sandboxes/"+id+"/logs", ""); body != "booted\n" {
		t.Errorf("log %q", body)
	}
	resp, body := f.do("GET", "/v1/sandboxes/"+id+"/logs?follow=maybe", "")
	f.wantError(resp, body, 400, api.CodeInvalid, "follow")

	req, _ := http.NewRequest("GET", f.url+"/v1/sandboxes/"+id+"/logs?follow=true", nil)
	req.Header.Set("X-API-Key", key)
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	if l, _ := lines.ReadString('\n'); l != "booted\n" {
		t.Errorf("first line %q", l)
	}
	file, err := os.OpenFile(f.core.LogFile, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	io.WriteString(file, "more\n")
	if l, _ := lines.ReadString('\n'); l != "more\n" {
		t.Errorf("next line %q", l)
	}
	if err := f.core.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(lines); err != nil || len(rest) != 0 {
		t.Errorf("after the sandbox is gone: %q, %v", rest, err)
	}
}

func TestProgressLines(t *testing.T) {
	f := newFixture(t)
	f.core.Steps = []sandbox.Progress{{Phase: "rootfs", Message: "fetch"}, {Phase: "image", Done: 1, Total: 2}}
	read := func(path, body string) (last api.Progress, lines int) {
		resp, text := f.do("POST", path, body)
		if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/x-ndjson" {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
		for l := range strings.Lines(text) {
			last = api.Progress{}
			if err := json.Unmarshal([]byte(l), &last); err != nil {
				t.Fatalf("%v: %q", err, l)
			}
			lines++
		}
		return last, lines
	}
	if last, n := read("/v1/templates", `{"name":"py"}`); n != 3 || last.Template == nil || last.Template.Name != "py" {
		t.Errorf("%d lines, the last %+v", n, last)
	}
	if last, n := read("/v1/store/verify", ""); n != 3 || last.Verify == nil || last.Verify.Faults == nil {
		t.Errorf("%d lines, the last %+v", n, last)
	}
	f.core.Fail = func(string) error { return fmt.Errorf("template py: %w", sandbox.ErrNoSpace) }
	if last, n := read("/v1/templates", `{"name":"py"}`); n != 3 || last.Error == nil || last.Error.Code != api.CodeNoSpace {
		t.Errorf("%d lines, the last %+v", n, last)
	}
	f.core.Steps = nil // an error before any progress has a status
	resp, body := f.do("POST", "/v1/templates", `{"name":"py"}`)
	f.wantError(resp, body, 507, api.CodeNoSpace, "py")
}
