// Guest is PID 1 of the machine under test: it loads the drivers, shows the
// base image and the network card to be there, and runs the suite's program.
package main

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm/vmmtest"
	"golang.org/x/sys/unix"
)

func main() {
	if err := run(); err != nil {
		fmt.Println("guest failed:", err)
	}
	select {} // PID 1 must not return
}

func run() error {
	for _, m := range [][2]string{{"proc", "/proc"}, {"devtmpfs", "/dev"}} {
		if err := unix.Mount(m[0], m[1], m[0], 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	base, err := readBase()
	if err != nil {
		return err
	}
	fmt.Printf("guest base %q time %d\n", base, time.Now().Unix())
	if err := raiseCard(); err != nil {
		return err
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	memory := make([]byte, vmmtest.ProgramBytes)
	for n := uint64(1); ; n++ {
		if n == vmmtest.EndStep {
			end(strings.Fields(string(cmdline)))
		}
		fmt.Println(vmmtest.Step(memory, n))
		time.Sleep(20 * time.Millisecond)
	}
}

func loadModules() error {
	list, err := os.ReadFile("/modules/order")
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(list)) {
		f, err := os.Open("/modules/" + name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && err != unix.EEXIST {
			return fmt.Errorf("load module %s: %w", name, err)
		}
	}
	return nil
}

// readBase returns the text at the start of the base image.
func readBase() (string, error) {
	f, err := os.Open("/dev/pmem0")
	if err != nil {
		return "", err
	}
	defer f.Close()
	text := make([]byte, 64)
	if _, err := f.Read(text); err != nil {
		return "", err
	}
	return string(bytes.TrimRight(text, "\x00")), nil
}

// raiseCard switches the network card on; the kernel then sends frames of its own.
func raiseCard() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("eth0")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}

func end(words []string) {
	switch {
	case slices.Contains(words, vmmtest.EndPowerOff):
		unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case slices.Contains(words, vmmtest.EndReboot):
		unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	case slices.Contains(words, vmmtest.EndPanic):
		os.Exit(1) // the kernel panics when PID 1 ends
	}
}
