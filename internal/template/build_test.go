package template

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
	"go.uber.org/goleak"
)

// bench is a host on which mmdebstrap is a script: it writes a small archive
// and a small kernel package.
type bench struct {
	dir, out, cache, agent, suite string
}

// newBench makes a bench. before runs in the script before it writes anything.
func newBench(t *testing.T, before string) *bench {
	t.Helper()
	for _, tool := range []string{"dpkg-deb", "apt-config"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	b := &bench{dir: t.TempDir(), suite: "bookworm"}
	b.agent = filepath.Join(b.dir, "agent")
	b.write(t, "agent", makeELF(t, 2, 0, nil))
	b.out, b.cache = filepath.Join(b.dir, "templates", "base"), filepath.Join(b.dir, "cache")
	b.write(t, "rootfs.tar", makeTar(t, dir("./"), dir("./bin"), file("./bin/sh", "shell")))
	b.kernelPackage(t, "6.1.0-test")
	bin := filepath.Join(b.dir, "bin")
	b.write(t, "bin/mmdebstrap", []byte("#!/bin/sh\nset -e\necho 'I: pretending' >&2\n"+before+
		"\ncp '"+b.dir+"/kernel.deb' kernel.deb\ncat '"+b.dir+"/rootfs.tar'\necho run >> '"+b.dir+"/runs'\n"))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	if err := canBootstrap(); err != nil {
		t.Skip(err)
	}
	return b
}

func (b *bench) write(t *testing.T, name string, content []byte) {
	t.Helper()
	path := filepath.Join(b.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
}

// kernelPackage makes kernel.deb with all modules that a guest needs.
func (b *bench) kernelPackage(t *testing.T, release string) {
	t.Helper()
	b.write(t, "deb/DEBIAN/control", []byte("Package: linux-image\nVersion: 1\nArchitecture: amd64\nMaintainer: Test <test@example.org>\nDescription: test\n"))
	b.write(t, "deb/boot/vmlinuz-"+release, makeBzImage(compressKernel(t, "lz4", makeTestKernel(t))))
	files := map[string]string{}
	for _, m := range guestModules {
		files["kernel/"+m.name+".ko"] = ""
	}
	writeModules(t, filepath.Join(b.dir, "deb/lib/modules", release), "", files)
	cmd := exec.Command("dpkg-deb", "--build", "-Zgzip", filepath.Join(b.dir, "deb"), filepath.Join(b.dir, "kernel.deb"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v\n%s", err, out)
	}
}

func (b *bench) build(ctx context.Context, progress func(Progress)) (Artifacts, error) {
	return Build(ctx, Options{Name: "base", Out: b.out, CacheDir: b.cache, GuestBinary: b.agent, Suite: b.suite}, progress)
}

// runs returns how often mmdebstrap ran to its end.
func (b *bench) runs() int {
	log, _ := os.ReadFile(filepath.Join(b.dir, "runs"))
	return strings.Count(string(log), "run")
}

// wantNothing checks that a build left nothing.
func (b *bench) wantNothing(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(filepath.Dir(b.out)); err == nil {
		wantFiles(t, filepath.Dir(b.out))
	}
}

func TestBuild(t *testing.T) {
	defer goleak.VerifyNone(t)
	b := newBench(t, "")
	var phases []Phase
	a, err := b.build(t.Context(), func(p Progress) {
		if len(phases) == 0 || phases[len(phases)-1] != p.Phase {
			phases = append(phases, p.Phase)
		}
		if p.Total != 0 && p.Done > p.Total {
			t.Errorf("progress %+v", p)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(phases) != 4 || phases[0] != PhaseFetch || phases[1] != PhaseImage || phases[2] != PhaseKernel || phases[3] != PhaseFinish {
		t.Errorf("phases %q", phases)
	}
	wantFiles(t, filepath.Dir(b.out), "base")
	wantFiles(t, b.out, recordFile, baseFile, kernelFile, initrdFile)
	if a.Name != "base" || a.KernelRelease != "6.1.0-test" || a.Suite != "bookworm" || a.BaseBytes%imageAlign != 0 || len(a.KernelDigest) != 64 {
		t.Errorf("artifacts %+v", a)
	}
	if err := a.Verify(); err != nil {
		t.Error(err)
	}
	loaded, err := Load(b.out)
	if err != nil || loaded != a {
		t.Errorf("loaded %+v (%v), built %+v", loaded, err, a)
	}
	image, err := os.Open(a.BaseImage)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	root, err := erofs.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	if sh, err := fs.ReadFile(root, "bin/sh"); err != nil || string(sh) != "shell" {
		t.Errorf("bin/sh: %q, %v", sh, err)
	}
	if _, err := b.build(t.Context(), nil); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second build at one place: %v, want fs.ErrExist", err)
	}
}

func TestBuildUsesItsCache(t *testing.T) {
	b := newBench(t, "")
	again := func() Artifacts {
		t.Helper()
		if err := os.RemoveAll(b.out); err != nil {
			t.Fatal(err)
		}
		a, err := b.build(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	first, second := again(), again()
	if b.runs() != 1 || first.BaseDigest != second.BaseDigest || first.KernelDigest != second.KernelDigest {
		t.Errorf("%d fetches, digests %s and %s", b.runs(), first.BaseDigest, second.BaseDigest)
	}
	archives, err := filepath.Glob(filepath.Join(b.cache, "*", archiveFile))
	if err != nil || len(archives) != 1 {
		t.Fatalf("archives %q, %v", archives, err)
	}

	// A damaged one is not used.
	if err := os.Truncate(archives[0], 20); err != nil {
		t.Fatal(err)
	}
	again()
	if b.runs() != 2 {
		t.Errorf("%d fetches, want a second for the damaged archive", b.runs())
	}

	// An old one is replaced, or used if it cannot be.
	age := func() {
		path := filepath.Join(filepath.Dir(archives[0]), debianFile)
		var d debian
		if err := readJSON(path, &d); err != nil {
			t.Fatal(err)
		}
		d.MadeAt = time.Now().Add(-maxDebianAge - time.Hour)
		if err := writeJSON(path, d); err != nil {
			t.Fatal(err)
		}
	}
	age()
	again()
	if b.runs() != 3 {
		t.Errorf("%d fetches, want a third for the old archive", b.runs())
	}
	age()
	b.write(t, "bin/mmdebstrap", []byte("#!/bin/sh\nexit 1\n"))
	again()
	wantFiles(t, b.cache, filepath.Base(filepath.Dir(archives[0])))
}

func TestFailedBuildLeavesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		before string
		break_ func(t *testing.T, b *bench)
		want   error
		text   string
	}{
		"mmdebstrap fails":       {before: "echo 'E: no mirror' >&2; exit 25", text: "E: no mirror"},
		"it writes no package":   {before: "exit 0", want: fs.ErrNotExist},
		"hostile archive":        {break_: func(t *testing.T, b *bench) { b.write(t, "rootfs.tar", makeTar(t, file("../x", "x"))) }, want: errArchive},
		"no archive":             {break_: func(t *testing.T, b *bench) { b.write(t, "rootfs.tar", nil) }, want: errArchive},
		"no kernel package":      {break_: func(t *testing.T, b *bench) { b.write(t, "kernel.deb", []byte("x")) }, text: "dpkg-deb"},
		"two kernels":            {break_: func(t *testing.T, b *bench) { b.kernelPackage(t, "6.2.0-test") }, want: errKernelImage},
		"agent is no executable": {break_: func(t *testing.T, b *bench) { b.agent = filepath.Join(b.dir, "rootfs.tar") }, want: errAgent},
		"unknown release":        {break_: func(_ *testing.T, b *bench) { b.suite = "potato" }, text: "bookworm, trixie"},
		"no folder":              {break_: func(_ *testing.T, b *bench) { b.out = "" }, text: "no folder"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, c.before)
			out := b.out
			if c.break_ != nil {
				c.break_(t, b)
			}
			_, err := b.build(t.Context(), nil)
			if err == nil || (c.want != nil && !errors.Is(err, c.want)) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v, want %v %s", err, c.want, c.text)
			}
			b.out = out
			b.wantNothing(t)
		})
	}
}

func TestCancelledBuildLeavesNothing(t *testing.T) {
	for _, phase := range []Phase{PhaseFetch, PhaseImage, PhaseKernel, PhaseFinish} {
		t.Run(string(phase), func(t *testing.T) {
			defer goleak.VerifyNone(t)
			before := ""
			if phase == PhaseFetch {
				before = "sleep 1000" // mmdebstrap hangs
			}
			b := newBench(t, before)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, err := b.build(ctx, func(p Progress) {
				if p.Phase == phase && (phase != PhaseFetch || p.Message == "pretending") {
					cancel()
				}
			})
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error %v, want context.Canceled", err)
			}
			b.wantNothing(t)
			if phase == PhaseFetch {
				wantFiles(t, b.cache)
			}
		})
	}
}

func TestLoadRefusesWhatIsNoTemplate(t *testing.T) {
	b := newBench(t, "")
	a, err := b.build(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(filepath.Join(b.out, recordFile))
	if err != nil {
		t.Fatal(err)
	}
	restore := func() {
		if err := os.WriteFile(filepath.Join(b.out, recordFile), good, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		change func(r map[string]any)
		want   error
	}{
		"another format":  {func(r map[string]any) { r["format"] = "x" }, ErrFormat},
		"newer version":   {func(r map[string]any) { r["version"] = formatVersion + 1 }, ErrFormat},
		"no version":      {func(r map[string]any) { delete(r, "version") }, ErrFormat},
		"a size is wrong": {func(r map[string]any) { r["kernel"].(map[string]any)["size"] = 1 }, ErrCorrupt},
		"a file is absent": {func(map[string]any) {
			if err := os.Rename(a.Initrd, a.Initrd+".away"); err != nil {
				t.Fatal(err)
			}
		}, fs.ErrNotExist},
	} {
		var r map[string]any
		if err := json.Unmarshal(good, &r); err != nil {
			t.Fatal(err)
		}
		c.change(r)
		if err := writeJSON(filepath.Join(b.out, recordFile), r); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(b.out); !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", name, err, c.want)
		}
		_ = os.Rename(a.Initrd+".away", a.Initrd)
		restore()
	}
	for name, content := range map[string]string{"no JSON": "{", "huge": strings.Repeat(" ", maxRecord+1)} {
		if err := os.WriteFile(filepath.Join(b.out, recordFile), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(b.out); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: error %v, want ErrFormat", name, err)
		}
	}
	restore()
	if _, err := Load(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty folder: error %v, want fs.ErrNotExist", err)
	}

	f, err := os.OpenFile(a.BaseImage, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("damage"), 5000); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Verify(); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), baseFile) {
		t.Errorf("a damaged base image: error %v, want ErrCorrupt that names it", err)
	}
}
