package server_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/internal/server"
)

// leases returns what holds a sandbox.
func (f *fixture) leases(id string) []api.Lease {
	f.Helper()
	_, body := f.do("GET", "/v1/sandboxes/"+id, "")
	var sb api.Sandbox
	if err := json.Unmarshal([]byte(body), &sb); err != nil {
		f.Fatalf("%v: %s", err, body)
	}
	return sb.Leases
}

// waitLeases waits until so many leases hold a sandbox.
func (f *fixture) waitLeases(id string, n int) []api.Lease {
	f.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		l := f.leases(id)
		if len(l) == n {
			return l
		}
		if time.Now().After(end) {
			f.Fatalf("the leases are %+v, want %d", l, n)
		}
	}
}

func (f *fixture) wantLease(id, kind string, words ...string) {
	f.Helper()
	l := f.waitLeases(id, 1)[0]
	if l.Kind != kind || l.Since.IsZero() || l.Until != nil {
		f.Errorf("the lease is %+v, want one of kind %s", l, kind)
	}
	for _, w := range append(words, "127.0.0.1:") {
		if !strings.Contains(l.Owner, w) {
			f.Errorf("its owner is %q, without %q", l.Owner, w)
		}
	}
}

func TestExecHoldsTheSandbox(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	fifo := filepath.Join(f.home, "go")
	done := make(chan string, 1)
	go func() {
		req, _ := json.Marshal(api.ExecRequest{Cmd: []string{"sh", "-c", "mkfifo " + fifo + "; cat " + fifo}})
		_, body := f.do("POST", "/v1/sandboxes/"+id+"/exec", string(req))
		done <- body
	}()
	f.wantLease(id, "exec", "mkfifo")
	// The file is there once the command has come so far.
	f.do("POST", "/v1/sandboxes/"+id+"/exec", `{"cmd":["sh","-c","until [ -p `+fifo+` ]; do sleep 0.01; done; echo x >`+fifo+`"]}`)
	if body := <-done; !strings.Contains(body, `"exit_code":0`) {
		t.Errorf("exec: %s", body)
	}
	f.waitLeases(id, 0)
}

func TestTransfersHoldTheSandbox(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	for _, path := range []string{"/files?path=", "/agent/files?path="} {
		r, w := io.Pipe()
		method := map[bool]string{true: "PUT", false: "POST"}[strings.HasPrefix(path, "/files")]
		req, err := http.NewRequest(method, f.url+"/v1/sandboxes/"+id+path+filepath.Join(f.home, "data"), r)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", key)
		req.Header.Set("Content-Type", "application/octet-stream")
		done := make(chan error, 1)
		go func() {
			resp, err := http.DefaultTransport.RoundTrip(req)
			if err == nil {
				resp.Body.Close()
			}
			done <- err
		}()
		f.wantLease(id, "upload", "data")
		w.Close()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		f.waitLeases(id, 0)
	}
}

// A stream of a process holds the sandbox for as long as it lasts, and is a
// session if it has a terminal. Short calls leave nothing behind.
func TestProcessStreamsHoldTheSandbox(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	c, err := client.New(f.url, key)
	if err != nil {
		t.Fatal(err)
	}
	hc, base := c.Agent(id, "")
	for _, codec := range []struct {
		name    string
		options []connect.ClientOption
	}{{"proto", nil}, {"json", []connect.ClientOption{connect.WithProtoJSON()}}} {
		for _, pty := range []bool{false, true} {
			procs := processconnect.NewProcessClient(hc, base, codec.options...)
			ctx, cancel := context.WithCancel(t.Context())
			req := &process.StartRequest{Process: &process.ProcessConfig{Cmd: "cat", Args: []string{"-"}}, Stdin: new(true)}
			sessions := 0
			if pty {
				req.Pty, sessions = &process.PTY{Size: &process.PTY_Size{Cols: 80, Rows: 24}}, 1
			}
			stream, err := procs.Start(ctx, connect.NewRequest(req))
			if err != nil {
				t.Fatal(err)
			}
			if !stream.Receive() {
				t.Fatal(stream.Err())
			}
			pid := stream.Msg().GetEvent().GetStart().GetPid()
			f.wantLease(id, "exec", "cat -")
			if n := f.core.Sessions(); n != sessions {
				t.Errorf("%s, terminal %v: %d sessions", codec.name, pty, n)
			}
			if _, err := procs.List(ctx, connect.NewRequest(&process.ListRequest{})); err != nil {
				t.Fatal(err)
			}
			f.waitLeases(id, 1)
			cancel()
			stream.Close()
			f.waitLeases(id, 0)
			if n := f.core.Sessions(); n != 0 {
				t.Errorf("%s, terminal %v: %d sessions are left", codec.name, pty, n)
			}
			selector := &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
			again, err := procs.Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: selector}))
			if err != nil {
				t.Fatal(err)
			}
			f.wantLease(id, "exec", "follows")
			if _, err := procs.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: selector, Signal: process.Signal_SIGNAL_SIGKILL})); err != nil {
				t.Fatal(err)
			}
			for again.Receive() {
			}
			again.Close()
			f.waitLeases(id, 0)
		}
	}
}

