package e2e

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestPagerEnds: the FUSE connection of a running guest is aborted. That is
// noticed, the sandbox goes on from its last snapshot by itself and says so; when it
// happens again at once, it has failed.
func TestPagerEnds(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to abort a FUSE connection")
	}
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 20, 8000)
	first := srv.Get("/sum")
	d.Hib("hibernate", id)
	d.Shell(id, "echo lost > note")
	abortPager(t, d)
	hibtest.Eventually(t, "it went back", func() bool {
		sb := d.Inspect(id)
		return sb.State == api.StateRunning && len(sb.LastResume.Warnings) > 0
	})
	if w := d.Inspect(id).LastResume.Warnings; !strings.Contains(strings.Join(w, "\n"), "memory could not be served") {
		t.Errorf("the warnings are %q", w)
	}
	if log := d.Log(); !strings.Contains(log, "the pager's mount has ended") {
		t.Error("the daemon's log does not tell why")
	}
	if now := srv.Get("/sum"); now.PID != first.PID || now.Counter < first.Counter || now.Sum != srv.WantSum() {
		t.Errorf("the server says %+v, before %+v", now, first)
	}
	if _, _, code := d.Try("exec", id, "--", "test", "-e", "note"); code != 1 {
		t.Errorf("test -e note: exit %d; it is not the snapshot that it went back to", code)
	}
	abortPager(t, d)
	if sb := d.WaitState(id, api.StateFailed); !strings.Contains(sb.Reason, "memory could not be served") {
		t.Errorf("reason: %q", sb.Reason)
	}
	d.Hib("resume", id)
	if now := srv.Get("/sum"); now.PID != first.PID || now.Sum != srv.WantSum() {
		t.Errorf("the server says %+v, before %+v", now, first)
	}
}

// abortPager ends the FUSE connection of the only machine from outside.
func abortPager(t *testing.T, d *hibtest.Daemon) {
	t.Helper()
	mounts := d.Mounts()
	if len(mounts) != 1 {
		t.Fatalf("mounted are %v", mounts)
	}
	if err := unix.Unmount(mounts[0], unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
}
