package shim

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// TestMain makes the test binary a shim, for a Launcher, or runs the tests.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "shim" {
		if err := runChild(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// runChild is Run with the fake driver. Each step of a machine leaves a file
// in the machine's folder, see passed. SIGUSR1 crashes the machine.
func runChild(config string) error {
	d := newDriver()
	d.on = func(m *machine, step string) error {
		return os.WriteFile(filepath.Join(m.dir, "passed-"+step), nil, 0o600)
	}
	crash := make(chan os.Signal, 1)
	signal.Notify(crash, syscall.SIGUSR1)
	go func() {
		for range crash {
			for _, m := range d.Machines() {
				m.Crash(vmm.ReasonCrashed)
			}
		}
	}()
	return run(context.Background(), config, func(DriverConfig) vmm.Driver { return d })
}

// passed tells whether the machine of a child has done the step.
func passed(c *Client, step string) bool {
	_, err := os.Stat(filepath.Join(c.Handle().Dir(), "passed-"+step))
	return err == nil
}
