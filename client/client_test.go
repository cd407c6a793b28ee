package client_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/server"
	"github.com/hibernacle/hibernacle/internal/server/servertest"
)

const key = "e2b_00112233445566778899aabbccddeeff00112233"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start returns a client of a server over a core in memory.
func start(t *testing.T) (*client.Client, *servertest.Core, string) {
	t.Helper()
	home := t.TempDir()
	core := servertest.NewCore(t, servertest.NewAgent(t, home))
	srv := server.New(server.Config{Core: core, Key: key, Version: api.Version{Version: "test", API: 1}})
	hs := httptest.NewServer(srv)
	c, err := client.New(hs.URL, key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); srv.Close(); hs.Close() })
	return c, core, home
}

func TestLifeOfASandbox(t *testing.T) {
	c, _, _ := start(t)
	ctx := t.Context()
	if err := c.Health(ctx); err != nil {
		t.Fatal(err)
	}
	if v, err := c.Version(ctx); err != nil || v.Version != "test" {
		t.Fatalf("%+v %v", v, err)
	}
	sb, err := c.Create(ctx, api.CreateRequest{Name: "mine", Labels: map[string]string{"k": "v"}})
	if err != nil || sb.State != api.StateRunning || sb.Labels["k"] != "v" {
		t.Fatalf("%+v %v", sb, err)
	}
	if got, err := c.Get(ctx, "mine"); err != nil || got.ID != sb.ID {
		t.Fatalf("%+v %v", got, err)
	}
	if got, err := c.Hibernate(ctx, sb.ID); err != nil || got.State != api.StateStandby || got.LastHibernate.Phases["freeze"] != 10 {
		t.Fatalf("%+v %v", got, err)
	}
	if got, err := c.Resume(ctx, sb.ID); err != nil || got.State != api.StateRunning {
		t.Fatalf("%+v %v", got, err)
	}
	if all, err := c.List(ctx); err != nil || len(all) != 1 {
		t.Fatalf("%+v %v", all, err)
	}
	out, err := c.Exec(ctx, sb.ID, api.ExecRequest{Cmd: []string{"echo", "hello"}})
	if err != nil || out.Stdout != "hello\n" {
		t.Fatalf("%+v %v", out, err)
	}
	if err := c.Delete(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(ctx, sb.ID); !client.IsNotFound(err) {
		t.Fatalf("%v", err)
	}
}

func TestTemplatesAndStore(t *testing.T) {
	c, core, _ := start(t)
	ctx := t.Context()
	core.Steps = []sandbox.Progress{{Phase: "rootfs"}, {Phase: "image", Done: 1, Total: 2}}
	var phases []string
	built, err := c.BuildTemplate(ctx, api.BuildRequest{Name: "py"}, func(p api.Progress) { phases = append(phases, p.Phase) })
	if err != nil || built.Name != "py" || strings.Join(phases, " ") != "rootfs image" {
		t.Fatalf("%+v %v %v", built, phases, err)
	}
	if all, err := c.Templates(ctx); err != nil || len(all) != 2 {
		t.Fatalf("%+v %v", all, err)
	}
	if err := c.DeleteTemplate(ctx, "py"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Template(ctx, "py"); !client.IsNotFound(err) {
		t.Fatalf("%v", err)
	}
	core.Found = sandbox.Verify{Objects: 1, Faults: []string{"pack x is damaged"}}
	if v, err := c.VerifyStore(ctx, api.VerifyRequest{Remote: true}, nil); err != nil || len(v.Faults) != 2 {
		t.Fatalf("%+v %v", v, err)
	}
	if s, err := c.StoreStatus(ctx); err != nil || s.Packs != 2 {
		t.Fatalf("%+v %v", s, err)
	}
	core.Fail = func(string) error {
		return &sandbox.Error{Kind: sandbox.ErrNoSpace, Message: "full", Hint: "free some"}
	}
	_, err = c.BuildTemplate(ctx, api.BuildRequest{Name: "py"}, nil)
	var e *client.Error
	if !errors.As(err, &e) || e.Code != api.CodeNoSpace || e.Hint != "free some" || e.RequestID == "" {
		t.Fatalf("%+v", err)
	}
}

func TestFilesAndLogs(t *testing.T) {
	c, core, home := start(t)
	ctx := t.Context()
	sb, err := c.Create(ctx, api.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for _, size := range []int64{int64(len(content)), -1} {
		path := filepath.Join(home, "f")
		if err := c.Upload(ctx, sb.ID, path, "", io.MultiReader(bytes.NewReader(content)), size); err != nil {
			t.Fatal(err)
		}
		body, _, err := c.Download(ctx, sb.ID, path, "user")
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(body)
		body.Close()
		if err != nil || !bytes.Equal(got, content) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	}
	if err := c.Upload(ctx, sb.ID, filepath.Join(home, "empty"), "", strings.NewReader(""), 0); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Download(ctx, sb.ID, "/no/such/file", ""); !client.IsNotFound(err) {
		t.Fatalf("%v", err)
	}
	core.LogFile = filepath.Join(home, "console")
	if err := os.WriteFile(core.LogFile, []byte("booted\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	logs, err := c.Logs(ctx, sb.ID, false)
	if err != nil {
		t.Fatal(err)
	}
	defer logs.Close()
	if b, err := io.ReadAll(logs); err != nil || string(b) != "booted\n" {
		t.Fatalf("%q %v", b, err)
	}
}

func TestDialPort(t *testing.T) {
	c, core, _ := start(t)
	ctx := t.Context()
	sb, err := c.Create(ctx, api.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		io.WriteString(conn, "welcome ")
		b, _ := io.ReadAll(conn)
		conn.Write(b)
		conn.Close()
	}()
	core.Ports[8000] = ln.Addr().String()
	conn, err := c.DialPort(ctx, sb.ID, 8000)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "guest")
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); err != nil || string(b) != "welcome guest" {
		t.Fatalf("%q %v", b, err)
	}
	if _, err := c.DialPort(ctx, "none", 8000); !client.IsNotFound(err) {
		t.Errorf("%v", err)
	}
	if _, err := c.DialPort(ctx, sb.ID, 1); client.CodeOf(err) != api.CodeUnavailable {
		t.Errorf("%v", err)
	}
}

func TestAgent(t *testing.T) {
	c, core, _ := start(t)
	ctx := t.Context()
	sb, err := c.Create(ctx, api.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	hc, base := c.Agent(sb.ID, "user")
	procs := processconnect.NewProcessClient(hc, base)
	stream, err := procs.Start(ctx, connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: "echo", Args: []string{"hi"}}}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var out []byte
	for stream.Receive() {
		out = append(out, stream.Msg().GetEvent().GetData().GetStdout()...)
	}
	if stream.Err() != nil || string(out) != "hi\n" {
		t.Fatalf("%q %v", out, stream.Err())
	}
	// What the daemon says is told apart from what the guest says.
	core.Break(sb.ID, "it broke")
	_, err = procs.List(ctx, connect.NewRequest(&process.ListRequest{}))
	if client.CodeOf(err) != api.CodeFailed || !strings.Contains(err.Error(), "it broke") {
		t.Errorf("%v", err)
	}
}

func TestUnreachable(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	c, err := client.New("http://"+ln.Addr().String(), key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.List(t.Context()); !errors.Is(err, client.ErrUnreachable) {
		t.Errorf("%v", err)
	}
	if _, err := c.DialPort(t.Context(), "x", 1); !errors.Is(err, client.ErrUnreachable) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.List(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestOtherServers(t *testing.T) {
	hs := httptest.NewServer(http.NotFoundHandler())
	defer hs.Close()
	c, err := client.New(hs.URL, key)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var e *client.Error
	if _, err := c.Get(t.Context(), "x"); !errors.As(err, &e) || client.IsNotFound(err) || e.Status != 404 {
		t.Errorf("%v", err)
	}
	for _, bad := range []string{"", "127.0.0.1:7070", "ftp://x", "http://"} {
		if _, err := client.New(bad, key); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestDialPortGivesUp connects to something that never answers.
func TestDialPortGivesUp(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := client.New("http://"+ln.Addr().String(), key)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.DialPort(ctx, "x", 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestOptions(t *testing.T) {
	write := func(t *testing.T, files map[string]string) string {
		dir := t.TempDir()
		for name, content := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	whole := map[string]string{api.KeyFile: key + "\n", api.DaemonFile: `{"url":"http://127.0.0.1:1234","pid":1}`}
	for name, c := range map[string]struct {
		files    map[string]string
		url, key string
		wantURL  string
		wantErr  string
	}{
		"of the folder":          {files: whole, wantURL: "http://127.0.0.1:1234"},
		"no daemon runs":         {files: map[string]string{api.KeyFile: key}, wantURL: api.DefaultURL},
		"never ran":              {wantErr: "no key"},
		"key given":              {key: key, wantURL: api.DefaultURL},
		"another port":           {files: whole, url: "http://localhost:99", wantURL: "http://localhost:99"},
		"the key stays at home":  {files: whole, url: "http://example.org", wantErr: client.EnvKey},
		"another host, with key": {url: "https://example.org/", key: key, wantURL: "https://example.org"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := client.Options{URL: c.url, Key: c.key, Data: write(t, c.files)}.Client()
			switch {
			case c.wantErr != "":
				if err == nil || !strings.Contains(err.Error(), c.wantErr) {
					t.Errorf("error %v, want %q", err, c.wantErr)
				}
			case err != nil:
				t.Error(err)
			case got.URL() != c.wantURL:
				t.Errorf("URL %s, want %s", got.URL(), c.wantURL)
			}
		})
	}
	t.Setenv(client.EnvData, "/some/where")
	if d, err := client.DataFolder(); err != nil || d != "/some/where" {
		t.Errorf("%s %v", d, err)
	}
}
