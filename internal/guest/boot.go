package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

const (
	baseDevice = "/dev/pmem0"
	baseWait   = 30 * time.Second // for the device to appear

	// Where the parts of the root are put together, in the initramfs.
	lowerDir = "/hib/lower"
	rwDir    = "/hib/rw"
	rootDir  = "/hib/root"

	gcPercent   = 50        // a small heap is a small set of pages that change
	memoryLimit = 128 << 20 // bytes of the agent's own memory before it collects harder
)

// Main is the whole life of the agent as the first process of a microVM: it
// boots the guest and serves it. It returns only with an error, upon which
// the kernel stops the machine.
func Main(log *slog.Logger) error {
	if os.Getpid() != 1 {
		return errors.New("hib-guest is the first process of a sandbox's machine and does not run elsewhere")
	}
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memoryLimit)
	runtime.GOMAXPROCS(runtime.NumCPU()) // being set, it is not looked up again and again
	if err := Boot(log); err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	cgroup, err := unix.Open(cgroupPath, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		log.Warn("processes run without a cgroup and will not be frozen", "err", err)
		cgroup = -1
	}
	a := New(Config{System: NewSystem(), Log: log, Cgroup: cgroup, Cgroups: cgroupRoot})
	signal.Notify(a.spawner.exits, unix.SIGCHLD)
	go a.spawner.reapOrphans()
	// The first process takes no orders from those in the guest. Ignored signals
	// would stay ignored in every process that it starts; those that are caught do not.
	// Uncaught, some of them would end the agent, and the machine with it.
	signal.Notify(make(chan os.Signal, 1), deafTo()...)

	// First the calls: who finds HTTP need not look for them again.
	ctx, n := context.Background(), readNetwork()
	go func() { warn(log, "keep the network up", n.keep(ctx, log)) }()
	at := netip.AddrPortFrom(n.address.Addr(), guestapi.CallPort)
	c, err := listenForCalls(a.control, at, n.gateway)
	warn(log, "take calls as frames", err)
	go again(log, "go on to serve calls", func() (err error) {
		if c == nil {
			if c, err = listenForCalls(a.control, at, n.gateway); err != nil {
				return err
			}
		}
		err, c = c.serve(ctx), nil
		return err
	})
	again(log, "serve", func() error {
		l, err := listen(ctx)
		if err != nil {
			return err
		}
		log.Info("the agent serves", "address", l.Addr().String())
		return a.Serve(ctx, l)
	})
	return nil
}

// again does for ever what ends only when a program in the guest makes it: a
// user may close any socket, and the machine must not end with it.
func again(log *slog.Logger, what string, do func() error) {
	for {
		warn(log, what, do())
		time.Sleep(time.Second)
	}
}

// deafTo returns the signals that the agent takes no notice of: all that can be
// caught, but those that the runtime and the reaper need.
func deafTo() (all []os.Signal) {
	for n := unix.Signal(1); n <= 64; n++ {
		switch n {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGCHLD, unix.SIGURG:
		default:
			all = append(all, n)
		}
	}
	return all
}

// Boot makes a running system of an initramfs: devices, the base image with a
// writable layer in memory as the root, and the network. What is not needed
// to reach the agent only warns.
func Boot(log *slog.Logger) error {
	if err := mountEarly(); err != nil {
		return err
	}
	redirectConsole(log)
	loadModules(modulesList, modulesDir, log)
	if err := assembleRoot(log); err != nil {
		return err
	}
	emptyInitramfs("/", log)
	if err := switchRoot(); err != nil {
		return err
	}
	mountLate(log)
	limits := unix.Rlimit{Cur: 65536, Max: 524288}
	warn(log, "raise the limit of open files", syscall.Setrlimit(unix.RLIMIT_NOFILE, (*syscall.Rlimit)(&limits)))
	warn(log, "set up the network", readNetwork().up())
	warn(log, "set the host name", unix.Sethostname([]byte("hib")))
	return nil
}

func warn(log *slog.Logger, what string, err error) {
	if err != nil {
		log.Warn("cannot "+what, "err", err)
	}
}

// mountPoint is a file system to mount. Its folder is made if it is missing.
type mountPoint struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

func (m mountPoint) mount() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s at %s: %w", m.kind, m.target, err)
	}
	return nil
}

