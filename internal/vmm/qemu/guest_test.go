package qemu

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// What the tests with real machines need: an uncompressed kernel, and the folder
// of its modules (lib/modules/RELEASE).
const (
	kernelVariable  = "HIB_TEST_VMLINUX"
	modulesVariable = "HIB_TEST_MODULES"
)

// guestModules are loaded by the guest in this order.
var guestModules = []string{
	"virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci",
	"libnvdimm", "nd_e820", "nd_btt", "nd_pmem",
	"failover", "net_failover", "virtio_net", "pvpanic", "pvpanic-pci",
}

// testGuest builds the guest program's initramfs and returns how to boot it.
func testGuest(t testing.TB) vmm.Boot {
	t.Helper()
	kernel, modules := os.Getenv(kernelVariable), os.Getenv(modulesVariable)
	if kernel == "" || modules == "" {
		t.Skipf("needs a guest kernel: set %s and %s", kernelVariable, modulesVariable)
	}
	dir := t.TempDir()
	program := filepath.Join(dir, "guest")
	build := exec.Command("go", "build", "-o", program, "./testdata/guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the guest: %v\n%s", err, out)
	}
	var archive bytes.Buffer
	w := cpio.NewWriter(&archive)
	for _, folder := range []string{"dev", "proc", "modules"} {
		check(t, w.WriteHeader(&cpio.Header{Name: folder, Mode: cpio.TypeDir | 0o755}))
	}
	addFile(t, w, "init", readFile(t, program))
	for _, name := range guestModules {
		addFile(t, w, "modules/"+name, readFile(t, findModule(t, modules, name)))
	}
	addFile(t, w, "modules/order", []byte(strings.Join(guestModules, "\n")))
	check(t, w.Close())
	initrd := filepath.Join(dir, "initrd")
	check(t, os.WriteFile(initrd, archive.Bytes(), 0o600))
	return vmm.Boot{Kernel: kernel, Initrd: initrd, Cmdline: "quiet loglevel=1"}
}

func addFile(t testing.TB, w *cpio.Writer, name string, data []byte) {
	t.Helper()
	check(t, w.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeReg | 0o755, Size: int64(len(data))}))
	_, err := w.Write(data)
	check(t, err)
}

func findModule(t testing.TB, dir, name string) string {
	t.Helper()
	var found string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == name+".ko" {
			found = path
			return fs.SkipAll
		}
		return err
	})
	check(t, err)
	if found == "" {
		t.Fatalf("no module %s below %s", name, dir)
	}
	return found
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	check(t, err)
	return data
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
