package qemu

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/pager"
	"github.com/hibernacle/hibernacle/internal/vmm/vmmtest"
)

func milliseconds(do func()) float64 {
	start := time.Now()
	do()
	return float64(time.Since(start)) / float64(time.Millisecond)
}

// TestGuestSeesItsDevices boots at a place whose path is longer than a socket
// address and holds what QEMU's option syntax is sensitive to.
func TestGuestSeesItsDevices(t *testing.T) {
	s := setup(t, Config{}, 1)
	rig := s.NewRig(t)
	deep := filepath.Join(t.TempDir(), "a,b=c", strings.Repeat("long ", 40))
	check(t, os.MkdirAll(deep, 0o700))
	for _, path := range []*string{&rig.Spec.MemoryPath, &rig.Spec.BaseImage, &rig.Spec.Dir} {
		moved := filepath.Join(deep, filepath.Base(*path))
		check(t, os.Rename(*path, moved))
		*path = moved
	}
	rig.Spec.NetSocket = filepath.Join(deep, "net")
	frames := listenForFrames(t, rig.Spec.NetSocket)

	before := time.Now().Unix()
	m := s.Boot(t, rig, "")
	rig.Console.Wait(s.Context(t), t, 1)

	said := regexp.MustCompile(`guest base "(.*)" time (\d+)`).FindStringSubmatch(rig.Console.String())
	if said == nil {
		t.Fatalf("the guest said:\n%s", rig.Console)
	}
	if said[1] != vmmtest.BaseText {
		t.Errorf("the guest reads %q from the base image", said[1])
	}
	if clock, _ := strconv.ParseInt(said[2], 10, 64); clock < before-1 || clock > time.Now().Unix()+1 {
		t.Errorf("the guest's clock is %d, the host's was %d at its start", clock, before)
	}
	select {
	case frame := <-frames:
		if source := net.HardwareAddr(frame[6:12]).String(); source != rig.Spec.MAC {
			t.Errorf("the card sends as %s, not %s", source, rig.Spec.MAC)
		}
	case <-s.Context(t).Done():
		t.Error("the guest sends no frame")
	}
	s.Snapshot(t, rig, m) // the state's file lies at a long path, too
}

// listenForFrames returns a channel that takes the first frame of a network card.
func listenForFrames(t *testing.T, path string) <-chan []byte {
	t.Helper()
	dir, err := os.Open(filepath.Dir(path))
	check(t, err)
	defer dir.Close()
	l, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
	check(t, err)
	frames, done := make(chan []byte, 1), make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		var length [4]byte
		if _, err := io.ReadFull(c, length[:]); err != nil {
			return
		}
		frame := make([]byte, min(binary.BigEndian.Uint32(length[:]), 1<<16))
		if _, err := io.ReadFull(c, frame); err == nil && len(frame) >= 14 {
			frames <- frame
		}
		io.Copy(io.Discard, c)
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return frames
}

// TestNoHugePages looks at the advice that the kernel has for guest RAM.
func TestNoHugePages(t *testing.T) {
	s := setup(t, Config{}, 1)
	rig := s.NewRig(t)
	m := s.Start(t, rig)
	smaps := string(readFile(t, fmt.Sprintf("/proc/%d/smaps", m.PID())))
	mappings := regexp.MustCompile(`(?m)^[0-9a-f]+-[0-9a-f]+ .*\n(?:\w+:.*\n)*VmFlags:(.*)\n`).FindAllStringSubmatch(smaps, -1)
	found := false
	for _, mapping := range mappings {
		if !strings.Contains(mapping[0], rig.Spec.MemoryPath+"\n") {
			continue
		}
		found = true
		for _, flag := range strings.Fields(mapping[1]) {
			if flag == "hg" || flag == "mg" {
				t.Errorf("guest RAM is mapped with flag %s", flag)
			}
		}
	}
	if !found {
		t.Errorf("no mapping of guest RAM among %d", len(mappings))
	}
	if status, want := string(readFile(t, fmt.Sprintf("/proc/%d/status", m.PID()))), "NoNewPrivs:\t1"; !strings.Contains(status, want) {
		t.Errorf("QEMU runs without %q", want)
	}
	if status := string(readFile(t, "/proc/thread-self/status")); !strings.Contains(status, "NoNewPrivs:\t0") || !strings.Contains(status, "Seccomp:\t0") {
		t.Errorf("the confinement reached another thread:\n%s", status)
	}
}

