// Package qemu is the vmm.Driver that runs machines in QEMU, with KVM where the
// processor offers it and else with QEMU's own translator (TCG).
//
// A machine is one QEMU process. Its monitor, its serial line and its network
// card are connections that the driver opens itself and hands to the process as
// open descriptors, so no path is limited to the length of a socket address. The
// driver knows RAM only as the private file mapping that it finds in the process,
// and device state only as the bytes that QEMU's migration code reads and writes.
package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// Topology names the set of devices and their places that the command line
// builds. It changes whenever a snapshot taken before would not fit the command
// line any more, since QEMU itself does not check that.
const Topology = "q35-3"

// The accelerators.
const (
	AccelKVM = "kvm"
	AccelTCG = "tcg"
)

const (
	defaultBinary  = "qemu-system-x86_64"
	defaultMachine = "pc-q35-7.2"
	howToInstall   = "install it (Debian, Ubuntu: apt-get install qemu-system-x86)"
)

// ErrUnavailable says that QEMU is missing or too old. The message says what to do.
var ErrUnavailable = errors.New("QEMU is not usable")

// Config says which QEMU to run and how. The zero value is ready to use.
type Config struct {
	// Binary is the name or path of QEMU; "" is qemu-system-x86_64 in PATH.
	Binary string
	// Accel is AccelKVM or AccelTCG; "" is KVM where the processor's flags show
	// hardware virtualisation and /dev/kvm opens, and else TCG.
	Accel string
	// CPUModel is a named model with its features as QEMU's -cpu takes it, never
	// "host"; "" chooses by accelerator. Features that the host lacks are refused.
	CPUModel string
	// MachineType is a versioned q35; "" is pc-q35-7.2.
	MachineType string
	// WrapCommand is put before QEMU's command line. It must replace itself by the
	// command that it is given, as env does: what it leaves running is not killed.
	WrapCommand []string
	// Log takes what has no other way to be noticed; nil is silence.
	Log *slog.Logger
}

// Driver starts QEMU. It implements vmm.Driver.
type Driver struct {
	config   Config
	hardware func() hardware // probed once

	mu   sync.Mutex
	info *vmm.Info // once Info succeeded
}

var _ vmm.Driver = (*Driver)(nil)

// New returns a driver. It looks at nothing yet: what is missing is reported by Info.
func New(config Config) *Driver {
	if config.Binary == "" {
		config.Binary = defaultBinary
	}
	if config.MachineType == "" {
		config.MachineType = defaultMachine
	}
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	return &Driver{config: config, hardware: sync.OnceValue(func() hardware { return chooseHardware(config) })}
}

// Info implements vmm.Driver. A success is remembered, a failure is not.
func (d *Driver) Info(ctx context.Context) (vmm.Info, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.info != nil {
		return *d.info, nil
	}
	path, err := exec.LookPath(d.config.Binary)
	if err != nil {
		return vmm.Info{}, fmt.Errorf("%w: %w; %s", ErrUnavailable, err, howToInstall)
	}
	if path, err = filepath.Abs(path); err != nil {
		return vmm.Info{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return vmm.Info{}, fmt.Errorf("%w: %s --version: %w", ErrUnavailable, path, err)
	}
	version, err := parseVersion(string(out))
	if err != nil {
		return vmm.Info{}, fmt.Errorf("%w: %s: %w", ErrUnavailable, path, err)
	}
	if d.config.Accel == AccelKVM && !kvmOpens() {
		return vmm.Info{}, fmt.Errorf("%w: KVM was asked for but /dev/kvm does not open; add the user to the group kvm, or use the accelerator tcg", ErrUnavailable)
	}
	d.info = &vmm.Info{Driver: "qemu", Version: version, Accelerator: d.hardware().accel, Binary: path}
	return *d.info, nil
}

var versionPattern = regexp.MustCompile(`version (\d{1,4})\.(\d{1,4})(\.\d{1,4})?`)

// parseVersion takes the version from the output of --version and refuses those
// before 7.2, the first with stream network back-ends.
func parseVersion(out string) (string, error) {
	m := versionPattern.FindStringSubmatch(out)
	if m == nil {
		first, _, _ := strings.Cut(out, "\n")
		return "", fmt.Errorf("%.80q names no version", first)
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	version := m[1] + "." + m[2] + m[3]
	if major < 7 || major == 7 && minor < 2 {
		return "", fmt.Errorf("version %s is too old, 7.2 or newer is needed; %s", version, howToInstall)
	}
	return version, nil
}

// Key implements vmm.Driver. QEMU runs with "enforce", so the CPU model's text
// is the whole truth about the features that a guest sees.
func (d *Driver) Key(_ context.Context, shape vmm.Shape) (vmm.Key, error) {
	if err := checkShape(shape); err != nil {
		return nil, err
	}
	hw := d.hardware()
	return vmm.Key{
		"driver":      "qemu",
		"machine":     d.config.MachineType,
		"topology":    Topology,
		"accelerator": hw.accel,
		"cpu":         hw.cpu,
		"cpu_vendor":  hw.vendor,
		"memory_mib":  strconv.Itoa(shape.MemoryMiB),
		"cpus":        strconv.Itoa(shape.CPUs),
	}, nil
}

// The limits of a machine's shape. More memory or processors would need other
// choices on the command line.
const (
	minMemoryMiB = 128
	maxMemoryMiB = 256 << 10
	maxCPUs      = 64
)

func checkShape(s vmm.Shape) error {
	if s.MemoryMiB < minMemoryMiB || s.MemoryMiB > maxMemoryMiB || s.MemoryMiB%2 != 0 {
		return fmt.Errorf("%d MiB of memory: must be an even number from %d to %d", s.MemoryMiB, minMemoryMiB, maxMemoryMiB)
	}
	if s.CPUs < 1 || s.CPUs > maxCPUs {
		return fmt.Errorf("%d CPUs: must be from 1 to %d", s.CPUs, maxCPUs)
	}
	return nil
}

// environment is all that QEMU and a wrapper see of the caller's environment.
func environment() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
}
