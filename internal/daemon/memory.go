package daemon

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hostReserve returns how many bytes of so much memory are not for guests:
// the daemon, the page cache of snapshots and whatever else runs need them.
func hostReserve(memory int64) int64 { return max(1<<30, memory/10) }

// hostMemory returns the bytes of memory of the host, or of this process's
// cgroup if that is less.
func hostMemory() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("find out the host's memory: %w", err)
	}
	memory := int64(info.Totalram) * int64(info.Unit)
	limit, err := cgroupMemory("/")
	if err != nil {
		return 0, fmt.Errorf("find out the memory limit of this cgroup: %w", err)
	}
	if limit > 0 {
		memory = min(memory, limit)
	}
	return memory, nil
}

// guestMemory returns how many of so many bytes of the host's may be promised
// to guests where nobody says: all without hostReserve.
func guestMemory(memory int64) int64 {
	// What is left on a host that small is for whoever wants to try.
	return max(memory-hostReserve(memory), memory/4)
}

// memoryLimits returns how many bytes may be promised to guests that run and
// taken up by parked machines, 0 for no limit of the former and none of the
// latter, and how to tell that the host is short of memory.
func memoryLimits(c Config) (guests, parked int64, p pressure, err error) {
	memory, err := hostMemory()
	switch {
	case err == nil:
	case c.GuestMemory == 0:
		return 0, 0, p, fmt.Errorf("%w; set hib serve --guest-memory", err)
	case c.ParkedMemory == 0:
		return 0, 0, p, fmt.Errorf("%w; set hib serve --parked-memory", err)
	}
	guests, parked = c.GuestMemory, c.ParkedMemory
	switch guests {
	case NoLimit:
		guests = 0
	case 0:
		guests = guestMemory(memory)
	}
	switch parked {
	case NoParking:
		parked = 0
	case 0:
		parked = memory / 8
	}
	return guests, parked, newPressure(memory), nil
}

// cgroupMemory returns the lowest memory limit of the cgroups that this
// process is in, in bytes, 0 if there is none. root is where /proc and /sys are.
func cgroupMemory(root string) (int64, error) {
	f, err := os.Open(filepath.Join(root, "proc/self/cgroup"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var lowest int64
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// hierarchy:controllers:path, where version 2 has no controllers
		fields := strings.SplitN(lines.Text(), ":", 3)
		if len(fields) != 3 {
			continue
		}
		mount, file := filepath.Join(root, "sys/fs/cgroup"), "memory.max"
		switch fields[1] {
		case "":
		case "memory":
			mount, file = filepath.Join(mount, "memory"), "memory.limit_in_bytes"
		default:
			continue
		}
		// In a container the path may be the host's, with nothing of it mounted but
		// the container's own cgroup, at the top.
		for dir := path.Clean("/" + fields[2]); ; dir = path.Dir(dir) {
			limit, err := readLimit(filepath.Join(mount, dir, file))
			if err != nil {
				return 0, err
			}
			if limit > 0 && (lowest == 0 || limit < lowest) {
				lowest = limit
			}
			if dir == "/" {
				break
			}
		}
	}
	return lowest, lines.Err()
}

// readLimit reads a limit in bytes, 0 if the file says that there is none or
// is not there. Version 1 writes a number beyond all memory for none.
func readLimit(name string) (int64, error) {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	text := strings.TrimSpace(string(b))
	if text == "max" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return n, nil
}
