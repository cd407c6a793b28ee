package pager

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrMounted is returned by CleanStale for a mount that a living process serves.
var ErrMounted = errors.New("a living pager is mounted there")

// CleanStale unmounts what a pager that died left mounted at dir. It returns
// nil where dir does not exist or no pager is mounted there; other file
// systems are not touched. A mount that is still served is left alone, with
// an error that wraps ErrMounted.
func CleanStale(dir string) error {
	dir, err := canonical(dir)
	if err != nil {
		return fmt.Errorf("clean up stale mount: %w", err)
	}
	for {
		mounted, err := pagerMounted(dir)
		if err != nil {
			return fmt.Errorf("clean up stale mount at %s: %w", dir, err)
		}
		if !mounted {
			return nil
		}
		if served(dir) {
			return fmt.Errorf("clean up stale mount at %s: %w", dir, ErrMounted)
		}
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

// served tells whether somebody answers requests at the mount point dir. A
// lookup of a name that nobody asked for before is never answered from the
// kernel's caches.
func served(dir string) bool {
	var st unix.Stat_t
	err := unix.Lstat(filepath.Join(dir, fmt.Sprintf(".stale-%d", os.Getpid())), &st)
	return err == nil || err == unix.ENOENT
}

// pagerMounted tells whether the topmost mount at dir is a pager's.
func pagerMounted(dir string) (bool, error) {
	m, err := mountAt(dir)
	return m.fsType == "fuse."+fsName, err
}

// mountPoint is what mountinfo tells about a mount.
type mountPoint struct {
	path, fsType string
	device       string // major:minor
}

// mountAt returns the topmost mount at dir, the zero value if there is none.
func mountAt(dir string) (found mountPoint, err error) {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return mountPoint{}, err
	}
	for line := range strings.Lines(string(info)) {
		if m := parseMount(line); m.path == dir {
			found = m
		}
	}
	return found, nil
}

// parseMount reads a line of mountinfo: "36 35 98:0 /root /point options
// optional… - type source superoptions". It returns the zero value if the line
// is not of that form.
func parseMount(line string) mountPoint {
	front, back, ok := strings.Cut(line, " - ")
	fields, types := strings.Fields(front), strings.Fields(back)
	if !ok || len(fields) < 5 || len(types) < 1 {
		return mountPoint{}
	}
	return mountPoint{path: unescape(fields[4]), fsType: types[0], device: fields[2]}
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
		if mounted, lookErr := pagerMounted(dir); lookErr == nil && !mounted {
			return nil
		}
		return fmt.Errorf("fusermount3 -u -z: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// connection returns the number of the FUSE connection mounted at dir, "" if it
// cannot be told. It asks the kernel and not, by a stat, the pager: a process
// that is killed while it waits for its own answer never ends.
func connection(dir string) string {
	dir, err := canonical(dir)
	if err != nil {
		return ""
	}
	m, err := mountAt(dir)
	if err != nil {
		return ""
	}
	_, minor, _ := strings.Cut(m.device, ":")
	return minor
}

// abort ends a FUSE connection through fusectl, if that is mounted. Its
// files belong to the user who mounted. An error is of no interest: where
// it does not work, the connection ends with the processes that use it.
func abort(conn string) {
	if conn != "" {
		_ = os.WriteFile("/sys/fs/fuse/connections/"+conn+"/abort", []byte("1"), 0)
	}
}
