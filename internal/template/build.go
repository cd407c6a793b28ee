package template

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
)

// cmdline is the kernel's command line. Each word has a reason.
var cmdline = strings.Join([]string{
	"console=ttyS0",                // what the kernel and the agent print goes to the sandbox's log
	"quiet",                        // of the kernel warnings and worse: each character costs an exit of the VM
	"panic=-1",                     // a panic resets at once, which ends the machine instead of leaving it hung
	"reboot=t",                     // reset by triple fault, which every machine type has
	"init_on_free=1",               // freed pages are zero, and zero pages are not stored
	"transparent_hugepage=madvise", // else a touched page dirties 2 MiB
	"audit=0",                      // nobody reads it
	"lsm=landlock,yama",            // of those that Debian's kernel has, the ones that are of use without a policy
	"GODEBUG=asyncpreemptoff=1",    // the agent's environment: its loops are short, and a signal is much code after a resume
	"cryptomgr.notests",            // self-tests of ciphers are a tenth of a boot without hardware virtualisation
}, " ")

// Options says what to build and where.
type Options struct {
	Name        string // of the template, recorded
	Out         string // folder to make: it appears whole or not at all, and must not exist
	CacheDir    string // keeps what was fetched, for later builds; may be emptied at any time. "" keeps nothing
	GuestBinary string // the guest agent: a static ELF executable for x86-64
	Suite       string // Debian release: "bookworm" or "trixie"; "" is the host's, or else bookworm
}

// Progress is a step of a build that began or went on.
type Progress struct {
	Phase       Phase
	Message     string // for people; may be ""
	Done, Total int64  // bytes in this phase; Total 0 means that it is not known
}

// Phase names a part of a build.
type Phase string

// The phases of a build, in their order.
const (
	PhaseFetch  Phase = "fetch"  // get Debian's packages and unpack them
	PhaseImage  Phase = "image"  // make the base image
	PhaseKernel Phase = "kernel" // extract the kernel, make the initramfs
	PhaseFinish Phase = "finish" // compute digests, make all durable
)

// Build makes a template's files in the folder o.Out. progress, if not nil, is
// called by one goroutine at a time. When ctx ends the build stops, and
// nothing is left but o.CacheDir. If o.Out exists the error wraps fs.ErrExist;
// if the host lacks something it wraps ErrTool and says what.
func Build(ctx context.Context, o Options, progress func(Progress)) (Artifacts, error) {
	a, err := build(ctx, o, progress)
	if err != nil {
		return Artifacts{}, fmt.Errorf("build template %s: %w", o.Name, err)
	}
	return a, nil
}

func build(ctx context.Context, o Options, progress func(Progress)) (Artifacts, error) {
	if progress == nil {
		progress = func(Progress) {}
	}
	out, agent, err := checkOptions(o)
	if err != nil {
		return Artifacts{}, err
	}
	work, err := newScratch(filepath.Dir(out), "."+filepath.Base(out)+".building-")
	if err != nil {
		return Artifacts{}, err
	}
	defer work.remove()
	parts, err := newScratch(filepath.Dir(out), "."+filepath.Base(out)+".parts-")
	if err != nil {
		return Artifacts{}, err
	}
	defer parts.remove()

	cache := o.CacheDir
	if cache == "" {
		cache = parts.path("cache")
	}
	progress(Progress{Phase: PhaseFetch})
	recipe, err := hostRecipe(ctx, o.Suite)
	if err != nil {
		return Artifacts{}, err
	}
	deb, err := recipe.cached(ctx, cache, func(line string) { progress(Progress{Phase: PhaseFetch, Message: line}) })
	if err != nil {
		return Artifacts{}, err
	}
	if err := makeBase(ctx, deb, work.path(baseFile), parts.dir, progress); err != nil {
		return Artifacts{}, err
	}
	progress(Progress{Phase: PhaseKernel})
	release, err := makeKernel(ctx, deb, work, parts.path("kernel"), agent)
	if err != nil {
		return Artifacts{}, err
	}
	r := record{Format: formatName, Version: formatVersion, Name: o.Name, BuiltAt: time.Now().UTC().Truncate(time.Second),
		Suite: deb.Suite, KernelRelease: release, Cmdline: cmdline}
	return finish(ctx, r, work, out, progress)
}

// checkOptions checks, before the long work, what a build starts from. It
// returns the absolute path of o.Out and the guest agent's executable.
func checkOptions(o Options) (out string, agent []byte, err error) {
	if o.Out == "" {
		return "", nil, errors.New("no folder to build it in was named")
	}
	if out, err = filepath.Abs(o.Out); err != nil {
		return "", nil, err
	}
	if _, err := os.Lstat(out); err == nil {
		return "", nil, fmt.Errorf("%s: %w", out, fs.ErrExist)
	}
	if o.Suite != "" && !slices.Contains(suites, o.Suite) {
		return "", nil, fmt.Errorf("%q is no release that templates can be made of; these are: %s", o.Suite, strings.Join(suites, ", "))
	}
	if agent, err = readAgent(o.GuestBinary); err != nil {
		return "", nil, err
	}
	return out, agent, haveTools("apt-config", "dpkg-deb")
}

