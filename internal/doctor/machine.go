package doctor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/pager"
	"github.com/hibernacle/hibernacle/internal/shim"
)

func platform() Check {
	const name = "platform"
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fail(name, err.Error(), "Linux is needed")
	}
	detail := fmt.Sprintf("%s %s, %s", unix.ByteSliceToString(u.Sysname[:]), unix.ByteSliceToString(u.Release[:]), runtime.GOARCH)
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return fail(name, detail, "Linux on x86-64 is needed")
	}
	return pass(name, detail)
}

// monitor checks the VMM and what accelerates it.
func (h Host) monitor(ctx context.Context) []Check {
	const name = "qemu"
	info, err := shim.NewDriver(h.Driver).Info(ctx)
	if err != nil {
		return []Check{fail(name, err.Error(), "apt-get install qemu-system-x86 (7.2 or newer)"), acceleration("")}
	}
	return []Check{
		pass(name, fmt.Sprintf("%s %s at %s", info.Driver, info.Version, info.Binary)),
		acceleration(info.Accelerator),
	}
}

// acceleration checks for KVM. /dev/kvm alone proves nothing: a nested host may
// offer it without the processor's support, and runs guests very slowly then.
func acceleration(used string) Check {
	const (
		name     = "acceleration"
		boundary = "KVM is the security boundary: without it this host is for development only"
	)
	if !cpuHas("vmx", "svm") {
		return warn(name, "the processor's flags show neither vmx nor svm: guests run under TCG, many times slower. "+boundary,
			"use a host with hardware virtualisation, and turn it on in its firmware or (for a virtual machine) in its hypervisor")
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return warn(name, err.Error()+". "+boundary, "modprobe kvm_intel or kvm_amd, and add the user to the group kvm")
	}
	f.Close()
	if used != "" && used != "kvm" {
		return warn(name, "KVM works here but "+used+" was chosen. "+boundary, "leave --accel away")
	}
	return pass(name, "KVM")
}

// cpuHas tells whether the processor has one of the flags.
func cpuHas(flags ...string) bool {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return false
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if key, list, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "flags" {
			has := strings.Fields(list)
			return slices.ContainsFunc(flags, func(f string) bool { return slices.Contains(has, f) })
		}
	}
	return false
}

// kernel checks what the pager and the capture need of the kernel.
func kernel() []Check {
	checks := []Check{fuse()}
	if err := pager.ProbeDirty(); err != nil {
		checks = append(checks, warn("changed pages", err.Error()+": every hibernation saves the whole memory", "use Linux 6.6.44 or newer"))
	} else {
		checks = append(checks, pass("changed pages", "the kernel reports them rightly"))
	}
	return append(checks, seccomp(), namespaces())
}

func fuse() Check {
	const name = "fuse"
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fail(name, err.Error(), "as root: chmod 666 /dev/fuse (a udev rule keeps it so), or run hib as root; in a container allow the device")
	case err != nil:
		return fail(name, err.Error(), "modprobe fuse; in a container pass /dev/fuse on and allow mounts")
	}
	f.Close()
	path, err := exec.LookPath("fusermount3")
	if err != nil {
		return fail(name, "fusermount3 is not installed: shims, which are not root, mount with it", "apt-get install fuse3")
	}
	if info, err := os.Stat(path); err == nil && info.Mode()&os.ModeSetuid == 0 {
		return fail(name, path+" is not set-uid root", "chmod u+s "+path)
	}
	return pass(name, "/dev/fuse and "+path)
}

func seccomp() Check {
	const name = "seccomp"
	actions, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
	if err != nil || !slices.Contains(strings.Fields(string(actions)), "errno") {
		return fail(name, "the kernel has no system call filters", "use a kernel with CONFIG_SECCOMP_FILTER")
	}
	return pass(name, "system call filters work")
}

// namespaces checks that this user may make namespaces: template builds do.
func namespaces() Check {
	const name = "namespaces"
	probe := exec.Command("/bin/true")
	probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	fix := "give the container CAP_SYS_ADMIN, or build templates elsewhere"
	if os.Geteuid() != 0 {
		probe.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		fix = "sysctl kernel.unprivileged_userns_clone=1 (on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0), or build templates as root"
	}
	if err := probe.Run(); err != nil {
		return warn(name, "no template can be built here: "+err.Error(), fix)
	}
	return pass(name, "can be made")
}
