package qemu

import (
	"os"
	"slices"
	"strings"
)

// The CPU models. Both are built from a named, versioned model (x86-64-v2 with
// AES) and features that are written out, because models of newer processors
// contain some that TCG or the other vendor's processors lack.
const (
	// baseModel runs on every processor of the last decade and under TCG, where more
	// features make a guest slower. RDRAND gives a kernel randomness while it boots,
	// and each resumed guest a source of its own.
	baseModel = "Westmere-v1,+rdrand"
	// v3Features makes baseModel an x86-64-v3, for hosts that have it.
	v3Features = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave xsaveopt fsgsbase erms smep"
	// kvmFeatures are emulated by KVM on every host.
	kvmFeatures = "x2apic tsc-deadline"
)

// hardware is what the host decides about machines.
type hardware struct {
	accel  string
	cpu    string // for -cpu
	vendor string // of the processor that a guest sees
}

// hostCPU is what /proc/cpuinfo tells of the first processor.
type hostCPU struct {
	vendor string
	flags  []string
}

func parseCPUInfo(text string) hostCPU {
	var cpu hostCPU
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(name) {
		case "vendor_id":
			cpu.vendor = strings.TrimSpace(value)
		case "flags":
			cpu.flags = strings.Fields(value)
		case "":
			return cpu // the end of the first processor
		}
	}
	return cpu
}

func (c hostCPU) has(flags ...string) bool {
	return !slices.ContainsFunc(flags, func(f string) bool { return !slices.Contains(c.flags, f) })
}

func chooseHardware(config Config) hardware {
	text, _ := os.ReadFile("/proc/cpuinfo") // without it: no KVM and the base model
	return choose(config, parseCPUInfo(string(text)), kvmOpens)
}

// choose fills in what config leaves open. A host that offers /dev/kvm without
// showing its guests vmx or svm emulates KVM, thousands of times slower.
func choose(config Config, cpu hostCPU, kvm func() bool) hardware {
	hw := hardware{accel: config.Accel, cpu: config.CPUModel}
	if hw.accel == "" {
		hw.accel = AccelTCG
		if (cpu.has("vmx") || cpu.has("svm")) && kvm() {
			hw.accel = AccelKVM
		}
	}
	hw.vendor = "GenuineIntel" // of the named model; KVM shows the host's instead
	if hw.accel == AccelKVM {
		hw.vendor = cpu.vendor
	}
	if hw.cpu == "" {
		hw.cpu = baseModel
		if v3 := strings.Fields(v3Features); hw.accel == AccelKVM && cpu.has(v3...) {
			for _, feature := range append(v3, strings.Fields(kvmFeatures)...) {
				hw.cpu += ",+" + feature
			}
		}
	}
	return hw
}

func kvmOpens() bool {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	f.Close()
	return true
}
