package qemu

import (
	"strings"
	"testing"
)

const intel = `processor	: 0
vendor_id	: GenuineIntel
flags		: fpu vmx avx avx2 bmi1 bmi2 f16c fma abm movbe xsave xsaveopt fsgsbase erms smep

processor	: 1
vendor_id	: Another
flags		: svm
`

func TestChoose(t *testing.T) {
	const (
		nested = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx hypervisor\n" // offers KVM, but not vmx or svm
		old    = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu svm aes\n"
	)
	v3 := baseModel + ",+" + strings.Join(strings.Fields(v3Features+" "+kvmFeatures), ",+")
	opens, doesNot := func() bool { return true }, func() bool { return false }
	tests := []struct {
		name    string
		config  Config
		cpuinfo string
		kvm     func() bool
		want    hardware
	}{
		{"KVM on a new processor", Config{}, intel, opens, hardware{AccelKVM, v3, "GenuineIntel"}},
		{"KVM on an old processor", Config{}, old, opens, hardware{AccelKVM, baseModel, "AuthenticAMD"}},
		{"no /dev/kvm", Config{}, intel, doesNot, hardware{AccelTCG, baseModel, "GenuineIntel"}},
		{"KVM that is not real", Config{}, nested, opens, hardware{AccelTCG, baseModel, "GenuineIntel"}},
		{"nothing known", Config{}, "", opens, hardware{AccelTCG, baseModel, "GenuineIntel"}},
		{"TCG asked for", Config{Accel: AccelTCG}, intel, opens, hardware{AccelTCG, baseModel, "GenuineIntel"}},
		{"model asked for", Config{CPUModel: "EPYC-v3"}, old, opens, hardware{AccelKVM, "EPYC-v3", "AuthenticAMD"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := choose(tt.config, parseCPUInfo(tt.cpuinfo), tt.kvm); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestParseVersion(t *testing.T) {
	tests := []struct {
		out, want, failure string
	}{
		{"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c)", "7.2.22", ""},
		{"QEMU emulator version 10.0.0\n", "10.0.0", ""},
		{"QEMU emulator version 8.1 (x)\n", "8.1", ""},
		{"QEMU emulator version 7.1.0\n", "", "too old"},
		{"QEMU emulator version 5.2.0\n", "", "apt-get install"},
		{"something else", "", "names no version"},
		{"", "", "names no version"},
	}
	for _, tt := range tests {
		got, err := parseVersion(tt.out)
		if got != tt.want || (err == nil) != (tt.failure == "") || err != nil && !strings.Contains(err.Error(), tt.failure) {
			t.Errorf("parseVersion(%.40q) = %q, %v", tt.out, got, err)
		}
	}
}
