package e2e

import (
	"bufio"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestAgentsGuide runs the commands of docs/agents.md as they stand there.
func TestAgentsGuide(t *testing.T) {
	d := hibtest.Start(t)
	guide, err := os.Open("../../docs/agents.md")
	if err != nil {
		t.Fatal(err)
	}
	defer guide.Close()
	var script strings.Builder
	inside := false
	for lines := bufio.NewScanner(guide); lines.Scan(); {
		switch line := lines.Text(); {
		case line == "```sh":
			inside = true
		case line == "```":
			inside = false
		case inside:
			script.WriteString(line + "\n")
		}
	}
	cmd := exec.Command("bash", "-euxo", "pipefail", "-c", script.String())
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "HIB_DATA="+d.Data, "PATH="+os.Getenv("HIB_TEST_BIN")+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"pre-hibernate note, reason hibernate: done", "post-resume 10-clock, reason resume: ", "warm", "secret-of-"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the commands printed no %q", want)
		}
	}
}

// installHooks puts the examples, and files of the test, into a sandbox.
func installHooks(d *hibtest.Daemon, id string, files map[string]string) {
	for path, text := range files {
		d.WriteFile(id, "/tmp/hook", []byte(text))
		d.Shell(id, "sudo mkdir -p "+filepath.Dir(path)+"; sudo install -o root -m 755 /tmp/hook "+path)
	}
}

func example(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile("../../examples/hooks/" + path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestExampleHooks: a client is told to connect anew, a file system that was
// lost is mounted, a copy gets host keys only where there is a generator.
func TestExampleHooks(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	connections := make(chan net.Conn, 16)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(connections)
				return
			}
			connections <- c
		}
	}()
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512", "--allow", "host:"+port)
	files := map[string]string{"/usr/local/bin/client.py": example(t, "client.py")}
	for _, name := range []string{"30-reconnect", "40-remount.background", "50-ssh-host-keys"} {
		files["/etc/hib/hooks/post-resume.d/"+name] = example(t, "post-resume.d/"+name)
	}
	installHooks(d, id, files)
	d.Shell(id, "sudo mkdir -p /run/clients /mnt/lost; sudo chmod 777 /run/clients; echo /mnt/lost | sudo tee /etc/hib/remount; echo 'none /mnt/lost tmpfs size=1m 0 0' | sudo tee -a /etc/fstab")
	d.Hib("exec", "-d", id, "--", "python3", "/usr/local/bin/client.py", "host.hib.internal", port, "/run/clients/one.pid")
	accept := func() net.Conn {
		t.Helper()
		select {
		case c := <-connections:
			return c
		case <-time.After(hibtest.Patience):
			t.Fatal("the client does not connect")
		}
		return nil
	}
	first := accept()
	defer first.Close()
	d.Hib("hibernate", id)
	d.Hib("resume", id)
	defer accept().Close()
	hibtest.Eventually(t, "the file system is mounted", func() bool {
		_, _, code := d.Try("exec", id, "--", "mountpoint", "-q", "/mnt/lost")
		return code == 0
	})
	runs := map[string]api.HookRun{}
	hibtest.Eventually(t, "three hooks have run", func() bool {
		for _, r := range hookRuns(d, id) {
			runs[r.Name] = r
		}
		return len(runs) == 3
	})
	if r := runs["30-reconnect"]; r.Output != "told one\n" || r.ExitCode != 0 {
		t.Errorf("%+v", r)
	}
	if r := runs["40-remount.background"]; r.Output != "mounted /mnt/lost\n" || !r.Background {
		t.Errorf("%+v", r)
	}
	if r := runs["50-ssh-host-keys"]; r.ExitCode != 0 {
		t.Errorf("%+v", r)
	}
}

func hookRuns(d *hibtest.Daemon, id string) []api.HookRun {
	var runs []api.HookRun
	d.JSON(&runs, "logs", "--hooks", id)
	return runs
}

