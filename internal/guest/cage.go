package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	cgroupRoot = "/sys/fs/cgroup"

	hookMemoryShare = 4   // a hook that is waited for may use that part of the guest's memory
	hookTasks       = 512 // and that many processes and threads
)

// cages makes cgroups for hooks, one for each run. The zero value makes none.
type cages struct {
	root   string // of the cgroup file system; "": there is none
	number *atomic.Uint64
	limit  *sync.Once
}

func newCages(root string) cages {
	return cages{root: root, number: new(atomic.Uint64), limit: new(sync.Once)}
}

// cage is the cgroup of one run. Its zero value is none.
type cage struct {
	path   string
	folder *os.File
	user   string // cgroup of what is left over
}

// open makes a cage. One for the background is within the user's cgroup, and
// frozen with it; the others are limited. Without a cgroup the hook runs in
// the agent's.
func (c cages) open(background bool, log *slog.Logger) cage {
	if c.root == "" {
		return cage{}
	}
	user := filepath.Join(c.root, "user")
	// Those that are waited for shall not depend on the user's being frozen.
	parent := filepath.Join(c.root, "hooks")
	if background {
		parent = user
	} else {
		// Not before there is a hook: accounting for memory costs everybody.
		c.limit.Do(func() { warn(log, "limit hooks", c.delegate(parent)) })
	}
	k := cage{path: filepath.Join(parent, "hook-"+strconv.FormatUint(c.number.Add(1), 10)), user: user}
	err := os.Mkdir(k.path, 0o755)
	if err == nil {
		k.folder, err = os.Open(k.path)
	}
	if err != nil {
		log.Warn("a hook runs without a cgroup", "err", err)
		return cage{}
	}
	if !background {
		warn(log, "limit a hook", k.limit())
	}
	return k
}

// delegate lets the cgroups of hooks have limits.
func (c cages) delegate(hooks string) error {
	var failed error
	for _, dir := range []string{c.root, hooks} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		for _, controller := range []string{"+memory", "+pids"} { // each may be missing
			if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte(controller), 0); err != nil {
				failed = errors.Join(failed, fmt.Errorf("%s: %w", controller, err))
			}
		}
	}
	return failed
}

func (k cage) limit() error {
	total, err := memInfo("/proc", "MemTotal")
	if err != nil {
		return err
	}
	return errors.Join(
		ignoreMissing(k.set("memory.max", strconv.FormatUint(uint64(total/hookMemoryShare), 10))),
		ignoreMissing(k.set("memory.oom.group", "1")),
		ignoreMissing(k.set("pids.max", strconv.Itoa(hookTasks))),
	)
}

func (k cage) set(file, value string) error {
	return os.WriteFile(filepath.Join(k.path, file), []byte(value), 0)
}

// ignoreMissing drops the error of a file that the kernel does not have.
func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}

func (k cage) descriptor() (int, bool) {
	if k.folder == nil {
		return -1, false
	}
	return int(k.folder.Fd()), true
}

// kill ends all that runs in it.
func (k cage) kill() {
	if k.folder != nil {
		_ = k.set("cgroup.kill", "1") // kernels of before have the process group
	}
}

// failure says if a limit ended what ran in it.
func (k cage) failure() error {
	if k.folder == nil {
		return nil
	}
	events, err := os.ReadFile(filepath.Join(k.path, "memory.events"))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(events)) {
		if n, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok && n != "0" {
			return fmt.Errorf("killed: it used more than 1/%d of the sandbox's memory", hookMemoryShare)
		}
	}
	return nil
}

// close removes it. What still runs in it goes on in the user's cgroup.
func (k cage) close() {
	if k.folder == nil {
		return
	}
	k.folder.Close()
	for range 3 { // a process may start another one between two steps
		if err := os.Remove(k.path); err == nil || errors.Is(err, fs.ErrNotExist) {
			return
		}
		pids, err := os.ReadFile(filepath.Join(k.path, "cgroup.procs"))
		if err != nil {
			return
		}
		for _, pid := range strings.Fields(string(pids)) {
			_ = os.WriteFile(filepath.Join(k.user, "cgroup.procs"), []byte(pid), 0)
		}
	}
	_ = unix.Rmdir(k.path) // one that waits for a device stays in it
}
