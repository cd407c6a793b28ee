package template

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// errAgent is wrapped by errors about Options.GuestBinary.
var errAgent = errors.New("not usable as guest agent")

const maxAgent = 256 << 20 // bytes

// readAgent reads the guest agent and checks that it can be the first process
// of a guest: a static ELF executable for x86-64.
func readAgent(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("guest agent: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxAgent {
		return nil, fmt.Errorf("%s: %w: not a regular file of at most %d bytes", path, errAgent, maxAgent)
	}
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: no ELF executable: %w", path, errAgent, err)
	}
	defer f.Close()
	if f.Class != elf.ELFCLASS64 || f.Machine != elf.EM_X86_64 || (f.Type != elf.ET_EXEC && f.Type != elf.ET_DYN) {
		return nil, fmt.Errorf("%s: %w: it is a %v %v %v file; build it with GOOS=linux GOARCH=amd64", path, errAgent, f.Class, f.Machine, f.Type)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return nil, fmt.Errorf("%s: %w: it needs a dynamic loader; build it with CGO_ENABLED=0", path, errAgent)
		}
	}
	return os.ReadFile(path)
}

// writeInitramfs writes the archive that the kernel unpacks into its first
// root file system. It is not compressed: the kernel copies it from memory
// faster than it could uncompress it.
//
//	/init               the guest agent
//	/hib/modules/*.ko   kernel modules
//	/hib/modules.list   their file names, one a line, in the order to load them
//	/dev /proc /sys /root, and the node /dev/console
func writeInitramfs(w io.Writer, agent []byte, modules []module) error {
	a := cpioWriter{w: w}
	for _, dir := range []string{"dev", "hib", "hib/modules", "proc", "root", "sys"} {
		a.add(cpioEntry{name: dir, mode: cpioDir | 0o755})
	}
	a.add(cpioEntry{name: "dev/console", mode: cpioChar | 0o600, major: 5, minor: 1})
	a.add(cpioEntry{name: "init", mode: cpioFile | 0o755, data: agent})
	var list strings.Builder
	for _, m := range modules {
		a.add(cpioEntry{name: "hib/modules/" + m.file, mode: cpioFile | 0o644, data: m.data})
		list.WriteString(m.file + "\n")
	}
	a.add(cpioEntry{name: "hib/modules.list", mode: cpioFile | 0o644, data: []byte(list.String())})
	a.add(cpioEntry{name: "TRAILER!!!"})
	return a.err
}

// File types in a cpio header.
const (
	cpioType = 0o170000 // mask
	cpioDir  = 0o040000
	cpioChar = 0o020000
	cpioFile = 0o100000
)

// cpioEntry is one file of an archive, owned by root and without a time.
type cpioEntry struct {
	name         string
	mode         uint32
	major, minor uint32 // of a device node
	data         []byte
}

// cpioWriter writes archives in the "newc" format: a header of fixed-width
// hexadecimal fields, the name, the data, name and data padded to 4 bytes. It
// keeps the first error.
type cpioWriter struct {
	w     io.Writer
	inode uint32 // numbers must differ: equal ones mean hard links
	err   error
}

func (a *cpioWriter) add(e cpioEntry) {
	if a.err != nil {
		return
	}
	links := uint32(1)
	if e.mode&cpioType == cpioDir {
		links = 2
	}
	a.inode++
	const owner, group, mtime, devMajor, devMinor, check = 0, 0, 0, 0, 0, 0
	header := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		a.inode, e.mode, owner, group, links, mtime, len(e.data),
		devMajor, devMinor, e.major, e.minor, len(e.name)+1, check, e.name)
	for _, part := range [][]byte{[]byte(header), e.data} {
		if _, err := a.w.Write(part); err != nil {
			a.err = fmt.Errorf("write initramfs: %w", err)
			return
		}
		if _, err := a.w.Write(make([]byte, -len(part)&3)); err != nil {
			a.err = fmt.Errorf("write initramfs: %w", err)
			return
		}
	}
}
