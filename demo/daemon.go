package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
)

// daemon is a private "hib serve" on a free port of loopback. Its data folder
// is kept, so that a later demo finds its template.
type daemon struct {
	bin, data, cache string
	cmd              *exec.Cmd
	c                *client.Client
}

func startDaemon(ctx context.Context) (*daemon, error) {
	here, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	d := &daemon{bin: filepath.Join(here, "bin"), cache: filepath.Join(here, ".cache", "template")}
	agent, err := digest(filepath.Join(d.bin, "hib-guest"))
	if err != nil {
		return nil, fmt.Errorf("%w; build it with: make build", err)
	}
	// A template holds the agent that it was built with.
	d.data = filepath.Join(here, ".cache", "demo-"+agent[:12])
	if err := errors.Join(os.MkdirAll(d.data, 0o755), os.MkdirAll(d.cache, 0o755)); err != nil {
		return nil, err
	}
	step("hib serve --data %s --listen 127.0.0.1:0", d.data)
	return d, d.start(ctx)
}

func digest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

// start starts the daemon and waits until it answers.
func (d *daemon) start(ctx context.Context) error {
	where := filepath.Join(d.data, api.DaemonFile)
	if err := os.Remove(where); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	log, err := os.OpenFile(filepath.Join(d.data, "serve.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	d.cmd = exec.Command(filepath.Join(d.bin, "hib"), "serve", "--data", d.data, "--cache", d.cache, "--listen", "127.0.0.1:0",
		"--pool", "0", "--parked-memory", "0") // standby is shown as it is without any cache of machines
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.cmd.Start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		if c, err := (client.Options{Data: d.data}).Client(); err == nil && fileExists(where) && c.Health(ctx) == nil {
			d.c = c
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the daemon does not answer; see %s", log.Name())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// kill ends the daemon as a crash would.
func (d *daemon) kill() error {
	if err := d.cmd.Process.Kill(); err != nil {
		return err
	}
	_ = d.cmd.Wait()
	d.c.Close()
	return nil
}

func (d *daemon) killAndRestart(ctx context.Context) error {
	if err := d.kill(); err != nil {
		return err
	}
	return d.start(ctx)
}

func (d *daemon) close() error {
	if d.c == nil {
		return nil
	}
	d.c.Close()
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return d.cmd.Wait()
}

// template builds the base template unless it is there.
func (d *daemon) template(ctx context.Context) error {
	t, err := d.c.Template(ctx, "base")
	if err == nil {
		figure("template base, version %d, is there already", t.Version)
		return nil
	}
	if !client.IsNotFound(err) {
		return err
	}
	step("hib template build base (once: root file system, kernel, boot, base snapshot)")
	begun, phase := time.Now(), ""
	t, err = d.c.BuildTemplate(ctx, api.BuildRequest{Name: "base", MemoryMiB: 512}, func(p api.Progress) {
		if p.Phase != phase {
			phase = p.Phase
			figure("%3.0f s  %s", time.Since(begun).Seconds(), phase)
		}
	})
	if err != nil {
		return err
	}
	return claim(len(t.Bases) > 0, "built in %.0f s: base image %d MB, base snapshot %d MB",
		time.Since(begun).Seconds(), t.BaseBytes/1e6, t.Bases[0].StoredBytes/1e6)
}

// machines returns the folders of the machines that the daemon holds.
func (d *daemon) machines() ([]string, error) {
	var info api.DaemonInfo
	b, err := os.ReadFile(filepath.Join(d.data, api.DaemonFile))
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return nil, err
	}
	return filepath.Glob(filepath.Join(info.Run, "*", "handle.json"))
}

// lastMachines is machines once none is left, which comes right behind the answer of a
// hibernation, or those that are there after a while.
func (d *daemon) lastMachines(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		machines, err := d.machines()
		if err != nil || len(machines) == 0 || ctx.Err() != nil {
			return machines, err
		}
		time.Sleep(5 * time.Millisecond)
	}
}
