// Package vmmtest is the conformance suite of vmm.Driver: a driver is done when
// Run passes. The guest that it boots runs a small *program* (see Step) whose
// output proves that no bit of its memory was lost between a snapshot and its
// resume.
package vmmtest

import (
	"context"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// Setup is what a driver brings to the suite.
type Setup struct {
	// Driver is the driver under test.
	Driver vmm.Driver
	// Shape is that of all machines.
	Shape vmm.Shape
	// Guest is how to boot the guest program; the suite adds words to its Cmdline.
	Guest vmm.Boot
	// Crash ends a machine as an accident would; nil where nothing can.
	Crash func(t *testing.T, m vmm.Machine)
	// Timeout is the time after which a step that should come to an end has failed.
	Timeout time.Duration
}

// Run runs the suite.
func Run(t *testing.T, s Setup) {
	t.Run("Info", s.testInfo)
	t.Run("Key", s.testKey)
	t.Run("BootPauseClose", s.testBootPauseClose)
	t.Run("Ends", s.testEnds)
	t.Run("BadSpec", s.testBadSpec)
	t.Run("Resume", s.testResume)
}

// testResume shares one snapshot among tests that need one, since a boot is slow.
func (s Setup) testResume(t *testing.T) {
	first := s.BootSnapshot(t)
	t.Run("Continuity", func(t *testing.T) { s.testContinuity(t, first) })
	t.Run("Concurrent", func(t *testing.T) { s.testConcurrent(t, first) })
	t.Run("BadState", func(t *testing.T) { s.testBadState(t, first) })
	t.Run("WrongOrder", func(t *testing.T) { s.testWrongOrder(t, first) })
	t.Run("Crash", func(t *testing.T) { s.testCrash(t, first) })
}

// Context returns one that ends with the test or after the time-out.
func (s Setup) Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), s.Timeout)
	t.Cleanup(cancel)
	return ctx
}
