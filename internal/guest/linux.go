package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	cgroupPath     = "/sys/fs/cgroup/user"
	runPath        = "/run/hib"
	generationFile = runPath + "/generation"
	idFile         = runPath + "/id"
	bootIDFile     = runPath + "/boot_id"
	kernelBootID   = "/proc/sys/kernel/random/boot_id"

	// ioctls of include/uapi/linux/random.h, which the system package does not name.
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// linux is the System of the machine that the agent is the first process of.
// What a resume needs is kept open: an emulated processor pays for every line
// of code that runs for the first time.
type linux struct {
	random     int            // descriptor of /dev/urandom, 0 before it was used
	diag       *netlinkSocket // of the kernel's socket monitor, once it was used
	generation *os.File       // of generationFile, once it was published
	freezer    *os.File       // cgroup.freeze of the user's cgroup, once it was used
}

// NewSystem returns the running guest's System. Its methods change the machine
// that they are called on.
func NewSystem() System { return &linux{} }

func (*linux) SetClock(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

func (l *linux) AddEntropy(secret []byte) error {
	if l.random == 0 {
		fd, err := unix.Open("/dev/urandom", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		l.random = fd
	}
	// struct rand_pool_info: bits of entropy, bytes, the bytes.
	pool := make([]uint32, 2+(len(secret)+3)/4)
	pool[0], pool[1] = uint32(len(secret)*8), uint32(len(secret))
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&pool[2])), len(secret)), secret)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(l.random), rndAddEntropy, uintptr(unsafe.Pointer(&pool[0]))); errno != 0 {
		return fmt.Errorf("add entropy: %w", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(l.random), rndReseedCRNG, 0); errno != 0 {
		return fmt.Errorf("reseed: %w", errno)
	}
	return nil
}

func (*linux) SetIdentity(id, hostname, machineID string) error {
	return errors.Join(
		unix.Sethostname([]byte(hostname)),
		replaceFile("/etc/hostname", hostname+"\n"),
		writeHosts("/etc/hosts", hostname),
		writeMachineID("/etc/machine-id", "/var/lib/dbus/machine-id", machineID),
		os.MkdirAll(runPath, 0o755),
		replaceFile(idFile, id+"\n"),
	)
}

// writeMachineID writes the machine's id, and its older place where an image
// has a copy there instead of a link.
func writeMachineID(path, older, id string) error {
	err := replaceFile(path, id+"\n")
	if info, statErr := os.Lstat(older); statErr == nil && info.Mode().IsRegular() {
		err = errors.Join(err, replaceFile(older, id+"\n"))
	}
	return err
}

// RenewBootID puts a file over the kernel's, which is written over from the
// second time on.
func (*linux) RenewBootID() error {
	id, err := os.ReadFile("/proc/sys/kernel/random/uuid")
	if err != nil {
		return err
	}
	_, statErr := os.Stat(bootIDFile)
	f, err := os.OpenFile(bootIDFile, os.O_CREATE|os.O_WRONLY, 0o444)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(id, 0)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if statErr == nil {
		return nil
	}
	if err := unix.Mount(bootIDFile, kernelBootID, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(err, os.Remove(bootIDFile))
	}
	return nil
}

func (l *linux) DestroySockets(keep Flow) (int, error) {
	if l.diag == nil {
		s, err := openNetlink(unix.NETLINK_SOCK_DIAG)
		if err != nil {
			return 0, err
		}
		l.diag = s
	}
	n, err := destroySockets(l.diag, keep)
	if err != nil { // what it still says may belong to the request that failed
		l.diag.close()
		l.diag = nil
	}
	return n, err
}

func (l *linux) Publish(generation uint64) error {
	if l.generation == nil {
		if err := os.MkdirAll(runPath, 0o755); err != nil {
			return err
		}
		f, err := os.OpenFile(generationFile, os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		l.generation = f
	}
	// Written over in one piece, which grows only: who watches the file is told,
	// and who reads it sees one number.
	_, err := l.generation.WriteAt([]byte(strconv.FormatUint(generation, 10)+"\n"), 0)
	return err
}

// setFrozen writes to the freezer of the user's cgroup.
func (l *linux) setFrozen(value string) error {
	if l.freezer == nil {
		f, err := os.OpenFile(filepath.Join(cgroupPath, "cgroup.freeze"), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		l.freezer = f
	}
	_, err := l.freezer.WriteAt([]byte(value), 0)
	return err
}

func (l *linux) Thaw() error {
	err := l.setFrozen("0")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // without the cgroup nothing was frozen
	}
	return err
}

func (l *linux) Freeze(timeout time.Duration) error {
	if err := l.setFrozen("1"); err != nil {
		return err
	}
	fd, err := unix.Open(filepath.Join(cgroupPath, "cgroup.events"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var buf [256]byte
	for end := time.Now().Add(timeout); ; {
		n, err := unix.Pread(fd, buf[:], 0)
		if err != nil {
			return err
		}
		if strings.Contains(string(buf[:n]), "frozen 1") {
			return nil
		}
		left := time.Until(end)
		if left <= 0 {
			return ErrFreezeTimeout
		}
		// The kernel tells of changes of the file by an exceptional condition.
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// replaceFile replaces a small file, or the link at its place, whole: who
// watches or reads it sees the old or the new content.
func replaceFile(path, content string) error {
	temp := path + ".hib-new"
	if err := os.WriteFile(temp, []byte(content), 0o644); err != nil {
		return err
	}
	return os.Rename(temp, path)
}

// The names that a sandbox knows its host by.
const (
	hostName = "host.hib.internal"
	hostIP   = "192.168.127.254"
	ownIP    = "127.0.1.1"
)

// writeHosts puts the machine's own name and the host's into a hosts file, and
// keeps the lines that others wrote.
func writeHosts(path, hostname string) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return replaceFile(path, mergeHosts(string(old), hostname))
}

func mergeHosts(old, hostname string) string {
	var b strings.Builder
	local := false
	for line := range strings.Lines(old) {
		f := strings.Fields(line)
		if len(f) > 1 && (f[0] == ownIP || f[0] == hostIP) {
			continue
		}
		local = local || len(f) > 1 && f[0] == "127.0.0.1"
		b.WriteString(strings.TrimSuffix(line, "\n") + "\n")
	}
	if !local {
		b.WriteString("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
	}
	fmt.Fprintf(&b, "%s %s\n%s %s\n", ownIP, hostname, hostIP, hostName)
	return b.String()
}
