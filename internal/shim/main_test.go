package shim

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/pager"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// TestMain makes the test binary a shim, for a Launcher, or a daemon that
// launches one, or runs the tests.
func TestMain(m *testing.M) {
	var err error
	switch {
	case len(os.Args) == 3 && os.Args[1] == "shim":
		err = runChild()
	case len(os.Args) == 5 && os.Args[1] == "daemon":
		err = runDaemon(os.Args[2], os.Args[3], os.Args[4] == "true")
	case len(os.Args) == 4 && os.Args[1] == "headless":
		loseHead()
	case len(os.Args) == 3 && os.Args[1] == "stuck":
		err = runStuck(os.Args[2])
	default:
		goleak.VerifyTestMain(m)
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// runDaemon launches a shim with a running guest, adopts it or not, says so
// and waits to be killed.
func runDaemon(runDir, store string, adopt bool) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	image := filepath.Join(filepath.Dir(runDir), "base")
	if err := os.WriteFile(image, make([]byte, 2<<20), 0o600); err != nil {
		return err
	}
	ctx := context.Background()
	l := &Launcher{Binary: self, RunDir: runDir, Store: store}
	c, err := l.Launch(ctx, "vm1")
	if err != nil {
		return err
	}
	if err := c.Prepare(ctx, PrepareRequest{Shape: testShape, BaseImage: image, Boot: &vmm.Boot{}}); err != nil {
		return err
	}
	if _, err := c.Boot(ctx, bootRequest()); err != nil {
		return err
	}
	if adopt {
		if err := c.Adopt(ctx); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	select {}
}

// runStuck serves memory in dir as a shim does, from a source that never
// answers, and pushes a page that is being read.
func runStuck(dir string) error {
	if err := os.Mkdir(memDir(dir), 0o700); err != nil {
		return err
	}
	mem, err := pager.Mount(memDir(dir), nil)
	if err != nil {
		return err
	}
	slot, err := mem.NewSlot("ram", 1<<20)
	if err != nil {
		return err
	}
	asked := make(chan struct{}, 100)
	err = slot.Bind(readerAt(func([]byte, int64) (int, error) {
		asked <- struct{}{}
		select {}
	}))
	if err != nil {
		return err
	}
	fd, err := syscall.Open(slot.Path(), syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	go syscall.Pread(fd, make([]byte, 1), 0)
	<-asked
	return slot.Push(0, make([]byte, page.Size))
}

// runChild is Run with the fake driver. Each step of a machine leaves a file
// in the machine's folder, see passed. SIGUSR1 crashes the machine.
func runChild() error {
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
	return run(context.Background(), func(DriverConfig) vmm.Driver { return d })
}

// loseHead ends the first thread of this process and keeps the others.
func loseHead() {
	met := make(chan bool)
	for lost := false; !lost; lost = <-met {
		go func() {
			runtime.LockOSThread() // for good: each one has another thread
			first := os.Getpid() == syscall.Gettid()
			met <- first
			if first {
				syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0)
			}
			select {}
		}()
	}
	time.Sleep(10 * patience) // to be killed long before
}

// passed tells whether the machine of a child has done the step.
func passed(c *Client, step string) bool {
	_, err := os.Stat(filepath.Join(c.Handle().Dir(), "passed-"+step))
	return err == nil
}
