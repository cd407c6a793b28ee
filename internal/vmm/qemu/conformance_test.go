package qemu

import (
	"syscall"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/vmmtest"
)

func TestConformance(t *testing.T) {
	vmmtest.Run(t, vmmtest.Setup{
		Driver:  New(Config{}),
		Shape:   vmm.Shape{MemoryMiB: 256, CPUs: 1},
		Boot:    testGuest(t),
		Crash:   func(t *testing.T, m vmm.Machine) { check(t, syscall.Kill(m.PID(), syscall.SIGABRT)) },
		Timeout: 3 * time.Minute,
	})
}
