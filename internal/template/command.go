package template

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// ErrTool is wrapped by errors about programs or rights that a build needs and the host lacks.
var ErrTool = errors.New("the host cannot build templates")

const (
	stopGrace = 20 * time.Second // for a program to clean up after SIGTERM
	tailLines = 15               // of a failed program's messages in its error
	maxLine   = 64 << 10         // bytes of one message
)

// command is a program run during a build.
type command struct {
	name   string
	args   []string
	dir    string            // working folder
	env    map[string]string // beyond PATH and a neutral locale
	stdin  string
	stdout io.Writer
	log    func(line string) // nil, or gets each line of standard error
}

// run runs c and waits for it. It runs in a process group of its own with a
// minimal environment and no terminal. When ctx ends the group gets SIGTERM,
// and after stopGrace SIGKILL. The error has the program's last messages.
func (c command) run(ctx context.Context) error {
	cmd := exec.Command(c.name, c.args...)
	cmd.Dir = c.dir
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"}
	for key, value := range c.env {
		cmd.Env = append(cmd.Env, key+"="+value)
	}
	cmd.Stdin = strings.NewReader(c.stdin)
	cmd.Stdout = c.stdout
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	messages, stderr, err := os.Pipe()
	if err != nil {
		return err
	}
	defer messages.Close()
	cmd.Stderr = stderr
	if err := ctx.Err(); err != nil {
		stderr.Close()
		return err
	}
	if err := cmd.Start(); err != nil {
		stderr.Close()
		return fmt.Errorf("%w: start %s: %w", ErrTool, c.name, err)
	}
	stderr.Close()

	done := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		stopGroup(ctx, cmd.Process.Pid, done)
	}()
	tail := c.collect(messages)
	err = cmd.Wait()
	close(done)
	<-stopped
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", c.name, context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", c.name, err, strings.Join(tail, "\n"))
	}
	return nil
}

// stopGroup ends the process group pid when ctx ends, unless done is closed before.
func stopGroup(ctx context.Context, pid int, done <-chan struct{}) {
	select {
	case <-done:
		return
	case <-ctx.Done():
	}
	_ = syscall.Kill(-pid, syscall.SIGTERM)
	grace := time.NewTimer(stopGrace)
	defer grace.Stop()
	select {
	case <-done: // and its number may be another's by now
	case <-grace.C:
		_ = syscall.Kill(-pid, syscall.SIGKILL)
	}
}

// collect reads a program's messages to their end and returns the last ones.
func (c command) collect(r io.Reader) []string {
	var tail []string
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		line := hideCredentials(strings.TrimSpace(lines.Text()))
		if line == "" {
			continue
		}
		if tail = append(tail, line); len(tail) > tailLines {
			tail = tail[1:]
		}
		if c.log != nil {
			c.log(line)
		}
	}
	_, _ = io.Copy(io.Discard, r) // a line too long must not block the program
	return tail
}

// hideCredentials removes user and password from the addresses in a message.
func hideCredentials(s string) string {
	var b strings.Builder
	for {
		before, after, ok := strings.Cut(s, "://")
		b.WriteString(before)
		if !ok {
			return b.String()
		}
		b.WriteString("://")
		host, _, _ := strings.Cut(after, " ")
		host, _, _ = strings.Cut(host, "/")
		if at := strings.LastIndexByte(host, '@'); at >= 0 {
			after = after[at+1:]
		}
		s = after
	}
}
