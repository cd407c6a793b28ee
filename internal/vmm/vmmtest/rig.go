package vmmtest

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"go.uber.org/goleak"
)

// BaseText is what the base image of every machine starts with.
const BaseText = "vmmtest base image"

const (
	baseBytes = 2 << 20
	mac       = "5a:94:ef:e4:0c:ee"
)

// Rig is the surroundings of one machine: its files, its network socket and
// what it printed.
type Rig struct {
	Spec    vmm.Spec
	Console *Console
}

// NewRig makes surroundings whose memory file holds zeros.
func (s Setup) NewRig(t testing.TB) *Rig {
	t.Helper()
	dir := t.TempDir()
	rig := &Rig{Console: newConsole(), Spec: vmm.Spec{
		Shape:      s.Shape,
		Dir:        filepath.Join(dir, "machine"),
		MemoryPath: filepath.Join(dir, "memory"),
		BaseImage:  filepath.Join(dir, "base"),
		NetSocket:  filepath.Join(dir, "net"),
		MAC:        mac,
	}}
	rig.Spec.Console = rig.Console
	must(t, os.Mkdir(rig.Spec.Dir, 0o700))
	must(t, makeFile(rig.Spec.MemoryPath, "", s.Shape.MemoryBytes()))
	must(t, makeFile(rig.Spec.BaseImage, BaseText, baseBytes))
	serveNetwork(t, rig.Spec.NetSocket)
	return rig
}

func makeFile(path, start string, size int64) error {
	if err := os.WriteFile(path, []byte(start), 0o600); err != nil {
		return err
	}
	return os.Truncate(path, size)
}

// serveNetwork takes the connections of network cards and holds them, unread.
func serveNetwork(t testing.TB, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	must(t, err)
	var conns []net.Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, c)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		for _, c := range conns {
			c.Close()
		}
	})
}

// Start starts a machine that is closed with the test.
func (s Setup) Start(t testing.TB, rig *Rig) vmm.Machine {
	t.Helper()
	m, err := s.Driver.Start(s.Context(t), rig.Spec)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	rig.Console.machine = m
	return m
}

// Boot starts a machine from cold with words on its command line and lets it run.
func (s Setup) Boot(t testing.TB, rig *Rig, words string) vmm.Machine {
	t.Helper()
	boot := s.Guest
	boot.Cmdline = strings.TrimSpace(boot.Cmdline + " " + words)
	rig.Spec.Boot = &boot
	m := s.Start(t, rig)
	must(t, m.Run(s.Context(t)))
	return m
}

// Image is a snapshot as the suite takes one.
type Image struct {
	State []byte        // of devices and vCPUs
	RAM   []byte        // whole
	step  func() uint64 // the last that was printed before; known when the machine is closed
}

// Snapshot pauses a machine and takes its image: the memory file with the dirty
// pages laid over it.
func (s Setup) Snapshot(t testing.TB, rig *Rig, m vmm.Machine) Image {
	t.Helper()
	parent, err := os.ReadFile(rig.Spec.MemoryPath)
	must(t, err)
	return s.SnapshotOver(t, rig, m, parent)
}

// SnapshotOver is Snapshot for a memory file whose content is known to the caller.
func (s Setup) SnapshotOver(t testing.TB, rig *Rig, m vmm.Machine, parent []byte) Image {
	t.Helper()
	ctx := s.Context(t)
	must(t, m.Pause(ctx))
	var state bytes.Buffer
	must(t, m.SaveState(ctx, &state))
	dirty, err := m.DirtyPages(ctx)
	must(t, err)
	s.checkRuns(t, dirty)
	ram := bytes.Clone(parent)
	for _, r := range dirty {
		_, err := m.RAM().ReadAt(ram[r.Offset():r.Offset()+r.Bytes()], r.Offset())
		must(t, err)
	}
	return Image{State: state.Bytes(), RAM: ram, step: rig.Console.last}
}

func (s Setup) checkRuns(t testing.TB, runs []page.Run) {
	t.Helper()
	if len(runs) == 0 {
		t.Fatal("no page is dirty though the guest ran")
	}
	if fmt.Sprint(page.Normalize(runs)) != fmt.Sprint(runs) {
		t.Fatal("dirty pages are not normalised")
	}
	if end := runs[len(runs)-1].End(); int64(end)*page.Size > s.Shape.MemoryBytes() {
		t.Fatalf("page %d is dirty, which is behind the end of memory", end-1)
	}
}