// mountEarly mounts what the boot itself needs.
func mountEarly() error {
	return errors.Join(
		mountPoint{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"}.mount(),
		mountPoint{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""}.mount(),
	)
}

// redirectConsole makes the console the agent's input and output: the kernel
// may have found none to give it.
func redirectConsole(log *slog.Logger) {
	fd, err := unix.Open("/dev/console", unix.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return // nobody could be told
	}
	for i := range 3 {
		warn(log, "use the console", unix.Dup2(fd, i))
	}
	if fd > 2 {
		unix.Close(fd)
	}
}

// assembleRoot mounts the base image and the writable layer as one tree at rootDir.
func assembleRoot(log *slog.Logger) error {
	if err := waitForDevice(baseDevice, baseWait); err != nil {
		return err
	}
	base := mountPoint{baseDevice, lowerDir, "erofs", unix.MS_RDONLY, "dax=always"}
	if err := base.mount(); err != nil {
		log.Warn("the base image cannot be mapped directly: its pages will take guest memory", "err", err)
		base.data = ""
		if err := base.mount(); err != nil {
			return err
		}
	}
	total, err := memInfo("/proc", "MemTotal")
	if err != nil {
		return err
	}
	// Files may take half the memory. Each inode takes kernel memory of its own, about 1 KiB.
	writable := fmt.Sprintf("mode=0755,size=%d,nr_inodes=%d", total/2, max(total/4096, 1<<17))
	if err := (mountPoint{"tmpfs", rwDir, "tmpfs", 0, writable}).mount(); err != nil {
		return err
	}
	for _, dir := range []string{rwDir + "/upper", rwDir + "/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	return overlay()
}

// overlay joins the two layers. redirect_dir lets folders of the base be
// renamed, metacopy keeps a chmod or chown from copying the file into memory.
func overlay() error {
	m := mountPoint{"overlay", rootDir, "overlay", 0,
		"lowerdir=" + lowerDir + ",upperdir=" + rwDir + "/upper,workdir=" + rwDir + "/work,redirect_dir=on,metacopy=on"}
	return m.mount()
}

func waitForDevice(path string, limit time.Duration) error {
	for end := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return nil
		} else if time.Now().After(end) {
			return fmt.Errorf("the base image's device did not appear within %v: %w", limit, err)
		}
	}
}

// emptyInitramfs removes what was unpacked to boot from, to free its memory;
// mounted file systems are left alone.
func emptyInitramfs(root string, log *slog.Logger) {
	var own unix.Stat_t
	if err := unix.Lstat(root, &own); err != nil {
		warn(log, "free the initramfs", err)
		return
	}
	var remove func(dir string)
	remove = func(dir string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			var st unix.Stat_t
			if unix.Lstat(path, &st) != nil || st.Dev != own.Dev {
				continue
			}
			if e.IsDir() {
				remove(path)
			}
			_ = os.Remove(path) // a folder with a mount in it stays
		}
	}
	remove(root)
}

// switchRoot moves the assembled tree to / and into it.
func switchRoot() error {
	for _, dir := range []string{"/dev", "/proc"} {
		if err := os.MkdirAll(rootDir+dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(dir, rootDir+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	if err := unix.Chdir(rootDir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	return unix.Chdir("/")
}

// mountLate mounts and links what programs expect of a system.
func mountLate(log *slog.Logger) {
	const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []mountPoint{
		{"sysfs", "/sys", "sysfs", safe, ""},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", safe, ""},
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666"},
		{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"mqueue", "/dev/mqueue", "mqueue", safe, ""},
		{"tmpfs", runPath, "tmpfs", safe, "mode=0755,size=1m"}, // cheaper to change at each resume than the overlay
	} {
		warn(log, "mount", m.mount())
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, "/dev/"+name); !errors.Is(err, fs.ErrExist) {
			warn(log, "link", err)
		}
	}
	quieten(log)
	warn(log, "make the user's cgroup", os.MkdirAll(cgroupPath, 0o755))
	warn(log, "make the temporary folder", makeTemp())
}

// Where the kernel shows the event by which vmgenid tells of a resume, and the
// drivers that would hear it (of Linux up to and from 6.10).
const generationEvent = "/sys/firmware/acpi/interrupts/gpe05"

var generationDrivers = []string{"/sys/bus/acpi/drivers/vmgenid", "/sys/bus/platform/drivers/vmgenid"}

// quieten stops what the kernel would do in vain: at every resume, where it
// delays the first request, and while the guest idles.
func quieten(log *slog.Logger) {
	// Looking for memory to compact twice a second.
	warn(log, "end proactive compaction", os.WriteFile("/proc/sys/vm/compaction_proactiveness", []byte("0\n"), 0o644))
	for _, driver := range generationDrivers {
		if _, err := os.Stat(driver); err == nil {
			return
		}
	}
	// Interpreting the firmware's code for an event that no driver takes.
	if state, err := os.ReadFile(generationEvent); err == nil && strings.Contains(string(state), " enabled ") {
		warn(log, "end the generation event", os.WriteFile(generationEvent, []byte("disable\n"), 0o644))
	}
}

// makeTemp makes /tmp for images that have none.
func makeTemp() error {
	if err := os.Mkdir("/tmp", 0o1777); errors.Is(err, fs.ErrExist) {
		return nil
	} else if err != nil {
		return err
	}
	return os.Chmod("/tmp", 0o777|fs.ModeSticky)
}