// TestPagedMemory resumes a machine from a pager that is bound after its start.
func TestPagedMemory(t *testing.T) {
	s := setup(t, Config{}, 1)
	img := s.BootSnapshot(t)
	mount := t.TempDir()
	server, err := pager.Mount(mount, nil)
	check(t, err)
	t.Cleanup(func() { server.Close() })
	for i := range 2 {
		slot, err := server.NewSlot("vm"+strconv.Itoa(i), s.Shape.MemoryBytes())
		check(t, err)
		rig := s.NewRig(t)
		rig.Spec.MemoryPath = slot.Path()
		m := s.Start(t, rig)
		if reads := slot.Stats().Reads; reads != 0 {
			t.Errorf("QEMU made %d reads of its memory before a state was loaded", reads)
		}
		check(t, slot.Bind(bytes.NewReader(img.RAM)))
		check(t, m.LoadState(s.Context(t), bytes.NewReader(img.State)))
		check(t, m.Run(s.Context(t)))
		s.GoesOn(t, rig, img)
		stats := slot.Stats()
		if stats.BytesRead == 0 || stats.BytesRead > s.Shape.MemoryBytes()/4 {
			t.Errorf("a resume of %d bytes of memory read %d", s.Shape.MemoryBytes(), stats.BytesRead)
		}
		t.Logf("%d reads, %d KiB", stats.Reads, stats.BytesRead>>10)
		img = s.SnapshotOver(t, rig, m, img.RAM)
		check(t, m.Close())
	}
}

// TestDiesWithItsParent kills a process that started a machine.
func TestDiesWithItsParent(t *testing.T) {
	const role = "HIB_TEST_PARENT"
	s := setup(t, Config{}, 1)
	if os.Getenv(role) != "" {
		fmt.Printf("machine %d\n", s.Start(t, s.NewRig(t)).PID())
		select {}
	}
	parent := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	parent.Env = append(os.Environ(), role+"=1", "TMPDIR="+t.TempDir()) // it cannot clean up itself
	out, err := parent.StdoutPipe()
	check(t, err)
	check(t, parent.Start())
	var pid int
	_, err = fmt.Fscanf(out, "machine %d\n", &pid)
	check(t, err)
	check(t, parent.Process.Kill())
	parent.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for syscall.Kill(pid, 0) == nil && !isZombie(pid) {
		select {
		case <-ctx.Done():
			t.Fatalf("QEMU, process %d, outlives its parent", pid)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// isZombie tells whether a process has ended and only waits to be reaped by
// whoever inherited it.
func isZombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(stat), ") Z ")
}

// TestWrapCommand boots a machine whose QEMU believes in another time.
func TestWrapCommand(t *testing.T) {
	const library = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
	if _, err := os.Stat(library); err != nil {
		t.Skip("needs faketime")
	}
	// The command faketime itself does not do: it stays, as the parent of what it runs.
	s := setup(t, Config{WrapCommand: []string{"env", "LD_PRELOAD=" + library, "FAKETIME=+10d"}}, 1)
	rig := s.NewRig(t)
	s.Boot(t, rig, "")
	rig.Console.Wait(s.Context(t), t, 1)
	said := regexp.MustCompile(`time (\d+)`).FindStringSubmatch(rig.Console.String())
	clock, _ := strconv.ParseInt(said[1], 10, 64)
	if ahead := time.Until(time.Unix(clock, 0)); ahead < 239*time.Hour {
		t.Errorf("the guest's clock is %s ahead", ahead)
	}
}

// TestOrdersBetween gives orders where QEMU has the beginning of another.
func TestOrdersBetween(t *testing.T) {
	s := setup(t, Config{}, 1)
	img := s.BootSnapshot(t)
	rig := s.NewRig(t)
	m := s.Start(t, rig)
	rig.Fill(t, img)
	ask := func(want string) {
		t.Helper()
		var state struct{ Status string }
		check(t, m.(*machine).execute(t.Context(), "query-status", nil, &state))
		if state.Status != want {
			t.Errorf("QEMU is %s, want %s", state.Status, want)
		}
	}
	ask("inmigrate")
	check(t, m.LoadState(t.Context(), bytes.NewReader(img.State)))
	ask("paused")
	check(t, m.Run(t.Context()))
	rig.Console.Wait(s.Context(t), t, 1)
}
