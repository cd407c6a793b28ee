package vmmtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

func (s Setup) testInfo(t *testing.T) {
	info, err := s.Driver.Info(s.context(t))
	must(t, err)
	if info.Driver == "" || info.Version == "" || info.Accelerator == "" {
		t.Errorf("Info leaves something out: %+v", info)
	}
}

func (s Setup) testKey(t *testing.T) {
	key, err := s.Driver.Key(s.context(t), s.Shape)
	must(t, err)
	same, err := s.Driver.Key(s.context(t), s.Shape)
	must(t, err)
	if diff := key.Diff(same); diff != "" {
		t.Errorf("the key is not the same twice: %s", diff)
	}
	larger := s.Shape
	larger.MemoryMiB *= 2
	other, err := s.Driver.Key(s.context(t), larger)
	must(t, err)
	if key.Diff(other) == "" {
		t.Error("twice the memory has the same key")
	}
}

func (s Setup) testBootPauseClose(t *testing.T) {
	leavesNothing(t)
	b := s.newBench(t)
	before := hashFile(t, b.spec.MemoryPath)
	m := s.boot(t, b, "")
	ctx := s.context(t)
	checkSteps(t, b.console.wait(ctx, t, 2))

	for range 2 { // both are idempotent, and a pause is no end
		must(t, m.Pause(ctx))
		must(t, m.Pause(ctx))
		seen := len(b.console.wait(ctx, t, 1))
		must(t, m.Run(ctx))
		must(t, m.Run(ctx))
		checkSteps(t, b.console.wait(ctx, t, seen+2))
	}
	if hashFile(t, b.spec.MemoryPath) != before {
		t.Error("the machine wrote to its memory file")
	}

	pid := m.PID()
	must(t, m.Close())
	must(t, m.Close())
	s.checkGone(t, m, vmm.ReasonClosed)
	if pid != os.Getpid() && syscall.Kill(pid, 0) == nil {
		t.Errorf("process %d is left", pid)
	}
	left, err := os.ReadDir(b.spec.Dir)
	must(t, err)
	if len(left) > 0 {
		t.Errorf("left in the machine's folder: %v", left)
	}
}

// checkGone waits for a machine's end and checks what it says then.
func (s Setup) checkGone(t *testing.T, m vmm.Machine, reason vmm.Reason) {
	t.Helper()
	ctx := s.context(t)
	select {
	case <-m.Exited():
	case <-ctx.Done():
		t.Fatal("the machine does not end")
	}
	if exit := m.Exit(); exit.Reason != reason {
		t.Errorf("the machine ended by %q (%s), want %q", exit.Reason, exit.Detail, reason)
	}
	_, dirtyErr := m.DirtyPages(ctx)
	_, readErr := m.RAM().ReadAt(make([]byte, page.Size), 0)
	for name, err := range map[string]error{
		"Run":        m.Run(ctx),
		"Pause":      m.Pause(ctx),
		"SaveState":  m.SaveState(ctx, io.Discard),
		"LoadState":  m.LoadState(ctx, strings.NewReader("")),
		"DirtyPages": dirtyErr,
		"RAM":        readErr,
	} {
		if !errors.Is(err, vmm.ErrExited) {
			t.Errorf("%s after the end returns %v, want ErrExited", name, err)
		}
	}
}

func (s Setup) testEnds(t *testing.T) {
	for words, reason := range map[string]vmm.Reason{
		EndPowerOff: vmm.ReasonShutdown,
		EndReboot:   vmm.ReasonReset,
		EndPanic:    vmm.ReasonPanic,
	} {
		t.Run(string(reason), func(t *testing.T) {
			leavesNothing(t)
			b := s.newBench(t)
			m := s.boot(t, b, words)
			s.checkGone(t, m, reason)
			if last := b.console.last(); last != EndStep-1 {
				t.Errorf("the last step printed before the end is %d, want %d", last, EndStep-1)
			}
			must(t, m.Close())
		})
	}
}

