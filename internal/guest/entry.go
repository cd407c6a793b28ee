package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	filesystempb "github.com/hibernacle/hibernacle/api/filesystem"
)

// describe returns what there is to say about the entry at path. For a link
// that leads somewhere, type and mode are those of its target: SDKs show no
// other entries than files and folders.
func describe(path string, names *accounts) (*filesystempb.EntryInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	return describeInfo(path, info, names), nil
}

func describeInfo(path string, info fs.FileInfo, names *accounts) *filesystempb.EntryInfo {
	e := &filesystempb.EntryInfo{
		Name: filepath.Base(path), Path: path, Type: typeOf(info.Mode()), Size: info.Size(),
		Mode: uint32(info.Mode().Perm()), Permissions: info.Mode().String(),
		ModifiedTime: timestamppb.New(info.ModTime()),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = names.userName(st.Uid), names.groupName(st.Gid)
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err := filepath.EvalSymlinks(path); err == nil {
			e.SymlinkTarget = &target
			if info, err := os.Stat(target); err == nil {
				e.Type, e.Mode = typeOf(info.Mode()), uint32(info.Mode().Perm())
			}
		}
	}
	return e
}

func typeOf(m fs.FileMode) filesystempb.FileType {
	switch {
	case m.IsRegular():
		return filesystempb.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return filesystempb.FileType_FILE_TYPE_DIRECTORY
	case m&fs.ModeSymlink != 0:
		return filesystempb.FileType_FILE_TYPE_SYMLINK
	}
	return filesystempb.FileType_FILE_TYPE_UNSPECIFIED
}

// fileError gives an error the code that SDKs know it by. nil stays nil.
func fileError(err error) error {
	if err == nil {
		return nil
	}
	code := connect.CodeInternal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = connect.CodeNotFound
	case errors.Is(err, syscall.ENOTEMPTY): // before "exists", which it counts as
		code = connect.CodeFailedPrecondition
	case errors.Is(err, fs.ErrExist):
		code = connect.CodeAlreadyExists
	case errors.Is(err, errNoUser):
		code = connect.CodeUnauthenticated
	case errors.Is(err, errBadRequest), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR),
		errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP):
		code = connect.CodeInvalidArgument
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		code = connect.CodePermissionDenied
	case errors.Is(err, syscall.EXDEV), errors.Is(err, syscall.EBUSY):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT),
		errors.Is(err, syscall.EMFILE), errors.Is(err, errTooMany):
		code = connect.CodeResourceExhausted
	}
	return connect.NewError(code, err)
}

// errTooMany means that a bound of the agent's is reached.
var errTooMany = errors.New("too many")

// notFolder is the error for a file where a folder is needed.
func notFolder(path string) error { return fmt.Errorf("%w: %s is not a folder", errBadRequest, path) }
