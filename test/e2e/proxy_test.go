package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// webServer is a server in the guest: a PUT answers with the hash of its body,
// /flood never ends, an Upgrade to "echo" gives back what comes.
const webServer = `
import hashlib, http.server, socketserver
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    counted = 0
    def do_PUT(self):
        h, left = hashlib.sha256(), int(self.headers["Content-Length"])
        while left:
            b = self.rfile.read(min(left, 65536))
            if not b: return
            h.update(b); left -= len(b)
        self.answer(h.hexdigest())
    def do_GET(self):
        if self.headers.get("Upgrade") == "echo":
            self.connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
            while b := self.connection.recv(4096): self.connection.sendall(b)
            self.close_connection = True
        elif self.path == "/flood":
            self.send_response(200); self.send_header("Connection", "close"); self.end_headers()
            try:
                while True: self.wfile.write(b"x" * 65536)
            except OSError: pass
        elif self.path == "/count":
            H.counted += 1
            self.answer(str(H.counted))
        else:
            self.answer(self.headers["Host"] + " " + self.path)
    def answer(self, text):
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *a): pass
class S(socketserver.ThreadingMixIn, http.server.HTTPServer): daemon_threads = True
S(("", 8000), H).serve_forever()
`

// web is a sandbox with that server.
type web struct {
	*hibtest.Daemon
	t    *testing.T
	id   string
	sb   api.Sandbox
	http *http.Client
}

