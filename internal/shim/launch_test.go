package shim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// newLauncher starts shims as processes: this test binary, see TestMain.
func newLauncher(t *testing.T) *Launcher {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := tempDir(t)
	l := &Launcher{Binary: self, RunDir: filepath.Join(dir, "run"), Store: filepath.Join(dir, "store")}
	if err := os.Mkdir(l.RunDir, 0o700); err != nil {
		t.Fatal(err)
	}
	return l
}

// launch starts a shim, which the end of the test releases.
func launch(t *testing.T, l *Launcher, vm string) *guest {
	t.Helper()
	c, err := l.Launch(context.Background(), vm)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := c.Release(ctx); err != nil {
			t.Errorf("release %s: %v", vm, err)
		}
		isGone(t, c)
	})
	return &guest{t: t, client: c, image: baseImage(t, filepath.Dir(l.RunDir))}
}

// isGone checks that nothing is left of a machine.
func isGone(t *testing.T, c *Client) {
	t.Helper()
	if c.handle.Alive() {
		t.Error("the process lives")
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), c.handle.Dir()+"/") {
		t.Error("the pager is mounted")
	}
	if _, err := os.Lstat(c.handle.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is there: %v", err)
	}
}

func TestLaunch(t *testing.T) {
	l := newLauncher(t)
	g := launch(t, l, "vm1")
	h := g.client.Handle()
	if h.VM != "vm1" || h.Protocol != ProtocolVersion || !h.Alive() || h.PID == os.Getpid() {
		t.Errorf("the handle is %+v", h)
	}
	left, err := readHandle(h.Dir())
	if err != nil || left != h {
		t.Errorf("the folder holds %+v (%v), want %+v", left, err, h)
	}
	if _, err := l.Launch(context.Background(), "vm1"); !errors.Is(err, os.ErrExist) {
		t.Errorf("the same name again: %v", err)
	}
	g.boot()
	g.goesOn()
	g.capture(1)

	// Another daemon finds it by its handle.
	adopted, err := l.Adopt(context.Background(), h)
	if err != nil {
		t.Fatal(err)
	}
	defer adopted.Close()
	other := &guest{t: t, client: adopted}
	if s := other.status(); s.Phase != PhaseSealed || s.VM != "vm1" {
		t.Errorf("the status is %+v", s)
	}
	other.thaw(1)
	other.goesOn()
}

func TestAdoptErrors(t *testing.T) {
	l := newLauncher(t)
	g := launch(t, l, "vm1")
	for name, tt := range map[string]struct {
		change func(*Handle)
		want   error
	}{
		"dead":       {func(h *Handle) { h.StartTime++ }, ErrGone},
		"too new":    {func(h *Handle) { h.Protocol = ProtocolVersion + 1 }, ErrProtocol},
		"too old":    {func(h *Handle) { h.Protocol = ProtocolVersion - 2 }, ErrProtocol},
		"one before": {func(h *Handle) { h.Protocol = ProtocolVersion - 1 }, nil},
		"no socket":  {func(h *Handle) { h.Socket += "x" }, os.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			h := g.client.Handle()
			tt.change(&h)
			c, err := l.Adopt(context.Background(), h)
			if !errors.Is(err, tt.want) {
				t.Errorf("%v, want %v", err, tt.want)
			}
			if err == nil {
				c.Close()
			}
		})
	}
}

func TestLaunchThatFails(t *testing.T) {
	t.Run("no binary", func(t *testing.T) {
		l := newLauncher(t)
		l.Binary = "/nowhere/hib"
		_, err := l.Launch(context.Background(), "vm1")
		if !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		isGone(t, newClient(Handle{Socket: filepath.Join(l.RunDir, "vm1", socketName)}, nil))
	})
	t.Run("the shim says why", func(t *testing.T) {
		l := newLauncher(t)
		l.Store = "/proc/no/store"
		_, err := l.Launch(context.Background(), "vm1")
		if err == nil || !strings.Contains(err.Error(), "open the store") || !strings.Contains(err.Error(), "vm1") {
			t.Error(err)
		}
		isGone(t, newClient(Handle{Socket: filepath.Join(l.RunDir, "vm1", socketName)}, nil))
	})
	t.Run("the path of the socket is too long", func(t *testing.T) {
		l := newLauncher(t)
		vm := strings.Repeat("x", 120)
		_, err := l.Launch(context.Background(), vm)
		if err == nil || !strings.Contains(err.Error(), "invalid argument") {
			t.Error(err)
		}
		isGone(t, newClient(Handle{Socket: filepath.Join(l.RunDir, vm, socketName)}, nil))
	})
	t.Run("the caller does not wait", func(t *testing.T) {
		l := newLauncher(t)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := l.Launch(ctx, "vm1"); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		isGone(t, newClient(Handle{Socket: filepath.Join(l.RunDir, "vm1", socketName)}, nil))
	})
	t.Run("something that is no shim", func(t *testing.T) {
		l := newLauncher(t)
		l.Binary = "/bin/cat"
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := l.Launch(ctx, "vm1")
		if err == nil || !strings.Contains(err.Error(), "did not start") {
			t.Error(err)
		}
		isGone(t, newClient(Handle{Socket: filepath.Join(l.RunDir, "vm1", socketName)}, nil))
	})
}