// What comes as the start of a process is read, or left to the agent to refuse.
func TestMalformedStarts(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	for _, body := range []string{"", "\x00", "\x00\x00\x00\x00\x05ab", "\x01\x00\x00\x00\x02ab", "\x00\xff\xff\xff\xff{}", "\x00\x00\x00\x00\x02{}", "\x00\x00\x00\x00\x03{\"a"} {
		for _, contentType := range []string{"application/connect+json", "application/connect+proto", "x", ""} {
			resp, _ := f.doWith("POST", "/v1/sandboxes/"+id+"/agent"+processconnect.ProcessStartProcedure, body, http.Header{"X-API-Key": {key}, "Content-Type": {contentType}})
			if resp.StatusCode >= 500 {
				t.Errorf("%q as %q: status %d", body, contentType, resp.StatusCode)
			}
		}
	}
	f.waitLeases(id, 0)
}

func TestHold(t *testing.T) {
	f := newFixture(t)
	id := f.create()
	resp, body := f.do("POST", "/v1/sandboxes/"+id+"/hold", `{"for":"30m","reason":"a demo"}`)
	var sb api.Sandbox
	if json.Unmarshal([]byte(body), &sb) != nil || resp.StatusCode != 200 || len(sb.Leases) != 1 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if l := sb.Leases[0]; l.Kind != "hold" || l.Owner != "a demo" || l.Until == nil || time.Until(*l.Until) > 30*time.Minute {
		t.Errorf("the lease is %+v", l)
	}
	for _, bad := range []string{`{}`, `{"for":"never"}`, `{"for":"soon"}`, `{"for":30}`} {
		resp, body := f.do("POST", "/v1/sandboxes/"+id+"/hold", bad)
		f.wantError(resp, body, 400, api.CodeInvalid, "")
	}
	if resp, body := f.do("DELETE", "/v1/sandboxes/"+id+"/hold", ""); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	f.waitLeases(id, 0)
}

// FuzzStartRequest makes sure that whatever comes as the start of a process is
// read or left alone.
func FuzzStartRequest(f *testing.F) {
	whole := "\x00\x00\x00\x00\x1f" + `{"process":{"cmd":"a"},"pty":{}}`
	for _, body := range []string{"", whole, whole[:9], "\x01" + whole[1:], "\x00\xff\xff\xff\xff", "\x00\x00\x00\x00\x02\x0a\x00"} {
		f.Add("application/connect+json", []byte(body))
		f.Add("application/connect+proto; charset=x", []byte(body))
	}
	f.Fuzz(func(t *testing.T, contentType string, body []byte) {
		if server.StartRequest(contentType, body) == nil {
			t.Error("no request")
		}
	})
}

func TestStartRequest(t *testing.T) {
	message := `{"process":{"cmd":"a","args":["b"]},"pty":{},"unknown":1}`
	body := append([]byte{0, 0, 0, 0, byte(len(message))}, message...)
	got := server.StartRequest("application/connect+json", body)
	if got.GetProcess().GetCmd() != "a" || got.GetPty() == nil {
		t.Errorf("got %v", got)
	}
}