func newWeb(t *testing.T, d *hibtest.Daemon) *web {
	t.Helper()
	w := &web{Daemon: d, t: t, id: d.Create("--memory", "512", "--name", "web", "--idle-timeout", "never")}
	w.sb = d.Inspect(w.id)
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	w.http = &http.Client{Transport: tr, Timeout: hibtest.Patience}
	d.WriteFile(w.id, "/home/user/web.py", []byte(webServer))
	d.Hib("exec", "-d", w.id, "--", "python3", "web.py")
	hibtest.Eventually(t, "the server answers", func() bool {
		resp, err := w.http.Do(w.request("GET", "/", nil))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
	return w
}

func (w *web) host() string { return "8000-" + w.id + ".localhost" }

// request makes a request to the server by its host name, with the token.
func (w *web) request(method, path string, body io.Reader) *http.Request {
	req, err := http.NewRequest(method, w.URL+path, body)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Host = w.host()
	req.Header.Set(api.TokenHeader, w.sb.TrafficToken)
	return req
}

func (w *web) do(req *http.Request) (*http.Response, string) {
	w.t.Helper()
	resp, err := w.http.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp, string(b)
}

// resumes counts the resumes that the daemon's log tells of.
func (w *web) resumes() int {
	return strings.Count(w.Log(), `msg="sandbox resuming" sandbox=`+w.id)
}

// passing counts the requests that the daemon is passing on.
func (w *web) passing() int {
	req, err := http.NewRequest("GET", w.URL+"/debug/pprof/goroutine?debug=2", nil)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("X-API-Key", w.Key)
	_, stacks := w.do(req)
	return strings.Count(stacks, "httputil.(*ReverseProxy).ServeHTTP(")
}

// dial opens a raw connection to the daemon and sends the head of a GET.
func (w *web) dial(path string, headers ...string) (net.Conn, *bufio.Reader) {
	w.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.URL, "http://"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\n%s: %s\r\n", path, w.host(), api.TokenHeader, w.sb.TrafficToken)
	for _, h := range headers {
		fmt.Fprintf(conn, "%s\r\n", h)
	}
	io.WriteString(conn, "\r\n")
	return conn, bufio.NewReader(conn)
}

// TestTrafficWakes: requests by host and by path wake a sandbox, are served
// once and told how it woke; what shows no token leaves it asleep.
func TestTrafficWakes(t *testing.T) {
	d := hibtest.StartBare(t)
	w := newWeb(t, d)

	d.Hib("hibernate", w.id)
	for _, token := range []string{"", "wrong"} {
		req := w.request("GET", "/", nil)
		req.Header.Set(api.TokenHeader, token)
		if resp, body := w.do(req); resp.StatusCode != http.StatusForbidden {
			t.Errorf("token %q: %s %s", token, resp.Status, body)
		}
	}
	if sb := d.Inspect(w.id); sb.State != api.StateStandby {
		t.Fatalf("requests without the token made it %s", sb.State)
	}

	before := w.resumes()
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			resp, err := w.http.Do(w.request("GET", "/x", nil))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			if how := resp.Header.Get(api.ResumeHeader); string(body) != w.host()+" /x" || !strings.HasPrefix(how, "tier=local; ms=") {
				t.Errorf("%s %q, %s %q", resp.Status, body, api.ResumeHeader, how)
			}
		})
	}
	wg.Wait()
	if n := w.resumes() - before; n != 1 {
		t.Errorf("ten requests at once woke it %d times", n)
	}
	if by := d.Inspect(w.id).LastResume.By; by != "http 8000" {
		t.Errorf("it was woken by %q", by)
	}
	if resp, _ := w.do(w.request("GET", "/", nil)); resp.Header.Get(api.ResumeHeader) != "" {
		t.Error("a request to a sandbox that runs is told that it was resumed")
	}

	d.Hib("hibernate", w.id)
	upload := make([]byte, 20<<20)
	rand.NewChaCha8([32]byte{7}).Read(upload)
	if resp, body := w.do(w.request("PUT", "/", bytes.NewReader(upload))); body != fmt.Sprintf("%x", sha256.Sum256(upload)) {
		t.Errorf("20 MB arrived as %s %q", resp.Status, body)
	}

	d.Hib("hibernate", w.id)
	c, err := client.New(d.URL, d.Key)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	hc, base := c.Port("web", 8000)
	resp, err := hc.Get(base + "/a?b")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if !strings.HasSuffix(string(body), " /a?b") || resp.Header.Get(api.ResumeHeader) == "" {
		t.Errorf("by path: %s %q", resp.Status, body)
	}

	d.Hib("hibernate", w.id)
	if out, err := exec.Command("curl", "-sS", "--max-time", "60", d.Hib("url", w.id, "8000")).CombinedOutput(); !strings.HasSuffix(string(out), " /") {
		t.Errorf("curl of hib url: %s, %v", out, err)
	}
	d.Hib("update", w.id, "--port", "8000=public")
	d.Hib("hibernate", w.id)
	if url := d.Hib("url", w.id, "8000"); strings.Contains(url, api.TokenParameter) {
		t.Errorf("the URL of a public port has a token: %s", url)
	}
	req := w.request("GET", "/", nil)
	req.Header.Del(api.TokenHeader)
	if resp, body := w.do(req); resp.StatusCode != 200 {
		t.Errorf("a public port: %s %s", resp.Status, body)
	}

	for path, by := range map[string]string{"/v1/sandboxes/web/files?path=/etc/hostname": "files", "/v1/sandboxes/web/agent/health": "agent"} {
		d.Hib("hibernate", w.id)
		req, _ := http.NewRequest("GET", d.URL+path, nil)
		req.Header.Set("X-API-Key", d.Key)
		if resp, body := w.do(req); resp.StatusCode >= 300 || resp.Header.Get(api.ResumeHeader) == "" {
			t.Errorf("%s: %s %s", path, resp.Status, body)
		}
		if got := d.Inspect(w.id).LastResume.By; got != by {
			t.Errorf("%s: it was woken by %q, want %q", path, got, by)
		}
	}

	// A port at which nobody listens, and a sandbox that is no more.
	closed := w.request("GET", "/", nil)
	closed.Host = "8001-" + w.id + ".localhost"
	if resp, body := w.do(closed); resp.StatusCode != http.StatusBadGateway || !strings.Contains(body, "8001") {
		t.Errorf("%s %s", resp.Status, body)
	}
	d.Hib("rm", w.id)
	if resp, body := w.do(w.request("GET", "/", nil)); resp.StatusCode != http.StatusNotFound {
		t.Errorf("deleted: %s %s", resp.Status, body)
	}
}

