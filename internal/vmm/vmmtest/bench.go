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

// bench is the surroundings of one machine: its files, its network socket and
// what it printed.
type bench struct {
	spec    vmm.Spec
	console *console
}

// newBench makes surroundings whose memory file holds zeros.
func (s Setup) newBench(t *testing.T) *bench {
	t.Helper()
	dir := t.TempDir()
	b := &bench{console: newConsole(), spec: vmm.Spec{
		Shape:      s.Shape,
		Dir:        filepath.Join(dir, "machine"),
		MemoryPath: filepath.Join(dir, "memory"),
		BaseImage:  filepath.Join(dir, "base"),
		NetSocket:  filepath.Join(dir, "net"),
		MAC:        mac,
	}}
	b.spec.Console = b.console
	must(t, os.Mkdir(b.spec.Dir, 0o700))
	must(t, makeFile(b.spec.MemoryPath, "", s.Shape.MemoryBytes()))
	must(t, makeFile(b.spec.BaseImage, BaseText, baseBytes))
	serveNetwork(t, b.spec.NetSocket)
	return b
}

func makeFile(path, start string, size int64) error {
	if err := os.WriteFile(path, []byte(start), 0o600); err != nil {
		return err
	}
	return os.Truncate(path, size)
}

// serveNetwork takes the connections of network cards and holds them, unread.
func serveNetwork(t *testing.T, path string) {
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

// start starts a machine that is closed with the test.
func (s Setup) start(t *testing.T, b *bench) vmm.Machine {
	t.Helper()
	m, err := s.Driver.Start(s.context(t), b.spec)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

// boot starts a machine from cold with words on its command line and lets it run.
func (s Setup) boot(t *testing.T, b *bench, words string) vmm.Machine {
	t.Helper()
	boot := s.Boot
	boot.Cmdline = strings.TrimSpace(boot.Cmdline + " " + words)
	b.spec.Boot = &boot
	m := s.start(t, b)
	must(t, m.Run(s.context(t)))
	return m
}

// image is a snapshot as the suite takes one.
type image struct {
	state []byte
	ram   []byte
	step  func() uint64 // the last that was printed before; known when the machine is closed
}

// snapshot pauses a machine and takes its image: the memory file with the dirty
// pages laid over it.
func (s Setup) snapshot(t *testing.T, b *bench, m vmm.Machine) image {
	t.Helper()
	ctx := s.context(t)
	must(t, m.Pause(ctx))
	var state bytes.Buffer
	must(t, m.SaveState(ctx, &state))
	dirty, err := m.DirtyPages(ctx)
	must(t, err)
	s.checkRuns(t, dirty)
	ram, err := os.ReadFile(b.spec.MemoryPath)
	must(t, err)
	for _, r := range dirty {
		_, err := m.RAM().ReadAt(ram[r.Offset():r.Offset()+r.Bytes()], r.Offset())
		must(t, err)
	}
	return image{state: state.Bytes(), ram: ram, step: b.console.last}
}

func (s Setup) checkRuns(t *testing.T, runs []page.Run) {
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

// resume starts a machine, and only then fills its memory file with the image
// and loads its state; the vCPUs are still stopped.
func (s Setup) resume(t *testing.T, img image) (*bench, vmm.Machine) {
	t.Helper()
	b := s.newBench(t)
	m := s.start(t, b)
	must(t, writeOver(b.spec.MemoryPath, img.ram))
	must(t, m.LoadState(s.context(t), bytes.NewReader(img.state)))
	return b, m
}

// writeOver writes data into the file without replacing it.
func writeOver(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(data)
	return err
}

// goesOn waits until the machine printed three steps more, the first of which
// follows img, all of them right.
func (s Setup) goesOn(t *testing.T, b *bench, img image) {
	t.Helper()
	steps := b.console.wait(s.context(t), t, 3)
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
func checkSteps(t *testing.T, steps []step) {
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

// console takes what a guest prints.
type console struct {
	mu      sync.Mutex
	text    []byte
	changed chan struct{} // closed and replaced with each write
}

func newConsole() *console { return &console{changed: make(chan struct{})} }

// Write implements io.Writer.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.text = append(c.text, p...)
	close(c.changed)
	c.changed = make(chan struct{})
	return len(p), nil
}

func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.text)
}

// steps returns the whole lines of the program that were printed so far.
func (c *console) steps() ([]step, <-chan struct{}) {
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
func (c *console) last() uint64 {
	steps, _ := c.steps()
	if len(steps) == 0 {
		return 0
	}
	return steps[len(steps)-1].n
}

// wait waits until at least n steps were printed and returns all there are.
func (c *console) wait(ctx context.Context, t *testing.T, n int) []step {
	t.Helper()
	for {
		steps, changed := c.steps()
		if len(steps) >= n {
			return steps
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("%d steps in time, want %d; the guest printed:\n%s", len(steps), n, c)
		}
	}
}

// leavesNothing checks at the end of the test that no goroutine and no
// descriptor is left of it.
func leavesNothing(t *testing.T) {
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

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
