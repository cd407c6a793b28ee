package template

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
	"time"

	"github.com/erofs/go-erofs"
)

const (
	// imageAlign is what a base image's length is a multiple of: persistent
	// memory is mapped in units of 2 MiB.
	imageAlign = 2 << 20
	// imageBuildTime is recorded in every image, so that equal trees give equal images.
	imageBuildTime = 1

	maxEntries   = 4 << 20
	maxImageData = 64 << 30 // bytes of all files
	maxPath      = 4095     // bytes, as in the kernel
	maxName      = 255
	maxXattrs    = 32 << 10 // bytes of one file's attributes
)

// errArchive is wrapped by errors about a root file system's archive.
var errArchive = errors.New("not a usable root file system archive")

// emptied are the folders whose content a running guest supplies.
var emptied = []string{"dev", "proc", "sys", "run", "tmp"}

// writeImage turns the tar archive of a root file system into an uncompressed
// EROFS image, padded to imageAlign. Owners, modes, times, links' content and
// file capabilities are kept; hard links become files of their own. scratch is
// a folder for temporary data. The archive is checked: names stay within the
// root, parents are folders that came before, nothing comes twice, and device
// nodes exist only under /dev, which stays empty.
func writeImage(ctx context.Context, archive io.Reader, out *os.File, scratch string) error {
	b := imageBuilder{
		image: erofs.Create(out, erofs.WithBuildTime(imageBuildTime, 0), erofs.WithTempDir(scratch)),
		kinds: map[string]byte{"": tar.TypeDir},
	}
	r := tar.NewReader(contextReader{ctx, archive})
	for entries := 0; ; entries++ {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errArchive, err)
		}
		if entries == maxEntries {
			return fmt.Errorf("%w: it has more than %d entries", errArchive, maxEntries)
		}
		if err := b.add(h, r); err != nil && ctx.Err() != nil {
			return context.Cause(ctx)
		} else if err != nil {
			return fmt.Errorf("%w: entry %.200q: %w", errArchive, h.Name, err)
		}
	}
	if len(b.kinds) == 1 {
		return fmt.Errorf("%w: it is empty", errArchive)
	}
	if err := b.image.Close(); err != nil {
		return fmt.Errorf("write image: %w", err)
	}
	return pad(out)
}

// pad extends f with zeros to a multiple of imageAlign.
func pad(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return f.Truncate((info.Size() + imageAlign - 1) / imageAlign * imageAlign)
}

type imageBuilder struct {
	image *erofs.Writer
	kinds map[string]byte // tar type of every path so far, "" is the root
	data  int64           // bytes of files so far
}

// add adds one entry, whose content, if it has any, r delivers.
func (b *imageBuilder) add(h *tar.Header, r io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := entryName(h.Name)
	if err != nil {
		return err
	}
	if isEmptied(name) {
		return nil
	}
	again, err := b.place(name, h.Typeflag)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if !again {
			err = b.image.Mkdir("/"+name, h.FileInfo().Mode().Perm())
		}
	case tar.TypeReg:
		err = b.file(name, r, h.Size)
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) > maxPath || strings.ContainsRune(h.Linkname, 0) {
			return errors.New("its target is empty, too long or has a zero byte")
		}
		err = b.image.Symlink(h.Linkname, "/"+name)
	case tar.TypeLink:
		err = b.hardLink(name, h.Linkname)
	default:
		return fmt.Errorf("entries of type %q are not accepted in a root file system", h.Typeflag)
	}
	if err != nil {
		return err
	}
	return b.metadata("/"+name, h)
}

// place checks that an entry may be at name and records it. It reports whether
// name is a folder that was added before.
func (b *imageBuilder) place(name string, kind byte) (again bool, err error) {
	if before, ok := b.kinds[name]; ok {
		if before == tar.TypeDir && kind == tar.TypeDir {
			return true, nil
		}
		return false, errors.New("it comes a second time")
	}
	parent := path.Dir(name)
	if parent == "." {
		parent = ""
	}
	if before, ok := b.kinds[parent]; !ok || before != tar.TypeDir {
		return false, errors.New("no folder was added before that it could be in")
	}
	if kind == tar.TypeLink {
		kind = tar.TypeReg
	}
	b.kinds[name] = kind
	return false, nil
}

// file adds a regular file of size bytes.
func (b *imageBuilder) file(name string, r io.Reader, size int64) error {
	if b.data += size; size < 0 || b.data > maxImageData {
		return fmt.Errorf("the files have more than %d bytes", int64(maxImageData))
	}
	f, err := b.image.Create("/" + name)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, r)
	if err != nil {
		return err
	}
	if n != size {
		return fmt.Errorf("it has %d bytes instead of %d", n, size)
	}
	return f.Close()
}

// hardLink adds a file with the content of another one, because the image
// writer has no links.
func (b *imageBuilder) hardLink(name, target string) error {
	target, err := entryName(target)
	if err != nil {
		return fmt.Errorf("its target: %w", err)
	}
	if b.kinds[target] != tar.TypeReg || target == name {
		return fmt.Errorf("its target %.200q is no file that was added before", target)
	}
	f, err := b.image.Open("/" + target)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return b.file(name, f, info.Size())
}

// metadata sets owner, mode, time and attributes. Mode is set here for every
// kind because the image writer's Mkdir leaves out setgid and sticky bits.
func (b *imageBuilder) metadata(name string, h *tar.Header) error {
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) >= math.MaxUint32 || int64(h.Gid) >= math.MaxUint32 {
		return fmt.Errorf("its owner %d:%d is out of range", h.Uid, h.Gid)
	}
	if err := b.image.Chown(name, h.Uid, h.Gid); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeSymlink {
		if err := b.image.Chmod(name, h.FileInfo().Mode()&(fs.ModePerm|fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky)); err != nil {
			return err
		}
	}
	mtime := h.ModTime
	if mtime.Before(time.Unix(0, 0)) {
		mtime = time.Unix(0, 0)
	}
	if err := b.image.Chtimes(name, mtime, mtime); err != nil {
		return err
	}
	total := 0
	for key, value := range h.PAXRecords {
		attr, ok := strings.CutPrefix(key, "SCHILY.xattr.")
		if !ok || (attr != "security.capability" && !strings.HasPrefix(attr, "user.")) {
			continue // labels of the host's security modules mean nothing in the guest
		}
		if total += len(attr) + len(value); total > maxXattrs || len(attr) > maxName {
			return fmt.Errorf("its extended attributes have more than %d bytes", maxXattrs)
		}
		if err := b.image.Setxattr(name, attr, value); err != nil {
			return err
		}
	}
	return nil
}

// entryName returns the path, relative to the root and in its shortest form,
// that an archive's name means; "" is the root.
func entryName(name string) (string, error) {
	if len(name) > maxPath || strings.ContainsRune(name, 0) {
		return "", errors.New("the name is too long or has a zero byte")
	}
	if strings.HasPrefix(name, "/") {
		return "", errors.New("the name is absolute")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", errors.New(`the name has ".." in it`)
		}
		if len(part) > maxName {
			return "", fmt.Errorf("a part of the name has more than %d bytes", maxName)
		}
	}
	if name = path.Clean(name); name == "." {
		name = ""
	}
	return name, nil
}

// isEmptied reports whether name lies in one of the emptied folders.
func isEmptied(name string) bool {
	top, _, below := strings.Cut(name, "/")
	for _, dir := range emptied {
		if below && top == dir {
			return true
		}
	}
	return false
}

// contextReader reads from r until ctx ends, for the one call that made it.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