// Resume starts a machine, and only then fills its memory file with the image
// and loads its state; the vCPUs are still stopped.
func (s Setup) Resume(t testing.TB, img Image) (*Rig, vmm.Machine) {
	t.Helper()
	rig := s.NewRig(t)
	m := s.Start(t, rig)
	rig.Fill(t, img)
	must(t, m.LoadState(s.Context(t), bytes.NewReader(img.State)))
	return rig, m
}

// Fill writes an image into the memory file, without replacing the file.
func (rig *Rig) Fill(t testing.TB, img Image) {
	t.Helper()
	f, err := os.OpenFile(rig.Spec.MemoryPath, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	_, err = f.Write(img.RAM)
	must(t, err)
}

// GoesOn waits until the machine printed three steps more, the first of which
// follows img, all of them right.
func (s Setup) GoesOn(t testing.TB, rig *Rig, img Image) {
	t.Helper()
	steps := rig.Console.wait(s.Context(t), t, 3)
	// A step that was under way may or may not have been printed whole.
	if first, last := steps[0].n, img.step(); first != last+1 && first != last+2 {
		t.Fatalf("the snapshot ends with step %d, and the resumed guest goes on with %d", last, first)
	}
	checkSteps(t, steps)
}

// step is one line of the guest's program.
type step struct {
	n   uint64
	sum uint32
}

// checkSteps compares steps, which must be consecutive, with those of a program
// that ran here.
func checkSteps(t testing.TB, steps []step) {
	t.Helper()
	memory := make([]byte, ProgramBytes)
	for n := uint64(1); n < steps[0].n; n++ {
		Step(memory, n)
	}
	for i, got := range steps {
		n := steps[0].n + uint64(i)
		Step(memory, n)
		if want := (step{n, crc32.ChecksumIEEE(memory)}); got != want {
			t.Fatalf("the guest printed step %d with sum %08x, want step %d with sum %08x", got.n, got.sum, want.n, want.sum)
		}
	}
}

// Console takes what a guest prints.
type Console struct {
	machine vmm.Machine // that prints

	mu      sync.Mutex
	text    []byte
	changed chan struct{} // closed and replaced with each write
}

func newConsole() *Console { return &Console{changed: make(chan struct{})} }

// Write implements io.Writer.
func (c *Console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.text = append(c.text, p...)
	close(c.changed)
	c.changed = make(chan struct{})
	return len(p), nil
}

// String returns all that was printed so far.
func (c *Console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.text)
}

// steps returns the whole lines of the program that were printed so far.
func (c *Console) steps() ([]step, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var steps []step
	for line := range bytes.Lines(c.text) {
		var st step
		if n, _ := fmt.Sscanf(string(line), "vmmtest step %d sum %x\r\n", &st.n, &st.sum); n == 2 && bytes.HasSuffix(line, []byte("\n")) {
			steps = append(steps, st)
		}
	}
	return steps, c.changed
}

// last returns the number of the last step printed, 0 before the first.
func (c *Console) last() uint64 {
	steps, _ := c.steps()
	if len(steps) == 0 {
		return 0
	}
	return steps[len(steps)-1].n
}

// Wait waits until the guest's program printed at least n steps.
func (c *Console) Wait(ctx context.Context, t testing.TB, n int) {
	t.Helper()
	c.wait(ctx, t, n)
}

// wait is Wait; it returns all steps that there are.
func (c *Console) wait(ctx context.Context, t testing.TB, n int) []step {
	t.Helper()
	for {
		steps, changed := c.steps()
		if len(steps) >= n {
			return steps
		}
		select {
		case <-changed:
		case <-c.machine.Exited(): // after its last words were written
			if steps, _ := c.steps(); len(steps) >= n {
				return steps
			}
			t.Fatalf("the machine ended: %+v; it printed:\n%s", c.machine.Exit(), c)
		case <-ctx.Done():
			t.Fatalf("%d steps in time, want %d; the guest printed:\n%s", len(steps), n, c)
		}
	}
}

// leavesNothing checks at the end of the test that no goroutine and no
// descriptor is left of it.
func leavesNothing(t testing.TB) {
	t.Helper()
	running := goleak.IgnoreCurrent()
	before := openFiles(t)
	t.Cleanup(func() {
		goleak.VerifyNone(t, running)
		if after := openFiles(t); after > before {
			t.Errorf("%d descriptors are open, %d were before", after, before)
		}
	})
}

func openFiles(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
