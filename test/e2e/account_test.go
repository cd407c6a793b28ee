package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestOrdinaryUser: the daemon, its shims and its VMMs need no root.
func TestOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("every other test shows it: this one is for root")
	}
	const uid, gid = 65534, 65534 // nobody: FUSE mounts need a name
	d := hibtest.StartAs(t, uid, gid)
	id := d.Create("--memory", "512")
	d.Shell(id, "echo kept > note")
	checkUsers(t, d, uid)
	d.Hib("hibernate", id)
	d.Restart()
	if got := d.Shell(id, "cat note"); got != "kept" {
		t.Errorf("after the hibernation: %q", got)
	}
	checkUsers(t, d, uid)
}

// TestRootDropsPrivileges: a daemon that runs as root starts shims and VMMs
// under another account.
func TestRootDropsPrivileges(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	d := hibtest.Start(t)
	d.Create("--memory", "512")
	for pid, args := range d.Processes() {
		if uid := uidOf(t, pid); uid == 0 {
			t.Errorf("process %d runs as root: %s", pid, args)
		}
	}
}

func checkUsers(t *testing.T, d *hibtest.Daemon, want int) {
	t.Helper()
	processes := d.Processes()
	if len(processes) < 2 {
		t.Errorf("shim and VMM are expected, there is %v", processes)
	}
	for pid, args := range processes {
		if uid := uidOf(t, pid); uid != want {
			t.Errorf("process %d runs as user %d, not %d: %s", pid, uid, want, args)
		}
	}
}

func uidOf(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(b), "\nUid:")
	var uid int
	if _, err := fmt.Sscan(line, &uid); err != nil {
		t.Fatal(err)
	}
	return uid
}
