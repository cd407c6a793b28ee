package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	filesystempb "github.com/hibernacle/hibernacle/api/filesystem"
)

// maxListed bounds the entries of one listing: the answer is one message.
const maxListed = 100_000

// fileService serves the calls of filesystem.Filesystem that look at or change
// entries, and file transfers.
type fileService struct {
	accounts func() (*accounts, error)
}

// place is a path in a request, with who asks.
type place struct {
	path  string
	user  account
	names *accounts
}

func (s *fileService) place(h http.Header, path string) (place, error) {
	name, err := callerName(h)
	if err != nil {
		return place{}, fmt.Errorf("%w: %w", errNoUser, err)
	}
	return s.placeOf(name, path)
}

func (s *fileService) placeOf(user, path string) (place, error) {
	names, err := s.accounts()
	if err != nil {
		return place{}, err
	}
	p := place{names: names}
	if p.user, err = names.find(user); err != nil {
		return place{}, err
	}
	if p.path, err = p.user.resolve(path); err != nil {
		return place{}, fmt.Errorf("%w: %w", errBadRequest, err)
	}
	return p, nil
}

func (p place) describe() (*filesystempb.EntryInfo, error) { return describe(p.path, p.names) }

// Stat describes one entry.
func (s *fileService) Stat(_ context.Context, req *connect.Request[filesystempb.StatRequest]) (*connect.Response[filesystempb.StatResponse], error) {
	p, err := s.place(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, fileError(err)
	}
	entry, err := p.describe()
	return connect.NewResponse(&filesystempb.StatResponse{Entry: entry}), fileError(err)
}

// MakeDir makes a folder and its parents.
func (s *fileService) MakeDir(_ context.Context, req *connect.Request[filesystempb.MakeDirRequest]) (*connect.Response[filesystempb.MakeDirResponse], error) {
	p, err := s.place(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, fileError(err)
	}
	if info, err := os.Stat(p.path); err == nil {
		if !info.IsDir() {
			return nil, fileError(notFolder(p.path))
		}
		return nil, fileError(fmt.Errorf("folder %s: %w", p.path, fs.ErrExist))
	}
	if err := p.user.makeDirs(p.path); err != nil {
		return nil, fileError(err)
	}
	entry, err := p.describe()
	return connect.NewResponse(&filesystempb.MakeDirResponse{Entry: entry}), fileError(err)
}

// Move renames an entry, within one file system.
func (s *fileService) Move(_ context.Context, req *connect.Request[filesystempb.MoveRequest]) (*connect.Response[filesystempb.MoveResponse], error) {
	from, err := s.place(req.Header(), req.Msg.GetSource())
	if err != nil {
		return nil, fileError(err)
	}
	to, err := s.place(req.Header(), req.Msg.GetDestination())
	if err != nil {
		return nil, fileError(err)
	}
	if _, err := os.Lstat(from.path); err != nil {
		return nil, fileError(err)
	}
	if err := to.user.makeDirs(filepath.Dir(to.path)); err != nil {
		return nil, fileError(err)
	}
	if err := os.Rename(from.path, to.path); errors.Is(err, syscall.EXDEV) {
		return nil, fileError(fmt.Errorf("%w: copy it, then remove it", err))
	} else if err != nil {
		return nil, fileError(err)
	}
	entry, err := to.describe()
	return connect.NewResponse(&filesystempb.MoveResponse{Entry: entry}), fileError(err)
}

// Remove removes an entry with all that is in it. One that is not there is no error.
func (s *fileService) Remove(_ context.Context, req *connect.Request[filesystempb.RemoveRequest]) (*connect.Response[filesystempb.RemoveResponse], error) {
	p, err := s.place(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, fileError(err)
	}
	if p.path == "/" {
		return nil, fileError(fmt.Errorf("%w: / cannot be removed", errBadRequest))
	}
	return connect.NewResponse(&filesystempb.RemoveResponse{}), fileError(os.RemoveAll(p.path))
}

// ListDir lists a folder, depth levels down, in the order of names.
func (s *fileService) ListDir(ctx context.Context, req *connect.Request[filesystempb.ListDirRequest]) (*connect.Response[filesystempb.ListDirResponse], error) {
	p, err := s.place(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, fileError(err)
	}
	depth := max(int(req.Msg.GetDepth()), 1)
	entries, err := list(ctx, p, depth)
	return connect.NewResponse(&filesystempb.ListDirResponse{Entries: entries}), fileError(err)
}

// list walks a folder. The folder itself may be a link; links in it are not followed.
func list(ctx context.Context, p place, depth int) ([]*filesystempb.EntryInfo, error) {
	root, err := filepath.EvalSymlinks(p.path)
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(root); err != nil {
		return nil, err
	} else if !info.IsDir() {
		return nil, notFolder(p.path)
	}
	var entries []*filesystempb.EntryInfo
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			if path == root {
				return err
			}
			return nil // it went away, or cannot be read
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if len(entries) == maxListed {
			return fmt.Errorf("%w entries below %s, at most %d are listed: ask for less depth", errTooMany, p.path, maxListed)
		}
		rel := strings.TrimPrefix(strings.TrimPrefix(path, root), "/")
		if info, err := d.Info(); err == nil {
			entries = append(entries, describeInfo(filepath.Join(p.path, rel), info, p.names))
		}
		if d.IsDir() && strings.Count(rel, "/")+1 >= depth {
			return fs.SkipDir
		}
		return nil
	})
	return entries, err
}
