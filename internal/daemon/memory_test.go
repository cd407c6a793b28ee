package daemon

import (
	"os"
	"path/filepath"
	"testing"
)

func TestCgroupMemory(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  int64
		fails bool
	}{
		{"no cgroups", nil, 0, false},
		{"version 2 without a limit", map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 0, false},
		{"the lowest counts", map[string]string{"proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "5000\n", "sys/fs/cgroup/a/memory.max": "3000\n"}, 3000, false},
		{"container", map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096, false},
		{"container with the host's path", map[string]string{"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096, false},
		{"version 1", map[string]string{"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n0::/y\n",
			"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2048\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 2048, false},
		{"nonsense", map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "much\n"}, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			for name, text := range tt.files {
				file := filepath.Join(root, name)
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			got, err := cgroupMemory(root)
			if got != tt.want || (err != nil) != tt.fails {
				t.Errorf("%d, %v; want %d", got, err, tt.want)
			}
		})
	}
}

func TestMemoryLimits(t *testing.T) {
	memory, err := hostMemory()
	if err != nil || memory <= 0 {
		t.Fatalf("%d, %v", memory, err)
	}
	for _, tt := range []struct {
		name           string
		config         Config
		guests, parked int64
	}{
		{"defaults", Config{}, guestMemory(memory), memory / 8},
		{"set", Config{GuestMemory: 100, ParkedMemory: 10}, 100, 10},
		{"off", Config{GuestMemory: NoLimit, ParkedMemory: NoParking}, 0, 0},
	} {
		guests, parked, p, err := memoryLimits(tt.config)
		if p.trigger != nil {
			_ = p.trigger.Close()
		}
		if err != nil || guests != tt.guests || parked != tt.parked {
			t.Errorf("%s: guests %d, parked %d, %v; want %d and %d", tt.name, guests, parked, err, tt.guests, tt.parked)
		}
	}
	for memory, want := range map[int64]int64{4 << 30: 1 << 30, 100 << 30: 10 << 30} {
		if got := hostReserve(memory); got != want {
			t.Errorf("of %d bytes %d are kept, want %d", memory, got, want)
		}
	}
}