// startDaemon starts a process that launches a shim as a daemon would and then
// waits; see daemon in TestMain.
func startDaemon(t *testing.T, l *Launcher, adopt bool) (daemon *exec.Cmd, shim Handle) {
	t.Helper()
	cmd := exec.Command(l.Binary, "daemon", l.RunDir, l.Store, strconv.FormatBool(adopt))
	cmd.Stderr = t.Output()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	if n, err := out.Read(make([]byte, 16)); err != nil || n == 0 {
		t.Fatalf("the daemon does not come up: %v", err)
	}
	if shim, err = readHandle(filepath.Join(l.RunDir, "vm1")); err != nil {
		t.Fatal(err)
	}
	return cmd, shim
}

func TestLifeline(t *testing.T) {
	t.Run("before the adoption the shim ends with the daemon", func(t *testing.T) {
		l := newLauncher(t)
		daemon, handle := startDaemon(t, l, false)
		if err := daemon.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the shim ends", func() bool { return !handle.Alive() })
		if err := l.Reap(context.Background(), nil); err != nil {
			t.Fatal(err)
		}
		isGone(t, newClient(handle, nil))
	})
	t.Run("afterwards it lives on", func(t *testing.T) {
		l := newLauncher(t)
		daemon, handle := startDaemon(t, l, true)
		if err := daemon.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		daemon.Wait()
		c, err := l.Adopt(context.Background(), handle)
		if err != nil {
			t.Fatal(err)
		}
		g := &guest{t: t, client: c}
		if s := g.status(); !s.Adopted {
			t.Errorf("the status is %+v", s)
		}
		g.goesOn()
		g.capture(1)
		if err := c.Release(context.Background()); err != nil {
			t.Fatal(err)
		}
		isGone(t, c)
	})
}

// TestReleaseOfAHungShim: a stopped process answers nothing, so it is killed.
func TestReleaseOfAHungShim(t *testing.T) {
	l := newLauncher(t)
	g := launch(t, l, "vm1")
	g.boot()
	if err := syscall.Kill(g.client.handle.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the shim stands still", func() bool { return threadsAre(t, g.client.handle.PID, "T") })
	if err := g.client.Release(context.Background()); err != nil {
		t.Fatal(err)
	}
	isGone(t, g.client)
}

// threadsAre tells whether all threads of a process are in a state of proc(5).
func threadsAre(t *testing.T, pid int, state string) bool {
	t.Helper()
	stats, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			return false // the thread ended meanwhile
		}
		if !strings.Contains(string(stat), ") "+state+" ") {
			return false
		}
	}
	return len(stats) > 0
}

// TestKilledAtTheEnd: a shim that is killed while it ends by itself, at
// whatever instant, ends all the same.
func TestKilledAtTheEnd(t *testing.T) {
	l := newLauncher(t)
	rng := rand.New(rand.NewPCG(seed(t), 0))
	for range 20 {
		g := launch(t, l, "vm1")
		g.boot()
		released := make(chan error, 1)
		go func() { released <- g.release() }()
		time.Sleep(time.Duration(rng.IntN(15_000)) * time.Microsecond)
		_ = syscall.Kill(g.client.handle.PID, syscall.SIGKILL) // nobody else reuses the number: it is waited for below
		<-released
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		if err := g.client.Release(ctx); err != nil {
			t.Fatal(err)
		}
		cancel()
		isGone(t, g.client)
	}
}

