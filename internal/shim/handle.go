package shim

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// handleFile is where a shim leaves its own handle in its folder, so that a
// daemon that recorded nothing about it can still end it.
const handleFile = "handle.json"

// newHandle describes the process pid, which holds machine vm at socket.
func newHandle(vm, socket string, pid int) (Handle, error) {
	boot, err := bootID()
	if err != nil {
		return Handle{}, err
	}
	start, err := startTime(pid)
	if err != nil {
		return Handle{}, err
	}
	return Handle{VM: vm, Socket: socket, PID: pid, StartTime: start, BootID: boot, Protocol: ProtocolVersion}, nil
}

// Alive tells whether the very process that the handle describes still runs: a
// later process of the same number, another boot of the host and a zombie are not it.
func (h Handle) Alive() bool {
	boot, err := bootID()
	if err != nil || boot != h.BootID {
		return false
	}
	start, err := startTime(h.PID)
	return err == nil && start == h.StartTime
}

// Dir returns the folder of the shim's machine.
func (h Handle) Dir() string { return filepath.Dir(h.Socket) }

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the host's boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// startTime returns when a living process was started, in clock ticks since boot.
func startTime(pid int) (uint64, error) {
	const state, threads, start = 0, 17, 19 // fields 3, 20 and 22 of proc(5)
	fields, err := processStat(pid, start)
	if err != nil {
		return 0, err
	}
	// The state is that of its first thread, which may end before the others.
	if s := fields[state][0]; s == 'X' || s == 'Z' && string(fields[threads]) == "1" {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	return strconv.ParseUint(string(fields[start]), 10, 64)
}

// processStat returns the fields of a process's stat line from the third of
// proc(5) on, which is index 0, and at least up to index last.
func processStat(pid, last int) ([][]byte, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, fmt.Errorf("look at process %d: %w", pid, err)
	}
	// The name in parentheses may hold blanks and parentheses of its own.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) <= last {
		return nil, fmt.Errorf("look at process %d: short stat line", pid)
	}
	return fields, nil
}
