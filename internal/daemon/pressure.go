package daemon

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	pressureFile = "/proc/pressure/memory"
	// pressureTrigger tells when, in any 2 s, tasks waited 200 ms for memory
	// (in µs). Without privilege the window must be a multiple of 2 s.
	pressureTrigger = "some 200000 2000000"
)

// pressure tells when the host is short of memory: by the kernel's pressure
// stall information, which costs nothing while all is well, or where there is
// none by what it says is available.
type pressure struct {
	trigger *os.File // nil: the kernel has no stall information for us
	memory  int64    // bytes of the host's
}

// newPressure finds out how to watch a host with so much memory.
func newPressure(memory int64) pressure {
	p := pressure{memory: memory}
	f, err := os.OpenFile(pressureFile, os.O_RDWR, 0)
	if err != nil {
		return p
	}
	if _, err := f.WriteString(pressureTrigger + "\x00"); err != nil {
		_ = f.Close()
		return p
	}
	p.trigger = f
	return p
}

// watch calls notify whenever the host is short of memory, at most every 2 s,
// until ctx ends. It returns at once where there is no stall information. Tasks
// stall also at the limit of a cgroup of their own, or reading what was dropped from
// the page cache: where much is available, that is not for us to mend.
func (p pressure) watch(ctx context.Context, notify func()) error {
	if p.trigger == nil {
		return nil
	}
	defer p.trigger.Close()
	wake, stop, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("watch %s: %w", pressureFile, err)
	}
	defer wake.Close()
	defer stop.Close() // a second time does nothing
	defer context.AfterFunc(ctx, func() { _ = stop.Close() })()
	for {
		fds := []unix.PollFd{{Fd: int32(p.trigger.Fd()), Events: unix.POLLPRI}, {Fd: int32(wake.Fd()), Events: unix.POLLIN}}
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("watch %s: %w", pressureFile, err)
		case ctx.Err() != nil || fds[1].Revents != 0:
			return ctx.Err()
		case fds[0].Revents&unix.POLLERR != 0:
			return fmt.Errorf("watch %s: it ended", pressureFile)
		case fds[0].Revents&unix.POLLPRI != 0:
			if isBelow(p.memory / 4) {
				notify()
			}
		}
	}
}

// isLow reports whether the host is short of memory now, where watch does not tell.
func (p pressure) isLow() bool {
	return p.trigger == nil && isBelow(hostReserve(p.memory))
}

// isBelow reports whether less than so many bytes are available.
func isBelow(bytes int64) bool {
	available, err := AvailableMemory()
	return err == nil && available < bytes
}

// AvailableMemory returns how many bytes new work on this host can have without
// swapping.
func AvailableMemory() (int64, error) { return availableMemory("/proc/meminfo") }

// availableMemory reads how many bytes new work can have without swapping.
func availableMemory(meminfo string) (int64, error) {
	f, err := os.Open(meminfo)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", meminfo, err)
			}
			return kib << 10, nil
		}
	}
	return 0, errors.Join(lines.Err(), fmt.Errorf("%s does not tell what is available", meminfo))
}
