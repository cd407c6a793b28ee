package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/fake"
)

// patience bounds every wait of a test for what is to come soon.
const patience = time.Minute

var (
	testShape = vmm.Shape{MemoryMiB: 8, CPUs: 1}
	testKey   = vmm.Key{"driver": "fake", "kernel": "k1"}
)

// rig is a shim of this process, with the real pager and the fake driver.
type rig struct {
	*guest
	driver *driver
	cfg    Config
	served chan error // what Serve returned
	stop   context.CancelFunc
	ended  bool
}

// guest is a shim seen through its client, in whatever process it is.
type guest struct {
	t      testing.TB
	client *Client
	image  string // base image
}

// rigOptions change a rig before it is started.
type rigOptions struct {
	store    string // another rig's; "" makes one
	limits   limits // zero fields are generous
	lifeline io.Reader
	driver   *driver
	remote   *remote
}

func newRig(t testing.TB, opts rigOptions) *rig {
	t.Helper()
	dir := tempDir(t)
	r := &rig{driver: opts.driver, served: make(chan error, 1)}
	if r.driver == nil {
		r.driver = newDriver()
	}
	r.guest = &guest{t: t, image: baseImage(t, dir)}
	r.cfg = Config{VM: "vm1", Dir: filepath.Join(dir, "vm1"), Store: opts.store}
	if r.cfg.Store == "" {
		r.cfg.Store = filepath.Join(dir, "store")
	}
	if err := os.Mkdir(r.cfg.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	limits := fill(opts.limits)
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	ready := make(chan struct{})
	go func() {
		r.served <- Serve(ctx, r.cfg, r.driver, ServeOptions{
			Lifeline: opts.lifeline, Ready: func() { close(ready) }, Log: testLog(t), limits: &limits, remote: opts.remote,
		})
	}()
	select {
	case <-ready:
	case err := <-r.served:
		stop()
		t.Fatalf("Serve: %v", err)
	}
	handle, err := readHandle(r.cfg.Dir)
	if err != nil {
		t.Fatal(err)
	}
	// Never Release this client: the process that it would kill is this one.
	r.client = newClient(handle, nil)
	t.Cleanup(func() { r.end() })
	return r
}

func fill(l limits) limits {
	for _, d := range []*time.Duration{&l.boot, &l.init, &l.freeze, &l.thaw, &l.awake} {
		if *d == 0 {
			*d = patience
		}
	}
	return l
}

// tempDir is t.TempDir with a path that is short enough for sockets.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "shim")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("the folder of the test does not go: %v", err)
		}
	})
	return dir
}

func baseImage(t testing.TB, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "base")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 2<<20); err != nil {
		t.Fatal(err)
	}
	return path
}

func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// end releases the shim and waits until it is gone. It may be called again.
func (r *rig) end() {
	r.t.Helper()
	if r.ended {
		return
	}
	r.ended = true
	defer r.client.Close()
	defer r.stop()
	if err := r.release(); err != nil {
		r.t.Errorf("release: %v", err)
	}
	select {
	case err := <-r.served:
		if err != nil {
			r.t.Errorf("Serve: %v", err)
		}
	case <-time.After(patience):
		r.t.Fatal("the shim does not end")
	}
}

// release gives the order of that name, no more.
func (g *guest) release() error {
	return g.client.call(context.Background(), http.MethodPost, "release", struct{}{}, &struct{}{})
}

func (r *rig) repo() *snapshot.Repository { return openRepo(r.t, r.cfg.Store) }

func openRepo(t testing.TB, store string) *snapshot.Repository {
	t.Helper()
	s, err := disk.Open(store)
	if err != nil {
		t.Fatal(err)
	}
	return snapshot.NewRepository(s)
}

// prepare starts the VMM, to boot or for a snapshot.
func (g *guest) prepare(boot bool) {
	g.t.Helper()
	if err := g.client.Prepare(context.Background(), g.prepareRequest(boot)); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guest) prepareRequest(boot bool) PrepareRequest {
	req := PrepareRequest{Shape: testShape, BaseImage: g.image}
	if boot {
		req.Boot = &vmm.Boot{}
	}
	return req
}

func bootRequest() BootRequest {
	return BootRequest{Init: guestapi.InitRequest{
		Reason: guestapi.ReasonBoot, Generation: 1,
		Identity: &guestapi.Identity{ID: "sb1", ControlToken: "secret"},
	}}
}

func resumeRequest(ref snapshot.Ref) ResumeRequest {
	return ResumeRequest{Snapshot: ref, Key: testKey, Init: guestapi.InitRequest{Reason: guestapi.ReasonResume, Generation: 2, Snapshot: string(ref.ID)}}
}

func captureRequest(attempt uint64) CaptureRequest {
	return CaptureRequest{Attempt: attempt, ID: snapshot.NewID(), Deadline: patience, Generation: 1, Key: testKey}
}

