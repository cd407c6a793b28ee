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
	info, err := s.Driver.Info(s.Context(t))
	must(t, err)
	if info.Driver == "" || info.Version == "" || info.Accelerator == "" {
		t.Errorf("Info leaves something out: %+v", info)
	}
}

func (s Setup) testKey(t *testing.T) {
	key, err := s.Driver.Key(s.Context(t), s.Shape)
	must(t, err)
	same, err := s.Driver.Key(s.Context(t), s.Shape)
	must(t, err)
	if diff := key.Diff(same); diff != "" {
		t.Errorf("the key is not the same twice: %s", diff)
	}
	larger := s.Shape
	larger.MemoryMiB *= 2
	other, err := s.Driver.Key(s.Context(t), larger)
	must(t, err)
	if key.Diff(other) == "" {
		t.Error("twice the memory has the same key")
	}
}

func (s Setup) testBootPauseClose(t *testing.T) {
	leavesNothing(t)
	rig := s.NewRig(t)
	before := hashFile(t, rig.Spec.MemoryPath)
	m := s.Boot(t, rig, "")
	ctx := s.Context(t)
	checkSteps(t, rig.Console.wait(ctx, t, 2))

	for range 2 { // both are idempotent, and a pause is no end
		must(t, m.Pause(ctx))
		must(t, m.Pause(ctx))
		seen := len(rig.Console.wait(ctx, t, 1))
		must(t, m.Run(ctx))
		must(t, m.Run(ctx))
		checkSteps(t, rig.Console.wait(ctx, t, seen+2))
	}
	if hashFile(t, rig.Spec.MemoryPath) != before {
		t.Error("the machine wrote to its memory file")
	}

	pid := m.PID()
	must(t, m.Close())
	must(t, m.Close())
	s.checkGone(t, m, vmm.ReasonClosed)
	if pid != os.Getpid() && syscall.Kill(pid, 0) == nil {
		t.Errorf("process %d is left", pid)
	}
	left, err := os.ReadDir(rig.Spec.Dir)
	must(t, err)
	if len(left) > 0 {
		t.Errorf("left in the machine's folder: %v", left)
	}
}

// checkGone waits for a machine's end and checks what it says then.
func (s Setup) checkGone(t *testing.T, m vmm.Machine, reason vmm.Reason) {
	t.Helper()
	ctx := s.Context(t)
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
			rig := s.NewRig(t)
			m := s.Boot(t, rig, words)
			s.checkGone(t, m, reason)
			if last := rig.Console.last(); last != EndStep-1 {
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
			rig := s.NewRig(t)
			tt.spoil(&rig.Spec)
			m, err := s.Driver.Start(s.Context(t), rig.Spec)
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
		rig := s.NewRig(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if m, err := s.Driver.Start(ctx, rig.Spec); !errors.Is(err, context.Canceled) {
			t.Errorf("Start returns %v, %v", m, err)
		}
	})
}

// BootSnapshot boots a guest and takes its first image.
func (s Setup) BootSnapshot(t testing.TB) Image {
	t.Helper()
	rig := s.NewRig(t)
	m := s.Boot(t, rig, "")
	checkSteps(t, rig.Console.wait(s.Context(t), t, 3))
	img := s.Snapshot(t, rig, m)
	must(t, m.Close())
	return img
}

// testContinuity goes through several generations, each the child of the one
// before. One of them goes on in place after its snapshot was taken, as a
// cancelled hibernation does.
func (s Setup) testContinuity(t *testing.T, img Image) {
	leavesNothing(t)
	for range 3 {
		rig, m := s.Resume(t, img)
		before := hashFile(t, rig.Spec.MemoryPath)
		must(t, m.Run(s.Context(t)))
		s.GoesOn(t, rig, img)
		s.Snapshot(t, rig, m)
		seen := len(rig.Console.wait(s.Context(t), t, 1))
		must(t, m.Run(s.Context(t)))
		checkSteps(t, rig.Console.wait(s.Context(t), t, seen+2))
		img = s.Snapshot(t, rig, m)
		if hashFile(t, rig.Spec.MemoryPath) != before {
			t.Error("the machine wrote to its memory file")
		}
		must(t, m.Close())
	}
}

// testConcurrent resumes one image in several machines at once.
func (s Setup) testConcurrent(t *testing.T, img Image) {
	leavesNothing(t)
	var done sync.WaitGroup
	for range 3 {
		rig, m := s.Resume(t, img)
		done.Go(func() {
			if err := m.Run(t.Context()); err != nil {
				t.Error(err)
			}
		})
		defer s.GoesOn(t, rig, img)
	}
	done.Wait()
}

func (s Setup) testBadState(t *testing.T, img Image) {
	garbage := bytes.Repeat([]byte("no device state"), 1000)
	failing := io.MultiReader(bytes.NewReader(img.State[:len(img.State)/3]), failingReader{})
	tests := map[string]io.Reader{
		"empty":     strings.NewReader(""),
		"garbage":   bytes.NewReader(garbage),
		"truncated": bytes.NewReader(img.State[:len(img.State)/2]),
		"spoiled":   bytes.NewReader(append(bytes.Clone(img.State[:len(img.State)/2]), garbage...)),
		"unread":    failing,
	}
	for name, state := range tests {
		t.Run(name, func(t *testing.T) {
			leavesNothing(t)
			rig := s.NewRig(t)
			m := s.Start(t, rig)
			rig.Fill(t, img)
			err := m.LoadState(s.Context(t), state)
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
		m := s.Start(t, s.NewRig(t))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := m.LoadState(ctx, bytes.NewReader(img.State)); !errors.Is(err, context.Canceled) {
			t.Errorf("LoadState returns %v", err)
		}
	})
}

var errUnreadable = errors.New("the state is unreadable")

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, errUnreadable }

// testWrongOrder gives orders that do not fit.
func (s Setup) testWrongOrder(t *testing.T, img Image) {
	leavesNothing(t)
	ctx := s.Context(t)
	waiting := s.Start(t, s.NewRig(t))
	if waiting.Run(ctx) == nil {
		t.Error("a machine runs before a state was loaded")
	}
	rig, m := s.Resume(t, img)
	must(t, m.Run(ctx))
	s.GoesOn(t, rig, img)
	if m.SaveState(ctx, io.Discard) == nil {
		t.Error("a machine's state is saved while it runs")
	}
	if _, err := m.DirtyPages(ctx); err == nil {
		t.Error("dirty pages are found while the machine runs")
	}
	if m.LoadState(ctx, bytes.NewReader(img.State)) == nil {
		t.Error("a running machine loads a state")
	}
}

func (s Setup) testCrash(t *testing.T, img Image) {
	if s.Crash == nil {
		t.Skip("the driver's machines do not crash")
	}
	leavesNothing(t)
	rig, m := s.Resume(t, img)
	must(t, m.Run(s.Context(t)))
	s.GoesOn(t, rig, img)
	s.Crash(t, m)
	s.checkGone(t, m, vmm.ReasonCrashed)
	if m.Exit().Detail == "" {
		t.Error("the end has no detail")
	}
	must(t, m.Close())
}

func hashFile(t testing.TB, path string) [sha256.Size]byte {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return sha256.Sum256(data)
}
