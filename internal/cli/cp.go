package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/filesystem"
	"github.com/hibernacle/hibernacle/api/filesystem/filesystemconnect"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/client"
)

func newCpCommand(a *app) *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp SRC DST",
		Short: "Copy files and folders into and out of a sandbox",
		Long: `Copy a file or a folder from this host into a sandbox or back. One of SRC and DST
is ID:PATH; a relative PATH is relative to the user's home. The other is a path
here, or - for standard input or output (a file's content).

If DST is a folder that exists, or ends with a slash, the copy goes into it;
otherwise DST is the copy's name.`,
		Example: `  hib cp report.csv ID:/home/user/
  hib cp ID:out ./out
  hib cp ID:/etc/os-release -`,
		Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runCp(cmd.Context(), a, args[0], args[1], user)
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "`user` in the sandbox")
	return cmd
}

// standard stands for standard input or output.
const standard = "-"

func runCp(ctx context.Context, a *app, src, dst, user string) error {
	srcID, srcPath, srcRemote := splitRemote(src)
	dstID, dstPath, dstRemote := splitRemote(dst)
	if srcRemote == dstRemote {
		return usagef("one of SRC and DST must be of the form ID:PATH, the other a path here or -")
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	id := srcID + dstID
	hc, base := c.Agent(id, user)
	cp := &copier{
		app: a, client: c, id: id, user: user, progress: newProgress(a.Err),
		files: filesystemconnect.NewFilesystemClient(hc, base), procs: processconnect.NewProcessClient(hc, base),
	}
	defer cp.progress.end()
	if dstRemote {
		return cp.upload(ctx, src, dstPath)
	}
	return cp.download(ctx, srcPath, dst)
}

// splitRemote reads "ID:PATH". A path here that has a colon is written with a
// slash before it, as in ./a:b.
func splitRemote(s string) (id, p string, ok bool) {
	id, p, ok = strings.Cut(s, ":")
	if !ok || id == "" || strings.Contains(id, "/") || id == standard {
		return "", "", false
	}
	if p == "" {
		p = "."
	}
	return id, p, true
}

// copier copies between this host and one sandbox.
type copier struct {
	*app
	client   *client.Client
	id, user string
	files    filesystemconnect.FilesystemClient
	procs    processconnect.ProcessClient
	progress *progress
}

// stat looks at a path in the sandbox; nil means that nothing is there.
func (c *copier) stat(ctx context.Context, p string) (*filesystem.EntryInfo, error) {
	resp, err := c.files.Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: p}))
	if connect.CodeOf(err) == connect.CodeNotFound && client.CodeOf(err) == "" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return resp.Msg.GetEntry(), nil
}

// upload copies src, here, to dst in the sandbox.
func (c *copier) upload(ctx context.Context, src, dst string) error {
	entry, err := c.stat(ctx, dst)
	if err != nil {
		return err
	}
	isDir := entry.GetType() == filesystem.FileType_FILE_TYPE_DIRECTORY
	if src == standard {
		if isDir || strings.HasSuffix(dst, "/") {
			return usagef("%s is a folder: standard input needs the name of a file", dst)
		}
		return c.client.Upload(ctx, c.id, dst, c.user, c.In, -1)
	}
	info, err := os.Stat(src)
	if err != nil {
		return err
	}
	if isDir || strings.HasSuffix(dst, "/") {
		name, err := filepath.Abs(src)
		if err != nil {
			return err
		}
		dst = path.Join(dst, filepath.Base(name))
	}
	switch {
	case info.IsDir():
		return c.uploadTree(ctx, src, dst)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is neither a file nor a folder", src)
	}
	return c.uploadFile(ctx, src, dst, info)
}

func (c *copier) uploadFile(ctx context.Context, src, dst string, info os.FileInfo) error {
	f, err := os.Open(src)
	if err != nil {
		return err
	}
	defer f.Close()
	r := io.LimitReader(f, info.Size()) // a file that grows meanwhile is cut
	if err := c.client.Upload(ctx, c.id, dst, c.user, c.progress.reader(filepath.Base(src), r, info.Size()), info.Size()); err != nil {
		return err
	}
	if info.Mode().Perm()&0o111 == 0 {
		return nil
	}
	mode := fmt.Sprintf("%o", info.Mode().Perm())
	out, err := c.client.Exec(ctx, c.id, api.ExecRequest{Cmd: []string{"chmod", mode, "--", dst}, User: c.user})
	if err == nil && out.ExitCode != 0 {
		err = fmt.Errorf("set the mode of %s: %s", dst, strings.TrimSpace(out.Stderr))
	}
	return err
}

// download copies src in the sandbox to dst, here.
func (c *copier) download(ctx context.Context, src, dst string) error {
	entry, err := c.stat(ctx, src)
	if err != nil {
		return err
	}
	if entry == nil {
		return &client.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("%s not found in sandbox %s", src, c.id)}
	}
	isDir := entry.GetType() == filesystem.FileType_FILE_TYPE_DIRECTORY
	if dst == standard {
		if isDir {
			return usagef("%s is a folder: only a file can go to standard output", src)
		}
		return c.downloadTo(ctx, src, c.Out)
	}
	if info, err := os.Stat(dst); err == nil && info.IsDir() || strings.HasSuffix(dst, "/") {
		name := path.Base(path.Clean("/" + entry.GetPath()))
		if name == "/" {
			name = "root"
		}
		dst = filepath.Join(dst, name)
	}
	if isDir {
		return c.downloadTree(ctx, src, dst)
	}
	return c.downloadFile(ctx, src, dst, entry)
}

// downloadFile puts a file in place once it is whole.
func (c *copier) downloadFile(ctx context.Context, src, dst string, entry *filesystem.EntryInfo) (err error) {
	mode := os.FileMode(entry.GetMode()) & 0o777
	if info, err := os.Stat(dst); err == nil && !info.Mode().IsRegular() { // a device, a pipe
		f, err := os.OpenFile(dst, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		return errors.Join(c.downloadTo(ctx, src, f), f.Close())
	}
	f, err := os.CreateTemp(filepath.Dir(dst), ".hib-cp-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	err = errors.Join(c.downloadTo(ctx, src, f), f.Chmod(mode), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), dst)
}

func (c *copier) downloadTo(ctx context.Context, src string, w io.Writer) error {
	body, size, err := c.client.Download(ctx, c.id, src, c.user)
	if err != nil {
		return err
	}
	defer body.Close()
	if _, err := io.Copy(w, c.progress.reader(path.Base(src), body, size)); err != nil {
		return fmt.Errorf("copy %s: %w", src, err)
	}
	return nil
}
