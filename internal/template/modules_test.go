package template

import (
	"bytes"
	"compress/gzip"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// makeModule returns a kernel module that depends on others.
func makeModule(t testing.TB, depends string) []byte {
	return makeELF(t, 1, 0, nil, section{".modinfo", []byte("license=GPL\x00depends=" + depends + "\x00vermagic=6\x00")})
}

// writeModules writes a module tree: a file's path stands against what the module depends on.
func writeModules(t testing.TB, dir, builtin string, files map[string]string) {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(dir, 0o755))
	must(os.WriteFile(filepath.Join(dir, "modules.builtin"), []byte(builtin), 0o644))
	for name, depends := range files {
		var b bytes.Buffer
		ko := makeModule(t, depends)
		switch filepath.Ext(name) {
		case ".xz":
			w, err := xz.NewWriter(&b)
			must(err)
			_, err = w.Write(ko)
			must(err)
			must(w.Close())
		case ".zst":
			w, err := zstd.NewWriter(&b)
			must(err)
			_, err = w.Write(ko)
			must(err)
			must(w.Close())
		case ".gz":
			w := gzip.NewWriter(&b)
			_, err := w.Write(ko)
			must(err)
			must(w.Close())
		default:
			b.Write(ko)
		}
		path := filepath.Join(dir, name)
		must(os.MkdirAll(filepath.Dir(path), 0o755))
		must(os.WriteFile(path, b.Bytes(), 0o644))
	}
}

func TestModulesComeBehindWhatTheyNeed(t *testing.T) {
	dir := t.TempDir()
	writeModules(t, dir, "kernel/drivers/virtio/virtio.ko\nkernel/fs/fuse/fuse.ko\n", map[string]string{
		"kernel/drivers/net/virtio_net.ko.xz":         "net_failover,virtio",
		"kernel/net/core/failover.ko.zst":             "",
		"kernel/drivers/net/net_failover.ko.gz":       "failover",
		"kernel/drivers/misc/pvpanic/pvpanic-pci.ko":  "pvpanic",
		"kernel/drivers/misc/pvpanic/pvpanic.ko":      "",
		"kernel/arch/x86/crypto/crc32c-intel.ko":      "",
		"kernel/drivers/unused/something-unwanted.ko": "missing",
	})
	tree, err := openModuleTree(dir)
	if err != nil {
		t.Fatal(err)
	}
	modules, err := tree.load([]wantedModule{
		{name: "virtio_net"}, {name: "failover"}, {name: "fuse"}, {name: "pvpanic-pci"}, {name: "crc32c-intel"},
		{name: "not-there", optional: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, m := range modules {
		files = append(files, m.file)
		if !bytes.HasPrefix(m.data, []byte("\x7fELF")) {
			t.Errorf("%s is not uncompressed", m.file)
		}
	}
	want := []string{"failover.ko", "net_failover.ko", "virtio_net.ko", "pvpanic.ko", "pvpanic-pci.ko", "crc32c-intel.ko"}
	if !slices.Equal(files, want) {
		t.Errorf("modules %q, want %q", files, want)
	}
}

func TestModulesThatCannotBeLoaded(t *testing.T) {
	dir := t.TempDir()
	writeModules(t, dir, "", map[string]string{
		"a.ko": "b", "b.ko": "a", "self.ko": "self", "needy.ko": "gone", "odd.ko.lzma": "",
	})
	for name, content := range map[string]string{"text.ko": "text", "noxz.ko.xz": "text", "bare.ko": string(makeELF(t, 1, 0, nil))} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tree, err := openModuleTree(dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"a": "depend on each other", "self": "depend on each other", "needy": "gone is missing (needed by needy)",
		"absent": "absent is missing (needed by the guest)", "odd": "compression .lzma", "text": "text.ko", "noxz": "noxz.ko.xz", "bare": ".modinfo",
	} {
		if _, err := tree.load([]wantedModule{{name: name}}); !errors.Is(err, errModules) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one about %s", name, err, want)
		}
	}
}

func TestOpenModuleTreeNeedsTheListOfBuiltIns(t *testing.T) {
	if _, err := openModuleTree(t.TempDir()); !errors.Is(err, errModules) {
		t.Errorf("error %v, want errModules", err)
	}
}

func FuzzModuleDepends(f *testing.F) {
	f.Add(makeModule(f, "a,b"))
	f.Add(makeELF(f, 1, 0, nil))
	f.Fuzz(func(t *testing.T, ko []byte) { _, _ = moduleDepends(ko) })
}
