package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/internal/bench"
	"github.com/hibernacle/hibernacle/internal/bench/peer"
	"github.com/hibernacle/hibernacle/internal/daemon"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// benchHost is this host, if the daemon runs on it.
type benchHost struct {
	client  *client.Client
	data    string // the daemon's data folder
	program string // this program
	restart bool   // the daemon may be ended
}

// benchHost returns this host, and whether the client's daemon runs on it.
func (a *app) benchHost(c *client.Client, restart bool) (benchHost, bool) {
	h := benchHost{client: c, restart: restart}
	var err error
	if h.data, err = a.data(); err != nil {
		return h, false
	}
	info, err := h.daemon()
	if err != nil || info.URL != c.URL() {
		return h, false
	}
	h.program, err = os.Executable()
	return h, err == nil
}

// daemon reads who the daemon of the data folder is.
func (h benchHost) daemon() (info api.DaemonInfo, err error) {
	b, err := os.ReadFile(filepath.Join(h.data, api.DaemonFile))
	if err != nil {
		return info, err
	}
	return info, json.Unmarshal(b, &info)
}

// PID implements bench.Host.
func (h benchHost) PID() (int, error) {
	info, err := h.daemon()
	return info.PID, err
}

// List implements bench.Host.
func (h benchHost) List(ctx context.Context) (time.Duration, error) {
	cmd := exec.CommandContext(ctx, h.program, "ls", "--data", h.data)
	begun := time.Now()
	err := cmd.Run()
	return time.Since(begun), err
}

// restartPatience bounds how long the daemon may take to end, and to be there again.
const restartPatience = 2 * time.Minute

// Restart implements bench.Host: it ends the daemon and leaves it to whoever
// looks after it to start it again.
func (h benchHost) Restart(ctx context.Context) (time.Duration, error) {
	if !h.restart {
		return 0, fmt.Errorf("%w without --restart-daemon", errors.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(ctx, restartPatience)
	defer cancel()
	pid, err := h.PID()
	if err != nil {
		return 0, err
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		return 0, fmt.Errorf("end the daemon: %w", err)
	}
	if !poll(ctx, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }) {
		return 0, fmt.Errorf("the daemon (pid %d) does not end", pid)
	}
	begun := time.Now()
	if !poll(ctx, func() bool { return h.client.Health(ctx) == nil }) {
		return 0, errors.New("nobody started the daemon again")
	}
	return time.Since(begun), nil
}

// poll waits until cond is true, and returns false if ctx ends before.
func poll(ctx context.Context, cond func() bool) bool {
	for !cond() {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(2 * time.Millisecond):
		}
	}
	return true
}

// newPeer returns what prepares QEMU's own restore of a template's guest.
func (h benchHost) newPeer(name string) func(context.Context, int, []string, int) (bench.Peer, error) {
	return func(ctx context.Context, memoryMiB int, server []string, port int) (bench.Peer, error) {
		version, err := h.client.Version(ctx)
		if err != nil {
			return nil, err
		}
		t, err := h.client.Template(ctx, name)
		if err != nil {
			return nil, err
		}
		p, err := peer.New(ctx, peer.Config{
			Template: filepath.Join(daemon.FoldersOf(h.data).Templates, t.Name, "v"+strconv.Itoa(t.Version)),
			Accel:    version.Accel, Shape: vmm.Shape{MemoryMiB: memoryMiB, CPUs: t.CPUs}, Server: server, Port: uint16(port),
		})
		if err != nil {
			return nil, err
		}
		return p, nil
	}
}
