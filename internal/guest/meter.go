package guest

import (
	"bufio"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// usage is the answer of /metrics. Sizes are bytes; the processor's share is
// that since the last call, or since boot, of all processors together.
type usage struct {
	CPUCount  int     `json:"cpu_count"`
	CPUUsed   float64 `json:"cpu_used_pct"`
	MemTotal  uint64  `json:"mem_total"`
	MemUsed   uint64  `json:"mem_used"`
	DiskTotal uint64  `json:"disk_total"`
	DiskUsed  uint64  `json:"disk_used"`
	Timestamp int64   `json:"ts"` // seconds since 1970
}

// meter measures what the guest uses.
type meter struct {
	proc, disk string

	mu          sync.Mutex
	busy, total uint64 // processor ticks at the last call
}

func newMeter(proc, disk string) *meter { return &meter{proc: proc, disk: disk} }

func (m *meter) serve(w http.ResponseWriter, _ *http.Request) {
	u, err := m.read()
	if err != nil {
		writeError(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, u)
}

func (m *meter) read() (usage, error) {
	u := usage{CPUCount: runtime.NumCPU(), Timestamp: time.Now().Unix()}
	cpu, err := m.cpu()
	if err != nil {
		return u, err
	}
	u.CPUUsed = cpu
	if u.MemTotal, u.MemUsed, err = m.memory(); err != nil {
		return u, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(m.disk, &st); err != nil {
		return u, fmt.Errorf("size of %s: %w", m.disk, err)
	}
	u.DiskTotal = st.Blocks * uint64(st.Bsize)
	u.DiskUsed = (st.Blocks - st.Bfree) * uint64(st.Bsize)
	return u, nil
}

// cpu returns the processors' busy share since the last call, in percent.
func (m *meter) cpu() (float64, error) {
	raw, err := os.ReadFile(filepath.Join(m.proc, "stat"))
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(raw), "\n")
	fields := strings.Fields(line) // cpu user nice system idle iowait irq softirq steal …
	if len(fields) < 6 {
		return 0, errors.New("/proc/stat has no line of all processors")
	}
	var total, idle uint64
	for i, f := range fields[1:min(len(fields), 9)] { // guest time is within user time
		ticks, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		total += ticks
		if i == 3 || i == 4 {
			idle += ticks
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	busy := total - idle
	dBusy, dTotal := busy-m.busy, total-m.total
	m.busy, m.total = busy, total
	if dTotal == 0 || dBusy > dTotal {
		return 0, nil
	}
	return float64(dBusy) * 100 / float64(dTotal), nil
}

func (m *meter) memory() (total, used uint64, err error) {
	total, err = memInfo(m.proc, "MemTotal")
	if err != nil {
		return 0, 0, err
	}
	available, err := memInfo(m.proc, "MemAvailable")
	return total, total - min(available, total), err
}

// memInfo returns a figure of /proc/meminfo in bytes.
func memInfo(proc, name string) (uint64, error) {
	f, err := os.Open(filepath.Join(proc, "meminfo"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), name+":"); ok {
			kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("meminfo has no %s", name)
}
