package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/cavaliergopher/cpio"

	processpb "github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// The modules that the test's machine needs, in the order of loading.
var vmModules = strings.Fields(`virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci
	libnvdimm nd_e820 nd_btt nd_pmem crc32c-intel libcrc32c erofs overlay
	failover net_failover virtio_net inet_diag tcp_diag`)

const vmPatience = 5 * time.Minute

// TestInAMachine boots the agent in a real virtual machine and makes the calls
// that cannot be made on the machine that tests. It needs QEMU, mkfs.erofs, a
// static busybox, and by environment HIB_TEST_VMLINUX, an uncompressed kernel,
// and HIB_TEST_MODULES, the folder of its modules.
func TestInAMachine(t *testing.T) {
	g := bootMachine(t)
	t.Run("token", g.testToken)
	t.Run("system", g.testSystem)
	t.Run("orphans", g.testOrphans)
	t.Run("sockets", g.testSockets)
	t.Run("freeze", g.testFreeze)
	t.Run("full", g.testFullDisk)
	t.Run("size", g.testSize)
}

// machine is a guest in a virtual machine.
type machine struct {
	*guestUnderTest
	console string // file
}

const (
	firstToken  = "first-control-token"
	secondToken = "second-control-token"
)

func bootMachine(t *testing.T) *machine {
	kernel, modules := os.Getenv("HIB_TEST_VMLINUX"), os.Getenv("HIB_TEST_MODULES")
	if kernel == "" || modules == "" {
		t.Skip("set HIB_TEST_VMLINUX and HIB_TEST_MODULES to boot a machine")
	}
	dir := t.TempDir()
	m := &machine{console: filepath.Join(dir, "console")}
	buildInitramfs(t, filepath.Join(dir, "initrd"), modules)
	size := buildBase(t, filepath.Join(dir, "base"))
	port := freePort(t)
	cmd := exec.Command("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-machine", "pc-q35-7.2,nvdimm=on,accel=tcg,sata=off,smbus=off,i8042=off,usb=off,hpet=off,graphics=off",
		"-cpu", "Haswell", "-m", "512,maxmem=4G,slots=2", "-serial", "file:"+m.console,
		"-object", "memory-backend-file,id=pm,share=off,readonly=on,mem-path="+filepath.Join(dir, "base")+",size="+strconv.Itoa(size),
		"-device", "nvdimm,memdev=pm,unarmed=on,addr=0x100000000", "-device", "virtio-net-pci,netdev=n,romfile=",
		"-netdev", fmt.Sprintf("user,id=n,hostfwd=tcp:127.0.0.1:%d-:%d", port, guestapi.Port),
		"-kernel", kernel, "-initrd", filepath.Join(dir, "initrd"),
		"-append", "console=ttyS0 quiet panic=-1 reboot=t audit=0 hib.ip=10.0.2.15/24 hib.gw=10.0.2.2 hib.mtu=1500 memmap="+strconv.Itoa(size)+"!0x100000000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			raw, _ := os.ReadFile(m.console)
			t.Logf("console:\n%s\n%s", raw, &stderr)
		}
	})
	m.guestUnderTest = &guestUnderTest{dial: func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	}}
	m.http = guestapi.HTTPClient(m.dial)
	m.control = guestapi.NewClient(m.dial)
	m.process = processconnect.NewProcessClient(m.http, guestapi.BaseURL, connect.WithInterceptors(withToken("access")))
	began := time.Now()
	if err := m.control.Health(m.context(t)); err != nil {
		t.Fatal(err)
	}
	t.Logf("booted to the agent's answer in %v", time.Since(began).Round(time.Millisecond))
	return m
}

func (m *machine) context(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), vmPatience)
	t.Cleanup(cancel)
	return ctx
}

