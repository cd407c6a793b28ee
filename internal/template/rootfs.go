package template

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed" // the scripts
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/klauspost/compress/zstd"
)

// packages are what a sandbox has beyond Debian's packages of priority "required".
var packages = []string{
	"bash", "ca-certificates", "coreutils", "curl", "git", "iproute2", "procps", "python3", "sudo",
}

// excluded are files that packages bring and a sandbox has no use for.
var excluded = []string{
	"path-exclude=/usr/share/doc/*",
	"path-include=/usr/share/doc/*/copyright",
	"path-exclude=/usr/share/info/*",
	"path-exclude=/usr/share/lintian/*",
	"path-exclude=/usr/share/locale/*",
	"path-include=/usr/share/locale/locale.alias",
	"path-exclude=/usr/share/man/*",
}

var (
	//go:embed customize.sh
	customizeScript string
	//go:embed kernel-hook.sh
	kernelScript string
)

// The files of a Debian that was fetched.
const (
	archiveFile = "rootfs.tar.zst"
	packageFile = "kernel.deb"
	debianFile  = "debian.json"

	debianVersion = 1                  // of debianFile
	maxDebianAge  = 7 * 24 * time.Hour // of a cached one; then it is fetched again for its updates
)

// debian is a root file system and a kernel package as they were fetched.
type debian struct {
	dir string // holds archiveFile, packageFile and debianFile

	Version  int        `json:"version"`
	Suite    string     `json:"suite"`
	MadeAt   time.Time  `json:"made_at"`
	Packages []string   `json:"packages"`
	Archive  fileRecord `json:"archive"`
	Kernel   fileRecord `json:"kernel"`
}

// openDebian opens a cached one and compares its files with their digests.
func openDebian(dir string) (debian, error) {
	d := debian{dir: dir}
	if err := readJSON(filepath.Join(dir, debianFile), &d); err != nil {
		return debian{}, err
	}
	if d.Version != debianVersion {
		return debian{}, fmt.Errorf("%s: %w: its version is %d", dir, ErrFormat, d.Version)
	}
	if err := d.Archive.verify(filepath.Join(dir, archiveFile)); err != nil {
		return debian{}, err
	}
	return d, d.Kernel.verify(filepath.Join(dir, packageFile))
}

// recipe is all that decides what is fetched.
type recipe struct {
	suite   string
	sources string // of apt; "" leaves the mirrors to mmdebstrap
	options string // of the host's apt, for fetching
}

// key names what the recipe makes in a cache.
func (r recipe) key() string {
	h := sha256.New()
	for _, s := range []string{fmt.Sprint(debianVersion), r.suite, r.sources, customizeScript, kernelScript,
		strings.Join(packages, ","), strings.Join(excluded, ",")} {
		fmt.Fprintf(h, "%d:%s\n", len(s), s)
	}
	return "debian-" + r.suite + "-" + hex.EncodeToString(h.Sum(nil))[:16]
}

// hostRecipe returns the recipe for a suite ("" is the host's) with the
// sources and the way out to them that the host's apt is set up with.
func hostRecipe(ctx context.Context, suite string) (recipe, error) {
	if suite == "" {
		osRelease, _ := os.ReadFile("/etc/os-release")
		suite = hostSuite(osRelease)
	}
	var dump bytes.Buffer
	c := command{name: "apt-config", args: []string{"dump"}, stdout: &dump}
	if err := c.run(ctx); err != nil {
		return recipe{}, err
	}
	return recipe{
		suite:   suite,
		sources: debianSources(readSources("/etc/apt"), suite),
		options: fetchOptions(dump.String()),
	}, nil
}

// fetchOptions picks from a dump of apt's configuration what says how to
// reach the mirrors.
func fetchOptions(dump string) string {
	var picked strings.Builder
	for line := range strings.Lines(dump) {
		for _, prefix := range []string{"Acquire::http::", "Acquire::https::", "Acquire::Check-Valid-Until ",
			"Acquire::Check-Date ", "Acquire::Retries ", "Acquire::ForceIPv4 ", "Acquire::ForceIPv6 "} {
			if strings.HasPrefix(line, prefix) && !strings.HasSuffix(strings.TrimSpace(line), ` "";`) {
				picked.WriteString(line)
			}
		}
	}
	return picked.String()
}

// cached returns what the recipe makes, from cacheDir if it is there and
// young, and else fetched and put there. If it is old and fetching fails, the
// old one is used. log gets a line for each step.
func (r recipe) cached(ctx context.Context, cacheDir string, log func(string)) (debian, error) {
	dir := filepath.Join(cacheDir, r.key())
	old, err := openDebian(dir)
	if err == nil && time.Since(old.MadeAt) < maxDebianAge {
		log("using the Debian " + r.suite + " that was fetched on " + old.MadeAt.Format(time.DateOnly))
		return old, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log("fetching anew, because the cache cannot be used: " + err.Error())
	}
	work, err := newScratch(cacheDir, ".fetch-")
	if err != nil {
		return debian{}, fmt.Errorf("cache: %w", err)
	}
	defer work.remove()
	d, err := r.fetch(ctx, work.dir, log)
	if err != nil {
		if old.dir != "" && ctx.Err() == nil {
			log("using the Debian " + r.suite + " of " + old.MadeAt.Format(time.DateOnly) + ", because a newer one could not be fetched: " + err.Error())
			return old, nil
		}
		return debian{}, err
	}
	if err := os.RemoveAll(dir); err != nil {
		return debian{}, fmt.Errorf("cache: %w", err)
	}
	if err := work.publish(dir); err != nil {
		return debian{}, fmt.Errorf("cache: %w", err)
	}
	d.dir = dir
	return d, nil
}

