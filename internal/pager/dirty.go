package pager

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/page"
)

// Dirty returns the dirty pages of length bytes from addr on, a private file
// mapping of process pid, sorted and joined; page 0 is the one at addr, which
// must be page-aligned, as length. The process must be stopped from writing,
// or be ready to see later writes missed. Whether the kernel tells the truth
// is what ProbeDirty finds out. A range that is not mapped is an error.
func Dirty(pid int, addr uintptr, length int64) ([]page.Run, error) {
	runs, err := scan(pid, addr, length, dirtyPages)
	if err != nil {
		return nil, fmt.Errorf("dirty pages of process %d: %w", pid, err)
	}
	return runs, nil
}

// Present returns, as Dirty does, the pages that the process has in memory or
// in swap space. A page that was never touched is among them if its neighbour
// was: the kernel maps up to 64 KiB of a file around a fault.
func Present(pid int, addr uintptr, length int64) ([]page.Run, error) {
	runs, err := scan(pid, addr, length, presentPages)
	if err != nil {
		return nil, fmt.Errorf("pages of process %d in memory: %w", pid, err)
	}
	return runs, nil
}

// selection says which pages a scan returns, for both of the kernel's interfaces.
type selection struct {
	inverted, mask, anyOf uint64 // of PAGEMAP_SCAN
	entry                 func(uint64) bool
}

var (
	dirtyPages = selection{
		inverted: pageIsFile, mask: pageIsFile, anyOf: pageIsPresent | pageIsSwapped,
		entry: func(e uint64) bool { return e&(entryPresent|entrySwapped) != 0 && e&entryFile == 0 },
	}
	presentPages = selection{
		anyOf: pageIsPresent | pageIsSwapped,
		entry: func(e uint64) bool { return e&(entryPresent|entrySwapped) != 0 },
	}
)

func scan(pid int, addr uintptr, length int64, want selection) ([]page.Run, error) {
	if addr%page.Size != 0 || length < 0 || length%page.Size != 0 {
		return nil, fmt.Errorf("range %#x+%d is not made of pages", addr, length)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, ErrNoProcess
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	runs, err := scanPagemap(f, addr, length, want)
	if errors.Is(err, unix.ENOTTY) { // Linux before 6.7
		runs, err = readPagemap(f, addr, length, want)
	}
	if err != nil {
		return nil, err
	}
	// The memory of a process that died meanwhile looks clean, not wrong.
	if err := covered(pid, addr, length); err != nil {
		return nil, err
	}
	return runs, nil
}

// From the kernel's include/uapi/linux/fs.h (Linux 6.7).
const (
	pagemapScan = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)

	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4
)

// scanArg is the kernel's struct pm_scan_arg.
type scanArg struct {
	size, flags       uint64
	start, end        uint64
	walkEnd           uint64
	vec               *scanRegion
	vecLen            uint64
	maxPages          uint64
	categoryInverted  uint64
	categoryMask      uint64
	categoryAnyofMask uint64
	returnMask        uint64
}

// scanRegion is the kernel's struct page_region: addresses, end exclusive.
type scanRegion struct {
	start, end uint64
	_          uint64 // categories
}

var _ [96]byte = [unsafe.Sizeof(scanArg{})]byte{}

// scanPagemap lists pages with one PAGEMAP_SCAN, repeated only where the
// regions are too many for one answer. The error wraps ENOTTY where the kernel
// does not know it. A page mapped to the zero page is "present, not file".
func scanPagemap(f *os.File, addr uintptr, length int64, want selection) ([]page.Run, error) {
	base, end := uint64(addr), uint64(addr)+uint64(length)
	vec := make([]scanRegion, 4096)
	var runs []page.Run
	for start := base; start < end; {
		arg := scanArg{
			size:  uint64(unsafe.Sizeof(scanArg{})),
			start: start, end: end,
			vec: &vec[0], vecLen: uint64(len(vec)),
			categoryInverted:  want.inverted,
			categoryMask:      want.mask,
			categoryAnyofMask: want.anyOf,
		}
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return nil, os.NewSyscallError("PAGEMAP_SCAN", errno)
		}
		for _, r := range vec[:n] {
			runs = appendRun(runs, (r.start-base)/page.Size, (r.end-r.start)/page.Size)
		}
		if n < uintptr(len(vec)) { // the scan came to its end
			break
		}
		// Linux 6.18 may leave walkEnd at a place before the last regions:
		// starting there would list them twice.
		start = max(arg.walkEnd, vec[n-1].end)
	}
	return runs, nil
}

// Bits of an entry of /proc/PID/pagemap.
const (
	entryPresent = 1 << 63
	entrySwapped = 1 << 62
	entryFile    = 1 << 61
)

// readPagemap lists pages by reading the entry of every page.
func readPagemap(f *os.File, addr uintptr, length int64, want selection) ([]page.Run, error) {
	const entry = 8
	var runs []page.Run
	buf := make([]byte, 1<<20)
	first, pages := uint64(addr)/page.Size, uint64(length)/page.Size
	for done := uint64(0); done < pages; {
		b := buf[:min(uint64(len(buf)), (pages-done)*entry)]
		n, err := f.ReadAt(b, int64((first+done)*entry))
		if n < len(b) {
			if err == io.EOF { // what a process that ended has
				err = ErrNoProcess
			}
			return nil, fmt.Errorf("read pagemap: %w", err)
		}
		for ; len(b) > 0; b = b[entry:] {
			e := binary.NativeEndian.Uint64(b)
			if want.entry(e) {
				runs = appendRun(runs, done, 1)
			}
			done++
		}
	}
	return runs, nil
}

// appendRun is page.Append for count pages.
func appendRun(runs []page.Run, first, count uint64) []page.Run {
	if k := len(runs); k > 0 && runs[k-1].End() == first {
		runs[k-1].Count += count
		return runs
	}
	return append(runs, page.Run{First: first, Count: count})
}
