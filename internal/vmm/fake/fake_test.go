package fake

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/vmmtest"
)

// suiteProgram runs the suite's program in a fake guest.
func suiteProgram(memory []byte, cmdline string, step uint64) (string, vmm.Reason) {
	ends := map[string]vmm.Reason{
		vmmtest.EndPowerOff: vmm.ReasonShutdown,
		vmmtest.EndReboot:   vmm.ReasonReset,
		vmmtest.EndPanic:    vmm.ReasonPanic,
	}
	words := strings.Fields(cmdline)
	for word, reason := range ends {
		if step == vmmtest.EndStep && slices.Contains(words, word) {
			return "", reason
		}
	}
	return vmmtest.Step(memory, step), ""
}

func TestConformance(t *testing.T) {
	driver := New()
	driver.Program = suiteProgram
	vmmtest.Run(t, vmmtest.Setup{
		Driver:  driver,
		Shape:   vmm.Shape{MemoryMiB: 8, CPUs: 1},
		Crash:   func(_ *testing.T, m vmm.Machine) { m.(*Machine).Crash(vmm.ReasonCrashed) },
		Timeout: time.Minute,
	})
	if left := driver.Machines(); len(left) > 0 {
		t.Errorf("%d machines are left", len(left))
	}
}
