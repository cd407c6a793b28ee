package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/catalog/catalogtest"
	"github.com/hibernacle/hibernacle/internal/cli"
	"github.com/hibernacle/hibernacle/internal/events"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/server"
	"github.com/hibernacle/hibernacle/internal/server/servertest"
	"github.com/hibernacle/hibernacle/internal/webhook"
)

const key = "e2b_00112233445566778899aabbccddeeff00112233"

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"hib": func() { os.Exit(cli.Main("1.2.3")) },
	})
}

// daemon is a server over a core in memory, whose guest's home is home.
func daemon(t testing.TB, home string) (url string, core *servertest.Core, journal *events.Journal) {
	core = servertest.NewCore(t, servertest.NewAgent(t, home))
	journal, err := events.Open(filepath.Join(t.TempDir(), "events"), events.Options{})
	if err != nil {
		t.Fatal(err)
	}
	hooks, err := webhook.New(context.Background(), webhook.Config{Journal: journal, Catalog: &catalogtest.Memory{}})
	if err != nil {
		t.Fatal(err)
	}
	srv := server.New(server.Config{Core: core, Key: key, PortURL: "http://{port}-{id}.localhost:7070/", Version: api.Version{Version: "1.2.3", API: 1, VMM: "qemu 7.2.0", Accel: "tcg"},
		Events: journal, Webhooks: hooks})
	hs := httptest.NewServer(srv)
	t.Cleanup(func() { srv.Close(); hs.CloseClientConnections(); hs.Close(); hooks.Close(); journal.Close() })
	return hs.URL, core, journal
}

// TestScripts runs the scripts in testdata/script against a daemon of their
// own. $GUEST is the home of the guest's user. "break ID REASON" makes a sandbox fail.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			guest := filepath.Join(e.WorkDir, "guest")
			if err := os.MkdirAll(guest, 0o755); err != nil {
				return err
			}
			tb := e.T().(testing.TB)
			url, core, journal := daemon(tb, guest)
			core.Steps = []sandbox.Progress{{Phase: "rootfs", Message: "fetch"}, {Phase: "image", Done: 50, Total: 100}}
			core.Found = sandbox.Verify{Objects: 3, Bytes: 2048}
			core.LogFile = filepath.Join(e.WorkDir, "console")
			if err := os.WriteFile(core.LogFile, []byte("booted\n"), 0o600); err != nil {
				return err
			}
			e.Values["core"], e.Values["journal"] = core, journal
			e.Setenv("GUEST", guest)
			e.Setenv("HIB_API_URL", url)
			e.Setenv("HIB_API_KEY", key)
			e.Setenv("HIB_DATA", filepath.Join(e.WorkDir, "data"))
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"break": func(ts *testscript.TestScript, _ bool, args []string) {
				ts.Value("core").(*servertest.Core).Break(args[0], args[1])
			},
			"happen": happen,
			"damage": func(ts *testscript.TestScript, _ bool, args []string) {
				ts.Value("core").(*servertest.Core).Found.Faults = args
			},
			"replicate": func(ts *testscript.TestScript, _ bool, args []string) {
				ts.Value("core").(*servertest.Core).Replicate(args[0], sandbox.Replication{State: "local", Error: args[1]})
			},
			"exits": exits,
		},
	})
}

// happen appends an event about the sandbox s1: happen TYPE NAME DATA.
func happen(ts *testscript.TestScript, _ bool, args []string) {
	journal := ts.Value("journal").(*events.Journal)
	sub := journal.Subscribe(0, events.Filter{})
	defer sub.Close()
	for _, err := sub.Ready(); err == nil; _, err = sub.Ready() {
	}
	journal.Append(events.Event{Type: args[0], Sandbox: "s1", Name: args[1], Data: json.RawMessage(args[2])})
	if _, err := sub.Next(context.Background()); err != nil {
		ts.Fatalf("%v", err)
	}
}

// exits runs hib and checks its exit code: exits CODE ARG...
func exits(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec("hib", args[1:]...)
	code := "0"
	if e, ok := err.(interface{ ExitCode() int }); ok {
		code = fmt.Sprint(e.ExitCode())
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if code != args[0] {
		ts.Fatalf("hib %v ended with %s, want %s", args[1:], code, args[0])
	}
}

// lockedBuffer may be read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestPortForward(t *testing.T) {
	url, core, _ := daemon(t, t.TempDir())
	ln, err := net.Listen("tcp", "127.0.0.1:0")
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
			b, _ := io.ReadAll(c)
			c.Write(append([]byte("heard "), b...))
			c.Close()
		}
	}()
	core.Ports[8000] = ln.Addr().String()
	if _, err := core.Create(t.Context(), sandbox.CreateOptions{Name: "mine"}); err != nil {
		t.Fatal(err)
	}
	var out, errOut lockedBuffer
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan int, 1)
	go func() {
		done <- cli.Run(ctx, cli.Config{In: strings.NewReader(""), Out: &out, Err: &errOut},
			[]string{"--api-url", url, "--api-key", key, "port-forward", "mine", "0:8000"})
	}()
	address := regexp.MustCompile(`(127\.0\.0\.1:\d+) -> sandbox1:8000`)
	eventually(t, "it listens", func() bool { return address.MatchString(out.String()) })
	for range 2 {
		c, err := net.Dial("tcp", address.FindStringSubmatch(out.String())[1])
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "this")
		c.(*net.TCPConn).CloseWrite()
		b, err := io.ReadAll(c)
		c.Close()
		if err != nil || string(b) != "heard this" {
			t.Errorf("%q %v", b, err)
		}
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit code %d: %s", code, errOut.String())
	}
}
