package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
)

// SelfTest says how a self-test is run.
type SelfTest struct {
	Program  string             // file of this program, whose "serve" is started
	Args     []string           // further arguments of serve, such as --accel
	Template string             // of the sandbox, built if it is missing
	Data     string             // data folder whose template is used; "": a temporary one, deleted afterwards
	Log      io.Writer          // takes what the daemon says
	Progress func(api.Progress) // hears of each step and of the build
}

// clockTolerance is how far a guest's clock may be off after a resume.
const clockTolerance = time.Second

// serveTimeout bounds the start of the daemon; its stop has the same.
const serveTimeout = time.Minute

// counterScript counts in a shell process. It writes its pid, and then each
// number, whole, to a file.
const counterScript = `i=0; while :; do i=$((i+1)); echo "$$ $i" > /tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.05; done`

// Run takes a sandbox through its life on a daemon of its own: template,
// creation, hibernation, resume and deletion, and checks that the process in
// it went on where it was, and that its clock is right.
func (t SelfTest) Run(ctx context.Context) (err error) {
	data := t.Data
	if data == "" {
		if data, err = os.MkdirTemp("", "hib-selftest-*"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(data)) }()
		if err := os.Chmod(data, 0o711); err != nil { // the account passes it
			return err
		}
	}
	t.step("daemon", "start it in "+data)
	d, err := t.serve(ctx, data)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	c, err := client.Options{Data: data}.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	if err := t.template(ctx, c); err != nil {
		return err
	}
	return t.life(ctx, c)
}

func (t SelfTest) step(phase, message string) {
	t.Progress(api.Progress{Phase: phase, Message: message})
}

// template builds the template unless it is there.
func (t SelfTest) template(ctx context.Context, c *client.Client) error {
	_, err := c.Template(ctx, t.Template)
	if err == nil || !client.IsNotFound(err) {
		return err
	}
	t.step("template", "build "+t.Template+", which takes minutes")
	_, err = c.BuildTemplate(ctx, api.BuildRequest{Name: t.Template}, t.Progress)
	if err != nil {
		return fmt.Errorf("build the template %s: %w", t.Template, err)
	}
	return nil
}

// life creates a sandbox, lets it sleep and wake, and deletes it.
func (t SelfTest) life(ctx context.Context, c *client.Client) (err error) {
	t.step("create", "a sandbox of "+t.Template)
	sb, err := c.Create(ctx, api.CreateRequest{Template: t.Template, Policy: &api.PolicyPatch{IdleTimeout: new(api.Duration)}})
	if err != nil {
		return fmt.Errorf("create a sandbox: %w", err)
	}
	defer func() {
		t.step("delete", sb.ID)
		// Also when ctx has ended: nothing is to be left behind.
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), serveTimeout)
		defer cancel()
		err = errors.Join(err, c.Delete(last, sb.ID))
		if _, gone := c.Get(last, sb.ID); err == nil && !client.IsNotFound(gone) {
			err = fmt.Errorf("sandbox %s is still there after its deletion", sb.ID)
		}
	}()
	t.step("process", "start a counter")
	if _, err := sh(ctx, c, sb.ID, "setsid sh -c '"+counterScript+"' </dev/null >/dev/null 2>&1 &"); err != nil {
		return fmt.Errorf("start a process: %w", err)
	}
	before, err := awaitCount(ctx, c, sb.ID, count{})
	if err != nil {
		return err
	}
	t.step("hibernate", sb.ID)
	sb, err = c.Hibernate(ctx, sb.ID)
	switch {
	case err != nil:
		return fmt.Errorf("hibernate: %w", err)
	case sb.State != api.StateStandby:
		return fmt.Errorf("the sandbox is %s after its hibernation, not %s", sb.State, api.StateStandby)
	}
	if r := sb.LastHibernate; r != nil {
		t.step("hibernate", fmt.Sprintf("took %.0f ms", r.TotalMS))
	}
	t.step("resume", sb.ID)
	if sb, err = c.Resume(ctx, sb.ID); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	if r := sb.LastResume; r != nil {
		t.step("resume", fmt.Sprintf("took %.0f ms", r.TotalMS))
	}
	if err := checkClock(ctx, c, sb.ID); err != nil {
		return err
	}
	after, err := awaitCount(ctx, c, sb.ID, before)
	if err != nil {
		return err
	}
	if after.pid != before.pid {
		return fmt.Errorf("the counter is process %d after the resume, it was %d: it did not go on", after.pid, before.pid)
	}
	t.step("process", fmt.Sprintf("went on from %d to %d", before.n, after.n))
	return nil
}

