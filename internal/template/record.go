package template

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// The files in a template's folder, see docs/formats/template.md.
const (
	recordFile = "template.json"
	baseFile   = "base.erofs"
	kernelFile = "vmlinux"
	initrdFile = "initrd.cpio"

	formatName    = "hibernacle-template"
	formatVersion = 1
	maxRecord     = 1 << 20 // bytes of template.json
)

var (
	// ErrFormat is wrapped by errors about a template whose record cannot be
	// understood: it is damaged, or a newer version wrote it.
	ErrFormat = errors.New("not a template that this version can read")
	// ErrCorrupt is wrapped by errors about a template's file that is not what its record says.
	ErrCorrupt = errors.New("the file is damaged; build the template anew")
)

// record is the content of template.json.
type record struct {
	Format        string     `json:"format"`
	Version       int        `json:"version"`
	Name          string     `json:"name"`
	BuiltAt       time.Time  `json:"built_at"`
	Suite         string     `json:"suite"`
	KernelRelease string     `json:"kernel_release"`
	Cmdline       string     `json:"cmdline"`
	Base          fileRecord `json:"base"`
	Kernel        fileRecord `json:"kernel"`
	Initrd        fileRecord `json:"initrd"`
}

// fileRecord says what a file must be. The file's name is fixed by its role.
type fileRecord struct {
	Size   int64  `json:"size"`   // bytes
	SHA256 string `json:"sha256"` // lower-case hexadecimal
}

// describe returns the record of an existing file.
func describe(path string) (fileRecord, error) {
	f, err := os.Open(path)
	if err != nil {
		return fileRecord{}, err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return fileRecord{}, fmt.Errorf("read %s: %w", path, err)
	}
	return fileRecord{Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}, nil
}

// checkSize compares a file's length with the record.
func (r fileRecord) checkSize(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if !info.Mode().IsRegular() || info.Size() != r.Size {
		return fmt.Errorf("%s: %w: it has %d bytes, its record says %d", path, ErrCorrupt, info.Size(), r.Size)
	}
	return nil
}

// verify compares a file's length and content with the record.
func (r fileRecord) verify(path string) error {
	if err := r.checkSize(path); err != nil {
		return err
	}
	is, err := describe(path)
	if err != nil {
		return err
	}
	if is != r {
		return fmt.Errorf("%s: %w: its SHA-256 is %s, its record says %s", path, ErrCorrupt, is.SHA256, r.SHA256)
	}
	return nil
}

// writeJSON writes v to a new file.
func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// readJSON reads a JSON file of at most maxRecord bytes. Fields that v does
// not have are ignored: a later version may add some.
func readJSON(path string, v any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if len(b) > maxRecord {
		return fmt.Errorf("%s: %w: it has more than %d bytes", path, ErrFormat, maxRecord)
	}
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(v); err != nil {
		return fmt.Errorf("%s: %w: %w", path, ErrFormat, err)
	}
	return nil
}

// Artifacts are the files of a template that was built, by absolute paths if
// the folder was named by one.
type Artifacts struct {
	Name  string // of the template, as it was built
	Dir   string // its folder
	Suite string // the Debian release that it was made of

	BaseImage string // EROFS image, uncompressed, a multiple of 2 MiB long
	Kernel    string // uncompressed ELF kernel with a PVH entry
	Initrd    string // initramfs archive

	BaseDigest, KernelDigest, InitrdDigest string // SHA-256, lower-case hexadecimal
	BaseBytes                              int64  // length of BaseImage

	KernelRelease string // as uname -r says it
	Cmdline       string // kernel's command line
	BuiltAt       time.Time
}

// artifacts returns what the record r in the folder dir stands for.
func (r record) artifacts(dir string) Artifacts {
	return Artifacts{
		Name: r.Name, Dir: dir, Suite: r.Suite,
		BaseImage: filepath.Join(dir, baseFile), Kernel: filepath.Join(dir, kernelFile), Initrd: filepath.Join(dir, initrdFile),
		BaseDigest: r.Base.SHA256, KernelDigest: r.Kernel.SHA256, InitrdDigest: r.Initrd.SHA256,
		BaseBytes: r.Base.Size, KernelRelease: r.KernelRelease, Cmdline: r.Cmdline, BuiltAt: r.BuiltAt,
	}
}

// readRecord reads the record in a template's folder and checks the files' lengths.
func readRecord(dir string) (record, error) {
	var r record
	path := filepath.Join(dir, recordFile)
	if err := readJSON(path, &r); err != nil {
		return record{}, fmt.Errorf("load template: %w", err)
	}
	if r.Format != formatName || r.Version < 1 {
		return record{}, fmt.Errorf("load template: %s: %w: its format is %q, version %d", path, ErrFormat, r.Format, r.Version)
	}
	if r.Version > formatVersion {
		return record{}, fmt.Errorf("load template: %s: %w: its version is %d, the latest known is %d; upgrade hib", path, ErrFormat, r.Version, formatVersion)
	}
	for name, file := range r.files() {
		if err := file.checkSize(filepath.Join(dir, name)); err != nil {
			return record{}, fmt.Errorf("load template: %w", err)
		}
	}
	if r.Base.Size == 0 || r.Base.Size%imageAlign != 0 {
		return record{}, fmt.Errorf("load template: %s: %w: the base image's size %d is no multiple of %d", path, ErrFormat, r.Base.Size, imageAlign)
	}
	return r, nil
}

func (r record) files() map[string]fileRecord {
	return map[string]fileRecord{baseFile: r.Base, kernelFile: r.Kernel, initrdFile: r.Initrd}
}

// Load reads the template in the folder dir and checks that its files are
// there and as long as they must be. It does not read them: see Verify. A
// folder without a template is an error that wraps fs.ErrNotExist; others wrap
// ErrFormat or ErrCorrupt.
func Load(dir string) (Artifacts, error) {
	r, err := readRecord(dir)
	if err != nil {
		return Artifacts{}, err
	}
	return r.artifacts(dir), nil
}

// Verify reads the template's files and compares them with their digests. The
// error names the first file that differs and wraps ErrCorrupt.
func (a Artifacts) Verify() error {
	r, err := readRecord(a.Dir)
	if err != nil {
		return err
	}
	if r.artifacts(a.Dir) != a {
		return fmt.Errorf("verify template %s: %w: its record was changed since it was loaded", a.Dir, ErrCorrupt)
	}
	for _, name := range []string{kernelFile, initrdFile, baseFile} {
		if err := r.files()[name].verify(filepath.Join(a.Dir, name)); err != nil {
			return fmt.Errorf("verify template: %w", err)
		}
	}
	return nil
}
