package hibtest

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/shim"
)

// Shims returns the handles of the machines that sandboxes have, running or
// parked, by looking into the daemon's runtime folder.
func (d *Daemon) Shims() []shim.Handle {
	d.t.Helper()
	return d.machines(func(s shim.Status) bool { return s.Phase != shim.PhasePrepared && s.Phase != shim.PhaseIdle })
}

// Waiting returns the handles of the machines that are kept ready for anybody.
func (d *Daemon) Waiting() []shim.Handle {
	d.t.Helper()
	return d.machines(func(s shim.Status) bool { return s.Phase == shim.PhasePrepared && !s.Adopted })
}

// Parked returns the handles of the machines that are parked.
func (d *Daemon) Parked() []shim.Handle {
	d.t.Helper()
	return d.machines(func(s shim.Status) bool { return s.Phase == shim.PhaseParked })
}

// machines returns the handles of the machines whose status is such.
func (d *Daemon) machines(such func(shim.Status) bool) []shim.Handle {
	d.t.Helper()
	return slices.DeleteFunc(d.handles(), func(h shim.Handle) bool {
		c, err := shim.Adopt(d.t.Context(), h) // connects, no more
		if err != nil {
			return true // it ends at this moment
		}
		defer c.Close()
		s, err := c.Status(d.t.Context())
		return err != nil || !such(s)
	})
}

func (d *Daemon) handles() []shim.Handle {
	d.t.Helper()
	var all []shim.Handle
	files, err := filepath.Glob(filepath.Join(d.RunDir(), "*", "handle.json"))
	if err != nil {
		d.t.Fatal(err)
	}
	for _, f := range files {
		var h shim.Handle
		b, err := os.ReadFile(f)
		if err != nil {
			continue // released at this moment
		}
		if err := json.Unmarshal(b, &h); err != nil {
			d.t.Fatalf("%s: %v", f, err)
		}
		all = append(all, h)
	}
	return all
}

// RunDir returns the daemon's runtime folder.
func (d *Daemon) RunDir() string {
	d.t.Helper()
	var where struct {
		Run string `json:"run"`
	}
	b, err := os.ReadFile(filepath.Join(d.Data, "daemon.json"))
	if err == nil {
		err = json.Unmarshal(b, &where)
	}
	if err != nil || where.Run == "" {
		d.t.Fatalf("daemon.json does not tell the runtime folder: %v: %s", err, b)
	}
	return where.Run
}

// Processes returns the command lines by pid of every process whose arguments
// or parent tell that it belongs to this daemon's machines: shims and VMMs. It
// is for finding leaks, so it looks at all processes of the host.
func (d *Daemon) Processes() map[int]string { return ProcessesOf(d.RunDir()) }

// ProcessesOf is Processes of the daemon whose runtime folder is run.
func ProcessesOf(run string) map[int]string {
	found := map[int]string{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.Contains(string(b), run+"/") {
			found[pid] = strings.ReplaceAll(string(b), "\x00", " ")
		}
	}
	return found
}

// Left is Processes without those of machines that are kept ready.
func (d *Daemon) Left() map[int]string {
	d.t.Helper()
	left := d.Processes()
	for _, h := range d.Waiting() {
		maps.DeleteFunc(left, func(_ int, args string) bool { return strings.Contains(args, h.VM) })
	}
	return left
}

// Mounts returns the mount points below the daemon's runtime folder.
func (d *Daemon) Mounts() []string {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		d.t.Fatal(err)
	}
	var found []string
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[1], d.RunDir()+"/") {
			found = append(found, f[1])
		}
	}
	return found
}

// VMM returns the process id of the sandbox's QEMU. The sandbox must be the
// daemon's only running one.
func (d *Daemon) VMM() int {
	d.t.Helper()
	for _, h := range d.Shims() {
		for pid, args := range d.Processes() {
			if strings.Contains(args, "qemu-system") && strings.Contains(args, h.VM) {
				return pid
			}
		}
	}
	d.t.Fatal("no QEMU runs")
	return 0
}

// DirtyBytes counts, independently of the product, the guest's pages that
// were changed since its VMM was started: present in or swapped out of the
// private mapping of the memory file, and not of that file. The sandbox must be
// the only running one.
func (d *Daemon) DirtyBytes(id string) int64 {
	d.t.Helper()
	pid := d.VMM()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		d.t.Fatal(err)
	}
	pagemap, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		d.t.Fatal(err)
	}
	defer pagemap.Close()
	var dirty int64
	for _, line := range strings.Split(string(maps), "\n") {
		var from, to uint64
		if !strings.Contains(line, "/mem/") {
			continue
		}
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil {
			d.t.Fatalf("%q: %v", line, err)
		}
		entries := make([]byte, (to-from)/4096*8)
		if _, err := pagemap.ReadAt(entries, int64(from/4096*8)); err != nil {
			d.t.Fatal(err)
		}
		for ; len(entries) > 0; entries = entries[8:] {
			const present, swapped, file = 1 << 63, 1 << 62, 1 << 61
			e := binary.LittleEndian.Uint64(entries)
			if e&(present|swapped) != 0 && e&file == 0 {
				dirty += 4096
			}
		}
	}
	if dirty == 0 {
		d.t.Fatalf("sandbox %s: no dirty page found in QEMU's mappings", id)
	}
	return dirty
}

// StoreBytes returns how much the store holds.
func (d *Daemon) StoreBytes() int64 {
	d.t.Helper()
	var s api.StoreStatus
	d.JSON(&s, "store", "status")
	return s.PackBytes + s.ManifestBytes + s.StateBytes
}

// PeakRSS returns the most memory that a process had resident, in bytes.
func PeakRSS(t testing.TB, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		var kib int64
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &kib); err == nil {
			return kib << 10
		}
	}
	t.Fatalf("process %d shows no VmHWM", pid)
	return 0
}

// Descriptors returns how many files the daemon has open.
func (d *Daemon) Descriptors() int {
	d.t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.PID()))
	if err != nil {
		d.t.Fatal(err)
	}
	return len(fds)
}

// Goroutines returns how many goroutines the daemon has.
func (d *Daemon) Goroutines() int {
	d.t.Helper()
	req, err := http.NewRequest(http.MethodGet, d.URL+"/debug/pprof/goroutine?debug=1", nil)
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("X-API-Key", d.Key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	profile, err := io.ReadAll(resp.Body) // to its end: the connection is kept
	if err != nil {
		d.t.Fatal(err)
	}
	var n int
	if _, err := fmt.Sscanf(string(profile), "goroutine profile: total %d", &n); err != nil {
		d.t.Fatalf("goroutine profile: %v", err)
	}
	return n
}

// Settle waits until nothing goes on behind the last answer: no machine but
// the pooled ones is left, and idle connections are closed.
func (d *Daemon) Settle() {
	d.t.Helper()
	http.DefaultClient.CloseIdleConnections()
	last, same := -1, 0
	Eventually(d.t, "the daemon has settled", func() bool {
		n := d.Goroutines() + d.Descriptors() + len(d.Processes())
		if n != last {
			last, same = n, 0
		}
		same++
		return same > 100
	})
}

// Bin returns the folder of the programs.
func (d *Daemon) Bin() string { return d.bin }

// Env returns the environment in which hib finds the daemon.
func (d *Daemon) Env() []string { return d.env }
