package e2e

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestGuestThatEnds: what the guest does to itself becomes a state with a
// reason, and the sandbox comes back from its last snapshot.
func TestGuestThatEnds(t *testing.T) {
	d := hibtest.Start(t)
	for _, tt := range []struct{ name, script, reason string }{
		{"power off", "echo o | sudo tee /proc/sysrq-trigger", "power"},
		{"reboot", "echo b | sudo tee /proc/sysrq-trigger", "reboot"},
		{"panic", "echo c | sudo tee /proc/sysrq-trigger", "panic"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			id := d.Create("--memory", "512")
			d.Shell(id, "echo kept > note")
			d.Hib("hibernate", id)
			d.Hib("resume", id)
			// Detached and a moment later, so that it strikes a guest at rest.
			d.Hib("exec", "-d", id, "--", "bash", "-c", "sudo sysctl -qw kernel.sysrq=1; sleep 0.5; "+tt.script)
			sb := d.WaitState(id, api.StateFailed)
			t.Logf("reason: %s", sb.Reason)
			if !strings.Contains(strings.ToLower(sb.Reason), tt.reason) {
				t.Errorf("the reason %q does not speak of %q", sb.Reason, tt.reason)
			}
			d.Hib("resume", id)
			if got := d.Shell(id, "cat note"); got != "kept" {
				t.Errorf("after the way out: %q", got)
			}
			d.Hib("rm", id)
		})
	}
}

// TestKillVMM: a VMM that dies is told with its reason.
func TestKillVMM(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	d.Hib("hibernate", id)
	d.Hib("resume", id)
	kill(t, d.VMM())
	sb := d.WaitState(id, api.StateFailed)
	t.Logf("reason: %s", sb.Reason)
	d.Hib("resume", id)
	d.Shell(id, "true")
	kill(t, d.VMM())
	d.WaitState(id, api.StateFailed)
	d.Hib("rm", id) // works from every state
	// A machine of the pool that is just being started is not told from others.
	hibtest.Eventually(t, "nothing is left behind", func() bool { return len(d.Left()) == 0 })
}

// TestRequestsWake: exec, file calls and a port-forward wake a sandbox.
func TestRequestsWake(t *testing.T) {
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512", "--name", "sleeper")
	srv := d.StartServer(id, 1, 8000)
	for _, tt := range []struct {
		name string
		do   func(t *testing.T)
	}{
		{"exec", func(t *testing.T) { d.Shell("sleeper", "true") }},
		{"download", func(t *testing.T) {
			if out := d.Hib("cp", id+":/etc/hostname", "-"); out == "" {
				t.Error("nothing came")
			}
		}},
		{"upload", func(t *testing.T) { d.WriteFile(id, "/tmp/x", []byte("y")) }},
		{"port-forward", func(t *testing.T) {
			if a := d.Forward(t, id, srv.Port); a.PID == 0 {
				t.Error("the server did not answer")
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d.Hibernate(id)
			if left := d.Processes(); len(left) > 0 {
				t.Errorf("standby holds processes: %v", left)
			}
			if sb := d.Inspect(id); sb.State != api.StateStandby {
				t.Fatalf("the sandbox is %s, want standby", sb.State)
			}
			tt.do(t)
			if sb := d.Inspect(id); sb.State != api.StateRunning {
				t.Errorf("the sandbox is %s, want running", sb.State)
			}
		})
	}
}

// TestProcessesOutliveStandby: a process is listed after a resume and can be
// reattached, its output goes on.
func TestProcessesOutliveStandby(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	pid := strings.TrimSpace(d.Hib("exec", "-d", id, "--", "bash", "-c", "echo first; while [ ! -e go ]; do sleep 0.1; done; echo last; exit 7"))
	for range 3 {
		d.Hib("hibernate", id)
		d.Hib("resume", id)
	}
	d.Shell(id, "touch go")
	out, stderr, code := d.Try("exec", "--attach", pid, id)
	if code != 7 || !strings.Contains(out, "first") || !strings.Contains(out, "last") {
		t.Errorf("reattach by pid %s: exit %d, output %q, %q", pid, code, out, stderr)
	}
}

// TestRequestsMeetHibernation: a request at any instant of a hibernation is
// answered once, whether it cancels the hibernation or wakes the sandbox.
func TestRequestsMeetHibernation(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	const rounds = 12
	cancelled := 0
	for round := range rounds {
		answered := make(chan string, 1)
		var code int
		var stderr string
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, stderr, code = d.Try("hibernate", id)
		}()
		go func() {
			time.Sleep(time.Duration(round*8) * time.Millisecond) // another instant each time
			out, errOut, execCode := d.Try("exec", id, "--", "bash", "-c", "echo once >> asked; wc -l < asked")
			if execCode != 0 {
				out = errOut
			}
			answered <- strings.TrimSpace(out)
		}()
		if got, want := <-answered, strconv.Itoa(round+1); got != want {
			t.Fatalf("round %d: the request was answered with %q, want %q", round, got, want)
		}
		<-done
		switch {
		case code == 0:
		case strings.Contains(stderr, "cancel"):
			cancelled++
		default:
			t.Errorf("round %d: hibernate: exit %d: %s", round, code, stderr)
		}
	}
	t.Logf("%d of %d hibernations were cancelled by a request", cancelled, rounds)
	if got := d.Shell(id, "wc -l < asked"); got != strconv.Itoa(rounds) {
		t.Errorf("%s requests were carried out, want %d", got, rounds)
	}
}