func freePort(t *testing.T) int {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func run(t *testing.T, env []string, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

func buildInitramfs(t *testing.T, path, modules string) {
	agent := filepath.Join(t.TempDir(), "hib-guest")
	run(t, []string{"CGO_ENABLED=0"}, "go", "build", "-o", agent, "github.com/hibernacle/hibernacle/cmd/hib-guest")
	files := map[string]string{}
	err := filepath.WalkDir(modules, func(p string, _ os.DirEntry, err error) error {
		files[filepath.Base(p)] = p
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	w := cpio.NewWriter(out)
	add := func(name string, mode cpio.FileMode, content string) {
		if err := w.WriteHeader(&cpio.Header{Name: name, Mode: mode, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	add("init", cpio.TypeReg|0o755, readFile(t, agent))
	add("hib", cpio.TypeDir|0o755, "")
	add("hib/modules", cpio.TypeDir|0o755, "")
	list := ""
	for _, name := range vmModules {
		list += name + ".ko\n"
		add("hib/modules/"+name+".ko", cpio.TypeReg|0o644, readFile(t, files[name+".ko"]))
	}
	add("hib/modules.list", cpio.TypeReg|0o644, list+"missing.ko\n")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

// buildBase makes a base image with nothing but busybox in it.
func buildBase(t *testing.T, path string) int {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("the test's machine needs a static busybox")
	}
	root := t.TempDir()
	for _, dir := range []string{"bin", "etc", "home/user", "root"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(filepath.Join(root, "home/user"), 1000, 1000); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(root, "bin/busybox"), readFile(t, busybox))
	if err := os.Chmod(filepath.Join(root, "bin/busybox"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, applet := range strings.Fields("sh cat date echo hostname id ls mv nc ps sleep stat wc dd grep mount") {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", applet)); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, filepath.Join(root, "etc/passwd"), "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
	writeFile(t, filepath.Join(root, "etc/group"), "root:x:0:\nuser:x:1000:\n")
	run(t, nil, "mkfs.erofs", path, root)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	const unit = 2 << 20
	size := (int(info.Size()) + unit - 1) / unit * unit
	if err := os.Truncate(path, int64(size)); err != nil {
		t.Fatal(err)
	}
	return size
}

// withToken sends an access token with every call.
type withToken string

func (w withToken) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		r.Header().Set(guestapi.AccessHeader, string(w))
		return next(ctx, r)
	}
}

func (w withToken) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, s connect.Spec) connect.StreamingClientConn {
		c := next(ctx, s)
		c.RequestHeader().Set(guestapi.AccessHeader, string(w))
		return c
	}
}

func (w withToken) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// sh runs a script to its end and returns its output.
func (m *machine) sh(t *testing.T, script string) string {
	t.Helper()
	e := m.start(m.context(t), t, shell(script)).all()
	if e.end == nil || e.end.ExitCode != 0 {
		t.Fatalf("%s: end %v, error %v\n%s%s", script, e.end, e.err(), e.stdout.String(), e.stderr.String())
	}
	return e.stdout.String()
}

func shell(script string) *processpb.StartRequest {
	r := bash(script)
	r.Process.Cmd = "sh"
	return r
}

var testIdentity = guestapi.Identity{
	ID: "abc123", Hostname: "sandbox-abc123", MachineID: "0123456789abcdef0123456789abcdef",
	ControlToken: firstToken, AccessToken: "access", Env: map[string]string{"GREETING": "hello"},
}

func initOf(reason string, generation uint64, id *guestapi.Identity) guestapi.InitRequest {
	return guestapi.InitRequest{
		Reason: reason, UnixNano: time.Now().UnixNano(), Generation: generation, Identity: id,
		Entropy: bytes.Repeat([]byte("secret! "), 8),
	}
}

func (m *machine) init(t *testing.T, token string, req guestapi.InitRequest) guestapi.InitResponse {
	t.Helper()
	resp, err := m.control.Init(m.context(t), token, req)
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Warnings) > 0 {
		t.Errorf("init warns: %q", resp.Warnings)
	}
	t.Logf("init for %s took %v", req.Reason, resp.Steps)
	return resp
}

func (m *machine) testToken(t *testing.T) {
	_, err := m.control.Freeze(m.context(t), "", guestapi.FreezeRequest{Attempt: 1, Deadline: time.Minute})
	if !errors.Is(err, guestapi.ErrUnauthorized) {
		t.Fatalf("a freeze before the first init: %v", err)
	}
	id := testIdentity
	m.init(t, "", initOf(guestapi.ReasonBoot, 1, &id))
	if _, err := m.control.Init(m.context(t), "guess", initOf(guestapi.ReasonResume, 2, nil)); !errors.Is(err, guestapi.ErrUnauthorized) {
		t.Fatalf("an init with a wrong token: %v", err)
	}
	id.ControlToken = secondToken
	m.init(t, firstToken, initOf(guestapi.ReasonCreate, 2, &id))
	if _, err := m.control.Init(m.context(t), firstToken, initOf(guestapi.ReasonResume, 3, nil)); !errors.Is(err, guestapi.ErrUnauthorized) {
		t.Fatalf("an init with the old token: %v", err)
	}
	_, err = processconnect.NewProcessClient(m.http, guestapi.BaseURL).List(m.context(t), connect.NewRequest(&processpb.ListRequest{}))
	wantCode(t, err, connect.CodeUnauthenticated)
}

func (m *machine) testSystem(t *testing.T) {
	for _, c := range []struct{ script, want string }{
		{"hostname", "sandbox-abc123\n"},
		{"cat /etc/hostname /etc/machine-id /run/hib/id /run/hib/generation", "sandbox-abc123\n0123456789abcdef0123456789abcdef\nabc123\n2\n"},
		{"cat /etc/resolv.conf", "nameserver 10.0.2.2\n"},
		{"grep -c -e sandbox-abc123 -e host.hib.internal /etc/hosts", "2\n"},
		{"id -un; pwd; echo $GREETING", "user\n/home/user\nhello\n"},
		{"echo mine > f; stat -c %U:%G f", "user:user\n"},
		{"cat /proc/self/cgroup", "0::/user\n"},
		{"cat /proc/self/oom_score_adj", "0\n"},
		{"mount | grep -c ' / type overlay'", "1\n"},
		{"cmp /proc/sys/kernel/random/boot_id /run/hib/boot_id && wc -c </run/hib/boot_id", "37\n"},
		{"ls -d /dev/fd /dev/stdin /dev/shm/ /dev/pts/ptmx /sys/fs/cgroup/user", "/dev/fd\n/dev/pts/ptmx\n/dev/shm/\n/dev/stdin\n/sys/fs/cgroup/user\n"},
	} {
		if got := m.sh(t, c.script); got != c.want {
			t.Errorf("%s: got %q, want %q", c.script, got, c.want)
		}
	}
	seconds, err := strconv.ParseInt(strings.TrimSpace(m.sh(t, "date +%s")), 10, 64)
	if err != nil || time.Since(time.Unix(seconds, 0)).Abs() > 30*time.Second {
		t.Errorf("the guest's clock says %v (%v)", time.Unix(seconds, 0), err)
	}
	// Folders of the base can be renamed, and a chmod leaves the data where it is.
	root := shell("mv /home/user /home/other && mv /home/other /home/user && ls /home")
	e := m.start(m.context(t), t, root, "Authorization", "Basic cm9vdDo=").all()
	if e.stdout.String() != "user\n" {
		t.Errorf("renaming: %s%s", e.stdout.String(), e.stderr.String())
	}
	console := readFile(t, m.console)
	if strings.Contains(console, "cannot be mapped") || !strings.Contains(console, "missing.ko") {
		t.Errorf("the console shows:\n%s", console)
	}
	terminal := interactive("tty")
	terminal.Process.Cmd, terminal.Process.Args = "sh", []string{"-c", "ls -l /proc/self/fd/0"}
	terminal.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: 80, Rows: 24}}
	if p := m.start(m.context(t), t, terminal).all(); !strings.Contains(p.pty.String(), "/dev/pts/") {
		t.Errorf("a terminal: %q %v", p.pty.String(), p.end)
	}
}

func (m *machine) testOrphans(t *testing.T) {
	m.sh(t, "for i in 1 2 3 4 5 6 7 8; do (sleep 0.1 &) ; done; exit 0")
	waitFor(t, "all orphans to be reaped", func() bool {
		return !strings.Contains(m.sh(t, "ps -o stat,comm; true"), "sleep")
	})
	for i := range 5 {
		e := m.start(m.context(t), t, shell(fmt.Sprintf("(true &); exit %d", i))).all()
		if e.end.GetExitCode() != int32(i) {
			t.Errorf("exit status %d became %v", i, e.end)
		}
	}
}

func (m *machine) testSockets(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var held sync.WaitGroup
	held.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
		}
	})
	defer func() { l.Close(); held.Wait() }()
	ctx := m.context(t)
	outward := shell(fmt.Sprintf("echo go; sleep 600 | nc 10.0.2.2 %d; echo outward ended", l.Addr().(*net.TCPAddr).Port))
	inward := shell("(sleep 600 | nc -l -p 7000) & sleep 1; echo go; (echo hi; sleep 600) | nc 127.0.0.1 7000; echo inward ended")
	out, in := m.start(ctx, t, outward), m.start(ctx, t, inward)
	out.until("the outward connection", func() bool { return out.stdout.Len() > 0 })
	in.until("the inward connection", func() bool { return in.stdout.Len() > 0 })
	established := func() int {
		n, _ := strconv.Atoi(strings.TrimSpace(m.sh(t, "cat /proc/net/tcp /proc/net/tcp6 | grep -c ' 01 '")))
		return n
	}
	// Two loopback ends, the outward one, the two streams, and that of the script that counts.
	waitFor(t, "the connections to be there", func() bool { return established() == 6 })

	resp := m.init(t, secondToken, initOf(guestapi.ReasonResume, 3, nil))
	if resp.SocketsDestroyed < 3 {
		t.Errorf("%d sockets were destroyed, want the outward one and two streams", resp.SocketsDestroyed)
	}
	again := m.init(t, secondToken, initOf(guestapi.ReasonResume, 3, nil))
	if again.Steps["sockets"] != resp.Steps["sockets"] {
		t.Errorf("the same init was done twice")
	}
	if out.all(); out.end != nil || out.err() == nil {
		t.Errorf("the stream from before the resume ended with %v, error %v", out.end, out.err())
	}
	waitFor(t, "only loopback connections to be left", func() bool { return established() == 3 })
	back := m.attach(m.context(t), t, byPID(out.pid), true)
	if _, err := m.process.SendSignal(m.context(t), connect.NewRequest(&processpb.SendSignalRequest{Process: byPID(in.pid), Signal: 9})); err != nil {
		t.Error(err)
	}
	// nc ends with its connection; the sleep that feeds it holds the pipeline.
	_, err = m.process.SendSignal(m.context(t), connect.NewRequest(&processpb.SendSignalRequest{Process: byPID(out.pid), Signal: 9}))
	if err != nil {
		t.Error(err)
	}
	if back.all(); !strings.HasPrefix(back.stdout.String(), "go\n") || back.end == nil {
		t.Errorf("reattached: %q, %v", back.stdout.String(), back.end)
	}
	if got := m.sh(t, "cat /run/hib/generation"); got != "3\n" {
		t.Errorf("generation %q", got)
	}
}