// boot brings a guest up from cold.
func (g *guest) boot() {
	g.t.Helper()
	g.prepare(true)
	if _, err := g.client.Boot(context.Background(), bootRequest()); err != nil {
		g.t.Fatal(err)
	}
}

// resume brings a guest up from a snapshot.
func (g *guest) resume(ref snapshot.Ref) StartReport {
	g.t.Helper()
	g.prepare(false)
	report, err := g.client.Resume(context.Background(), resumeRequest(ref))
	if err != nil {
		g.t.Fatal(err)
	}
	return report
}

func (g *guest) capture(attempt uint64) CaptureReport {
	g.t.Helper()
	report, err := g.client.Capture(context.Background(), captureRequest(attempt))
	if err != nil {
		g.t.Fatal(err)
	}
	return report
}

func (g *guest) thaw(attempt uint64) {
	g.t.Helper()
	if err := g.client.Thaw(context.Background(), ThawRequest{Attempt: attempt}); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guest) status() Status {
	g.t.Helper()
	s, err := g.client.Status(context.Background())
	if err != nil {
		g.t.Fatal(err)
	}
	return s
}

// ask makes a call to the guest's user port and reads its JSON answer.
func (g *guest) ask(ctx context.Context, method, path string, answer any) error {
	client := guestapi.HTTPClient(func(ctx context.Context) (net.Conn, error) {
		return g.client.Dial(ctx, fake.UserPort)
	})
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, body)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(body, answer)
}

func (g *guest) env() fake.Env {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var env fake.Env
	if err := g.ask(ctx, http.MethodGet, "/env", &env); err != nil {
		g.t.Fatal(err)
	}
	return env
}

// write fills a page of the guest's memory.
func (g *guest) write(page, value int) {
	g.t.Helper()
	if err := g.ask(context.Background(), http.MethodPost, fmt.Sprintf("/memory?page=%d&value=%d", page, value), nil); err != nil {
		g.t.Fatal(err)
	}
}

// read returns what a page of the guest's memory is filled with.
func (g *guest) read(page int) int {
	g.t.Helper()
	var value int
	if err := g.ask(context.Background(), http.MethodGet, fmt.Sprintf("/memory?page=%d", page), &value); err != nil {
		g.t.Fatal(err)
	}
	return value
}

// goesOn checks that the guest runs and its processes are not frozen.
func (g *guest) goesOn() {
	g.t.Helper()
	if s := g.status(); s.Phase != PhaseRunning || s.Captured != nil {
		g.t.Errorf("the status is %+v, want a running machine", s)
	}
	before := g.env()
	if before.Frozen {
		g.t.Error("the guest is frozen")
	}
	eventually(g.t, "the guest's counter ticks", func() bool { return g.env().Counter > before.Counter })
}

// standsStill checks that the vCPUs do not run.
func (r *rig) standsStill() {
	r.t.Helper()
	if r.driver.machine().runs.Load() {
		r.t.Error("the guest runs")
	}
}

// refuses checks that an attempt cannot be captured any more.
func (g *guest) refuses(attempt uint64) {
	g.t.Helper()
	if _, err := g.client.Capture(context.Background(), captureRequest(attempt)); Code(err) != CodeRefused {
		g.t.Errorf("attempt %d again: %v, want code %s", attempt, err, CodeRefused)
	}
}

func (g *guest) waitPhase(want Phase) Status {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var last Status
	err := g.client.Watch(ctx, func(e Event) {
		if last = e.Status; last.Phase == want {
			cancel()
		}
	})
	if last.Phase != want {
		g.t.Fatalf("the machine is %s and does not become %s: %v", last.Phase, want, err)
	}
	return last
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for pause := time.Millisecond; !cond(); pause = min(2*pause, 50*time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in vain: %s", what)
		}
		time.Sleep(pause)
	}
}

// wantCode checks the code of an error and what its message holds.
func wantCode(t testing.TB, err error, code string, words ...string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("the answer is %v (code %q), want code %q", err, Code(err), code)
		return
	}
	for _, w := range words {
		if !bytes.Contains([]byte(e.Message), []byte(w)) {
			t.Errorf("the message %q does not tell %q", e.Message, w)
		}
	}
}

// objects returns the keys in a store that begin with prefix.
func objects(t testing.TB, store, prefix string) []string {
	t.Helper()
	s, err := disk.Open(store)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for info, err := range s.List(context.Background(), prefix) {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, info.Key)
	}
	return keys
}

// holdsNoSnapshot checks that a store holds no snapshot and nothing that would
// not be collected.
func holdsNoSnapshot(t testing.TB, store string) {
	t.Helper()
	if left := append(objects(t, store, "manifests/"), objects(t, store, "states/")...); len(left) > 0 {
		t.Errorf("the store holds %v", left)
	}
	if _, err := openRepo(t, store).Collect(context.Background(), nil, nil); err != nil {
		t.Fatal(err)
	}
	if left := objects(t, store, ""); len(left) > 0 {
		t.Errorf("after a collection the store holds %v", left)
	}
}
