package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	processpb "github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

const (
	hooksDir = "/etc/hib/hooks" // of the image's hooks: EVENT.d

	// cancelBudget bounds the hooks after a hibernation that was cancelled: the
	// request that cancelled it waits for them.
	cancelBudget = 15 * time.Second

	hookKillWait = 2 * time.Second // for the end of a hook that was killed
)

// hookFile is the form of the names of hooks in a folder, as run-parts has it,
// so that editors' copies and packages' leftovers are not run. A suffix marks
// those that run in the background.
var hookFile = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.background)?$`)

const backgroundSuffix = ".background"

var errInterrupted = errors.New("ended: the hibernation was cancelled")

// hookRunner runs the image's and the sandbox's hooks, one list at a time.
type hookRunner struct {
	dir      string
	cages    cages
	spawner  *spawner
	accounts func() (*accounts, error)
	env      func() map[string]string
	log      *slog.Logger

	mu      sync.Mutex
	ended   []guestapi.HookResult         // of hooks that nobody waited for, until somebody takes them
	running map[string]context.CancelFunc // background hooks, by name
}

// occasion is what hooks are run for.
type occasion struct {
	event      string
	reason     string
	slept      time.Duration
	snapshot   string
	generation uint64
}

func (o occasion) env() map[string]string {
	return map[string]string{
		"HIB_EVENT":         o.event,
		"HIB_REASON":        o.reason,
		"HIB_SLEPT_SECONDS": strconv.FormatInt(int64(o.slept/time.Second), 10),
		"HIB_SNAPSHOT":      o.snapshot,
		"HIB_GENERATION":    strconv.FormatUint(o.generation, 10),
	}
}

// hookSet is the hooks of one event.
type hookSet struct {
	hooks    []guestapi.Hook
	warnings []string
}

// with adds those of given that are of the event: the image's come first, in
// lexical order of their names, then the sandbox's.
func (s hookSet) with(event string, given []guestapi.Hook) hookSet {
	s.hooks = s.hooks[:len(s.hooks):len(s.hooks)]
	for _, h := range given {
		if h.Event == event {
			s.hooks = append(s.hooks, h)
		}
	}
	if n := len(s.hooks); n > guestapi.MaxHooks {
		s.hooks = s.hooks[:guestapi.MaxHooks]
		s.warnings = append(s.warnings, fmt.Sprintf("hooks: %d of %d %s hooks are not run: there may be %d",
			n-guestapi.MaxHooks, n, event, guestapi.MaxHooks))
	}
	return s
}

// scan lists the image's hooks of an event.
func (r *hookRunner) scan(event string) (set hookSet) {
	dir := filepath.Join(r.dir, event+".d")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return set
	}
	if err == nil {
		err = ownedByRoot(dir)
	}
	if err != nil {
		set.warnings = append(set.warnings, fmt.Sprintf("hooks: %v", err))
		return set
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		info, err := os.Stat(path)
		if !hookFile.MatchString(e.Name()) || err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
			continue
		}
		if err := ownedByRoot(path); err != nil {
			set.warnings = append(set.warnings, fmt.Sprintf("hooks: %v", err))
			continue
		}
		set.hooks = append(set.hooks, guestapi.Hook{
			Name: e.Name(), Event: event, Command: []string{path}, User: "root",
			Background: event == guestapi.EventPostResume && strings.HasSuffix(e.Name(), backgroundSuffix),
		})
	}
	return set
}

// ownedByRoot refuses what somebody else may write: it would be run as root.
func ownedByRoot(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s is not run: it must belong to root, and nobody else may write it", path)
	}
	return nil
}

// run runs the hooks of a set one after the other until ctx ends, for at most
// budget in all. Background ones are started in their turn and not waited for.
func (r *hookRunner) run(ctx context.Context, set hookSet, o occasion, budget time.Duration) (results []guestapi.HookResult, warnings []string) {
	end := time.Now().Add(budget)
	warnings = set.warnings
	left := 256 << 10 // bytes of output that the answer has room for
	for _, h := range set.hooks {
		result := guestapi.HookResult{Name: h.Name, Event: o.event, Reason: o.reason, Background: h.Background, StartedAt: time.Now(), ExitCode: -1}
		switch {
		case ctx.Err() != nil:
			result.Error = "not run: the hibernation was cancelled"
		case time.Until(end) <= 0:
			result.Error = "not run: the hooks before it took all the time that there is"
		case h.Background:
			if r.startBackground(h, result, o) {
				continue
			}
			result.Error = "not run: too many run in the background"
		default:
			result = r.runOne(ctx, h, result, o, min(hookTimeout(h), time.Until(end)))
		}
		if len(result.Output) > left {
			result.DroppedBytes += int64(len(result.Output) - left)
			result.Output = result.Output[:left]
		}
		left -= len(result.Output)
		if result.Failed() {
			warnings = append(warnings, fmt.Sprintf("%s hook %s: %s", o.event, h.Name, result.Describe()))
		}
		results = append(results, result)
	}
	return results, warnings
}

func hookTimeout(h guestapi.Hook) time.Duration {
	switch {
	case h.Timeout > 0:
		return min(h.Timeout, guestapi.MaxHookTimeout)
	case h.Background:
		return guestapi.BackgroundHookTimeout
	}
	return guestapi.DefaultHookTimeout
}

// startBackground runs a hook beside what follows. One of that name that still
// runs, from the resume before, is ended.
func (r *hookRunner) startBackground(h guestapi.Hook, result guestapi.HookResult, o occasion) bool {
	ctx, cancel := context.WithCancel(context.Background())
	r.mu.Lock()
	defer r.mu.Unlock()
	if before := r.running[h.Name]; before != nil {
		before()
	} else if len(r.running) >= guestapi.MaxHooks {
		cancel()
		return false
	}
	if r.running == nil {
		r.running = map[string]context.CancelFunc{}
	}
	r.running[h.Name] = cancel
	started := make(chan struct{})
	go func() {
		result := r.runStarted(ctx, h, result, o, hookTimeout(h), started)
		overtaken := ctx.Err() != nil
		cancel()
		r.mu.Lock()
		defer r.mu.Unlock()
		if !overtaken {
			delete(r.running, h.Name)
		}
		r.keepLocked([]guestapi.HookResult{result})
	}()
	<-started // a process is started only while the caller keeps the cgroup from being frozen
	return true
}

// keepLocked keeps results until take. The oldest give way. r.mu is held.
func (r *hookRunner) keepLocked(results []guestapi.HookResult) {
	r.ended = append(r.ended, results...)
	size := 0
	for i := len(r.ended) - 1; i >= 0; i-- {
		size += len(r.ended[i].Output)
		if size > 256<<10 || len(r.ended)-i > guestapi.MaxHooks {
			r.ended = append([]guestapi.HookResult(nil), r.ended[i+1:]...)
			return
		}
	}
}

func (r *hookRunner) keep(results []guestapi.HookResult) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keepLocked(results)
}

// take returns the results of hooks that nobody waited for, each once.
func (r *hookRunner) take() []guestapi.HookResult {
	r.mu.Lock()
	defer r.mu.Unlock()
	ended := r.ended
	r.ended = nil
	return ended
}

func (r *hookRunner) runOne(ctx context.Context, h guestapi.Hook, result guestapi.HookResult, o occasion, timeout time.Duration) guestapi.HookResult {
	return r.runStarted(ctx, h, result, o, timeout, make(chan struct{}))
}

// runStarted runs a hook to its end and closes started once its process is
// there, or will not be.
func (r *hookRunner) runStarted(ctx context.Context, h guestapi.Hook, result guestapi.HookResult, o occasion, timeout time.Duration, started chan<- struct{}) guestapi.HookResult {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	begun := time.Now()
	run, err := r.launch(h, o)
	close(started)
	if err != nil {
		result.Error = err.Error()
		return result
	}
	err = run.await(ctx)
	result.DurationMS = float64(time.Since(begun).Microseconds()) / 1000
	result.Output, result.DroppedBytes = run.output.text()
	if status, ok := run.status(); ok {
		switch {
		case status.Exited():
			result.ExitCode = status.ExitStatus()
		case status.Signaled():
			result.Signal = unix.SignalName(status.Signal())
		}
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		result.TimedOut = true
	case errors.Is(err, context.Canceled) && h.Background:
		result.Error = "ended: the sandbox was resumed anew"
	case errors.Is(err, context.Canceled):
		result.Error = errInterrupted.Error()
	case err != nil:
		result.Error = err.Error()
	}
	return result
}

// hookRun is a hook under way.
type hookRun struct {
	process *os.Process
	cage    cage
	output  *hookOutput
	pipe    *os.File      // its output
	drained chan struct{} // closed when all that it wrote has been read
	done    chan struct{} // closed when it has ended
	state   *os.ProcessState
}

// launch starts a hook as the user that it names.
func (r *hookRunner) launch(h guestapi.Hook, o occasion) (*hookRun, error) {
	cmd, err := r.command(h, o)
	if err != nil {
		return nil, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	ours, theirs, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	attr := &os.ProcAttr{
		Dir: cmd.dir, Env: cmd.env, Files: []*os.File{null, theirs, theirs},
		Sys: &syscall.SysProcAttr{Setsid: true,
			Credential: &syscall.Credential{Uid: cmd.user.UID, Gid: cmd.user.GID, Groups: cmd.user.Groups}},
	}
	run := &hookRun{cage: r.cages.open(h.Background, r.log), output: &hookOutput{}, pipe: ours, drained: make(chan struct{}), done: make(chan struct{})}
	if fd, ok := run.cage.descriptor(); ok {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, fd
	}
	if run.process, err = r.spawner.start(cmd.path, cmd.argv, attr); err != nil {
		ours.Close()
		run.cage.close()
		return nil, fmt.Errorf("start %s: %w", cmd.path, err)
	}
	go run.pump()
	go func() {
		run.state, _ = r.spawner.wait(run.process)
		close(run.done)
	}()
	return run, nil
}

// command resolves what a hook is executed as.
func (r *hookRunner) command(h guestapi.Hook, o occasion) (command, error) {
	if err := guestapi.CheckHook(h); err != nil {
		return command{}, err
	}
	all, err := r.accounts()
	if err != nil {
		return command{}, err
	}
	name := h.User
	if name == "" {
		name = "root"
	}
	user, err := all.find(name)
	if err != nil {
		return command{}, err
	}
	env := map[string]string{}
	for _, layer := range []map[string]string{h.Env, o.env()} {
		for k, v := range layer {
			env[k] = v
		}
	}
	return resolveCommand(&processpb.ProcessConfig{Cmd: h.Command[0], Args: h.Command[1:], Envs: env}, user, r.env())
}

// await waits for the hook's end. When ctx ends first, it and all that it
// started is killed, and ctx's error is returned. What a hook that ended by
// itself leaves running goes on as a process of the sandbox's.
func (h *hookRun) await(ctx context.Context) error {
	var err error
	select {
	case <-h.done:
	case <-ctx.Done():
		err = ctx.Err()
		h.kill()
		select {
		case <-h.done:
		case <-time.After(hookKillWait):
			err = errors.New("it was killed at its time-out and has not ended: it waits for a device or a file system")
		}
	}
	_ = h.pipe.SetReadDeadline(time.Now())
	<-h.drained
	if err == nil {
		err = h.cage.failure()
	}
	h.cage.close()
	return err
}

// kill ends the hook and what it started.
func (h *hookRun) kill() {
	h.cage.kill()
	_ = unix.Kill(-h.process.Pid, unix.SIGKILL)
}

// status returns how the hook ended, if it did.
func (h *hookRun) status() (syscall.WaitStatus, bool) {
	select {
	case <-h.done:
	default:
		return 0, false
	}
	if h.state == nil {
		return 0, false
	}
	status, ok := h.state.Sys().(syscall.WaitStatus)
	return status, ok
}

// pump reads what the hook writes, all of it: one that prints more than is kept
// must not wait for room. What its children write after its end is dropped.
func (h *hookRun) pump() {
	defer h.pipe.Close()
	buf := make([]byte, copySize)
	var err error
	for err == nil {
		var n int
		n, err = h.pipe.Read(buf)
		h.output.write(buf[:n])
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		_ = h.pipe.SetReadDeadline(time.Time{})
		for left := buffered(h.pipe); left > 0; {
			n, err := h.pipe.Read(buf[:min(left, len(buf))])
			h.output.write(buf[:n])
			left -= n
			if err != nil {
				break
			}
		}
	}
	close(h.drained)
	for err = nil; err == nil; {
		_, err = h.pipe.Read(buf)
	}
}

// hookOutput keeps the beginning and the end of an output.
type hookOutput struct {
	head, tail []byte
	total      int64
}

func (o *hookOutput) write(b []byte) {
	const half = guestapi.MaxHookOutput / 2
	o.total += int64(len(b))
	if n := min(half-len(o.head), len(b)); n > 0 {
		o.head = append(o.head, b[:n]...)
		b = b[n:]
	}
	if len(b) > half {
		b = b[len(b)-half:]
	}
	o.tail = append(o.tail, b...)
	if len(o.tail) > 2*half { // moved seldom, not at each write
		o.tail = append(o.tail[:0], o.tail[len(o.tail)-half:]...)
	}
}

// text returns what is kept, and how many bytes are not.
func (o *hookOutput) text() (string, int64) {
	const half = guestapi.MaxHookOutput / 2
	tail := o.tail[max(0, len(o.tail)-half):]
	dropped := o.total - int64(len(o.head)+len(tail))
	if dropped == 0 {
		return guestapi.CleanOutput(string(o.head) + string(tail)), 0
	}
	mark := fmt.Sprintf(guestapi.HookOutputMark, dropped)
	return guestapi.CleanOutput(string(o.head) + mark + string(tail)), dropped
}
