// Command init stands in for the guest agent in this package's tests: it loads
// the modules, mounts the base image, looks at it, prints what it found and
// powers off.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(); err != nil {
		fmt.Println("HIB-TEST-FAILED:", err)
	} else {
		fmt.Println("HIB-TEST-OK")
	}
	time.Sleep(200 * time.Millisecond) // the console is slow
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func run() error {
	for target, fstype := range map[string]string{"/dev": "devtmpfs", "/proc": "proc", "/sys": "sysfs"} {
		if err := unix.Mount(fstype, target, fstype, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", target, err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	fmt.Println("HIB-TEST-UPTIME-MODULES", uptime())
	if err := mountRoot(); err != nil {
		return err
	}
	if err := unix.Chroot("/root"); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	_ = unix.Sethostname([]byte("hib"))
	_ = unix.Mount("devtmpfs", "/dev", "devtmpfs", 0, "")
	_ = unix.Mount("proc", "/proc", "proc", 0, "")
	return look()
}

func loadModules() error {
	list, err := os.ReadFile("/hib/modules.list")
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(list)) {
		f, err := os.Open(filepath.Join("/hib/modules", name))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

// mountRoot mounts the base image with DAX and a tmpfs over it at /root.
func mountRoot() error {
	deadline := time.Now().Add(time.Minute)
	for {
		if _, err := os.Stat("/dev/pmem0"); err == nil {
			break
		}
		if time.Now().After(deadline) {
			return errors.New("/dev/pmem0 did not appear")
		}
		time.Sleep(time.Millisecond)
	}
	for _, dir := range []string{"/base", "/over"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("/dev/pmem0", "/base", "erofs", unix.MS_RDONLY, "dax=always"); err != nil {
		return fmt.Errorf("mount base image: %w", err)
	}
	if err := unix.Mount("tmpfs", "/over", "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, dir := range []string{"/over/upper", "/over/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("overlay", "/root", "overlay", 0, "lowerdir=/base,upperdir=/over/upper,workdir=/over/work"); err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	return nil
}

// look runs programs of the base image as the sandbox's user.
func look() error {
	for _, line := range []string{
		`test "$(id -un)" = user && test "$(id -u)" = 1000 && test "$HOME" = /home/user && test -f ~/.bashrc && touch ~/x`,
		`test "$(sudo -n id -u)" = 0`,
		`git --version && curl --version >/dev/null && ip -V && ps --version`,
		`s=$(date +%s%N); python3 -c 'import json'; e=$(date +%s%N); echo HIB-TEST-PYTHON-MS $(((e - s) / 1000000))`,
		`s=$(date +%s%N); python3 -c 'import json'; e=$(date +%s%N); echo HIB-TEST-PYTHON-MS $(((e - s) / 1000000))`,
		// Every module of the standard library comes from its compiled file.
		`! python3 -vc 'import json, urllib.request' 2>&1 | grep -E "^# (wrote|could not create)|^# code object from '.*[.]py'"`,
		`test ! -s /etc/machine-id && test -d /etc/hib && test -z "$(ls -A /run)"`,
	} {
		cmd := exec.Command("/bin/bash", "-c", line)
		cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/home/user"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
		out, err := cmd.CombinedOutput()
		os.Stdout.Write(out)
		if err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
	}
	fmt.Println("HIB-TEST-UPTIME-END", uptime())
	return nil
}

func uptime() string {
	b, _ := os.ReadFile("/proc/uptime")
	first, _, _ := bytes.Cut(b, []byte(" "))
	return string(first)
}
