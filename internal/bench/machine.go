package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/api"
)

// newMeta describes this machine and the daemon. What cannot be found out is left empty.
func newMeta(v api.Version) Meta {
	m := Meta{Accel: v.Accel, VMM: v.VMM, Version: v.Version, Cores: runtime.NumCPU(), Date: time.Now().UTC().Truncate(time.Second)}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		m.CPU = cpuName(string(text))
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.Memory = int64(info.Totalram) * int64(info.Unit)
	}
	return m
}

// cpuName takes the name of the first processor from the text of /proc/cpuinfo.
func cpuName(text string) string {
	for line := range strings.Lines(text) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// residentBytes returns the memory that a process holds.
func residentBytes(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("process %d has no memory: has it ended?", pid)
}

// cpuTime returns the processor time that the living threads of a process have
// used, to the nanosecond.
func cpuTime(pid int) (time.Duration, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err == nil && len(threads) == 0 {
		err = fmt.Errorf("process %d has no threads to look at: has it ended?", pid)
	}
	var sum time.Duration
	for _, path := range threads {
		text, readErr := os.ReadFile(path)
		if errors.Is(readErr, fs.ErrNotExist) || errors.Is(readErr, unix.ESRCH) {
			continue // a thread that ended
		}
		first, _, _ := strings.Cut(string(text), " ")
		ns, parseErr := strconv.ParseInt(first, 10, 64)
		if err := errors.Join(readErr, parseErr); err != nil {
			return 0, fmt.Errorf("look at the processor time of process %d: %w", pid, err)
		}
		sum += time.Duration(ns)
	}
	return sum, err
}
