package shim

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// TestHeadless: a process whose first thread has ended looks like a zombie, and
// is alive as long as another thread is.
func TestHeadless(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "headless", "process", "")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	eventually(t, "the first thread ends", func() bool {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		return err == nil && strings.Contains(string(stat), ") Z ")
	})
	h, err := newHandle("vm1", "/run/vm1/sock", pid)
	if err != nil || !h.Alive() {
		t.Errorf("%+v counts as dead: %v", h, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process ends", func() bool { return !h.Alive() })
	_ = cmd.Wait() // it was killed
}

func TestAlive(t *testing.T) {
	own, err := newHandle("vm1", "/run/vm1/sock", os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	zombie := exec.Command("true")
	if err := zombie.Start(); err != nil {
		t.Fatal(err)
	}
	pid := zombie.Process.Pid
	dead, err := newHandle("vm1", "/run/vm1/sock", pid)
	if err != nil { // it was that quick
		dead = Handle{BootID: own.BootID, PID: pid, StartTime: own.StartTime}
	}
	eventually(t, "the child ends", func() bool { _, err := startTime(pid); return err != nil })

	tests := []struct {
		name   string
		change func(h *Handle)
		want   bool
	}{
		{"this process", func(*Handle) {}, true},
		{"a zombie", func(h *Handle) { h.PID, h.StartTime = dead.PID, dead.StartTime }, false},
		{"a reused number", func(h *Handle) { h.StartTime-- }, false},
		{"another boot", func(h *Handle) { h.BootID = "4c5a0f6e-0000-0000-0000-000000000000" }, false},
		{"no boot", func(h *Handle) { h.BootID = "" }, false},
		{"no such process", func(h *Handle) { h.PID = 1 << 30 }, false},
		{"no process", func(h *Handle) { h.PID = 0 }, false},
		{"a group of processes", func(h *Handle) { h.PID = -h.PID }, false},
		{"nothing", func(h *Handle) { *h = Handle{} }, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := own
			tt.change(&h)
			if got := h.Alive(); got != tt.want {
				t.Errorf("Alive is %v for %+v", got, h)
			}
		})
	}
	if err := zombie.Wait(); err != nil {
		t.Fatal(err)
	}
	if dead.Alive() {
		t.Error("a process that was waited for is alive")
	}
}