// TestTrafficMeetsIdleness: requests that come when a sandbox is just falling
// asleep, is asleep or wakes are each answered, and carried out once.
func TestTrafficMeetsIdleness(t *testing.T) {
	d := hibtest.Start(t)
	w := newWeb(t, d)
	d.Hib("update", w.id, "--idle-timeout", "1s")
	const rounds = 40
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	pause := rand.New(rand.NewPCG(uint64(seed), 0))
	woken := 0
	for n := 1; n <= rounds; n++ {
		resp, body := w.do(w.request("GET", "/count", nil))
		if resp.StatusCode != 200 || body != strconv.Itoa(n) {
			t.Fatalf("request %d: %s %q", n, resp.Status, body)
		}
		if resp.Header.Get(api.ResumeHeader) != "" {
			woken++
		}
		time.Sleep(900*time.Millisecond + time.Duration(pause.IntN(500))*time.Millisecond) // around the instant
	}
	t.Logf("%d of %d requests woke it", woken, rounds)
	if woken == 0 {
		t.Error("it never fell asleep")
	}
}

// TestPortForwardOutlivesStandby: the listener stays, a connection ends with
// the hibernation, and the next one wakes the sandbox.
func TestPortForwardOutlivesStandby(t *testing.T) {
	d := hibtest.StartBare(t)
	w := newWeb(t, d)
	cmd := exec.Command(filepath.Join(d.Bin(), "hib"), "port-forward", w.id, "0:8000", "0:8001")
	cmd.Env = d.Env()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	defer stop()
	lines := bufio.NewReader(out)
	addr := func() string {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		where, _, _ := strings.Cut(line, " ")
		return where
	}
	open, closed := addr(), addr()
	for range 3 {
		d.Hib("hibernate", w.id)
		conn, err := net.Dial("tcp", open)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		r := bufio.NewReader(conn)
		if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%v, %v", resp, err)
		}
		fmt.Fprintln(conn, "hello")
		if l, err := r.ReadString('\n'); l != "hello\n" {
			t.Fatalf("%q, %v", l, err)
		}
		d.Hib("hibernate", w.id)
		_ = conn.SetReadDeadline(time.Now().Add(hibtest.Patience))
		if b, err := io.ReadAll(r); len(b) > 0 || err != nil && strings.Contains(err.Error(), "timeout") {
			t.Errorf("after the hibernation: %q, %v", b, err)
		}
		conn.Close()
	}
	// Half of a connection is closed by itself: the answer still comes.
	conn, err := net.Dial("tcp", open)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: half\r\nConnection: close\r\n\r\n")
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); !strings.HasSuffix(string(b), "half /") {
		t.Errorf("%q, %v", b, err)
	}
	if by := d.Inspect(w.id).LastResume.By; by != "port-forward 8000" {
		t.Errorf("it was woken by %q", by)
	}
	refused, err := net.Dial("tcp", closed)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.ReadAll(refused)
	refused.Close()
	stop()
	if text := complaints.String(); strings.Count(text, "8001") != 1 || strings.Count(text, "\n") != 1 {
		t.Errorf("it complained: %s", text)
	}
}

// streamCycles is how often a sandbox is hibernated under its streams.
const streamCycles = 20