// sh runs a script in the sandbox and returns what it printed.
func sh(ctx context.Context, c *client.Client, id, script string) (string, error) {
	out, err := c.Exec(ctx, id, api.ExecRequest{Cmd: []string{"sh", "-c", script}, TimeoutMS: time.Minute.Milliseconds()})
	switch {
	case err != nil:
		return "", err
	case out.ExitCode != 0:
		return "", fmt.Errorf("%q ended with %d: %s", script, out.ExitCode, strings.TrimSpace(out.Stderr))
	}
	return strings.TrimSpace(out.Stdout), nil
}

// count is what the counter wrote.
type count struct{ pid, n int }

// awaitCount waits until the counter is beyond an earlier count.
func awaitCount(ctx context.Context, c *client.Client, id string, beyond count) (count, error) {
	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()
	for {
		text, err := sh(ctx, c, id, "cat /tmp/count 2>/dev/null || true")
		if err != nil {
			return count{}, fmt.Errorf("look at the counter: %w", err)
		}
		var now count
		if _, err := fmt.Sscan(text, &now.pid, &now.n); err == nil && now.n > beyond.n {
			return now, nil
		}
		select {
		case <-ctx.Done():
			return count{}, fmt.Errorf("the counter stands still at %d", beyond.n)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// checkClock compares the guest's clock with the host's, before and after the
// question.
func checkClock(ctx context.Context, c *client.Client, id string) error {
	asked := time.Now()
	text, err := sh(ctx, c, id, "date +%s.%N")
	if err != nil {
		return fmt.Errorf("look at the guest's clock: %w", err)
	}
	answered := time.Now()
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(seconds) || math.Abs(seconds) > 1e12 {
		return fmt.Errorf("the guest's clock shows %q", text)
	}
	guest := time.Unix(0, int64(seconds*1e9))
	if guest.Before(asked.Add(-clockTolerance)) || guest.After(answered.Add(clockTolerance)) {
		return fmt.Errorf("the guest's clock is off by %v after the resume", guest.Sub(answered).Round(time.Millisecond))
	}
	return nil
}

// process is a daemon that the self-test started.
type process struct {
	cmd    *exec.Cmd
	said   lastLine
	exited chan error
}

// lastLine passes on what is written to it and keeps the last line: a daemon
// that can't start says why there.
type lastLine struct {
	to   io.Writer
	line []byte
}

func (l *lastLine) Write(p []byte) (int, error) {
	for line := range bytes.Lines(p) {
		if bytes.HasSuffix(l.line, []byte("\n")) {
			l.line = l.line[:0]
		}
		l.line = append(l.line, line...)
	}
	return l.to.Write(p)
}

// String returns the line without what programs put before their errors. It
// is called once nothing is written any more.
func (l *lastLine) String() string {
	return strings.TrimPrefix(strings.TrimSpace(string(l.line)), "hib: ")
}

// serve starts a daemon on a free port and waits until it answers.
func (t SelfTest) serve(ctx context.Context, data string) (*process, error) {
	args := append([]string{"serve", "--data", data, "--listen", "127.0.0.1:0"}, t.Args...)
	cmd := exec.Command(t.Program, args...)
	p := &process{cmd: cmd, said: lastLine{to: t.Log}, exited: make(chan error, 1)}
	cmd.Stdout, cmd.Stderr = &p.said, &p.said
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the daemon: %w", err)
	}
	go func() { p.exited <- cmd.Wait() }()
	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()
	for {
		if p.answers(ctx, data) {
			return p, nil
		}
		select {
		case err := <-p.exited:
			return nil, fmt.Errorf("the daemon ended (%v): %s", err, &p.said)
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("the daemon did not start: %w", ctx.Err()), p.stop())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// answers tells whether the daemon serves. Another one, which may run on the
// same data folder, is none of the self-test's.
func (p *process) answers(ctx context.Context, data string) bool {
	text, err := os.ReadFile(filepath.Join(data, api.DaemonFile))
	var running api.DaemonInfo
	if err != nil || json.Unmarshal(text, &running) != nil || running.PID != p.cmd.Process.Pid {
		return false
	}
	c, err := client.Options{Data: data}.Client()
	if err != nil {
		return false
	}
	defer c.Close()
	return c.Health(ctx) == nil
}

// stop stops the daemon and waits for it.
func (p *process) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop the daemon: %w", err)
	}
	select {
	case err := <-p.exited:
		if err != nil {
			return fmt.Errorf("the daemon stopped with an error: %w", err)
		}
		return nil
	case <-time.After(serveTimeout):
		return errors.Join(errors.New("the daemon did not stop"), p.cmd.Process.Kill())
	}
}
