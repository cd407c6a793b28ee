package template

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// wantedModule is a kernel module that a guest uses.
type wantedModule struct {
	name     string
	optional bool // not every kernel has it; a guest gets along without
}

// guestModules lists what a guest uses, in the order in which it is needed.
// What these depend on is found in the modules themselves.
var guestModules = []wantedModule{
	// The base image: a persistent memory module, EROFS, and the overlay on it.
	{name: "nd_e820"},
	{name: "nd_pmem"},
	{name: "virtio_pci"},
	{name: "crc32c-intel", optional: true}, // faster checksums where the CPU can
	{name: "erofs"},
	{name: "overlay"},
	{name: "virtio_net"},
	{name: "virtio_blk"},                 // volumes
	{name: "virtio-rng", optional: true}, // entropy from the host
	{name: "pvpanic-pci", optional: true},
	{name: "tcp_diag"}, // SOCK_DESTROY after a resume
	{name: "fuse", optional: true},
	{name: "nfsv3", optional: true}, // drives
}

const maxModule = 64 << 20 // bytes of an uncompressed module

// errModules is wrapped by errors about kernel modules that are missing or unreadable.
var errModules = errors.New("the kernel package does not hold the modules that a guest needs")

// module is a kernel module as the initramfs holds it.
type module struct {
	file string // name of the uncompressed file, for example "virtio_net.ko"
	data []byte
}

// moduleTree is the folder lib/modules/RELEASE of a kernel package. The names
// in its maps are as the kernel knows them, with "_" for "-".
type moduleTree struct {
	files   map[string]string // paths
	builtin map[string]bool
}

// moduleName returns the kernel's name of the module in a file.
func moduleName(path string) string {
	name, _, _ := strings.Cut(filepath.Base(path), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// openModuleTree reads the names of the modules under dir and those built
// into the kernel.
func openModuleTree(dir string) (*moduleTree, error) {
	t := &moduleTree{files: map[string]string{}, builtin: map[string]bool{}}
	builtin, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errModules, err)
	}
	lines := bufio.NewScanner(bytes.NewReader(builtin))
	for lines.Scan() {
		t.builtin[moduleName(lines.Text())] = true
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: modules.builtin: %w", errModules, err)
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			t.files[moduleName(path)] = path
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errModules, err)
	}
	return t, nil
}

// load returns the wanted modules and all that they depend on, each behind
// what it needs, without those that are built in.
func (t *moduleTree) load(wanted []wantedModule) ([]module, error) {
	var (
		loaded []module
		state  = map[string]int{} // 1: its dependencies are being loaded, 2: loaded
		visit  func(name, neededBy string) error
	)
	visit = func(name, neededBy string) error {
		name = strings.ReplaceAll(name, "-", "_")
		switch {
		case t.builtin[name] || state[name] == 2:
			return nil
		case state[name] == 1:
			return fmt.Errorf("%w: %s and %s depend on each other", errModules, name, neededBy)
		}
		path, ok := t.files[name]
		if !ok {
			return fmt.Errorf("%w: %s is missing (needed by %s)", errModules, name, neededBy)
		}
		state[name] = 1
		m, depends, err := readModule(path)
		if err != nil {
			return fmt.Errorf("%w: %s: %w", errModules, filepath.Base(path), err)
		}
		for _, d := range depends {
			if err := visit(d, name); err != nil {
				return err
			}
		}
		state[name] = 2
		loaded = append(loaded, m)
		return nil
	}
	for _, w := range wanted {
		name := strings.ReplaceAll(w.name, "-", "_")
		if w.optional && t.files[name] == "" {
			continue
		}
		if err := visit(name, "the guest"); err != nil {
			return nil, err
		}
	}
	return loaded, nil
}

// readModule reads a module file, uncompressed or not, and returns it with the
// names of the modules that it depends on.
func readModule(path string) (module, []string, error) {
	f, err := os.Open(path)
	if err != nil {
		return module{}, nil, err
	}
	defer f.Close()
	var r io.Reader
	switch suffix := filepath.Ext(path); suffix {
	case ".ko":
		r = f
	case ".xz":
		r, err = xz.NewReader(bufio.NewReader(f))
	case ".zst":
		var z *zstd.Decoder
		if z, err = zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxZstdWindow)); err == nil {
			defer z.Close()
			r = z
		}
	case ".gz":
		r, err = gzip.NewReader(f)
	default:
		err = fmt.Errorf("its compression %s is not known", suffix)
	}
	if err != nil {
		return module{}, nil, err
	}
	data, err := io.ReadAll(io.LimitReader(r, maxModule+1))
	if err != nil {
		return module{}, nil, err
	}
	if len(data) > maxModule {
		return module{}, nil, fmt.Errorf("it has more than %d bytes", maxModule)
	}
	depends, err := moduleDepends(data)
	name, _, _ := strings.Cut(filepath.Base(path), ".ko")
	return module{file: name + ".ko", data: data}, depends, err
}

// moduleDepends reads the names of the modules that a module needs from its
// section .modinfo: strings KEY=VALUE, each ended by a zero byte.
func moduleDepends(ko []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(ko))
	if err != nil {
		return nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, errors.New("it has no section .modinfo")
	}
	info, err := s.Data()
	if err != nil {
		return nil, err
	}
	for _, entry := range strings.Split(string(info), "\x00") {
		if list, ok := strings.CutPrefix(entry, "depends="); ok && list != "" {
			return strings.Split(list, ","), nil
		}
	}
	return nil, nil
}
