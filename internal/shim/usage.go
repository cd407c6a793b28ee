package shim

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"
)

// processorTime returns the processor time that a process took so far, in user
// and in kernel mode; 0 if it can't be told.
func processorTime(pid int) time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The second field is a name in parentheses that may hold anything.
	const user, kernel = 11, 12 // fields 14 and 15 of proc(5), counted from the third
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) <= kernel {
		return 0
	}
	var ticks int64
	for _, f := range fields[user : kernel+1] {
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0
		}
		ticks += n
	}
	const perSecond = 100 // USER_HZ, the same on every architecture that matters
	return time.Duration(ticks) * (time.Second / perSecond)
}