// fetch makes a Debian in dir, an empty folder, by mmdebstrap.
func (r recipe) fetch(ctx context.Context, dir string, log func(string)) (debian, error) {
	if err := canBootstrap(); err != nil {
		return debian{}, err
	}
	archive, err := os.Create(filepath.Join(dir, archiveFile))
	if err != nil {
		return debian{}, err
	}
	defer archive.Close()
	compressed, err := zstd.NewWriter(archive, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return debian{}, err
	}
	defer compressed.Close()
	if err := r.bootstrap(ctx, dir, compressed, log); err != nil {
		return debian{}, err
	}
	if err := errors.Join(compressed.Close(), archive.Close()); err != nil {
		return debian{}, fmt.Errorf("write %s: %w", archive.Name(), err)
	}
	d := debian{dir: dir, Version: debianVersion, Suite: r.suite, MadeAt: time.Now().UTC(), Packages: packages}
	if d.Archive, err = describe(archive.Name()); err != nil {
		return debian{}, err
	}
	if d.Kernel, err = describe(filepath.Join(dir, packageFile)); err != nil {
		return debian{}, err
	}
	return d, writeJSON(filepath.Join(dir, debianFile), d)
}

// bootstrap runs mmdebstrap, which writes the archive to out and the kernel's
// package into dir.
func (r recipe) bootstrap(ctx context.Context, dir string, out io.Writer, log func(string)) error {
	args := []string{"--mode=unshare", "--variant=minbase", "--format=tar", "--architectures=amd64",
		"--include=" + strings.Join(packages, ",")}
	for _, option := range excluded {
		args = append(args, "--dpkgopt="+option)
	}
	if r.options != "" {
		const file = "apt.conf" // not an argument: a proxy's address may hold a password
		if err := os.WriteFile(filepath.Join(dir, file), []byte(r.options), 0o600); err != nil {
			return err
		}
		defer os.Remove(filepath.Join(dir, file))
		args = append(args, "--setup-hook=upload "+file+" /etc/apt/apt.conf.d/90hib-build")
	}
	args = append(args,
		"--customize-hook="+kernelScript,
		"--customize-hook=download /hib-kernel/kernel.deb "+packageFile,
		`--customize-hook=rm -r "$1/hib-kernel"`,
		"--customize-hook="+customizeScript,
		r.suite, "-")
	if r.sources != "" {
		args = append(args, "-") // the sources are read from standard input
	} else {
		log("the host's apt has no Debian mirror; using the one that mmdebstrap knows")
	}
	c := command{name: "mmdebstrap", args: args, dir: dir, env: proxies(), stdin: r.sources, stdout: out}
	if os.Geteuid() == 0 {
		// The new root in a folder that is removed whatever happens. (An
		// ordinary user's root belongs to other user ids, which must reach it.)
		c.env["TMPDIR"] = dir
	}
	c.log = func(line string) {
		// Not the scripts, and not where it works.
		if text, ok := strings.CutPrefix(line, "I: "); ok && !strings.Contains(text, "hook") && !strings.Contains(text, "tempdir") {
			log(text)
		}
	}
	return c.run(ctx)
}

// proxies returns the environment's variables that name proxies.
func proxies() map[string]string {
	set := map[string]string{}
	for _, name := range []string{"http_proxy", "https_proxy", "no_proxy"} {
		if value := os.Getenv(name); value != "" {
			set[name] = value
		}
	}
	return set
}

// canBootstrap reports, in words that say what to do, whether mmdebstrap can
// work here. It always works in namespaces of its own, so that whatever
// happens no mount is left in the host's.
func canBootstrap() error {
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		return fmt.Errorf("%w: mmdebstrap is not installed (apt-get install mmdebstrap)", ErrTool)
	}
	probe := exec.Command("/bin/true")
	probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	if os.Geteuid() == 0 {
		if err := probe.Run(); err != nil {
			return fmt.Errorf("%w: root may not make namespaces here (%w); give the container CAP_SYS_ADMIN", ErrTool, err)
		}
		return nil
	}
	probe.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
	if err := probe.Run(); err != nil {
		return fmt.Errorf("%w: user namespaces are not allowed to ordinary users here (%w); build templates as root", ErrTool, err)
	}
	if _, err := exec.LookPath("newuidmap"); err != nil {
		return fmt.Errorf("%w: newuidmap is not installed (apt-get install uidmap, or build templates as root)", ErrTool)
	}
	me, err := user.Current()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrTool, err)
	}
	for _, path := range []string{"/etc/subuid", "/etc/subgid"} {
		ids, _ := os.ReadFile(path)
		if !bytes.Contains(append([]byte("\n"), ids...), []byte("\n"+me.Username+":")) {
			return fmt.Errorf("%w: %s has no entry for %s (usermod --add-subuids 100000-165535 --add-subgids 100000-165535 %s, or build templates as root)",
				ErrTool, path, me.Username, me.Username)
		}
	}
	return nil
}
