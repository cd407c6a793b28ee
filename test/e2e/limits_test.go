package e2e

import (
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestDrainForARestart: what ran before a drain and a restart of the daemon goes on
// after it; meanwhile nothing starts and the caller is told why.
func TestDrainForARestart(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 30, 8000)
	other := d.Create("--memory", "512")
	d.Hib("hibernate", other)
	if out := d.Hib("drain"); out != id {
		t.Errorf("drained were %q, want %s", out, id)
	}
	for _, args := range [][]string{{"resume", other}, {"exec", id, "--", "true"}, {"create", "base"}} {
		if _, stderr, code := d.Try(args...); code == 0 || !strings.Contains(stderr, "hib drain --undo") {
			t.Errorf("hib %v: exit %d, %q", args, code, stderr)
		}
	}
	d.Restart()
	if got := srv.Get("/sum").Sum; got != srv.WantSum() {
		t.Errorf("checksum is %d, want %d", got, srv.WantSum())
	}
	if sb := d.Inspect(other); sb.State != api.StateStandby {
		t.Errorf("the other one is %s", sb.State)
	}
}

// TestLimits: a timeout hibernates a busy sandbox, whose next wake gives it the
// time anew; a ttl deletes it, however it is.
func TestLimits(t *testing.T) {
	d := hibtest.Start(t)
	busy := d.Create("--memory", "512", "--timeout", "4s")
	d.Shell(busy, "(while :; do :; done) >/dev/null 2>&1 & echo $! > pid")
	d.WaitState(busy, api.StateStandby)
	d.Shell(busy, "kill -0 $(cat pid)")
	d.WaitState(busy, api.StateStandby)
	d.Hib("update", busy, "--timeout", "never", "--ttl-idle", "2s")
	hibtest.Eventually(t, "it is deleted", func() bool { return len(d.List()) == 0 })
	if _, stderr, code := d.Try("inspect", busy); code == 0 || !strings.Contains(stderr, "not found") {
		t.Errorf("exit %d, %q", code, stderr)
	}
}
