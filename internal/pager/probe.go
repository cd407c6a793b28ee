package pager

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/page"
)

// ProbeDirty maps a small file of its own, reads and writes some of its pages
// and looks whether Dirty names just the written ones. Its error says in words
// what this kernel reports wrongly; memory must then be saved in full.
func ProbeDirty() error {
	if err := probeDirty(); err != nil {
		return fmt.Errorf("probe for dirty pages: %w", err)
	}
	return nil
}

func probeDirty() error {
	const pages = 64
	fd, err := unix.MemfdCreate("hib-probe", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "hib-probe")
	defer f.Close()
	content := make([]byte, pages/2*page.Size) // the second half is a hole
	for i := range content {
		content[i] = 1
	}
	if _, err := f.Write(content); err != nil {
		return err
	}
	if err := f.Truncate(pages * page.Size); err != nil {
		return err
	}
	mem, err := unix.Mmap(fd, 0, pages*page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	defer func() { _ = unix.Munmap(mem) }()

	var sum byte
	for p := range pages / 4 { // reads in both halves; the others stay untouched
		sum += mem[2*p*page.Size] + mem[(pages/2+2*p)*page.Size]
	}
	written := []page.Run{{First: 2, Count: 2}, {First: 9, Count: 1}, {First: 40, Count: 3}}
	for _, r := range written {
		for p := r.First; p < r.End(); p++ {
			mem[p*page.Size] = 1 // in the first half its old content: that counts too
		}
	}
	got, err := Dirty(os.Getpid(), uintptr(unsafe.Pointer(&mem[0])), int64(len(mem)))
	runtime.KeepAlive(sum)
	if err != nil {
		return err
	}
	if !slices.Equal(got, written) {
		return fmt.Errorf("the kernel names the page runs %v (first, count) where %v were written", got, written)
	}
	return nil
}
