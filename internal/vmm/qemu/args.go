package qemu

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// Descriptors that the child inherits behind the standard ones.
const (
	monitorFD = 3 + iota
	consoleFD
	networkFD
	stateFD // of a machine that waits for a state
)

// Where devices sit on the PCI Express root bus. Fixed, so that an added device
// moves none; part of Topology.
const (
	networkSlot  = 0x03
	panicSlot    = 0x04
	rootPortSlot = 0x10 // a spare port, rp0, for what is plugged in later
)

const (
	// pmemSpace is the guest-physical room for the base image in GiB, part of Topology.
	pmemSpace = 32
	// pmemAlign is the unit of a persistent memory device's length in bytes.
	pmemAlign = 2 << 20
)

// kernelArguments are what this machine asks of any kernel: its serial line, and
// a reboot at once after a panic that pvpanic did not report (-no-reboot makes
// that the end).
const kernelArguments = "console=ttyS0 panic=-1"

// emulatedArguments are asked for besides where TCG emulates the processor. No
// speculation can leak there, and what guards against it (page tables that
// change at every system call above all) is what emulation is slowest at. The
// emulated counter stands still with the machine, so it is as good a clock as
// there is, but looks bad to a kernel that boots slowly. Pressure accounting is
// work at each change of task.
const emulatedArguments = "mitigations=off tsc=reliable psi=0"

// files are a Spec's files with absolute paths, and the base image's length.
type files struct {
	memory    string // "": anonymous memory
	base      string
	baseBytes int64
	boot      *vmm.Boot
}

// checkFiles looks at everything that QEMU will open, so that what is wrong is
// said in words that name the file.
func checkFiles(spec vmm.Spec, fromFile bool) (f files, err error) {
	if fromFile {
		var size int64
		if f.memory, size, err = locate("memory file", spec.MemoryPath); err != nil {
			return files{}, err
		}
		if want := spec.Shape.MemoryBytes(); size != want {
			return files{}, fmt.Errorf("memory file %s is %d bytes long: must be %d as the machine's memory is", f.memory, size, want)
		}
	}
	if f.base, f.baseBytes, err = locate("base image", spec.BaseImage); err != nil {
		return files{}, err
	}
	if f.baseBytes == 0 || f.baseBytes%pmemAlign != 0 || f.baseBytes > pmemSpace<<30 {
		return files{}, fmt.Errorf("base image %s is %d bytes long: must be a multiple of 2 MiB, at most %d GiB", f.base, f.baseBytes, pmemSpace)
	}
	if spec.Boot == nil {
		return f, nil
	}
	f.boot = &vmm.Boot{Cmdline: spec.Boot.Cmdline}
	if f.boot.Kernel, _, err = locate("kernel", spec.Boot.Kernel); err != nil {
		return files{}, err
	}
	if f.boot.Initrd, _, err = locate("initrd", spec.Boot.Initrd); err != nil {
		return files{}, err
	}
	return f, nil
}

// locate returns the absolute path and the length of a file that must exist.
func locate(what, path string) (abs string, size int64, err error) {
	if abs, err = filepath.Abs(path); err != nil {
		return "", 0, fmt.Errorf("%s %q: %w", what, path, err)
	}
	info, err := os.Stat(abs)
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", what, err)
	}
	return abs, info.Size(), nil
}

// arguments returns QEMU's command line without the binary.
func arguments(config Config, hw hardware, spec vmm.Spec, f files) []string {
	ram := spec.Shape.MemoryMiB
	memory := fmt.Sprintf("memory-backend-file,id=ram,share=off,mem-path=%s,size=%dM", escape(f.memory), ram)
	shareBase := "off"
	if f.memory == "" {
		memory, shareBase = fmt.Sprintf("memory-backend-ram,id=ram,size=%dM", ram), "on" // what is shared does not migrate
	}
	args := []string{
		"-nodefaults", "-no-user-config", "-no-reboot", "-S", "-display", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-machine", config.MachineType + ",memory-backend=ram,suppress-vmdesc=on,mem-merge=off,dump-guest-core=off," +
			"nvdimm=on,sata=off,smbus=off,i8042=off,usb=off,hpet=off,graphics=off,vmport=off",
		"-accel", hw.accel,
		"-cpu", hw.cpu + ",enforce",
		"-smp", fmt.Sprintf("cpus=%d,maxcpus=%d", spec.Shape.CPUs, spec.Shape.CPUs),
		"-m", fmt.Sprintf("%dM,maxmem=%dM,slots=2", ram, ram+(pmemSpace+1)<<10),
		"-rtc", "base=utc,clock=host",
		// The state is the same whatever this QEMU's version; the key is compared instead.
		"-global", "migration.send-configuration=off",
		"-object", memory,
		"-object", fmt.Sprintf("memory-backend-file,id=base,share=%s,readonly=on,mem-path=%s,size=%d", shareBase, escape(f.base), f.baseBytes),
		"-device", fmt.Sprintf("nvdimm,memdev=base,unarmed=on,addr=%#x", pmemAddress(spec.Shape)),
		"-device", "vmgenid,guid=" + newGUID(),
		"-device", fmt.Sprintf("pvpanic-pci,addr=%#x", panicSlot),
		"-chardev", fmt.Sprintf("socket,id=monitor,fd=%d", monitorFD),
		"-mon", "chardev=monitor,mode=control",
		"-chardev", fmt.Sprintf("socket,id=console,fd=%d", consoleFD),
		"-serial", "chardev:console",
		"-netdev", fmt.Sprintf("stream,id=net,server=off,addr.type=fd,addr.str=%d", networkFD),
		// A guest that was moved would be asked to announce its address. Nobody has
		// to learn it, and the guest has better things to do.
		"-device", fmt.Sprintf("virtio-net-pci,netdev=net,mac=%s,romfile=,guest_announce=off,addr=%#x", spec.MAC, networkSlot),
	}
	args = append(args, "-device", fmt.Sprintf("pcie-root-port,id=rp0,chassis=1,addr=%#x", rootPortSlot))
	if f.boot == nil {
		return append(args, "-incoming", "defer")
	}
	cmdline := []string{kernelArguments, fmt.Sprintf("memmap=%d!%#x", f.baseBytes, pmemAddress(spec.Shape))}
	if hw.accel == AccelTCG {
		cmdline = append(cmdline, emulatedArguments)
	}
	if f.boot.Cmdline != "" {
		cmdline = append(cmdline, f.boot.Cmdline)
	}
	return append(args, "-kernel", f.boot.Kernel, "-initrd", f.boot.Initrd, "-append", strings.Join(cmdline, " "))
}

// pmemAddress returns where the base image lies in the guest's physical
// memory: where q35 begins the room for pluggable memory. The kernel is told by
// memmap=, which makes it a persistent memory region that can be mapped (DAX)
// and has no driver whose state would be lost in a snapshot: QEMU does not save
// that of virtio-pmem, whose next flush then waits for ever, and a region found
// through ACPI's NFIT cannot be mapped without a header on the image.
func pmemAddress(s vmm.Shape) uint64 {
	const gib = 1 << 30
	ram, low := uint64(s.MemoryBytes()), uint64(0xb0000000)
	if ram >= low {
		low = 2 * gib
	}
	above := ram - min(ram, low)
	return (4*gib + above + gib - 1) / gib * gib
}

// escape makes path a value in a list of QEMU options.
func escape(path string) string { return strings.ReplaceAll(path, ",", ",,") }

// newGUID returns a random UUID: a new generation id tells the guest's kernel,
// where it has a driver for it, that it is a copy.
func newGUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
