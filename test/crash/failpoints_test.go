// Package crash kills daemons and shims at named points, cuts the power under
// the commit path, and looks at what is left.
package crash

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestKillAtEveryStep kills the daemon or the shim at each named step of
// create, hibernate, resume, checkpoint, fork, restore and delete, starts the daemon again and checks that
// the last acknowledged state is there, that nothing half-written shows and
// that no VMM is left.
func TestKillAtEveryStep(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 5, 8000)
	d.Hib("hibernate", id)
	for _, point := range append(append([]string{}, sandbox.Failpoints...), shim.Failpoints...) {
		t.Run(point, func(t *testing.T) {
			last := srv.Get("/")
			d.Shell(id, "date >> log; sync")
			acknowledged := d.Shell(id, "wc -l < log")
			d.Hib("hibernate", id)
			d.RestartWith(hibtest.Bare) // ends a parked machine, which knows nothing of the failpoint

			reachedLog := filepath.Join(t.TempDir(), "reached")
			openToAll(t, reachedLog)
			d.RestartWith(flagsFor(point), "HIB_FAILPOINT="+point+"=kill", "HIB_FAILPOINT_LOG="+reachedLog)
			victim := ""
			reached := false
			hit := func() bool {
				b, err := os.ReadFile(reachedLog)
				return err == nil && len(b) > 0
			}
			for _, step := range [][]string{
				{"resume", id}, {"hibernate", id}, {"resume", id}, {"hibernate", id},
				{"create", "base", "--memory", "512", "--idle-timeout", "never"}, {"rm", "--force"},
				{"resume", id}, {"checkpoint", "create", id, "here"}, {"fork", id}, {"restore", id, "here"},
				{"create", "base", "--memory", "640", "--idle-timeout", "never"}, // the last: that shape is booted once
			} {
				if step[0] == "rm" {
					if victim == "" {
						continue
					}
					step = append(step, victim)
				}
				out, stderr, code := d.Try(step...)
				if step[0] == "hibernate" && code == 0 { // what comes behind the answer is of this step
					hibtest.Eventually(t, "the hibernation has ended", func() bool { return hit() || hasLeft(d, id) })
				}
				if hit() {
					// From the point on where a snapshot is whole, its shim's death is no failure.
					t.Logf("hib %s: exit %d: %s", strings.Join(step, " "), code, strings.TrimSpace(stderr))
					reached = true
					break
				}
				if code != 0 {
					t.Fatalf("hib %s: exit %d: %s", strings.Join(step, " "), code, stderr)
				}
				if step[0] == "create" {
					victim = strings.TrimSpace(out)
				}
			}
			if !reached {
				t.Fatal("the failpoint was never reached")
			}
			d.RestartWith(nil)
			if sb := d.Inspect(id); sb.State == api.StateFailed {
				t.Logf("failed: %s", sb.Reason)
				if sb.Reason == "" {
					t.Error("failed without a reason")
				}
				d.Hib("resume", id)
			} else if sb.State != api.StateStandby && sb.State != api.StateRunning {
				t.Errorf("after the restart the sandbox is %s", sb.State)
			}
			now := srv.Get("/sum")
			if now.PID != last.PID || now.Counter < last.Counter || now.Sum != srv.WantSum() {
				t.Errorf("the server says %+v, before %+v", now, last)
			}
			if lines := d.Shell(id, "wc -l < log"); lines != acknowledged {
				t.Errorf("%s lines in the log, want %s", lines, acknowledged)
			}
			d.Hib("store", "verify")
			for _, sb := range d.List() {
				if sb.ID != id {
					d.Hib("rm", "--force", sb.ID)
				}
			}
			d.Try("checkpoint", "rm", id, "here")
			if n := len(d.Shims()); n != 1 {
				t.Errorf("%d machines run, want 1", n)
			}
			d.Hibernate(id)
			if n := len(d.Parked()); n != 1 {
				t.Errorf("%d machines are parked, want 1", n)
			}
			d.RestartWith(hibtest.Bare)
			d.Settle()
			if left := d.Processes(); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			d.RestartWith(nil)
		})
	}
}

// hasLeft reports whether the sandbox's last hibernation has ended; false: it has
// not, or the daemon does not answer.
func hasLeft(d *hibtest.Daemon, id string) bool {
	var sb api.Sandbox
	out, _, code := d.Try("--json", "inspect", id)
	return code == 0 && json.Unmarshal([]byte(out), &sb) == nil && hibtest.HasLeft(sb)
}

// flagsFor returns the flags of a daemon that comes to the point: some stand
// where a machine is started for its sandbox.
func flagsFor(point string) []string {
	for _, step := range []string{".launched", ".handle", ".prepared"} {
		if strings.HasSuffix(point, step) {
			return hibtest.Bare
		}
	}
	return nil
}

// TestKillDuringCompaction kills the daemon at each named step of a compaction
// and checks that what was hibernated is there and goes on.
func TestKillDuringCompaction(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 5, 8000)
	d.Hib("hibernate", id)
	for _, point := range sandbox.CompactFailpoints {
		t.Run(point, func(t *testing.T) {
			last := srv.Get("/")
			d.Shell(id, "date >> log; sync")
			acknowledged := d.Shell(id, "wc -l < log")
			reachedLog := filepath.Join(t.TempDir(), "reached")
			openToAll(t, reachedLog)
			d.Restart("HIB_FAILPOINT="+point+"=kill", "HIB_FAILPOINT_LOG="+reachedLog)
			reached := func() bool {
				b, err := os.ReadFile(reachedLog)
				return err == nil && len(b) > 0
			}
			for cycle := 0; cycle < 16 && !reached(); cycle++ { // half of them make a compaction worth it
				for _, step := range []string{"hibernate", "resume"} {
					if _, stderr, code := d.Try(step, id); code != 0 && !reached() {
						t.Fatalf("hib %s: exit %d: %s", step, code, stderr)
					}
				}
			}
			if !reached() { // each was cancelled by the hibernation after it: let one come to its end
				d.Try("hibernate", id)
				hibtest.Eventually(t, "the failpoint is reached", reached)
			}
			d.Restart()
			if sb := d.Inspect(id); sb.State != api.StateStandby && sb.State != api.StateRunning {
				t.Errorf("after the restart the sandbox is %s: %s", sb.State, sb.Reason)
			}
			now := srv.Get("/sum")
			if now.PID != last.PID || now.Counter < last.Counter || now.Sum != srv.WantSum() {
				t.Errorf("the server says %+v, before %+v", now, last)
			}
			if lines := d.Shell(id, "wc -l < log"); lines != acknowledged {
				t.Errorf("%s lines in the log, want %s", lines, acknowledged)
			}
			d.Hib("store", "verify")
			d.Hib("hibernate", id)
		})
	}
}

// openToAll makes a file that every account can write to, in folders that every
// account can pass.
func openToAll(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(path); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}
