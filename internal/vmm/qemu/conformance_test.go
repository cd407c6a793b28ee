package qemu

import (
	"syscall"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/vmmtest"
)

// setup is the suite's for machines of this driver.
func setup(t testing.TB, config Config, cpus int) vmmtest.Setup {
	return vmmtest.Setup{
		Driver:  New(config),
		Shape:   vmm.Shape{MemoryMiB: 256, CPUs: cpus},
		Guest:   testGuest(t),
		Crash:   func(t *testing.T, m vmm.Machine) { check(t, syscall.Kill(m.PID(), syscall.SIGABRT)) },
		Timeout: 3 * time.Minute,
	}
}

func TestConformance(t *testing.T) { vmmtest.Run(t, setup(t, Config{}, 1)) }
