package vmmtest

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// The program that the guest under test runs: it owns ProgramBytes of memory,
// zero at first, and calls Step for n = 1, 2, 3 … at a leisurely pace, printing
// each line that it returns. As each step's checksum covers what all the steps
// before wrote, a machine that lost one page of its memory prints a wrong line.
const (
	ProgramBytes = 64 * stepBytes
	stepBytes    = 4096
)

// Words on the kernel's command line that the guest obeys, where End tells it to
// end instead of taking step EndStep.
const (
	EndPowerOff = "vmmtest.end=poweroff"
	EndReboot   = "vmmtest.end=reboot"
	EndPanic    = "vmmtest.end=panic"
	EndStep     = 3
)

// Step does step n on the program's memory and returns the line to print,
// without a line break.
func Step(memory []byte, n uint64) string {
	at := n * stepBytes % ProgramBytes
	binary.LittleEndian.PutUint64(memory[at:], n*0x9e3779b97f4a7c15)
	return stepLine(n, crc32.ChecksumIEEE(memory))
}

func stepLine(n uint64, sum uint32) string { return fmt.Sprintf("vmmtest step %d sum %08x", n, sum) }
