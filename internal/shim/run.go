package shim

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/qemu"
)

func memDir(dir string) string { return filepath.Join(dir, "mem") }

// NewDriver returns the driver that cfg chooses.
func NewDriver(cfg DriverConfig) *qemu.Driver {
	return qemu.New(qemu.Config{
		Binary: cfg.Binary, Accel: cfg.Accel, CPUModel: cfg.CPUModel,
		MachineType: cfg.MachineType, WrapCommand: cfg.WrapCommand,
	})
}

// Run is the whole of "hib shim". Standard input brings a Config as JSON and is
// the lifeline from then on, standard output tells when the shim is ready.
func Run(ctx context.Context) error {
	return run(ctx, func(cfg DriverConfig) vmm.Driver { return NewDriver(cfg) })
}

func run(ctx context.Context, newDriver func(DriverConfig) vmm.Driver) error {
	var cfg Config
	if err := json.NewDecoder(os.Stdin).Decode(&cfg); err != nil {
		return fmt.Errorf("shim: read the configuration from standard input: %w", err)
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})).With("vm", cfg.VM)
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGINT) // not inherited by the VMM, unlike ignoring
	return Serve(ctx, cfg, newDriver(cfg.Driver), ServeOptions{
		Lifeline: os.Stdin,
		Ready: func() {
			_, _ = os.Stdout.Write(readyAnswer) // a parent that is gone ends the lifeline too
			_ = os.Stdout.Close()
		},
		Log: log,
	})
}
