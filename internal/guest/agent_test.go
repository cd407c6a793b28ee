package guest

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/api/filesystem/filesystemconnect"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must happen on a slow machine.
const patience = 60 * time.Second

// fakeSystem records what the control calls do.
type fakeSystem struct {
	mu         sync.Mutex
	calls      []string
	clock      time.Time
	entropy    []byte
	kept       Flow
	generation uint64
	frozen     bool
	fail       map[string]error
}

func (f *fakeSystem) record(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, name)
	return f.fail[name]
}

func (f *fakeSystem) SetClock(t time.Time) error {
	f.clock = t
	return f.record("clock")
}

func (f *fakeSystem) AddEntropy(b []byte) error {
	f.entropy = append([]byte(nil), b...)
	return f.record("entropy")
}

func (f *fakeSystem) SetIdentity(_, _, _ string) error { return f.record("identity") }

func (f *fakeSystem) RenewBootID() error { return f.record("boot_id") }

func (f *fakeSystem) DestroySockets(keep Flow) (int, error) {
	f.kept = keep
	return 3, f.record("sockets")
}

func (f *fakeSystem) Publish(g uint64) error {
	f.generation = g
	return f.record("publish")
}

func (f *fakeSystem) Freeze(time.Duration) error {
	err := f.record("freeze")
	f.setFrozen(true)
	return err
}

func (f *fakeSystem) Thaw() error {
	err := f.record("thaw")
	f.setFrozen(false)
	return err
}

func (f *fakeSystem) setFrozen(v bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.frozen = v
}

func (f *fakeSystem) isFrozen() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.frozen
}

// guestUnderTest is an agent that serves on a real socket, with its clients.
type guestUnderTest struct {
	agent   *Agent
	system  *fakeSystem
	home    string // of the user "tester", which is also the default
	dial    guestapi.Dial
	http    *http.Client
	control *guestapi.Client
	process processconnect.ProcessClient
	files   filesystemconnect.FilesystemClient
}

// newGuest serves an agent whose default user is nobody with a home of its own.
func newGuest(t testing.TB, change func(*Config)) *guestUnderTest {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("the agent runs as root")
	}
	root, err := os.MkdirTemp("", "guest")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	home, etc := filepath.Join(root, "home"), filepath.Join(root, "etc")
	for _, dir := range []string{home, etc} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(home, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(etc, "passwd"), "root:x:0:0:root:/root:/bin/bash\nuser:x:65534:65534::"+home+":/bin/bash\nbroken line\n")
	writeFile(t, filepath.Join(etc, "group"), "root:x:0:\nnogroup:x:65534:\nextra:x:7777:other,user\n")

	g := &guestUnderTest{system: &fakeSystem{fail: map[string]error{}}, home: home}
	cfg := Config{System: g.system, Log: slog.New(slog.DiscardHandler), Etc: etc, Cgroup: -1, Stall: 2 * time.Second}
	if change != nil {
		change(&cfg)
	}
	g.agent = New(cfg)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = g.agent.Serve(ctx, l)
	}()
	t.Cleanup(func() {
		for _, p := range g.agent.processes.table.running() {
			_ = p.signal(9)
			<-p.done
		}
		cancel()
		<-served
	})
	g.dial = func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	}
	g.http = guestapi.HTTPClient(g.dial)
	g.control = guestapi.NewClient(g.dial)
	g.process = processconnect.NewProcessClient(g.http, guestapi.BaseURL)
	g.files = filesystemconnect.NewFilesystemClient(g.http, guestapi.BaseURL, connect.WithProtoJSON())
	return g
}

func writeFile(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func readFile(t testing.TB, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// waitFor waits for a condition that must come true.
func waitFor(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for: %s", patience, what)
		}
	}
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func wantCode(t *testing.T, err error, code connect.Code) {
	t.Helper()
	if err == nil || connect.CodeOf(err) != code {
		t.Fatalf("got error %v, want code %v", err, code)
	}
}