// TestStreams: clients that never read are in nobody's way and do not keep a
// sandbox from hibernating; a process is listed after each resume, its output
// goes on, and it can be followed again by its pid.
func TestStreams(t *testing.T) {
	d := hibtest.Start(t)
	w := newWeb(t, d)
	pidText := strings.TrimSpace(d.Hib("exec", "-d", w.id, "--", "bash", "-c", "n=0; while sleep 0.1; do echo line $((n++)); done"))
	pid, err := strconv.ParseUint(pidText, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(d.URL, d.Key)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	hc, base := c.Agent(w.id, "")
	procs := processconnect.NewProcessClient(hc, base)
	noise := strings.TrimSpace(d.Hib("exec", "-d", w.id, "--", "bash", "-c", "while sleep 0.05; do head -c 100000 /dev/zero; done"))

	last := -1
	for cycle := range streamCycles {
		// Three that never read: an answer without end, an upgraded connection
		// with bytes on their way, and one that follows a process.
		_, flood := w.dial("/flood")
		if _, err := flood.ReadByte(); err != nil {
			t.Fatal(err)
		}
		echo, _ := w.dial("/", "Connection: Upgrade", "Upgrade: echo")
		go func() { _, _ = io.Copy(echo, &endless{}) }()
		follow := exec.Command(filepath.Join(d.Bin(), "hib"), "exec", "--attach", noise, w.id)
		follow.Env = d.Env()
		if _, err := follow.StdoutPipe(); err != nil { // nobody reads it
			t.Fatal(err)
		}
		if err := follow.Start(); err != nil {
			t.Fatal(err)
		}

		if resp, body := w.do(w.request("GET", "/", nil)); resp.StatusCode != 200 {
			t.Fatalf("cycle %d: another client got %s %q", cycle, resp.Status, body)
		}
		d.Shell(w.id, "true")
		d.Hib("hibernate", w.id)
		if sb := d.Inspect(w.id); sb.State != api.StateStandby {
			t.Fatalf("cycle %d: it is %s", cycle, sb.State)
		}
		if cycle == streamCycles-1 { // the clients are there still, but hold nothing in the daemon
			hibtest.Eventually(t, "the daemon has cut off who does not read", func() bool { return w.passing() == 0 })
		}

		ctx, cancel := context.WithTimeout(t.Context(), hibtest.Patience)
		list, err := procs.List(ctx, connect.NewRequest(&process.ListRequest{})) // wakes it
		if err != nil {
			t.Fatal(err)
		}
		listed := false
		for _, p := range list.Msg.GetProcesses() {
			listed = listed || p.GetPid() == uint32(pid)
		}
		if !listed {
			t.Fatalf("cycle %d: process %d is not listed", cycle, pid)
		}
		last = followOn(ctx, t, procs, uint32(pid), last)
		cancel()
		echo.Close()
		_ = follow.Process.Kill()
		_ = follow.Wait()
	}
	t.Logf("%d cycles, the process printed up to line %d", streamCycles, last)
}

// followOn follows a process by its pid and reads what it printed until there
// are lines beyond the last one that was seen. None may be missing of those
// that are kept.
func followOn(ctx context.Context, t *testing.T, procs processconnect.ProcessClient, pid uint32, last int) int {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req := connect.NewRequest(&process.ConnectRequest{Process: &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}})
	req.Header().Set(guestapi.ReplayHeader, "1")
	stream, err := procs.Connect(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	text, seen := "", -1
	for fresh := 0; fresh < 3; {
		if !stream.Receive() {
			t.Fatalf("the stream ended: %v", stream.Err())
		}
		text += string(stream.Msg().GetEvent().GetData().GetStdout())
		for {
			line, rest, ok := strings.Cut(text, "\n")
			if !ok {
				break
			}
			text = rest
			n, err := strconv.Atoi(strings.TrimPrefix(line, "line "))
			if err != nil || seen >= 0 && n != seen+1 {
				t.Fatalf("line %q after %d", line, seen)
			}
			if seen = n; n > last {
				fresh++
			}
		}
	}
	return seen
}

type endless struct{}

func (*endless) Read(p []byte) (int, error) { return len(p), nil }
