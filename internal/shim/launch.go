package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob/s3"
)

// Credential is the account that shims and their VMMs run under.
type Credential struct {
	UID    int   `json:"uid"`
	GID    int   `json:"gid"`
	Groups []int `json:"groups"` // supplementary, for /dev/kvm
}

// become makes this process, all its threads, run under the account for good.
func (c *Credential) become() error {
	if err := syscall.Setgroups(c.Groups); err != nil {
		return fmt.Errorf("drop privileges: set groups: %w", err)
	}
	if err := syscall.Setgid(c.GID); err != nil {
		return fmt.Errorf("drop privileges: set group: %w", err)
	}
	if err := syscall.Setuid(c.UID); err != nil {
		return fmt.Errorf("drop privileges: set user: %w", err)
	}
	return nil
}

// Launcher starts shims and finds those that were left over.
type Launcher struct {
	Binary      string      // the hib binary
	RunDir      string      // existing folder, in which each machine gets one of its own
	Store       string      // folder of the snapshot store
	Account     *Credential // that shims change to; nil: that of this process
	Driver      DriverConfig
	FullCapture bool
	Resolvers   []string   // DNS servers ("address:port") that answer guests; none: those of the host
	Remote      *s3.Config // what shims read from the remote store with; nil: there is none
}

// Launch starts a shim for a new machine vm and returns when it takes orders.
// It ends with this process until it is told Adopt.
func (l *Launcher) Launch(ctx context.Context, vm string) (*Client, error) {
	dir := filepath.Join(l.RunDir, vm)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("launch machine %s: %w", vm, err)
	}
	client, err := l.launch(ctx, vm, dir)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("launch machine %s: %w", vm, err), cleanUp(dir))
	}
	return client, nil
}

func (l *Launcher) launch(ctx context.Context, vm, dir string) (*Client, error) {
	cfg := Config{VM: vm, Dir: dir, Store: l.Store, Driver: l.Driver, Account: l.Account, FullCapture: l.FullCapture, Resolvers: l.Resolvers, Remote: l.Remote}
	text, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	logPath := filepath.Join(dir, "log")
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(l.Binary, "shim", dir) // the argument is for people who look at processes
	cmd.Env = environment(os.Environ())
	cmd.Stderr = log
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if l.Account != nil {
		if err := os.Chown(dir, l.Account.UID, l.Account.GID); err != nil {
			return nil, err
		}
	}
	// The configuration is the only thing that is ever written to the lifeline,
	// which the shim then reads to its end: command lines are seen by everybody,
	// and it may hold secrets. The shim answers "ready" on its standard output.
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	ready, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	_, _ = lifeline.Write(text) // a shim that does not take it does not get ready
	answer, _ := io.ReadAll(io.LimitReader(ready, 64))
	stopped := stop()
	if !bytes.Equal(answer, readyAnswer) || !stopped {
		_ = cmd.Process.Kill()
		waitErr := cmd.Wait()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		said, _ := os.ReadFile(logPath)
		return nil, fmt.Errorf("the shim did not start (%v): %s", waitErr, lastLines(string(said), 2000))
	}
	handle, err := newHandle(vm, filepath.Join(dir, socketName), cmd.Process.Pid)
	reaped := make(chan struct{})
	go func() {
		defer close(reaped)
		_ = cmd.Wait() // how it ended is told by its status, its log and its folder
	}()
	client := newClient(handle, reaped)
	if err != nil {
		return nil, errors.Join(err, client.Release(ctx))
	}
	return client, nil
}

// environment returns a daemon's environment without what grants access to
// stores: neither a shim, which is told, nor its VMM shall have that.
func environment(all []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(v string) bool {
		return strings.HasPrefix(v, "AWS_") || strings.HasPrefix(v, "HIB_STORE_")
	})
}

// readyAnswer is what a shim prints when it takes orders.
var readyAnswer = []byte("ready\n")

// Adopt is the function of the same name.
func (l *Launcher) Adopt(ctx context.Context, handle Handle) (*Client, error) {
	return Adopt(ctx, handle)
}

// Discard removes what the machine of a handle whose shim cannot be adopted
// left behind, killing that shim if it lives.
func (l *Launcher) Discard(ctx context.Context, handle Handle) error {
	return newClient(handle, nil).Release(ctx)
}

// Reap ends every shim in RunDir whose machine is not among known, and removes
// its folder. A shim is found by the handle that it left there, never by the
// name of a process.
func (l *Launcher) Reap(ctx context.Context, known []string) error {
	entries, err := os.ReadDir(l.RunDir)
	if err != nil {
		return fmt.Errorf("look for left-over machines: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if !e.IsDir() || slices.Contains(known, e.Name()) {
			continue
		}
		dir := filepath.Join(l.RunDir, e.Name())
		handle, err := readHandle(dir)
		if err == nil && handle.Alive() {
			reaping, cancel := context.WithTimeout(ctx, 30*time.Second)
			err = newClient(handle, nil).Release(reaping)
			cancel()
		} else {
			err = cleanUp(dir)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("reap machine %s: %w", e.Name(), err))
		}
	}
	return errors.Join(errs...)
}

func readHandle(dir string) (Handle, error) {
	var h Handle
	b, err := os.ReadFile(filepath.Join(dir, handleFile))
	if err != nil {
		return h, err
	}
	if err := json.Unmarshal(b, &h); err != nil {
		return h, fmt.Errorf("read %s of %s: %w", handleFile, dir, err)
	}
	// The folder is the truth about where it lies.
	h.Socket = filepath.Join(dir, socketName)
	return h, nil
}