func (m *machine) testFreeze(t *testing.T) {
	ctx := m.context(t)
	counter := m.start(ctx, t, shell("i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.05; done"))
	defer m.process.SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{Process: byPID(counter.pid), Signal: 9}))
	waitFor(t, "the counter to run", func() bool { return m.file(t, "count") != "" })
	freeze := func(attempt uint64, deadline time.Duration) error {
		resp, err := m.control.Freeze(ctx, secondToken, guestapi.FreezeRequest{Attempt: attempt, Deadline: deadline})
		if err == nil {
			t.Logf("freeze took %v", resp.Steps)
		}
		if len(resp.Warnings) > 0 {
			t.Errorf("freeze warns: %q", resp.Warnings)
		}
		return err
	}
	if err := freeze(1, vmPatience); err != nil {
		t.Fatal(err)
	}
	// A process that is started now waits, and the agent goes on to answer.
	waiting := make(chan string)
	go func() {
		e := events{t: t}
		s, err := m.process.Start(ctx, connect.NewRequest(shell("echo started")))
		if err != nil {
			waiting <- err.Error()
			return
		}
		e.err, e.receive = s.Err, func() *processpb.ProcessEvent {
			if !s.Receive() {
				return nil
			}
			return s.Msg().GetEvent()
		}
		e.first()
		waiting <- e.all().stdout.String()
	}()
	before := m.file(t, "count")
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		if now := m.file(t, "count"); now != before {
			t.Fatalf("the counter went on from %s to %s", before, now)
		}
	}
	select {
	case got := <-waiting:
		t.Fatalf("a start did not wait: %q", got)
	default:
	}
	if _, err := m.control.Thaw(ctx, secondToken, guestapi.ThawRequest{Attempt: 1}); err != nil {
		t.Fatal(err)
	}
	if got := <-waiting; got != "started\n" {
		t.Errorf("the start that waited: %q", got)
	}
	waitFor(t, "the counter to go on", func() bool { return m.file(t, "count") != before })
	if err := freeze(1, vmPatience); !errors.Is(err, guestapi.ErrRefused) {
		t.Errorf("a thawed attempt: %v", err)
	}
	if err := freeze(2, 500*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	before = m.file(t, "count")
	waitFor(t, "the guest to thaw by itself", func() bool { return m.file(t, "count") != before })
	if err := freeze(2, time.Minute); !errors.Is(err, guestapi.ErrRefused) {
		t.Errorf("an attempt that thawed by itself: %v", err)
	}
	if err := freeze(3, vmPatience); err != nil {
		t.Fatal(err)
	}
	m.init(t, secondToken, initOf(guestapi.ReasonResume, 4, nil))
	before = m.file(t, "count")
	waitFor(t, "init to thaw", func() bool { return m.file(t, "count") != before })
}

// file returns a file of the user's as the agent serves it.
func (m *machine) file(t *testing.T, path string) string {
	t.Helper()
	status, body := m.request(t, http.MethodGet, path, nil)
	if status != http.StatusOK {
		return ""
	}
	return body
}

func (m *machine) request(t *testing.T, method, path string, body io.Reader) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(m.context(t), method, guestapi.BaseURL+"/files?path="+path, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(guestapi.AccessHeader, "access")
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := m.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

func (m *machine) testFullDisk(t *testing.T) {
	status, body := m.request(t, http.MethodPost, "big", io.LimitReader(zeros{}, 400<<20))
	if status != http.StatusInsufficientStorage {
		t.Errorf("an upload beyond the disk: %d %s", status, body)
	}
	if got := m.sh(t, "ls"); strings.Contains(got, "big") {
		t.Errorf("the file that did not fit is left: %s", got)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// testSize tells how much memory the agent takes.
func (m *machine) testSize(t *testing.T) {
	e := m.start(m.context(t), t, shell("grep -e VmRSS -e RssAnon -e RssFile /proc/1/status"), "Authorization", "Basic cm9vdDo=").all()
	t.Logf("the agent:\n%s", e.stdout.String())
}
