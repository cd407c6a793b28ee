package cli

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process"
)

// uploadTree makes dst in the sandbox a copy of the folder src: a tar stream
// into a tar that runs there.
func (c *copier) uploadTree(ctx context.Context, src, dst string) error {
	script := `mkdir -p -- "$1" && exec tar -xf - --no-same-owner -C "$1"`
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(writeTree(pw, src)) }()
	defer pr.CloseWithError(io.ErrClosedPipe)
	in := c.progress.reader(filepath.Base(src), pr, -1)
	return c.pipe(ctx, []string{"sh", "-c", script, "sh", dst}, in, io.Discard)
}

// downloadTree makes dst here a copy of the folder src in the sandbox.
func (c *copier) downloadTree(ctx context.Context, src, dst string) error {
	if err := os.MkdirAll(dst, 0o777); err != nil {
		return err
	}
	// What the stream names is written below dst, wherever its links lead.
	root, err := os.OpenRoot(dst)
	if err != nil {
		return err
	}
	defer root.Close()
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		in := c.progress.reader(path.Base(src), pr, -1)
		err := readTree(in, root)
		if err == nil { // the padding behind the last entry
			_, err = io.Copy(io.Discard, in)
		}
		pr.CloseWithError(err)
		done <- err
	}()
	err = c.pipe(ctx, []string{"tar", "-cf", "-", "-C", src, "."}, nil, pw)
	pw.CloseWithError(err)
	if readErr := <-done; readErr != nil && (err == nil || errors.Is(err, readErr)) {
		return readErr
	}
	return err
}

// pipe runs a command in the sandbox with in (nil: none) as its input and out
// as its output. A command that fails is an error with what it complained of.
func (c *copier) pipe(ctx context.Context, cmd []string, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := c.procs.Start(ctx, connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Cmd: cmd[0], Args: cmd[1:]}, Stdin: new(in != nil),
	}))
	if err != nil {
		return err
	}
	defer stream.Close()
	var complaint bytes.Buffer
	for stream.Receive() {
		switch ev := stream.Msg().GetEvent().GetEvent().(type) {
		case *process.ProcessEvent_Start:
			if in != nil {
				to := &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: ev.Start.GetPid()}}
				go c.feed(ctx, cancel, to, in)
				in = nil
			}
		case *process.ProcessEvent_Data:
			if room := maxComplaint - complaint.Len(); room > 0 {
				p := ev.Data.GetStderr()
				complaint.Write(p[:min(room, len(p))])
			}
			if _, err := out.Write(ev.Data.GetStdout()); err != nil {
				return err
			}
		case *process.ProcessEvent_End:
			if code := api.ExitCode(ev.End.GetExitCode(), ev.End.GetExited(), ev.End.GetStatus()); code != 0 {
				return fmt.Errorf("%s in sandbox %s ended with %d: %s", cmd[0], c.id, code, printable(strings.TrimSpace(complaint.String())))
			}
			return nil
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return errors.Join(stream.Err(), io.ErrUnexpectedEOF)
}

// maxComplaint bounds what is kept of a command's standard error, in bytes.
const maxComplaint = 4 << 10

// feed gives a process its input and ends it. What can't be read here must not
// look like the end of the input there, so it breaks the whole off.
func (c *copier) feed(ctx context.Context, cancel context.CancelCauseFunc, to *process.ProcessSelector, in io.Reader) {
	var failed error
	watched := readerFunc(func(p []byte) (int, error) {
		n, err := in.Read(p)
		if err != nil && err != io.EOF {
			failed = err
		}
		return n, err
	})
	err := feedInput(ctx, c.procs, to, watched, false)
	if failed != nil {
		_, _ = c.procs.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: to, Signal: process.Signal_SIGNAL_SIGKILL}))
		cancel(failed)
		return
	}
	if err == nil {
		_, _ = c.procs.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: to}))
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// writeTree writes the folder dir as a tar stream: files, folders and links.
func writeTree(w io.Writer, dir string) error {
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil || rel == "." {
			return err
		}
		return writeEntry(tw, p, filepath.ToSlash(rel), d)
	})
	return errors.Join(err, tw.Close())
}

func writeEntry(tw *tar.Writer, p, name string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	link := ""
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		if link, err = os.Readlink(p); err != nil {
			return err
		}
	case !info.IsDir() && !info.Mode().IsRegular():
		return nil // sockets, pipes and devices mean nothing elsewhere
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name = name
	h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return nil
	}
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.CopyN(tw, f, info.Size()); err != nil {
		return fmt.Errorf("read %s: %w", p, err)
	}
	return nil
}

// readTree writes what a tar stream from a guest holds below root: files,
// folders and links, without owners and special mode bits. It refuses names
// that lead out of root.
func readTree(r io.Reader, root *os.Root) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the stream of files: %w", err)
		}
		name := filepath.FromSlash(path.Clean(h.Name))
		if name == "." {
			continue
		}
		if !filepath.IsLocal(name) {
			return fmt.Errorf("the sandbox sent the name %q, which leads out of the folder", printable(h.Name))
		}
		if err := readEntry(tr, root, name, h); err != nil {
			return err
		}
	}
}

func readEntry(tr *tar.Reader, root *os.Root, name string, h *tar.Header) error {
	perm := h.FileInfo().Mode().Perm()
	if err := root.MkdirAll(filepath.Dir(name), 0o777); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, perm|0o700) // it must be possible to fill it
	case tar.TypeSymlink:
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return root.Link(filepath.FromSlash(path.Clean(h.Linkname)), name)
	case tar.TypeReg:
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, tr)
		return errors.Join(err, f.Close())
	}
	return nil // devices and the like mean nothing here
}
