// Package failpoint lets tests stop a process, or make it fail, at a named
// instant of its code.
//
// A failpoint is a call of [Hit] with a name; each package declares the names
// of its own. The variable HIB_FAILPOINT arms them, as a comma-separated list
// of NAME=ACTION, for the whole process:
//
//	kill   the process sends SIGKILL to itself: it ends as by a power failure
//	error  Hit returns an error that wraps [ErrInjected]
//	hang   Hit blocks until its context ends, and returns the context's error
//
// Each armed failpoint that is reached is written, as a line of its own, to the
// end of the file that HIB_FAILPOINT_LOG names, if it names one that exists.
//
// The variable HIB_FAILPOINT_CLOCK, a duration like 720h, lets [Now] show another
// time: what a guest is told of a clock that runs ahead or behind.
//
// While HIB_FAILPOINT is unset, which is always so outside tests, Hit does
// nothing; while HIB_FAILPOINT_CLOCK is, Now is time.Now.
package failpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Env is the environment variable that arms failpoints. It is read once.
const Env = "HIB_FAILPOINT"

// LogEnv is the environment variable that names the file to which failpoints
// are written when they are reached.
const LogEnv = "HIB_FAILPOINT_LOG"

// ClockEnv is the environment variable that shifts Now. It is read once.
const ClockEnv = "HIB_FAILPOINT_CLOCK"

var shift = sync.OnceValue(func() time.Duration {
	d, _ := time.ParseDuration(os.Getenv(ClockEnv))
	return d
})

// Now returns the host's time, shifted by what [ClockEnv] says.
func Now() time.Time { return time.Now().Add(shift()) }

// ErrInjected is what a failpoint armed with "error" returns, wrapped with the
// failpoint's name.
var ErrInjected = errors.New("injected failure")

type action string

const (
	actionKill  action = "kill"
	actionError action = "error"
	actionHang  action = "hang"
)

var armed = sync.OnceValues(func() (map[string]action, error) {
	return parse(os.Getenv(Env))
})

// Hit marks the place of the failpoint name. It returns nil where the
// failpoint is not armed, and otherwise does what the package comment says.
// Where [Env] has an error in it, every Hit returns that error.
func Hit(ctx context.Context, name string) error {
	points, err := armed()
	if err != nil {
		return err
	}
	if points == nil {
		return nil
	}
	return points[name].do(ctx, name)
}

func (a action) do(ctx context.Context, name string) error {
	if a != "" {
		if err := note(name); err != nil {
			return fmt.Errorf("failpoint %s: %w", name, err)
		}
	}
	switch a {
	case actionKill:
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			return fmt.Errorf("failpoint %s: kill this process: %w", name, err)
		}
		select {} // the signal ends the process before the caller goes on
	case actionError:
		return fmt.Errorf("failpoint %s: %w", name, ErrInjected)
	case actionHang:
		<-ctx.Done()
		return fmt.Errorf("failpoint %s: %w", name, context.Cause(ctx))
	}
	return nil
}

func note(name string) error {
	path := os.Getenv(LogEnv)
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(name + "\n")
	return errors.Join(err, f.Close())
}

// parse returns the armed failpoints, nil if s is empty.
func parse(s string) (map[string]action, error) {
	if strings.TrimSpace(s) == "" {
		return nil, nil
	}
	points := make(map[string]action)
	for entry := range strings.SplitSeq(s, ",") {
		name, what, ok := strings.Cut(strings.TrimSpace(entry), "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%s: %q is not of the form NAME=ACTION", Env, entry)
		}
		if _, twice := points[name]; twice {
			return nil, fmt.Errorf("%s: failpoint %s is named twice", Env, name)
		}
		switch a := action(what); a {
		case actionKill, actionError, actionHang:
			points[name] = a
		default:
			return nil, fmt.Errorf("%s: failpoint %s: unknown action %q; use kill, error or hang", Env, name, what)
		}
	}
	return points, nil
}
