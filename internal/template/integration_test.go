package template

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
)

// TestRealTemplate builds a template of Debian from the host's mirrors and
// boots it. The environment's HIB_TEST_CACHE names a folder that keeps what
// was fetched, HIB_TEST_SUITE a release.
func TestRealTemplate(t *testing.T) {
	if testing.Short() {
		t.Skip("it fetches a Debian, which takes a minute")
	}
	if err := haveTools("apt-config", "apt-get", "dpkg-deb"); err != nil {
		t.Skip(err)
	}
	if err := canBootstrap(); err != nil {
		t.Skip(err)
	}
	cache := os.Getenv("HIB_TEST_CACHE")
	if cache == "" {
		cache = t.TempDir()
	}
	begin := time.Now()
	a, err := Build(t.Context(), Options{
		Name: "base", Out: filepath.Join(t.TempDir(), "base"), CacheDir: cache,
		GuestBinary: buildInit(t), Suite: os.Getenv("HIB_TEST_SUITE"),
	}, func(p Progress) {
		if p.Message != "" {
			t.Log(p.Phase, p.Message)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("built in %v: base image %d MiB, kernel %s", time.Since(begin).Round(time.Second), a.BaseBytes>>20, a.KernelRelease)
	if err := a.Verify(); err != nil {
		t.Error(err)
	}
	checkImage(t, a.BaseImage)
	checkPython(t, a.BaseImage)
	boot(t, a)
}

// checkPython checks that Python's compiled files belong to their sources, by
// the times that both hold: otherwise every start would compile them.
func checkPython(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	root, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	compiled, err := fs.Glob(root, "usr/lib/python3*/__pycache__/*.pyc")
	if err != nil || len(compiled) < 50 {
		t.Fatalf("only %d compiled files (%v)", len(compiled), err)
	}
	for _, name := range compiled {
		b, err := fs.ReadFile(root, name)
		if err != nil || len(b) < 16 {
			t.Fatalf("%s: %v", name, err)
		}
		base, _, _ := strings.Cut(filepath.Base(name), ".")
		info, err := fs.Stat(root, filepath.Join(filepath.Dir(filepath.Dir(name)), base+".py"))
		if err != nil {
			t.Error(err)
		} else if mtime := binary.LittleEndian.Uint32(b[8:]); int64(mtime) != info.ModTime().Unix() {
			t.Errorf("%s is of %d, its source of %d", name, mtime, info.ModTime().Unix())
		}
	}
}

// boot boots the template with the stand-in agent, which looks at the root.
func boot(t *testing.T, a Artifacts) {
	t.Helper()
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		t.Skip("qemu-system-x86_64 is not installed: the template was not booted")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, qemu,
		"-machine", "q35,nvdimm=on,accel=tcg,sata=off,smbus=off,i8042=off,usb=off,hpet=off,graphics=off",
		"-m", "512,maxmem=4G,slots=2", "-cpu", "max", "-nodefaults", "-no-user-config", "-no-reboot",
		"-display", "none", "-serial", "stdio",
		"-object", "memory-backend-file,id=pm,share=off,readonly=on,mem-path="+a.BaseImage+",size="+strconv.FormatInt(a.BaseBytes, 10),
		"-device", "nvdimm,memdev=pm,unarmed=on,addr=0x100000000",
		"-kernel", a.Kernel, "-initrd", a.Initrd, "-append", fmt.Sprintf("%s memmap=%d!0x100000000", a.Cmdline, a.BaseBytes))
	var console bytes.Buffer
	cmd.Stdout, cmd.Stderr = &console, &console
	begin := time.Now()
	if err := cmd.Run(); err != nil {
		t.Errorf("qemu: %v", err)
	}
	t.Logf("ran for %v; the console:\n%s", time.Since(begin).Round(time.Second), console.String())
	if !strings.Contains(console.String(), "HIB-TEST-OK") {
		t.Error("the guest did not find everything in order")
	}
}
