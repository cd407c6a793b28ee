package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Copy makes the folder out a template of that name with the files of another
// one, which are linked where that is possible and copied elsewhere. Nothing
// may be at out yet; what is there afterwards is whole, or nothing is. The files
// are not read: see Verify.
func Copy(ctx context.Context, from Artifacts, name, out string) (Artifacts, error) {
	r, err := readRecord(from.Dir)
	if err != nil {
		return Artifacts{}, err
	}
	out, err = filepath.Abs(out)
	if err != nil {
		return Artifacts{}, err
	}
	work, err := newScratch(filepath.Dir(out), "."+filepath.Base(out)+".building-")
	if err != nil {
		return Artifacts{}, err
	}
	defer work.remove()
	for file := range r.files() {
		if err := linkOrCopy(ctx, filepath.Join(from.Dir, file), work.path(file)); err != nil {
			return Artifacts{}, fmt.Errorf("copy template %s: %w", from.Dir, err)
		}
	}
	r.Name = name
	if err := writeJSON(work.path(recordFile), r); err != nil {
		return Artifacts{}, err
	}
	if err := work.publish(out); err != nil {
		return Artifacts{}, err
	}
	return Load(out)
}

// linkOrCopy makes to a name of the file from, or a copy of it where file
// systems do not link.
func linkOrCopy(ctx context.Context, from, to string) error {
	err := os.Link(from, to)
	if err == nil || !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EMLINK) && !errors.Is(err, unix.ENOTSUP) {
		return err
	}
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, contextReader{ctx, src})
	return errors.Join(err, dst.Close())
}
