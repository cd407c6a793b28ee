package qemu

import (
	"fmt"
	"os/exec"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// madvHugepage is MADV_HUGEPAGE. QEMU gives this advice on guest RAM; on a
// mapping that a FUSE server fills, each miss then reads 2 MiB instead of the
// readahead that the server chose.
const madvHugepage = unix.MADV_HUGEPAGE

// Offsets into struct seccomp_data (linux/seccomp.h) on little-endian machines.
const (
	seccompNr   = 0
	seccompArch = 4
	seccompArg2 = 16 + 2*8 // low half of the third argument
)

// hugepageFilter is a seccomp program that answers EINVAL to
// madvise(…, MADV_HUGEPAGE), as a kernel without huge pages does, and allows
// everything else. QEMU ignores that error.
func hugepageFilter() []unix.SockFilter {
	const (
		load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		answer = unix.BPF_RET | unix.BPF_K
	)
	return []unix.SockFilter{
		{Code: load, K: seccompArch},
		{Code: equal, K: auditArch(), Jf: 5},
		{Code: load, K: seccompNr},
		{Code: equal, K: unix.SYS_MADVISE, Jf: 3},
		{Code: load, K: seccompArg2},
		{Code: equal, K: madvHugepage, Jf: 1},
		{Code: answer, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EINVAL)},
		{Code: answer, K: unix.SECCOMP_RET_ALLOW},
	}
}

func auditArch() uint32 {
	if runtime.GOARCH == "arm64" {
		return unix.AUDIT_ARCH_AARCH64
	}
	return unix.AUDIT_ARCH_X86_64
}

// confineThread puts the filter on the calling thread alone; what the thread
// starts inherits it. There is no way back.
func confineThread() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	filter := hugepageFilter()
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("install the seccomp filter: %w", errno)
	}
	return nil
}

// startChild starts cmd from a thread of its own, which carries the filter if
// cmd is to be confined, and returns a channel that takes the result of cmd.Wait. The thread lives
// exactly as long as the child, because the kernel sends the child's
// parent-death signal when the thread that forked it ends.
func startChild(cmd *exec.Cmd, confine bool) (<-chan error, error) {
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the filter must not reach other goroutines
		var err error
		if confine {
			err = confineThread()
		}
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return ended, nil
}
