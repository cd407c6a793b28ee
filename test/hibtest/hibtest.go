// Package hibtest starts real daemons with real machines for tests, and drives
// them the way a user does: through the hib binary.
//
// It needs HIB_TEST_BIN (folder of hib and hib-guest) and HIB_TEST_FIXTURE (a
// data folder with the base template, see scripts/fixtures). Each daemon gets a
// copy of that folder in which immutable objects are hard links.
package hibtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// Patience bounds every wait of a test. It is no bar: emulated machines on a
// loaded host are slow.
const Patience = 3 * time.Minute

// Daemon is a real "hib serve" over a data folder of its own.
type Daemon struct {
	Data string // its data folder
	URL  string
	Key  string

	t     testing.TB
	bin   string
	flags []string
	env   []string
	wrap  []string // command line that the daemon's is added to
	cmd   *exec.Cmd
	log   string
}

// Start starts a daemon on a copy of the fixture in a new folder. env adds
// variables to its environment. At the end of the test the daemon is stopped,
// and so is every machine that it left.
func Start(t testing.TB, env ...string) *Daemon {
	t.Helper()
	return StartIn(t, tempDir(t), nil, env...)
}

// Bare are the flags of a daemon that holds no machine but those of guests that
// run: for tests of which that is the subject, or that tell machines apart.
var Bare = []string{"--pool", "0", "--parked-memory", "0"}

// StartBare is Start with the flags Bare.
func StartBare(t testing.TB, env ...string) *Daemon {
	t.Helper()
	return start(t, tempDir(t), Bare, env...)
}

// StartWith is Start with flags of hib serve.
func StartWith(t testing.TB, flags []string, env ...string) *Daemon {
	t.Helper()
	return start(t, tempDir(t), flags, env...)
}

// StartOn starts another daemon on a data folder that no daemon uses.
func StartOn(t testing.TB, data string, flags []string) *Daemon {
	t.Helper()
	d := &Daemon{flags: flags, Data: data, t: t, bin: binFolder(t), log: filepath.Join(filepath.Dir(data), "serve-other.log")}
	t.Cleanup(d.destroy)
	d.Run()
	return d
}

// StartIn is StartWith on a copy of the fixture in the folder dir.
func StartIn(t testing.TB, dir string, flags []string, env ...string) *Daemon {
	t.Helper()
	return start(t, dir, flags, env...)
}

func start(t testing.TB, dir string, flags []string, env ...string) *Daemon {
	t.Helper()
	d := &Daemon{flags: flags, Data: filepath.Join(dir, "data"), t: t, bin: binFolder(t), log: filepath.Join(dir, "serve.log")}
	copyFixture(t, fixture(t), d.Data)
	t.Cleanup(d.destroy)
	d.Run(env...)
	return d
}

// tempDir makes a folder that other accounts can pass through, unlike t.TempDir.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hibtest")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return dir
}

