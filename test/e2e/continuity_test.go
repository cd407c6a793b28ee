// Package e2e holds what a user would see: real daemons, real machines, the
// hib binary.
package e2e

import (
	"crypto/md5"
	"fmt"
	"math"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestContinuity: counter, process, listening port, files and 200 MB of state
// survive ten cycles that alternate with the daemon's death.
func TestContinuity(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 200, 8000)
	d.Shell(id, "mkdir -p work && seq 1 20000 > work/numbers && sync")
	first := srv.Get("/sum")
	if first.Sum != srv.WantSum() {
		t.Fatalf("checksum of the state is %d before any hibernation, want %d", first.Sum, srv.WantSum())
	}
	last := first
	for cycle := 1; cycle <= 10; cycle++ {
		d.Shell(id, "echo "+strings.Repeat("x", cycle)+" >> work/log")
		d.Hib("hibernate", id)
		if cycle%2 == 0 {
			d.Restart()
		}
		if cycle%4 == 1 { // running guests outlive the daemon as sleeping ones do
			d.Hib("resume", id)
			d.Restart()
		}
		now := srv.Get("/") // wakes it
		if now.PID != first.PID {
			t.Fatalf("cycle %d: the server's pid is %d, want %d", cycle, now.PID, first.PID)
		}
		if now.Counter < last.Counter {
			t.Fatalf("cycle %d: the counter went from %d back to %d", cycle, last.Counter, now.Counter)
		}
		if off := math.Abs(now.Time - float64(time.Now().UnixNano())/1e9); off > 1 {
			t.Errorf("cycle %d: the guest's clock is off by %.2f s", cycle, off)
		}
		last = now
	}
	if got := srv.Get("/sum").Sum; got != first.Sum {
		t.Errorf("checksum of 200 MB after ten cycles is %d, want %d", got, first.Sum)
	}
	if got, want := d.Shell(id, "md5sum < work/numbers; wc -l < work/log"), numbersMD5()+"  -\n10"; got != want {
		t.Errorf("files after ten cycles: %q, want %q", got, want)
	}
}

// numbersMD5 is the checksum of what "seq 1 20000" prints.
func numbersMD5() string {
	var b strings.Builder
	for i := 1; i <= 20000; i++ {
		fmt.Fprintln(&b, i)
	}
	return fmt.Sprintf("%x", md5.Sum([]byte(b.String())))
}

// TestDaemonIsNotTheGuest: the daemon's death does not reach the guests, and
// one shim's death does not reach the others.
func TestDaemonIsNotTheGuest(t *testing.T) {
	d := hibtest.Start(t)
	var servers []*hibtest.Server
	for range 4 {
		id := d.Create("--memory", "512")
		servers = append(servers, d.StartServer(id, 1, 8000))
	}
	before := map[string]hibtest.Answer{}
	for _, s := range servers {
		d.Hib("hibernate", s.ID) // a last snapshot to fall back to
		before[s.ID] = s.Get("/")
	}
	shims := d.Shims()
	if len(shims) != 4 {
		t.Fatalf("%d machines run, want 4", len(shims))
	}
	// The daemon stays away for so long that a guest that stands still meanwhile
	// shows: by few counts if its machine is stopped, by a gap if its processes are.
	const away = 5 * time.Second
	d.Kill()
	time.Sleep(away)
	d.Run()
	for _, s := range servers {
		now := s.Get("/")
		if now.PID != before[s.ID].PID {
			t.Errorf("sandbox %s: %+v before, %+v after the daemon's death", s.ID, before[s.ID], now)
		}
		// Twenty counts a second; an emulated machine on a loaded host makes fewer.
		if counted := now.Counter - before[s.ID].Counter; counted < int(away.Seconds()*5) {
			t.Errorf("sandbox %s counted only %d times in %s", s.ID, counted, away)
		}
		if limit := max(before[s.ID].LongestGap, away.Seconds()/2); now.LongestGap > limit {
			t.Errorf("sandbox %s: its counter stood still for %.1f s", s.ID, now.LongestGap)
		}
		if sb := d.Inspect(s.ID); sb.State != api.StateRunning {
			t.Errorf("sandbox %s is %s, want running", s.ID, sb.State)
		}
	}
	if again := d.Shims(); len(again) != 4 {
		t.Errorf("%d machines after the restart, want the same 4", len(again))
	} else {
		for _, h := range again {
			if !h.Alive() {
				t.Errorf("machine %s has ended", h.VM)
			}
		}
	}

	victim := shims[0]
	if err := syscall.Kill(victim.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	var failed api.Sandbox
	hibtest.Eventually(t, "the dead shim's sandbox is reported", func() bool {
		for _, sb := range d.List() {
			if sb.State == api.StateFailed {
				failed = sb
				return true
			}
		}
		return false
	})
	if failed.Reason == "" {
		t.Error("the failed sandbox has no reason")
	}
	t.Logf("reason: %s", failed.Reason)
	if _, stderr, code := d.Try("exec", failed.ID, "--", "true"); code == 0 || !strings.Contains(stderr, "hib resume") {
		t.Errorf("exec in a failed sandbox: exit %d, %q; want an error that tells the way out", code, stderr)
	}
	for _, s := range servers {
		if s.ID == failed.ID {
			continue
		}
		if now := s.Get("/"); now.PID != before[s.ID].PID {
			t.Errorf("sandbox %s noticed another one's death", s.ID)
		}
	}
	d.Hib("resume", failed.ID)
	for _, s := range servers {
		if s.ID == failed.ID {
			if now := s.Get("/"); now.PID != before[s.ID].PID || now.Counter == 0 {
				t.Errorf("sandbox %s after its last snapshot: %+v, before %+v", s.ID, now, before[s.ID])
			}
		}
	}
}