// finish records the files in work and publishes them as the folder out.
func finish(ctx context.Context, r record, work *scratch, out string, progress func(Progress)) (Artifacts, error) {
	progress(Progress{Phase: PhaseFinish})
	for name, file := range map[string]*fileRecord{baseFile: &r.Base, kernelFile: &r.Kernel, initrdFile: &r.Initrd} {
		var err error
		if *file, err = describe(work.path(name)); err != nil {
			return Artifacts{}, err
		}
	}
	if err := writeJSON(work.path(recordFile), r); err != nil {
		return Artifacts{}, err
	}
	if err := ctx.Err(); err != nil {
		return Artifacts{}, err
	}
	if err := work.publish(out); err != nil {
		return Artifacts{}, err
	}
	return Load(out)
}

// makeBase makes the base image at path out of the archive of deb.
func makeBase(ctx context.Context, deb debian, path, temp string, progress func(Progress)) error {
	progress(Progress{Phase: PhaseImage, Total: deb.Archive.Size})
	archive, err := os.Open(filepath.Join(deb.dir, archiveFile))
	if err != nil {
		return err
	}
	defer archive.Close()
	counted := &countingReader{r: archive, report: func(n int64) {
		progress(Progress{Phase: PhaseImage, Done: n, Total: deb.Archive.Size})
	}}
	plain, err := zstd.NewReader(bufio.NewReader(counted), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	defer plain.Close()
	image, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer image.Close()
	if err := writeImage(ctx, plain, image, temp); err != nil {
		return err
	}
	return image.Close()
}

// makeKernel unpacks the kernel package of deb into the folder temp and makes
// kernel and initramfs in work. It returns the kernel's release.
func makeKernel(ctx context.Context, deb debian, work *scratch, temp string, agent []byte) (string, error) {
	c := command{name: "dpkg-deb", args: []string{"--extract", filepath.Join(deb.dir, packageFile), temp}}
	if err := c.run(ctx); err != nil {
		return "", err
	}
	k, err := openKernel(temp)
	if err != nil {
		return "", err
	}
	bzImage, err := os.ReadFile(k.image)
	if err != nil {
		return "", err
	}
	vmlinux, err := extractVMLinux(bzImage)
	if err != nil {
		return "", fmt.Errorf("kernel %s: %w", k.release, err)
	}
	if err := os.WriteFile(work.path(kernelFile), vmlinux, 0o644); err != nil {
		return "", err
	}
	tree, err := openModuleTree(k.modules)
	if err != nil {
		return "", fmt.Errorf("kernel %s: %w", k.release, err)
	}
	modules, err := tree.load(guestModules)
	if err != nil {
		return "", fmt.Errorf("kernel %s: %w", k.release, err)
	}
	initrd, err := os.OpenFile(work.path(initrdFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return "", err
	}
	defer initrd.Close()
	if err := writeInitramfs(initrd, agent, modules); err != nil {
		return "", err
	}
	return k.release, initrd.Close()
}

// kernelTree is an unpacked kernel package.
type kernelTree struct {
	release string
	image   string // bzImage
	modules string // folder
}

var kernelRelease = regexp.MustCompile(`^[0-9][A-Za-z0-9.+~_-]{0,63}$`)

// openKernel finds the one kernel in an unpacked package.
func openKernel(dir string) (kernelTree, error) {
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil {
		return kernelTree{}, err
	}
	if len(images) != 1 {
		return kernelTree{}, fmt.Errorf("%w: its package has %d kernels, expected 1", errKernelImage, len(images))
	}
	k := kernelTree{image: images[0], release: strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")}
	if !kernelRelease.MatchString(k.release) {
		return kernelTree{}, fmt.Errorf("%w: its release is named %q", errKernelImage, k.release)
	}
	if info, err := os.Lstat(k.image); err != nil || !info.Mode().IsRegular() || info.Size() > maxKernelImage {
		return kernelTree{}, fmt.Errorf("%w: %s is no regular file of at most %d bytes", errKernelImage, k.image, maxKernelImage)
	}
	for _, lib := range []string{"lib", "usr/lib"} { // the latter from Debian 13 on
		k.modules = filepath.Join(dir, lib, "modules", k.release)
		if _, err := os.Stat(k.modules); err == nil {
			return k, nil
		}
	}
	return kernelTree{}, fmt.Errorf("kernel %s: %w: no folder lib/modules/%s", k.release, errModules, k.release)
}

// haveTools checks that programs are installed.
func haveTools(names ...string) error {
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("%w: %s is not installed; a Debian or Ubuntu host with apt is needed", ErrTool, name)
		}
	}
	return nil
}

// countingReader reports how many bytes were read from r, about every MiB.
type countingReader struct {
	r           io.Reader
	n, reported int64
	report      func(n int64)
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if c.n += int64(n); c.n-c.reported >= 1<<20 || (err == io.EOF && c.n > c.reported) {
		c.reported = c.n
		c.report(c.n)
	}
	return n, err
}
