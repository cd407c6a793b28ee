package e2e

import (
	"fmt"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestParkedContinuity: what holds over a resume holds over the end of a
// parking too: counter, process, checksum, the clock, fresh randomness; open
// connections to the outside are reset; and a hibernation behind it stores only
// what changed since the one before.
func TestParkedContinuity(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 50, 8000)
	first := srv.Get("/sum")
	sb := d.Hibernate(id)
	whole := sb.Snapshot.StoredBytes
	last, seen := first, map[string]bool{}
	for cycle := 1; cycle <= 8; cycle++ {
		if sb.State != api.StateStandby || !sb.Parked || len(d.Parked()) != 1 {
			t.Fatalf("cycle %d: it is %s, parked: %v", cycle, sb.State, sb.Parked)
		}
		if cycle%3 == 0 { // the next daemon finds it parked
			d.Restart()
		}
		now := srv.Get("/")
		if tier := d.Inspect(id).LastResume.Tier; tier != "parked" {
			t.Errorf("cycle %d: resumed from %q", cycle, tier)
		}
		if now.PID != first.PID || now.Counter < last.Counter {
			t.Fatalf("cycle %d: the server was %+v, now it is %+v", cycle, last, now)
		}
		if off := math.Abs(now.Time - float64(time.Now().UnixNano())/1e9); off > 1 {
			t.Errorf("cycle %d: the guest's clock is off by %.2f s", cycle, off)
		}
		random := d.Shell(id, "head -c 16 /dev/urandom | md5sum; cat /run/hib/generation")
		if seen[random] {
			t.Errorf("cycle %d: randomness or generation %q came twice", cycle, random)
		}
		seen[random], last = true, now
		d.Shell(id, "echo line >> log")
		sb = d.Hibernate(id)
		if stored := sb.Snapshot.StoredBytes; stored > whole/4 {
			t.Errorf("cycle %d: %d bytes were stored, %d for the first snapshot", cycle, stored, whole)
		}
	}
	// The snapshot says the same as the machine that was parked.
	d.RestartWith(hibtest.Bare)
	if now := srv.Get("/sum"); now.PID != first.PID || now.Sum != srv.WantSum() || now.Counter < last.Counter {
		t.Errorf("from the last snapshot: %+v, parked: %+v", now, last)
	}
	if lines := d.Shell(id, "wc -l < log"); lines != "8" {
		t.Errorf("%s lines in the log, want 8", lines)
	}
}

// TestParkedKilled: a parked machine is a cache. Its death loses nothing.
func TestParkedKilled(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	d.Shell(id, "echo kept > note")
	d.Hibernate(id)
	parked := d.Parked()
	if len(parked) != 1 {
		t.Fatalf("%d machines are parked", len(parked))
	}
	kill(t, parked[0].PID)
	hibtest.Eventually(t, "its end is noticed", func() bool { return !d.Inspect(id).Parked })
	if sb := d.Inspect(id); sb.State != api.StateStandby {
		t.Errorf("it is %s", sb.State)
	}
	if got := d.Shell(id, "cat note"); got != "kept" {
		t.Errorf("from the snapshot: %q", got)
	}
	if tier := d.Inspect(id).LastResume.Tier; tier != "local" {
		t.Errorf("resumed from %q", tier)
	}
}

// TestParkedConnections: an open connection to the outside is reset on both
// sides, so that nobody waits for what will not come.
func TestParkedConnections(t *testing.T) {
	d := hibtest.Start(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	port := listener.Addr().(*net.TCPAddr).Port
	id := d.Create("--memory", "512", "--allow", fmt.Sprintf("host:%d", port))
	d.WriteFile(id, "/home/user/client.py", fmt.Appendf(nil, `
import socket
s = socket.create_connection(("host.hib.internal", %d))
try:
    s.recv(1)
    print("closed", file=open("/home/user/end", "w"))
except OSError as e:
    print("reset", file=open("/home/user/end", "w"))
`, port))
	d.Hib("exec", "-d", id, "--", "python3", "/home/user/client.py")
	peer, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	d.Hib("hibernate", id)
	if err := peer.SetReadDeadline(time.Now().Add(hibtest.Patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("the peer outside got %v", err)
	}
	d.Hib("resume", id)
	if tier := d.Inspect(id).LastResume.Tier; tier != "parked" {
		t.Errorf("resumed from %q", tier)
	}
	hibtest.Eventually(t, "the client in the guest is told", func() bool {
		out, _, code := d.Try("exec", id, "--", "cat", "/home/user/end")
		return code == 0 && out == "reset\n"
	})
}

// TestPoolIsUsed: a creation and a resume take a machine that was started
// before, and the daemon keeps others ready.
func TestPoolIsUsed(t *testing.T) {
	d := hibtest.Start(t)
	ready := func() {
		t.Helper()
		hibtest.Eventually(t, "machines are ready", func() bool { return len(d.Waiting()) == 2 })
	}
	first := d.Create("--memory", "512")
	ready()
	id := d.Create("--memory", "512")
	if !d.Inspect(id).LastResume.Pooled {
		t.Error("a creation took no machine of the pool")
	}
	d.Shell(id, "echo kept > note")
	d.Hib("hibernate", id)
	d.RestartWith([]string{"--parked-memory", "0"})
	ready()
	if got := d.Shell(id, "cat note"); got != "kept" {
		t.Errorf("it has %q", got)
	}
	if r := d.Inspect(id).LastResume; !r.Pooled || r.Tier != "local" {
		t.Errorf("a resume took no machine of the pool: %+v", r)
	}
	d.Kill()
	hibtest.Eventually(t, "only those of sandboxes outlive the daemon", func() bool {
		return len(hibtest.ProcessesOf(d.RunDir())) == 4
	})
	d.Run()
	d.Shell(first, "true")
	d.Shell(id, "true")
}
