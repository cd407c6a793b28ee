package pager

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrMounted is returned by CleanStale for a mount that a living process serves.
var ErrMounted = errors.New("a living pager is mounted there")

// CleanStale unmounts what a pager that died left mounted at dir. It returns
// nil where dir does not exist or no pager is mounted there; other file
// systems are not touched. A mount that is still served is left alone, with
// an error that wraps ErrMounted. One that answers nothing for 5 s is dead: a
// killed pager with a thread that waits for its own mount, in Push or by a
// system call on a path in it, ends only now.
func CleanStale(dir string) error {
	dir, err := canonical(dir)
	if err != nil {
		return fmt.Errorf("clean up stale mount: %w", err)
	}
	for {
		conn, err := connection(dir)
		if err != nil {
			return fmt.Errorf("clean up stale mount at %s: %w", dir, err)
		}
		if conn == 0 {
			return nil
		}
		if served(dir) {
			return fmt.Errorf("clean up stale mount at %s: %w", dir, ErrMounted)
		}
		abort(conn)
		if err := detach(dir); err != nil {
			return fmt.Errorf("clean up stale mount at %s: %w", dir, err)
		}
	}
}

// canonical returns dir as the kernel names it in mountinfo. The last element
// is not looked at, as a dead mount answers nothing.
func canonical(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	parent, err := filepath.EvalSymlinks(filepath.Dir(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return dir, nil
	}
	if err != nil {
		return "", err
	}
	return filepath.Join(parent, filepath.Base(dir)), nil
}

// answerWait bounds how long a living pager may take to answer.
const answerWait = 5 * time.Second

// served tells whether somebody answers requests at the mount point dir. A
// lookup of a name that nobody asked for before is never answered from the
// kernel's caches. Without an answer it goes on until the mount is detached.
func served(dir string) bool {
	answered := make(chan bool, 1)
	go func() {
		var st unix.Stat_t
		err := unix.Lstat(filepath.Join(dir, fmt.Sprintf(".stale-%d", os.Getpid())), &st)
		answered <- err == nil || err == unix.ENOENT
	}()
	timeout := time.NewTimer(answerWait)
	defer timeout.Stop()
	select {
	case yes := <-answered:
		return yes
	case <-timeout.C:
		return false
	}
}

// connection returns the number of the FUSE connection of the pager that is
// mounted topmost at dir, 0 if there is none. It asks the kernel's table and
// not the mount, which would have to be answered: by this very process, if it
// serves it, which then could not be killed meanwhile.
func connection(dir string) (uint32, error) {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return 0, err
	}
	var conn uint32
	for line := range strings.Lines(string(info)) {
		if m := parseMount(line); m.point == dir {
			conn = 0
			if m.fsType == "fuse."+fsName {
				conn = m.minor
			}
		}
	}
	return conn, nil
}

// mountLine is what is of interest in a line of mountinfo.
type mountLine struct {
	point, fsType string
	minor         uint32 // of the device number; for FUSE the connection's
}

// parseMount parses a line of mountinfo: "36 35 98:0 /root /point options
// optional… - type source superoptions". The result is zero if the line is not
// of that form.
func parseMount(line string) mountLine {
	front, back, ok := strings.Cut(line, " - ")
	fields, types := strings.Fields(front), strings.Fields(back)
	if !ok || len(fields) < 5 || len(types) < 1 {
		return mountLine{}
	}
	_, minor, _ := strings.Cut(fields[2], ":")
	n, err := strconv.ParseUint(minor, 10, 32)
	if err != nil {
		return mountLine{}
	}
	return mountLine{point: unescape(fields[4]), fsType: types[0], minor: uint32(n)}
}

// detach unmounts dir at once, even if it is in use: by system call where this
// process may, else by fusermount3. Not being mounted is no error.
func detach(dir string) error {
	// MNT_FORCE aborts the connection, so that nobody waits for it for ever.
	err := unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err == nil || err == unix.EINVAL || err == unix.ENOENT {
		return nil
	}
	if err != unix.EPERM {
		return fmt.Errorf("unmount: %w", err)
	}
	out, err := exec.Command("fusermount3", "-u", "-z", dir).CombinedOutput()
	if err != nil {
		if conn, lookErr := connection(dir); lookErr == nil && conn == 0 {
			return nil
		}
		return fmt.Errorf("fusermount3 -u -z: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// abort ends a FUSE connection through fusectl, if that is mounted. Its
// files belong to the user who mounted. An error is of no interest: where
// it does not work, the connection ends with the processes that use it.
func abort(conn uint32) {
	if conn != 0 {
		_ = os.WriteFile(fmt.Sprintf("/sys/fs/fuse/connections/%d/abort", conn), []byte("1"), 0)
	}
}
