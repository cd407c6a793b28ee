package api

import (
	"strings"
	"syscall"
)

// ExitCode returns the exit code of a process that ended as the agent reports
// it, in the convention of shells: its own code, or 128 + the number of the
// signal that ended it. status is the agent's text, like "signal: killed".
func ExitCode(code int32, exited bool, status string) int {
	if exited {
		return int(code)
	}
	name, ok := strings.CutPrefix(status, "signal: ")
	name, _, _ = strings.Cut(name, " (") // " (core dumped)"
	for n := syscall.Signal(1); ok && n < 65; n++ {
		if n.String() == name {
			return 128 + int(n)
		}
	}
	if code > 0 {
		return int(code)
	}
	return 255
}
