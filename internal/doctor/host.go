package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/internal/daemon"
)

const gib = 1 << 30

// account checks the user that shims run as, and that it gets to its files.
func (h Host) account() []Check {
	const name = "account"
	a, err := daemon.LookupAccount(h.User)
	if err != nil {
		return []Check{fail(name, err.Error(), "name one that exists with --user"), writable(h.Data)}
	}
	who := pass(name, fmt.Sprintf("shims and VMMs run as %s (%d)", a.Name, a.UID))
	if a.UID != os.Geteuid() && a.Name == "nobody" {
		who = warn(name, "shims and VMMs run as nobody, which other services may use too", "useradd --system --no-create-home hibernacle")
	}
	reach := pass("paths", "data folder "+h.Data)
	if err := errors.Join(a.CheckReach(h.Data), a.CheckReach(filepath.Dir(h.Program))); err != nil {
		reach = fail("paths", err.Error(), "let the account pass these folders, or use others")
	}
	return []Check{who, reach, writable(h.Data)}
}

// writable checks that the daemon can write to the data folder, or make it.
func writable(dir string) Check {
	const name = "data folder"
	there := existing(dir)
	if err := unix.Access(there, unix.W_OK|unix.X_OK); err != nil {
		return fail(name, fmt.Sprintf("%s can't be written to: %v", there, err), "choose another folder with --data, or change its owner")
	}
	if there == dir {
		return pass(name, dir)
	}
	return pass(name, dir+" (will be made)")
}

// existing returns the nearest folder above dir, or dir itself, that is there.
func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

// disk checks the room for templates (about 2 GiB each) and snapshots.
func (h Host) disk() Check {
	const name = "disk"
	var st unix.Statfs_t
	dir := existing(h.Data)
	if err := unix.Statfs(dir, &st); err != nil {
		return fail(name, fmt.Sprintf("%s: %v", dir, err), "choose another folder with --data")
	}
	free := int64(st.Bavail) * st.Bsize
	detail := fmt.Sprintf("%.1f GiB free at %s", float64(free)/gib, dir)
	const fix = "free some space, or choose another folder with --data"
	switch {
	case free < 3*gib:
		return fail(name, detail+": a template build needs about 3 GiB", fix)
	case free < 10*gib:
		return warn(name, detail, fix)
	}
	return pass(name, detail)
}

// memory checks the room for running guests; standby needs none.
func memory() Check {
	const name = "memory"
	available, err := daemon.AvailableMemory()
	if err != nil {
		return warn(name, err.Error(), "mount /proc")
	}
	detail := fmt.Sprintf("%.1f GiB available", float64(available)/gib)
	switch {
	case available < gib/2:
		return fail(name, detail, "a guest that runs needs at least 512 MiB")
	case available < 3*gib:
		return warn(name, detail+", little for guests of 2 GiB", "make smaller sandboxes: hib create --memory 512")
	}
	return pass(name, detail)
}

// daemonPatience bounds the wait for the daemon of the data folder.
const daemonPatience = 3 * time.Second

// guests tells what the daemon of the data folder has promised to its guests,
// if one runs.
func (h Host) guests(ctx context.Context) []Check {
	const name = "guests"
	if _, err := os.Stat(filepath.Join(h.Data, api.DaemonFile)); err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, daemonPatience)
	defer cancel()
	c, err := client.Options{Data: h.Data}.Client()
	if err != nil {
		return []Check{warn(name, err.Error(), "run hib doctor as the user that runs the daemon")}
	}
	defer c.Close()
	host, err := c.Host(ctx)
	if err != nil {
		return []Check{warn(name, "the daemon of this data folder does not answer: "+err.Error(), "look at its log, or start hib serve")}
	}
	limit := "no limit"
	if host.MemoryLimit > 0 {
		limit = fmt.Sprintf("%.1f GiB", float64(host.MemoryLimit)/gib)
	}
	detail := fmt.Sprintf("%d run, %.1f GiB of memory promised of %s, %.1f GiB of disk kept for their hibernations",
		host.Guests, float64(host.MemoryPromised)/gib, limit, float64(host.DiskReserve)/gib)
	if host.Draining {
		return []Check{warn(name, detail+"; the host is being drained and starts none", "hib drain --undo, or a restart of the daemon, lets sandboxes start again")}
	}
	return []Check{pass(name, detail)}
}

// Lengths of Unix socket paths, in bytes.
const (
	maxSocketPath = 107
	socketSuffix  = 1 + 32 + 1 + 24 // folder of a machine, name of a socket
)

func (h Host) sockets() Check {
	const name = "socket paths"
	run := daemon.FoldersOf(h.Data).Run
	if n := len(run) + socketSuffix; n > maxSocketPath {
		return fail(name, fmt.Sprintf("the runtime folder %s is too long: paths of %d bytes, %d are possible", run, n, maxSocketPath), "set XDG_RUNTIME_DIR to a shorter path")
	}
	return pass(name, "runtime folder "+run)
}

// tools checks the programs that template builds call.
func tools() []Check {
	var checks []Check
	for _, t := range []struct{ name, program, pack string }{
		{"mmdebstrap", "mmdebstrap", "mmdebstrap"},
		{"apt", "apt-get", "apt"},
		{"dpkg-deb", "dpkg-deb", "dpkg"},
	} {
		path, err := exec.LookPath(t.program)
		if err != nil {
			checks = append(checks, warn(t.name, t.program+" is not installed: no template can be built here", "apt-get install "+t.pack))
			continue
		}
		checks = append(checks, pass(t.name, path))
	}
	return checks
}
