package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/server/servertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeCore is a core in memory that notices that it is closed.
type fakeCore struct {
	*servertest.Core
	closed atomic.Bool
}

func (c *fakeCore) observed() *observers { return nil }

func (c *fakeCore) Close() error {
	c.closed.Store(true)
	return nil
}

// running is a daemon in this process.
type running struct {
	Started
	core *fakeCore
	stop context.CancelFunc
	done chan error
}

// testData returns a data folder that another account can reach, unlike
// t.TempDir.
func testData(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hib-daemon-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		os.RemoveAll(dir)
		os.RemoveAll(FoldersOf(filepath.Join(dir, "data")).Run)
	})
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "data")
}

func testConfig(data string) Config {
	return Config{Data: data, Listen: "127.0.0.1:0", Program: "/bin/true", Version: "test", Log: slog.New(slog.DiscardHandler)}
}

// start runs a daemon until the test ends. The error is that of its start.
func start(t *testing.T, c Config) (*running, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{core: &fakeCore{Core: servertest.NewCore(t, http.NotFoundHandler())}, stop: cancel, done: make(chan error, 1)}
	wire := func(context.Context, Config, Folders, Account) (core, api.Version, error) {
		return r.core, api.Version{Version: "test"}, nil
	}
	ready := make(chan Started, 1)
	go func() { r.done <- run(ctx, c, wire, func(s Started) { ready <- s }) }()
	select {
	case r.Started = <-ready:
		t.Cleanup(func() {
			cancel()
			<-r.done
			http.DefaultClient.CloseIdleConnections()
		})
		return r, nil
	case err := <-r.done:
		cancel()
		return nil, err
	}
}

// wait waits for the end of a daemon and keeps its error for others.
func (r *running) wait() error {
	err := <-r.done
	r.done <- err
	return err
}

func TestStartAndStop(t *testing.T) {
	data := testData(t)
	r, err := start(t, testConfig(data))
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(r.KeyFile)
	if err != nil || !regexp.MustCompile(`^e2b_[0-9a-f]{40}\n$`).Match(key) {
		t.Errorf("key %q: %v", key, err)
	}
	if info, err := os.Stat(r.KeyFile); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key's mode is %v", info.Mode())
	}
	var where api.DaemonInfo
	b, err := os.ReadFile(filepath.Join(data, api.DaemonFile))
	if err != nil || json.Unmarshal(b, &where) != nil || where.URL != r.URL || where.PID != os.Getpid() || where.Run != FoldersOf(data).Run {
		t.Errorf("%s: %v", b, err)
	}
	if r.Plain || r.Templates != 1 {
		t.Errorf("%+v", r.Started)
	}
	resp, err := http.Get(r.URL + "/v1/health")
	if err != nil || resp.StatusCode != 204 {
		t.Fatalf("%v %v", resp, err)
	}
	resp.Body.Close()

	// A second one is told who has the folder.
	if _, err := start(t, testConfig(data)); err == nil || !strings.Contains(err.Error(), "pid "+strconv.Itoa(os.Getpid())) {
		t.Errorf("the second daemon: %v", err)
	}

	r.stop()
	if err := r.wait(); err != nil || !r.core.closed.Load() {
		t.Errorf("stop: %v, core closed: %v", err, r.core.closed.Load())
	}
	if _, err := os.Stat(filepath.Join(data, api.DaemonFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is still announced: %v", err)
	}
	// The next one has the same key.
	if _, err := start(t, testConfig(data)); err != nil {
		t.Fatal(err)
	}
	if again, _ := os.ReadFile(r.KeyFile); string(again) != string(key) {
		t.Error("the key has changed")
	}
}

// TestStopBreaksStreamsOff stops a daemon while a log is followed.
func TestStopBreaksStreamsOff(t *testing.T) {
	r, err := start(t, testConfig(testData(t)))
	if err != nil {
		t.Fatal(err)
	}
	sb, err := r.core.Create(t.Context(), sandbox.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	key, _ := os.ReadFile(r.KeyFile)
	req, _ := http.NewRequest("GET", r.URL+"/v1/sandboxes/"+sb.ID+"/logs?follow=1", nil)
	req.Header.Set("X-API-Key", strings.TrimSpace(string(key)))
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %v", resp, err)
	}
	defer resp.Body.Close()
	before := time.Now()
	r.stop()
	if err := r.wait(); err != nil {
		t.Error(err)
	}
	if d := time.Since(before); d > shutdownPatience-time.Second {
		t.Errorf("the stop took %v", d)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
}

func TestRefusedStarts(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	data := testData(t)
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"port taken":      {func(c *Config) { c.Listen = busy.Addr().String() }, "--listen"},
		"no port":         {func(c *Config) { c.Listen = "127.0.0.1" }, "HOST:PORT"},
		"accelerator":     {func(c *Config) { c.Accel = "hvf" }, "kvm or tcg"},
		"account missing": {func(c *Config) { c.User = "no-such-account" }, "no-such-account"},
		"no folder":       {func(c *Config) { c.Data = "/dev/null/data" }, "data folder"},
		"bad key": {func(c *Config) {
			c.Data = data
			os.MkdirAll(data, 0o711)
			os.WriteFile(filepath.Join(data, api.KeyFile), []byte("password\n"), 0o600)
		}, "delete it"},
	} {
		t.Run(name, func(t *testing.T) {
			config := testConfig(testData(t))
			c.change(&config)
			if _, err := start(t, config); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}

func TestCheckReach(t *testing.T) {
	base, err := os.MkdirTemp("", "hib-reach-*")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(base)
	inner := filepath.Join(base, "inner")
	if err := os.Mkdir(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	stranger := Account{Name: "stranger", UID: 54321, GID: 54321, Groups: []int{54321}}
	for _, c := range []struct {
		mode os.FileMode
		ok   bool
	}{{0o700, false}, {0o710, false}, {0o711, true}, {0o755, true}, {0o754, false}} {
		if err := os.Chmod(base, c.mode); err != nil {
			t.Fatal(err)
		}
		err := stranger.CheckReach(filepath.Join(inner, "not", "yet"))
		if (err == nil) != c.ok {
			t.Errorf("%o: %v", c.mode, err)
		}
		if err != nil && !strings.Contains(err.Error(), "chmod o+x "+base) {
			t.Errorf("no advice: %v", err)
		}
	}
}

func TestRunFolder(t *testing.T) {
	a, b := FoldersOf("/data/a").Run, FoldersOf("/data/b").Run
	if a == b || len(filepath.Base(a)) != 8 {
		t.Errorf("%s %s", a, b)
	}
	dir := filepath.Join(t.TempDir(), "run")
	if err := os.Symlink(t.TempDir(), dir); err != nil {
		t.Fatal(err)
	}
	if err := makePrivate(dir, 0o700); err == nil {
		t.Error("a symbolic link is taken for the runtime folder")
	}
}