// copyFixture copies a data folder; what lies in store and templates is
// immutable and linked where both are on one file system.
func copyFixture(t testing.TB, from, to string) {
	t.Helper()
	if exec.Command("cp", "-al", from, to).Run() != nil {
		_ = os.RemoveAll(to)
		copyWhole(t, from, to)
		return
	}
	for _, own := range []string{"catalog.db", "api.key", "daemon.json", "daemon.lock"} {
		path := filepath.Join(to, own)
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		if err := errors.Join(os.Remove(path), os.WriteFile(path, b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	_ = os.Remove(filepath.Join(to, "daemon.json"))
}

// copyWhole copies a data folder without links to the old one.
func copyWhole(t testing.TB, from, to string) {
	t.Helper()
	if out, err := exec.Command("cp", "-a", "--sparse=always", from, to).CombinedOutput(); err != nil {
		t.Fatalf("copy fixture: %v: %s", err, out)
	}
	_ = os.Remove(filepath.Join(to, "daemon.json"))
}

// StartAs starts a daemon that is run by an unprivileged account, uid and gid, on
// a whole copy of the fixture. It needs root, to make the account's data folder
// and to let it open /dev/fuse, which a host may keep from users.
func StartAs(t testing.TB, uid, gid int) *Daemon {
	t.Helper()
	dir := tempDir(t)
	d := &Daemon{Data: filepath.Join(dir, "data"), t: t, bin: binFolder(t), log: filepath.Join(dir, "serve.log")}
	copyWhole(t, fixture(t), d.Data)
	if out, err := exec.Command("chown", "-R", fmt.Sprintf("%d:%d", uid, gid), dir).CombinedOutput(); err != nil {
		t.Fatalf("chown: %v: %s", err, out)
	}
	device := filepath.Join(dir, "fuse")
	d.wrap = []string{"unshare", "--mount", "sh", "-c",
		`[ -e "$0" ] || { mknod "$0" c 10 229 && chmod 666 "$0"; } && mount --bind "$0" /dev/fuse && exec "$@"`, device,
		"setpriv", fmt.Sprintf("--reuid=%d", uid), fmt.Sprintf("--regid=%d", gid), "--clear-groups", "env", "-u", "XDG_RUNTIME_DIR"}
	t.Cleanup(d.destroy)
	d.Run()
	return d
}

func fixture(t testing.TB) string {
	t.Helper()
	return need(t, "HIB_TEST_FIXTURE")
}

func binFolder(t testing.TB) string {
	t.Helper()
	return need(t, "HIB_TEST_BIN")
}

func need(t testing.TB, variable string) string {
	t.Helper()
	v := os.Getenv(variable)
	if v == "" {
		t.Fatalf("%s is not set: run the tests with make", variable)
	}
	return v
}

// Run starts the daemon, which must not run, and waits until it answers.
func (d *Daemon) Run(env ...string) {
	d.t.Helper()
	_ = os.Remove(filepath.Join(d.Data, "daemon.json"))
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	defer log.Close()
	d.env = append(os.Environ(), "HIB_DATA="+d.Data)
	argv := append(slices.Clone(d.wrap), filepath.Join(d.bin, "hib"), "serve", "--data", d.Data, "--listen", "127.0.0.1:0")
	argv = append(argv, d.flags...)
	d.cmd = exec.Command(argv[0], argv[1:]...)
	d.cmd.Env = append(d.env, env...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func(cmd *exec.Cmd) { exited <- cmd.Wait() }(d.cmd)
	deadline := time.After(Patience)
	for !d.ready() {
		select {
		case err := <-exited:
			d.t.Fatalf("hib serve ended: %v\n%s", err, d.Log())
		case <-deadline:
			d.t.Fatalf("hib serve does not answer\n%s", d.Log())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (d *Daemon) ready() bool {
	var where struct {
		URL string `json:"url"`
	}
	b, err := os.ReadFile(filepath.Join(d.Data, "daemon.json"))
	if err != nil || json.Unmarshal(b, &where) != nil || where.URL == "" {
		return false
	}
	key, err := os.ReadFile(filepath.Join(d.Data, "api.key"))
	if err != nil {
		return false
	}
	d.URL, d.Key = where.URL, strings.TrimSpace(string(key))
	resp, err := http.Get(d.URL + "/v1/health")
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode < 300
}

// Log returns what the daemon printed so far.
func (d *Daemon) Log() string {
	b, _ := os.ReadFile(d.log)
	if len(b) > 20000 {
		b = b[len(b)-20000:]
	}
	return string(b)
}

// PID returns the daemon's process id.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Kill ends the daemon as kill -9 does and waits until it is gone.
func (d *Daemon) Kill() {
	d.t.Helper()
	_ = d.cmd.Process.Kill()
	d.WaitGone()
}

// WaitGone waits until the daemon's process has ended.
func (d *Daemon) WaitGone() {
	d.t.Helper()
	Eventually(d.t, "the daemon has ended", func() bool { return syscall.Kill(d.PID(), 0) != nil })
}

// Stop ends the daemon in the orderly way. Guests go on.
func (d *Daemon) Stop() {
	d.t.Helper()
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	d.WaitGone()
}

// RestartWith is Restart with flags of hib serve, which later ones keep.
func (d *Daemon) RestartWith(flags []string, env ...string) {
	d.t.Helper()
	d.flags = flags
	d.Restart(env...)
}

// Restart is Kill and Run.
func (d *Daemon) Restart(env ...string) {
	d.t.Helper()
	d.Kill()
	d.Run(env...)
}

// destroy deletes every sandbox and stops the daemon.
func (d *Daemon) destroy() {
	if d.t.Failed() {
		d.t.Logf("log of the daemon:\n%s", d.Log())
	}
	if !d.ready() {
		if d.cmd != nil && d.cmd.Process != nil {
			_ = d.cmd.Process.Kill()
			d.WaitGone()
		}
		d.Run()
	}
	for _, sb := range d.List() {
		if _, stderr, code := d.Try("rm", "--force", sb.ID); code != 0 {
			d.t.Errorf("rm %s: %s", sb.ID, stderr)
		}
	}
	d.Stop()
}

// Try runs hib with args and returns what it printed and its exit code.
func (d *Daemon) Try(args ...string) (stdout, stderr string, code int) {
	return d.TryInput(nil, args...)
}

// TryInput is Try with standard input.
func (d *Daemon) TryInput(stdin []byte, args ...string) (stdout, stderr string, code int) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(d.bin, "hib"), args...)
	cmd.Env = d.env
	cmd.Stdin = bytes.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit):
		code = exit.ExitCode()
	default:
		code = -1
		errOut.WriteString(err.Error())
	}
	return out.String(), errOut.String(), code
}

// Hib runs hib with args, which must succeed, and returns its standard output
// without the last newline.
func (d *Daemon) Hib(args ...string) string {
	d.t.Helper()
	out, stderr, code := d.Try(args...)
	if code != 0 {
		d.t.Fatalf("hib %s: exit %d: %s%s", strings.Join(args, " "), code, out, stderr)
	}
	return strings.TrimSuffix(out, "\n")
}

// Create makes a sandbox from the base template, which does not hibernate by
// itself unless args say so, and returns its id.
func (d *Daemon) Create(args ...string) string {
	d.t.Helper()
	return d.Hib(append([]string{"create", "base", "--idle-timeout", "never"}, args...)...)
}

// Shell runs a script in the sandbox, which must succeed, and returns its output.
func (d *Daemon) Shell(id, script string) string {
	d.t.Helper()
	return d.Hib("exec", id, "--", "bash", "-c", script)
}

// JSON runs hib with args and --json and decodes the answer into v.
func (d *Daemon) JSON(v any, args ...string) {
	d.t.Helper()
	out := d.Hib(append([]string{"--json"}, args...)...)
	if err := json.Unmarshal([]byte(out), v); err != nil {
		d.t.Fatalf("hib %s: %v in %q", strings.Join(args, " "), err, out)
	}
}

// Inspect returns the sandbox as hib shows it.
func (d *Daemon) Inspect(id string) api.Sandbox {
	d.t.Helper()
	var sb api.Sandbox
	d.JSON(&sb, "inspect", id)
	return sb
}

// List returns all sandboxes.
func (d *Daemon) List() []api.Sandbox {
	d.t.Helper()
	var all []api.Sandbox
	d.JSON(&all, "ls")
	return all
}

// WaitState waits until the sandbox is in the given state.
func (d *Daemon) WaitState(id string, want api.State) api.Sandbox {
	d.t.Helper()
	var sb api.Sandbox
	Eventually(d.t, fmt.Sprintf("sandbox %s is %s", id, want), func() bool {
		sb = d.Inspect(id)
		return sb.State == want
	})
	return sb
}

// Hibernate hibernates the sandbox and returns it with its machine parked or
// released, which comes behind the answer. Its snapshot is that of the answer: a compaction may
// have replaced it by now.
func (d *Daemon) Hibernate(id string) api.Sandbox {
	d.t.Helper()
	var sb api.Sandbox
	d.JSON(&sb, "hibernate", id)
	Eventually(d.t, fmt.Sprintf("the machine of sandbox %s is parked or released", id), func() bool {
		now := d.Inspect(id)
		sb.LastHibernate, sb.Parked = now.LastHibernate, now.Parked
		return HasLeft(now)
	})
	return sb
}

// HasLeft reports whether the sandbox's last hibernation has ended: its machine is
// parked or released.
func HasLeft(sb api.Sandbox) bool {
	if sb.LastHibernate == nil {
		return false
	}
	_, released := sb.LastHibernate.Phases["release"]
	_, parked := sb.LastHibernate.Phases["park"]
	return released || parked
}

// WriteFile puts content into a file of the sandbox.
func (d *Daemon) WriteFile(id, path string, content []byte) {
	d.t.Helper()
	if _, stderr, code := d.TryInput(content, "cp", "-", id+":"+path); code != 0 {
		d.t.Fatalf("cp to %s:%s: %s", id, path, stderr)
	}
}

// Eventually waits until cond is true.
func Eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
