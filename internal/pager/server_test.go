package pager

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/page"
)

// nobody is the user id that tests use for a process without privileges.
const nobody = 65534

// isMountPoint tells whether a pager is mounted at dir.
func isMountPoint(t testing.TB, dir string) bool {
	t.Helper()
	conn, err := connection(dir)
	if err != nil {
		t.Fatal(err)
	}
	return conn != 0
}

func TestCloseLeavesAnEmptyFolder(t *testing.T) {
	dir := t.TempDir()
	s, err := Mount(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.NewSlot("ram", page.Size)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 || isMountPoint(t, dir) {
		t.Errorf("the folder has %v, %v after Close", entries, err)
	}
	if err := l.Bind(Zero); !errors.Is(err, ErrClosed) {
		t.Errorf("Bind after Close returned %v", err)
	}
	if _, err := s.NewSlot("late", page.Size); !errors.Is(err, ErrClosed) {
		t.Errorf("NewSlot after Close returned %v", err)
	}
}

func TestCloseUnderAMapping(t *testing.T) {
	dir := t.TempDir()
	s, err := Mount(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.NewSlot("ram", testSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Bind(pattern(testSize)); err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: testSize})
	c.must(command{Op: "read", Len: page.Size})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if isMountPoint(t, dir) {
		t.Error("still mounted after Close")
	}
	if !c.try(command{Op: "read", Off: testSize - page.Size, Len: 1}).Fault {
		t.Error("reading after Close was no fault")
	}
}

// TestEndedFromOutside: a mount that is aborted or unmounted under a process
// fails its slots, whether somebody reads or not.
func TestEndedFromOutside(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to unmount")
	}
	for name, flags := range map[string]int{"aborted": unix.MNT_FORCE | unix.MNT_DETACH, "unmounted": unix.MNT_DETACH} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s, err := Mount(dir, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			l, err := s.NewSlot("ram", testSize)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Bind(pattern(testSize)); err != nil {
				t.Fatal(err)
			}
			if err := s.Check(); err != nil || l.Err() != nil {
				t.Fatalf("Check = %v, Err = %v", err, l.Err())
			}
			if err := unix.Unmount(dir, flags); err != nil {
				t.Fatal(err)
			}
			select {
			case <-l.Failed():
			case <-time.After(time.Minute):
				t.Fatal("the slot has not failed")
			}
			if err := s.Check(); !errors.Is(err, ErrEnded) || !errors.Is(l.Err(), ErrEnded) {
				t.Errorf("Check = %v, Err = %v", err, l.Err())
			}
		})
	}
}

// TestClosedIsNoFailure: slots do not fail because their server was closed.
func TestClosedIsNoFailure(t *testing.T) {
	s, err := Mount(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.NewSlot("ram", testSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil || l.Err() != nil {
		t.Errorf("Close = %v, Err = %v", err, l.Err())
	}
}

func TestMountAtNoFolder(t *testing.T) {
	if s, err := Mount(filepath.Join(t.TempDir(), "missing"), nil); err == nil {
		_ = s.Close()
		t.Error("mounted at a folder that does not exist")
	}
}

func TestPagerKilledUnderAMapping(t *testing.T) {
	dir := t.TempDir()
	pager := startChild(t, "server")
	path := pager.must(command{Op: "mount", Path: dir, Len: testSize}).Path
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: path, Len: testSize})
	c.must(command{Op: "read", Len: page.Size})
	pager.kill()
	if !c.try(command{Op: "read", Off: testSize - page.Size, Len: 1}).Fault {
		t.Error("reading from a dead pager was no fault")
	}
	c.must(command{Op: "read", Len: page.Size}) // what is mapped stays
	if err := CleanStale(dir); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 || isMountPoint(t, dir) {
		t.Errorf("after CleanStale the folder has %v, %v", entries, err)
	}
}

// TestPagerKilledWhileItPushes: a thread that waits in Push for a READ that
// nobody will answer keeps a killed pager from ending until it is cleaned up.
func TestPagerKilledWhileItPushes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to abort the connection")
	}
	dir := t.TempDir()
	pager := startChild(t, "server")
	path := pager.must(command{Op: "mount silent", Path: dir, Len: testSize}).Path
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: path, Len: testSize})
	read := make(chan result, 1)
	go func() { read <- c.try(command{Op: "read", Len: 1}) }()
	pager.must(command{Op: "push", Len: page.Size}) // once the READ is there
	waitBlocked(t, pager.pid())
	dead := make(chan struct{})
	go func() {
		defer close(dead)
		pager.kill()
	}()
	waitKilled(t, pager.pid())
	if err := CleanStale(dir); err != nil {
		t.Error(err)
	}
	<-dead
	if !(<-read).Fault || isMountPoint(t, dir) {
		t.Error("the reader or the mount remained")
	}
}

// waitBlocked waits until a thread of a process is in a sleep that no signal ends.
func waitBlocked(t testing.TB, pid int) {
	t.Helper()
	waitThreads(t, pid, func(states string) bool { return strings.Contains(states, "D") })
}

// waitKilled waits until all threads of a process have ended but such ones.
func waitKilled(t testing.TB, pid int) {
	t.Helper()
	waitThreads(t, pid, func(states string) bool { return strings.Trim(states, "DZX") == "" })
}

