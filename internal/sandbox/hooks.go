package sandbox

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/shim"
)

// HookRun is how a hook ran, as the log of hooks has it.
type HookRun = guestapi.HookResult

const (
	hookLogMax  = 1 << 20 // bytes of a log of hooks until a new one is begun; the one before is kept
	hookLineMax = 1 << 20 // bytes of one line
)

// guestHooks returns the hooks of a policy as the guest takes them.
func guestHooks(hooks []Hook) []guestapi.Hook {
	var out []guestapi.Hook
	for _, h := range hooks {
		out = append(out, guestapi.Hook(h))
	}
	return out
}

// logHooks keeps how hooks ran and tells of it. That it cannot be kept stops
// nothing.
func (c *Core) logHooks(e *entry, runs []HookRun) {
	if len(runs) == 0 {
		return
	}
	for _, run := range runs {
		told := run
		told.Output = ""
		c.emit(e, Event{Type: EventHook, Hook: &told, Reason: run.Describe()})
	}
	if err := c.appendHookLog(e.id, runs); err != nil {
		c.log.Warn("the log of hooks cannot be written", keySandbox, e.id, keyError, err)
	}
}

// older returns the path of the log before the present one.
func older(path string) string { return path + ".1" }

func (c *Core) appendHookLog(id string, runs []HookRun) error {
	path := c.cfg.HookLog(id)
	if path == "" {
		return nil
	}
	c.hookLog.Lock()
	defer c.hookLog.Unlock()
	if info, err := os.Stat(path); err == nil && info.Size() >= hookLogMax {
		if err := os.Rename(path, older(path)); err != nil {
			return err
		}
	}
	var lines []byte
	for _, run := range runs {
		line, err := json.Marshal(run)
		if err != nil {
			return err
		}
		lines = append(append(lines, line...), '\n')
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(lines)
	return errors.Join(err, f.Close())
}

func (c *Core) removeHookLog(id string) error {
	path := c.cfg.HookLog(id)
	if path == "" {
		return nil
	}
	c.hookLog.Lock()
	defer c.hookLog.Unlock()
	var failed error
	for _, file := range []string{path, older(path)} {
		if err := os.Remove(file); !errors.Is(err, fs.ErrNotExist) {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// HookRuns returns how the sandbox's hooks ran, the last ones of them, oldest
// first. It wakes nothing; a guest that runs is asked for hooks of the
// background that have ended.
func (c *Core) HookRuns(ctx context.Context, id string) ([]HookRun, error) {
	e, err := c.find(id)
	if err != nil {
		return nil, err
	}
	c.collectHooks(ctx, e)
	path := c.cfg.HookLog(e.id)
	if path == "" {
		return nil, nil
	}
	c.hookLog.Lock()
	defer c.hookLog.Unlock()
	var runs []HookRun
	for _, file := range []string{older(path), path} {
		runs, err = readHookLog(file, runs)
		if err != nil {
			return nil, unavailable(err, "read the log of hooks of sandbox %s", e.id)
		}
	}
	return runs, nil
}

// collectHooks asks a guest that runs for what no report had. One that does
// not answer has it still, the next time.
func (c *Core) collectHooks(ctx context.Context, e *entry) {
	e.mu.Lock()
	vm, runs := e.vm, e.rec.State == StateRunning
	e.mu.Unlock()
	if vm == nil || !runs {
		return
	}
	ctx, cancel := c.short(ctx)
	defer cancel()
	if report, err := vm.Hooks(ctx, shim.HooksRequest{}); err == nil {
		c.logHooks(e, report.Hooks)
	}
}

// keptHooks logs the hooks of a hibernation that was cancelled. A guest that
// ended has none, and what cannot be had now comes with the next report.
func (c *Core) keptHooks(ctx context.Context, e *entry) {
	if e.vm == nil {
		return
	}
	if report, err := e.vm.Hooks(ctx, shim.HooksRequest{KeptOnly: true}); err == nil {
		c.logHooks(e, report.Hooks)
	}
}

// readHookLog adds what a log holds to runs. A line that is not whole, as a full
// disk leaves it, is passed over.
func readHookLog(path string, runs []HookRun) ([]HookRun, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return runs, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, hookLineMax)
	for lines.Scan() {
		var run HookRun
		if json.Unmarshal(lines.Bytes(), &run) == nil {
			runs = append(runs, run)
		}
	}
	return runs, lines.Err()
}
