package hibtest

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// Shims returns the handles of this daemon's machines, by looking into its
// runtime folder.
func (d *Daemon) Shims() []shim.Handle {
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
func (d *Daemon) Processes() map[int]string {
	run := d.RunDir()
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