func waitThreads(t testing.TB, pid int, ok func(states string) bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		states := ""
		for _, path := range stats {
			if b, err := os.ReadFile(path); err == nil {
				_, rest, _ := strings.Cut(string(b), ") ")
				states += rest[:1]
			}
		}
		if ok(states) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the threads are in the states %q", states)
		}
	}
}

// TestConnectionAsksNobody: a pager that does not answer is no reason to wait.
func TestConnectionAsksNobody(t *testing.T) {
	dir := t.TempDir()
	pager := startChild(t, "server")
	pager.must(command{Op: "mount", Path: dir, Len: testSize})
	if err := syscall.Kill(pager.pid(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if conn, err := connection(dir); conn == 0 || err != nil {
		t.Errorf("connection %d, %v", conn, err)
	}
	pager.kill()
	if err := CleanStale(dir); err != nil {
		t.Error(err)
	}
}

func TestCleanStaleLeavesTheRestAlone(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Join(dir, "missing"), filepath.Join(dir, "missing", "too"), "/proc"} {
		if err := CleanStale(d); err != nil {
			t.Errorf("CleanStale(%s): %v", d, err)
		}
	}
	s, err := Mount(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := CleanStale(dir); !errors.Is(err, ErrMounted) {
		t.Errorf("CleanStale of a mount in use returned %v, want ErrMounted", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestCleanStaleThroughASymbolicLink(t *testing.T) {
	parent := t.TempDir()
	dir, link := filepath.Join(parent, "real", "mount point"), filepath.Join(parent, "link")
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.Symlink("real", link)); err != nil {
		t.Fatal(err)
	}
	pager := startChild(t, "server")
	pager.must(command{Op: "mount", Path: dir, Len: testSize})
	pager.kill()
	if err := CleanStale(filepath.Join(link, "mount point")); err != nil {
		t.Fatal(err)
	}
	if isMountPoint(t, dir) {
		t.Error("still mounted")
	}
}

// nobodysFolder returns a folder that the user nobody owns and reaches.
func nobodysFolder(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to become another user")
	}
	if _, err := exec.LookPath("fusermount3"); err != nil {
		t.Skip("needs fusermount3")
	}
	dir, err := os.MkdirTemp("", "hib-pager-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	return dir
}

// needUserMounts skips a test where users cannot mount.
func needUserMounts(t testing.TB) {
	t.Helper()
	if info, err := os.Stat("/dev/fuse"); err != nil || info.Mode().Perm()&0o006 != 0o006 {
		t.Skip("users may not open /dev/fuse here, so fusermount3 refuses them")
	}
}

func asNobody(cmd *exec.Cmd) {
	cmd.Dir = "/"
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
}

func TestUnprivileged(t *testing.T) {
	needUserMounts(t)
	dir := nobodysFolder(t)
	pager := startChild(t, "server", asNobody)
	r := pager.must(command{Op: "mount", Path: dir, Len: testSize})
	t.Logf("mounted through fusermount3 in %v", r.Took)
	c := startChild(t, "toucher", asNobody)
	c.must(command{Op: "map", Path: r.Path, Len: testSize})
	if got := c.must(command{Op: "read", Len: testSize}).Sum; got != pattern(testSize).sum(0, testSize) {
		t.Error("the bytes differ")
	}
	c.stop()
	t.Logf("closed in %v", pager.must(command{Op: "close"}).Took)
	if isMountPoint(t, dir) {
		t.Error("still mounted after Close")
	}
}

func TestRootMountsForTheOwnerAndDropsPrivileges(t *testing.T) {
	dir := nobodysFolder(t)
	pager := startChild(t, "server")
	path := pager.must(command{Op: "mount", Path: dir, Len: testSize}).Path
	pager.must(command{Op: "setuid", UID: nobody})
	c := startChild(t, "toucher", asNobody)
	c.must(command{Op: "map", Path: path, Len: testSize})
	if got := c.must(command{Op: "read", Len: testSize}).Sum; got != pattern(testSize).sum(0, testSize) {
		t.Error("the bytes differ")
	}
	c.stop()
	pager.must(command{Op: "close"})
	if isMountPoint(t, dir) {
		t.Error("still mounted after Close")
	}
}

func TestCleanStaleOfAnotherUser(t *testing.T) {
	needUserMounts(t)
	dir := nobodysFolder(t)
	pager := startChild(t, "server", asNobody)
	pager.must(command{Op: "mount", Path: dir, Len: testSize})
	pager.kill()
	if err := CleanStale(dir); err != nil {
		t.Fatal(err)
	}
	if isMountPoint(t, dir) {
		t.Error("still mounted")
	}
}

func TestParseMount(t *testing.T) {
	for line, want := range map[string]mountLine{
		"40 23 0:36 / /run/a\\040b rw,nosuid - fuse.hibernacle hibernacle rw": {"/run/a b", "fuse.hibernacle", 36},
		"36 35 98:0 /m1 /m2 rw master:1 shared:2 - ext3 /dev/root rw":         {"/m2", "ext3", 0},
		"36 35 98 /m1 /m2 rw - ext3 /dev/root rw":                             {},
		"36 35 98:0 /m1 /m2 rw":                                               {},
		" - ":                                                                 {},
	} {
		if got := parseMount(line); got != want {
			t.Errorf("parseMount(%q) = %+v, want %+v", line, got, want)
		}
	}
}