// TestReleaseOfAShimThatCannotEnd: a shim that was killed while a thread of it
// waited for its own pager ends with the mount, by the hand of whoever releases it.
func TestReleaseOfAShimThatCannotEnd(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to abort the mount")
	}
	for _, child := range []bool{true, false} {
		t.Run(fmt.Sprintf("own child %t", child), func(t *testing.T) {
			dir := filepath.Join(tempDir(t), "vm1")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command("/proc/self/exe", "stuck", dir)
			cmd.Stderr = os.Stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "a thread is in a sleep that no signal ends", func() bool {
				stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", cmd.Process.Pid))
				return slices.ContainsFunc(stats, func(path string) bool {
					b, _ := os.ReadFile(path)
					return strings.Contains(string(b), ") D ")
				})
			})
			handle, err := newHandle("vm1", filepath.Join(dir, socketName), cmd.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = cmd.Wait()
			}()
			reaped := ended
			if !child { // as a daemon that adopted it
				reaped = nil
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			client := newClient(handle, reaped)
			if err := client.Release(ctx); err != nil {
				t.Error(err)
			}
			isGone(t, client)
			<-ended
		})
	}
}

func TestKilledShim(t *testing.T) {
	l := newLauncher(t)
	g := launch(t, l, "vm1")
	g.boot()
	watched := make(chan error, 1)
	seen := make(chan Event, 100)
	go func() { watched <- g.client.Watch(context.Background(), func(e Event) { seen <- e }) }()
	if e := <-seen; e.Status.Phase != PhaseRunning {
		t.Errorf("the event is %+v", e)
	}
	if err := syscall.Kill(g.client.handle.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-watched; !errors.Is(err, ErrGone) {
		t.Errorf("Watch returned %v, want ErrGone", err)
	}
	if _, err := g.client.Status(context.Background()); !errors.Is(err, ErrGone) {
		t.Errorf("Status returned %v, want ErrGone", err)
	}
	if _, err := g.client.Dial(context.Background(), 8000); !errors.Is(err, ErrGone) {
		t.Errorf("Dial returned %v, want ErrGone", err)
	}
	if err := g.client.Thaw(context.Background(), ThawRequest{Attempt: 1}); !errors.Is(err, ErrGone) {
		t.Errorf("Thaw returned %v, want ErrGone", err)
	}
	for range 2 {
		if err := l.Discard(context.Background(), g.client.Handle()); err != nil {
			t.Fatal(err)
		}
		isGone(t, g.client)
	}
}

func TestReap(t *testing.T) {
	l := newLauncher(t)
	known, unknown, killed := launch(t, l, "known"), launch(t, l, "unknown"), launch(t, l, "killed")
	known.boot()
	unknown.boot()
	if err := syscall.Kill(killed.client.handle.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the shim is dead", func() bool { return !killed.client.handle.Alive() })
	for _, dir := range []string{"empty", "torn", "reused"} {
		if err := os.Mkdir(filepath.Join(l.RunDir, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	torn := filepath.Join(l.RunDir, "torn", handleFile)
	if err := os.WriteFile(torn, []byte(`{"vm":`), 0o600); err != nil {
		t.Fatal(err)
	}
	// A handle whose process number is another process's by now: this one's.
	reused := filepath.Join(l.RunDir, "reused", handleFile)
	text := `{"vm":"reused","pid":` + strconv.Itoa(os.Getpid()) + `,"start_time":1,"boot_id":"` + known.client.handle.BootID + `"}`
	if err := os.WriteFile(reused, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.Reap(context.Background(), []string{"known"}); err != nil {
		t.Fatal(err)
	}
	isGone(t, unknown.client)
	isGone(t, killed.client)
	known.goesOn()
	entries, err := os.ReadDir(l.RunDir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "known" {
		t.Errorf("the folders are %v (%v), want that of the known machine", entries, err)
	}
}

// TestAccount: a shim under another account cleans up behind itself all the same.
func TestAccount(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to change to another account")
	}
	l := newLauncher(t)
	l.Account = &Credential{UID: 65534, GID: 65534}
	for _, dir := range []string{filepath.Dir(l.RunDir), l.RunDir} {
		if err := os.Chmod(dir, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(l.Store, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(l.Store, l.Account.UID, l.Account.GID); err != nil {
		t.Fatal(err)
	}
	g := launch(t, l, "vm1")
	if err := os.Chmod(g.image, 0o644); err != nil {
		t.Fatal(err)
	}
	g.boot()
	status, err := os.ReadFile("/proc/" + strconv.Itoa(g.client.handle.PID) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(status), "\nUid:\t65534\t65534\t65534\t65534\n") {
		t.Errorf("the shim runs as\n%s", status)
	}
	report := g.capture(1)
	g.thaw(1)
	g.goesOn()
	if err := g.client.Release(context.Background()); err != nil {
		t.Fatal(err)
	}
	isGone(t, g.client)
	next := launch(t, l, "vm2")
	if err := os.Chmod(next.image, 0o644); err != nil {
		t.Fatal(err)
	}
	next.resume(report.Snapshot)
	next.goesOn()
}