// TestHooksThatMisbehave: a hook that hangs, fails, prints without end, eats all
// memory or strikes at the agent delays a hibernation by its timeout at most.
func TestHooksThatMisbehave(t *testing.T) {
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512")
	d.Shell(id, "echo kept > note")
	for name, c := range map[string]struct {
		command, event string
		failed         bool
		says           string
	}{
		"hangs":     {"sleep 1000 & setsid sleep 1000", "pre-hibernate", true, "killed at its timeout"},
		"fails":     {"echo broken >&2; exit 4", "pre-hibernate", true, "exit code 4"},
		"prints":    {"head -c 1000000000 /dev/zero", "post-resume", true, ""},
		"memory":    {"exec python3 -c 'x=[bytearray(1<<20) for _ in range(100000)]'", "post-resume", true, "memory"},
		"kill-init": {"kill -9 1; kill -QUIT 1; kill -SEGV 1; kill -ABRT 1; echo alive", "post-resume", false, "done"},
		"kill-all":  {"kill -9 -1; echo alive", "pre-hibernate", false, "done"},
		"network":   {"ip link set eth0 down; ip route flush table main; echo alive", "pre-hibernate", false, "done"},
	} {
		t.Run(name, func(t *testing.T) {
			d.Hib("update", id, "--hooks", `[{"name": "bad", "event": "`+c.event+`", "timeout": "3s", "command": ["sh", "-c", "`+c.command+`"]},
				{"name": "next", "event": "`+c.event+`", "command": ["true"]}]`)
			before := len(hookRuns(d, id))
			d.Hib("hibernate", id)
			d.Hib("resume", id)
			runs := hookRuns(d, id)[before:]
			if len(runs) != 2 {
				t.Fatalf("runs: %+v", runs)
			}
			bad := runs[0]
			failed := bad.ExitCode != 0 || bad.Error != ""
			if failed != c.failed && name != "prints" || runs[1].ExitCode != 0 || len(bad.Output) > 70<<10 {
				t.Errorf("runs: %+v", runs)
			}
			if out := d.Hib("logs", "--hooks", id); !strings.Contains(out, c.says) {
				t.Errorf("logs say %s", out)
			}
			if name == "prints" && bad.DroppedBytes == 0 {
				t.Errorf("%+v", bad)
			}
			sb := d.Inspect(id)
			report := sb.LastHibernate.Phases
			if c.event == "post-resume" {
				report = sb.LastResume.Phases
			}
			if report["hooks"] <= 0 {
				t.Errorf("phases %v", report)
			}
			if got := d.Shell(id, "cat note"); got != "kept" {
				t.Errorf("the note is %q", got)
			}
			if name == "hangs" {
				if got := d.Shell(id, "pgrep -c sleep || true"); got != "0" {
					t.Errorf("%s processes of the hook are left", got)
				}
			}
		})
	}
}

// TestAHookThatReboots: what ends the machine is told as such, and the sandbox
// goes on from its last snapshot.
func TestAHookThatReboots(t *testing.T) {
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512")
	d.Shell(id, "echo kept > note")
	d.Hib("hibernate", id)
	d.Hib("resume", id)
	d.Hib("update", id, "--hooks", `[{"name": "bad", "event": "pre-hibernate", "command": ["sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo b > /proc/sysrq-trigger; sleep 5"]}]`)
	if out, stderr, code := d.Try("hibernate", id); code == 0 {
		t.Fatalf("it hibernated: %s %s", out, stderr)
	} else {
		t.Logf("hibernate says: %s", stderr)
	}
	sb := d.WaitState(id, api.StateFailed)
	if !strings.Contains(sb.Reason, "reboot") {
		t.Errorf("the reason is %q", sb.Reason)
	}
	d.Hib("update", id, "--hooks", "[]")
	d.Hib("resume", id)
	if got := d.Shell(id, "cat note"); got != "kept" {
		t.Errorf("the note is %q", got)
	}
}

// TestARequestEndsHooks: a request that cancels a hibernation does not wait for
// a hook's timeout, and the guest learns that the hibernation did not happen.
func TestARequestEndsHooks(t *testing.T) {
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512")
	d.Hib("update", id, "--hooks", `[{"name": "slow", "event": "pre-hibernate", "timeout": "1m", "command": ["sh", "-c", "touch /tmp/begun; sleep 1000"]},
		{"name": "back", "event": "post-resume", "command": ["sh", "-c", "echo $HIB_REASON"]}]`)
	generation := d.Shell(id, "cat /run/hib/generation")
	hibernated := make(chan int, 1)
	go func() {
		_, _, code := d.Try("hibernate", id)
		hibernated <- code
	}()
	d.WaitState(id, api.StateHibernating)
	hibtest.Eventually(t, "the request is served", func() bool {
		_, _, code := d.Try("exec", id, "--", "true")
		return code == 0
	})
	if code := <-hibernated; code == 0 {
		t.Fatal("it hibernated though a request came")
	}
	hibtest.Eventually(t, "the hook after the cancellation ran", func() bool {
		for _, r := range hookRuns(d, id) {
			if r.Name == "back" && r.Reason == "cancelled" && r.Output == "cancelled\n" {
				return true
			}
		}
		return false
	})
	for _, r := range hookRuns(d, id) {
		if r.TimedOut {
			t.Errorf("the hook was waited for: %+v", r)
		}
	}
	if now := d.Shell(id, "cat /run/hib/generation"); now != generation {
		t.Errorf("the generation went from %s to %s", generation, now)
	}
}