func (s Setup) testBadSpec(t *testing.T) {
	leavesNothing(t)
	tests := map[string]struct {
		spoil func(*vmm.Spec)
		names string // what the error must contain
	}{
		"no memory file":    {func(s *vmm.Spec) { s.MemoryPath += "-missing" }, "memory-missing"},
		"short memory file": {func(s *vmm.Spec) { os.Truncate(s.MemoryPath, page.Size) }, "memory"},
		"no base image":     {func(s *vmm.Spec) { s.BaseImage += "-missing" }, "base-missing"},
		"odd base image":    {func(s *vmm.Spec) { os.Truncate(s.BaseImage, page.Size) }, "base"},
		"no CPU":            {func(s *vmm.Spec) { s.Shape.CPUs = 0 }, "CPU"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			b := s.newBench(t)
			tt.spoil(&b.spec)
			m, err := s.Driver.Start(s.context(t), b.spec)
			if err == nil {
				m.Close()
				t.Fatal("the machine starts")
			}
			if !strings.Contains(err.Error(), tt.names) {
				t.Errorf("error %q does not name %q", err, tt.names)
			}
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		b := s.newBench(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if m, err := s.Driver.Start(ctx, b.spec); !errors.Is(err, context.Canceled) {
			t.Errorf("Start returns %v, %v", m, err)
		}
	})
}

// bootSnapshot boots a guest and takes its first image.
func (s Setup) bootSnapshot(t *testing.T) image {
	t.Helper()
	b := s.newBench(t)
	m := s.boot(t, b, "")
	checkSteps(t, b.console.wait(s.context(t), t, 3))
	img := s.snapshot(t, b, m)
	must(t, m.Close())
	return img
}

// testContinuity goes through several generations, each the child of the one
// before. One of them goes on in place after its snapshot was taken, as a
// cancelled hibernation does.
func (s Setup) testContinuity(t *testing.T, img image) {
	leavesNothing(t)
	for range 3 {
		b, m := s.resume(t, img)
		before := hashFile(t, b.spec.MemoryPath)
		must(t, m.Run(s.context(t)))
		s.goesOn(t, b, img)
		s.snapshot(t, b, m)
		seen := len(b.console.wait(s.context(t), t, 1))
		must(t, m.Run(s.context(t)))
		checkSteps(t, b.console.wait(s.context(t), t, seen+2))
		img = s.snapshot(t, b, m)
		if hashFile(t, b.spec.MemoryPath) != before {
			t.Error("the machine wrote to its memory file")
		}
		must(t, m.Close())
	}
}

// testConcurrent resumes one image in several machines at once.
func (s Setup) testConcurrent(t *testing.T, img image) {
	leavesNothing(t)
	var done sync.WaitGroup
	for range 3 {
		b, m := s.resume(t, img)
		done.Go(func() {
			if err := m.Run(t.Context()); err != nil {
				t.Error(err)
			}
		})
		defer s.goesOn(t, b, img)
	}
	done.Wait()
}

func (s Setup) testBadState(t *testing.T, img image) {
	garbage := bytes.Repeat([]byte("no device state"), 1000)
	failing := io.MultiReader(bytes.NewReader(img.state[:len(img.state)/3]), failingReader{})
	tests := map[string]io.Reader{
		"empty":     strings.NewReader(""),
		"garbage":   bytes.NewReader(garbage),
		"truncated": bytes.NewReader(img.state[:len(img.state)/2]),
		"spoiled":   bytes.NewReader(append(bytes.Clone(img.state[:len(img.state)/2]), garbage...)),
		"unread":    failing,
	}
	for name, state := range tests {
		t.Run(name, func(t *testing.T) {
			leavesNothing(t)
			b := s.newBench(t)
			m := s.start(t, b)
			must(t, writeOver(b.spec.MemoryPath, img.ram))
			err := m.LoadState(s.context(t), state)
			if err == nil {
				t.Fatal("the state loads")
			}
			t.Log(err)
			if name == "unread" && !errors.Is(err, errUnreadable) {
				t.Errorf("the reader's error is lost: %v", err)
			}
			must(t, m.Close())
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		leavesNothing(t)
		m := s.start(t, s.newBench(t))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := m.LoadState(ctx, bytes.NewReader(img.state)); !errors.Is(err, context.Canceled) {
			t.Errorf("LoadState returns %v", err)
		}
	})
}

var errUnreadable = errors.New("the state is unreadable")

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, errUnreadable }

// testWrongOrder gives orders that do not fit.
func (s Setup) testWrongOrder(t *testing.T, img image) {
	leavesNothing(t)
	ctx := s.context(t)
	waiting := s.start(t, s.newBench(t))
	if waiting.Run(ctx) == nil {
		t.Error("a machine runs before a state was loaded")
	}
	b, m := s.resume(t, img)
	must(t, m.Run(ctx))
	s.goesOn(t, b, img)
	if m.SaveState(ctx, io.Discard) == nil {
		t.Error("a machine's state is saved while it runs")
	}
	if _, err := m.DirtyPages(ctx); err == nil {
		t.Error("dirty pages are found while the machine runs")
	}
	if m.LoadState(ctx, bytes.NewReader(img.state)) == nil {
		t.Error("a running machine loads a state")
	}
}

func (s Setup) testCrash(t *testing.T, img image) {
	if s.Crash == nil {
		t.Skip("the driver's machines do not crash")
	}
	leavesNothing(t)
	b, m := s.resume(t, img)
	must(t, m.Run(s.context(t)))
	s.goesOn(t, b, img)
	s.Crash(t, m)
	s.checkGone(t, m, vmm.ReasonCrashed)
	if m.Exit().Detail == "" {
		t.Error("the end has no detail")
	}
	must(t, m.Close())
}

func hashFile(t *testing.T, path string) [sha256.Size]byte {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return sha256.Sum256(data)
}
