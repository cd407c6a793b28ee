// Package doctor looks at a host and says whether sandboxes can run there, and
// what to do where they can't. A check has a status: ok; warn, if sandboxes run
// but worse than they could; fail, if they don't.
//
// SelfTest goes further: it runs a daemon of its own and takes a sandbox
// through a whole life.
package doctor

import (
	"context"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// Status is the outcome of a check.
type Status string

// The outcomes of a check.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is one thing that was looked at.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"` // what was found
	Fix    string `json:"fix"`    // what to do about it, "" with OK
}

// Host says what to look at.
type Host struct {
	Data    string            // the daemon's data folder, which need not exist yet
	User    string            // account for shims and VMMs, as for the daemon
	Program string            // file of this program
	Driver  shim.DriverConfig // that the daemon would use
}

// Run makes all checks.
func Run(ctx context.Context, h Host) []Check {
	checks := []Check{platform()}
	checks = append(checks, h.monitor(ctx)...)
	checks = append(checks, kernel()...)
	checks = append(checks, h.account()...)
	checks = append(checks, h.disk(), memory(), h.sockets())
	checks = append(checks, h.guests(ctx)...)
	return append(checks, tools()...)
}

// Failed tells whether one of the checks failed.
func Failed(checks []Check) bool {
	for _, c := range checks {
		if c.Status == Fail {
			return true
		}
	}
	return false
}

func pass(name, detail string) Check      { return Check{name, OK, detail, ""} }
func warn(name, detail, fix string) Check { return Check{name, Warn, detail, fix} }
func fail(name, detail, fix string) Check { return Check{name, Fail, detail, fix} }
