package pager

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Errors of the functions that look at another process.
var (
	// ErrNotMapped is returned where a process has no such mapping.
	ErrNotMapped = errors.New("not mapped")
	// ErrNoProcess is returned where the process has ended.
	ErrNoProcess = errors.New("the process has ended")
)

// mapping is one line of /proc/PID/maps. Addresses and offset are in bytes,
// end exclusive.
type mapping struct {
	start, end, offset uint64
	private            bool
	dev, inode         uint64 // dev as in unix.Stat_t
	path               string
}

// Mapping returns where process pid has the file path mapped, and the length
// in bytes. The parts into which the kernel splits such a mapping are joined.
// The mapping must be private and single, and begin at the file's first byte;
// an error that wraps ErrNotMapped says that there is none, or only one with a
// gap.
func Mapping(pid int, path string) (addr uintptr, length int64, err error) {
	maps, err := readMaps(pid)
	if err != nil {
		return 0, 0, fmt.Errorf("find mapping of %s: %w", path, err)
	}
	addr, length, err = join(ofFile(maps, path))
	if err != nil {
		return 0, 0, fmt.Errorf("find mapping of %s in process %d: %w", path, pid, err)
	}
	return addr, length, nil
}

// ofFile returns the mappings of the file path: those with that name or, if
// there are none, those of the file that is there (symbolic links).
func ofFile(maps []mapping, path string) []mapping {
	var named []mapping
	for _, m := range maps {
		if m.path == path {
			named = append(named, m)
		}
	}
	if len(named) > 0 {
		return named
	}
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return nil
	}
	var same []mapping
	for _, m := range maps {
		if m.inode != 0 && m.inode == st.Ino && m.dev == st.Dev {
			same = append(same, m)
		}
	}
	return same
}

// join returns the range that parts, in ascending order, make up.
func join(parts []mapping) (addr uintptr, length int64, err error) {
	if len(parts) == 0 {
		return 0, 0, ErrNotMapped
	}
	first := parts[0]
	if first.offset != 0 {
		return 0, 0, fmt.Errorf("%w: the first part begins at offset %d of the file", ErrNotMapped, first.offset)
	}
	end := first.start
	for _, m := range parts {
		if !m.private {
			return 0, 0, errors.New("it is mapped shared, not privately")
		}
		if m.start != end || m.offset != end-first.start {
			return 0, 0, fmt.Errorf("%w as a whole: a gap before address %#x", ErrNotMapped, m.start)
		}
		end = m.end
	}
	return uintptr(first.start), int64(end - first.start), nil
}

// covered returns nil if process pid is there and has every byte of the range
// mapped.
func covered(pid int, addr uintptr, length int64) error {
	maps, err := readMaps(pid)
	if err != nil {
		return err
	}
	next, end := uint64(addr), uint64(addr)+uint64(length)
	for _, m := range maps {
		if m.start <= next && next < m.end {
			next = m.end
		}
	}
	if next < end {
		return fmt.Errorf("address %#x of process %d: %w", next, pid, ErrNotMapped)
	}
	return nil
}

// readMaps returns the mappings of process pid in ascending order.
func readMaps(pid int) ([]mapping, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || err == nil && len(text) == 0 {
		return nil, fmt.Errorf("process %d: %w", pid, ErrNoProcess)
	}
	if err != nil {
		return nil, err
	}
	return parseMaps(string(text))
}

func parseMaps(text string) ([]mapping, error) {
	var maps []mapping
	for line := range strings.Lines(text) {
		m, err := parseMapping(strings.TrimSuffix(line, "\n"))
		if err != nil {
			return nil, fmt.Errorf("line %q of the process's maps: %w", line, err)
		}
		maps = append(maps, m)
	}
	return maps, nil
}

// parseMapping parses "7f00-7f01 rw-p 00000000 00:2a 123   /path".
func parseMapping(line string) (m mapping, err error) {
	var fields [5]string
	rest := line
	for i := range fields {
		fields[i], rest, _ = strings.Cut(rest, " ")
	}
	start, end, _ := strings.Cut(fields[0], "-")
	major, minor, _ := strings.Cut(fields[3], ":")
	number := func(s string, base, bits int) uint64 {
		n, parseErr := strconv.ParseUint(s, base, bits)
		err = errors.Join(err, parseErr)
		return n
	}
	m = mapping{
		start: number(start, 16, 64), end: number(end, 16, 64), offset: number(fields[2], 16, 64),
		private: strings.HasSuffix(fields[1], "p"),
		dev:     unix.Mkdev(uint32(number(major, 16, 32)), uint32(number(minor, 16, 32))),
		inode:   number(fields[4], 10, 64),
		path:    unescape(strings.TrimSuffix(strings.TrimLeft(rest, " "), " (deleted)")),
	}
	if err == nil && m.end <= m.start {
		err = errors.New("the end lies before the start")
	}
	return m, err
}

// unescape undoes the kernel's octal escapes (\012 in maps; also \040, \011
// and \134 in mountinfo).
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
