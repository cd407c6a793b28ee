// Package recordfs records what a program does to its files, operation by
// operation, and builds what a disk may hold after a loss of power behind any
// of them. It is a test tool: a file system in user space that passes
// everything on to a folder.
//
// The program must be another process than the one that serves the file system:
// a page fault of a mapped file would stop the server that is to answer it.
//
// What survives is what POSIX promises, and no more: the content of a file when
// that file was synced, a name when its folder was synced. Image builds this
// least, the most (nothing is lost), and random mixtures of the two.
package recordfs

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// ID is the number of a file or folder, unique in a recording. The root is 0.
type ID int

// Kind is the kind of an operation.
type Kind string

// The kinds of operations.
const (
	Create   Kind = "create"   // makes the empty file File as Name in Dir
	Mkdir    Kind = "mkdir"    // makes the folder File as Name in Dir
	Link     Kind = "link"     // gives File the further name Name in Dir
	Unlink   Kind = "unlink"   // removes Name, a file or an empty folder, from Dir
	Rename   Kind = "rename"   // moves Name in Dir to NewName in NewDir
	Write    Kind = "write"    // writes Data at Offset of File
	Truncate Kind = "truncate" // sets the size of File to Offset
	Sync     Kind = "sync"     // makes the content of File durable
	SyncDir  Kind = "syncdir"  // makes the names in Dir durable
)

// Op is one operation that changed or synced something.
type Op struct {
	Kind    Kind
	Dir     ID
	Name    string
	NewDir  ID
	NewName string
	File    ID
	Offset  int64
	Data    []byte
}

// String describes the operation for people.
func (o Op) String() string {
	switch o.Kind {
	case Write:
		return fmt.Sprintf("write %d bytes at %d of file %d", len(o.Data), o.Offset, o.File)
	case Truncate:
		return fmt.Sprintf("truncate file %d to %d", o.File, o.Offset)
	case Sync:
		return fmt.Sprintf("sync file %d", o.File)
	case SyncDir:
		return fmt.Sprintf("sync folder %d", o.Dir)
	case Rename:
		return fmt.Sprintf("rename %s in %d to %s in %d", o.Name, o.Dir, o.NewName, o.NewDir)
	}
	return fmt.Sprintf("%s %s in %d (file %d)", o.Kind, o.Name, o.Dir, o.File)
}

// FS is a mounted file system that records.
type FS struct {
	server *fuse.Server

	mu  sync.Mutex // held over each operation, so that they are recorded in their order
	ops []Op
	ids map[fs.StableAttr]ID
}

// Mount mounts a recording file system at the folder mountpoint, which passes
// everything on to the empty folder backing.
func Mount(backing, mountpoint string) (*FS, error) {
	f := &FS{ids: make(map[fs.StableAttr]ID)}
	var st syscall.Stat_t
	if err := syscall.Stat(backing, &st); err != nil {
		return nil, fmt.Errorf("mount recording file system: %w", err)
	}
	root := &fs.LoopbackRoot{Path: backing, Dev: uint64(st.Dev)}
	top := &node{LoopbackNode: &fs.LoopbackNode{RootData: root}, fs: f}
	root.RootNode = top
	server, err := fs.Mount(mountpoint, top, &fs.Options{
		MountOptions: fuse.MountOptions{FsName: "recordfs", Name: "recordfs", DirectMount: true},
	})
	if err != nil {
		return nil, fmt.Errorf("mount recording file system: %w", err)
	}
	f.server = server
	return f, nil
}

// Ops returns what was recorded so far.
func (f *FS) Ops() []Op {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.ops)
}

// Unmount ends the file system.
func (f *FS) Unmount() error { return f.server.Unmount() }

// id returns the number of a node; f.mu is held.
func (f *FS) id(n *fs.Inode) ID {
	if n.IsRoot() {
		return 0
	}
	key := n.StableAttr()
	key.Mode = 0
	if _, ok := f.ids[key]; !ok {
		f.ids[key] = ID(len(f.ids) + 1)
	}
	return f.ids[key]
}

// record adds an operation if it succeeded; f.mu is held.
func (f *FS) record(errno syscall.Errno, op Op) {
	if errno == 0 {
		f.ops = append(f.ops, op)
	}
}

// node is a file or folder. What it does not override changes nothing, or is
// refused because nobody recorded it.
type node struct {
	*fs.LoopbackNode
	fs *FS
}

// WrapChild makes a recording node of one that the loopback made.
func (n *node) WrapChild(_ context.Context, ops fs.InodeEmbedder) fs.InodeEmbedder {
	return &node{LoopbackNode: ops.(*fs.LoopbackNode), fs: n.fs}
}

var (
	_ fs.NodeWrapChilder    = (*node)(nil)
	_ fs.NodeCreater        = (*node)(nil)
	_ fs.NodeMkdirer        = (*node)(nil)
	_ fs.NodeLinker         = (*node)(nil)
	_ fs.NodeUnlinker       = (*node)(nil)
	_ fs.NodeRmdirer        = (*node)(nil)
	_ fs.NodeRenamer        = (*node)(nil)
	_ fs.NodeOpener         = (*node)(nil)
	_ fs.NodeWriter         = (*node)(nil)
	_ fs.NodeSetattrer      = (*node)(nil)
	_ fs.NodeFsyncer        = (*node)(nil)
	_ fs.NodeOpendirHandler = (*node)(nil)
	_ fs.NodeMknoder        = (*node)(nil)
	_ fs.NodeSymlinker      = (*node)(nil)
	_ fs.NodeTmpfiler       = (*node)(nil)
	_ fs.NodeAllocater      = (*node)(nil)
	_ fs.NodeCopyFileRanger = (*node)(nil)
)

// Create makes or opens a file.
func (n *node) Create(ctx context.Context, name string, flags uint32, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	var st syscall.Stat_t
	existed := syscall.Lstat(n.RootData.Path+"/"+n.Path(nil)+"/"+name, &st) == nil
	child, handle, ff, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	if errno == 0 && existed {
		n.fs.record(0, Op{Kind: Truncate, File: n.fs.id(child)})
	} else if errno == 0 {
		n.fs.record(0, Op{Kind: Create, Dir: n.fs.id(n.EmbeddedInode()), Name: name, File: n.fs.id(child)})
	}
	return child, recorded(handle), ff, errno
}

// Mkdir makes a folder.
func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	child, errno := n.LoopbackNode.Mkdir(ctx, name, mode, out)
	if errno == 0 {
		n.fs.record(0, Op{Kind: Mkdir, Dir: n.fs.id(n.EmbeddedInode()), Name: name, File: n.fs.id(child)})
	}
	return child, errno
}

// Link gives a file a further name.
func (n *node) Link(ctx context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	child, errno := n.LoopbackNode.Link(ctx, target, name, out)
	if errno == 0 {
		n.fs.record(0, Op{Kind: Link, Dir: n.fs.id(n.EmbeddedInode()), Name: name, File: n.fs.id(target.EmbeddedInode())})
	}
	return child, errno
}

// Unlink removes a file's name.
func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	errno := n.LoopbackNode.Unlink(ctx, name)
	n.fs.record(errno, Op{Kind: Unlink, Dir: n.fs.id(n.EmbeddedInode()), Name: name})
	return errno
}

// Rmdir removes an empty folder.
func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	errno := n.LoopbackNode.Rmdir(ctx, name)
	n.fs.record(errno, Op{Kind: Unlink, Dir: n.fs.id(n.EmbeddedInode()), Name: name})
	return errno
}

// Rename moves a name; the flags of renameat2 are not supported.
func (n *node) Rename(ctx context.Context, name string, newParent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	if flags != 0 {
		return syscall.EINVAL
	}
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	errno := n.LoopbackNode.Rename(ctx, name, newParent, newName, 0)
	n.fs.record(errno, Op{Kind: Rename, Dir: n.fs.id(n.EmbeddedInode()), Name: name, NewDir: n.fs.id(newParent.EmbeddedInode()), NewName: newName})
	return errno
}

// Open opens a file, which may cut it to nothing.
func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	handle, ff, errno := n.LoopbackNode.Open(ctx, flags)
	if flags&syscall.O_TRUNC != 0 {
		n.fs.record(errno, Op{Kind: Truncate, File: n.fs.id(n.EmbeddedInode())})
	}
	return recorded(handle), ff, errno
}

// fileHandle is an open file that the kernel must not read and write on its own
// behind the recorder's back.
type fileHandle struct{ *fs.LoopbackFile }

// PassthroughFd implements fs.FilePassthroughFder.
func (fileHandle) PassthroughFd() (int, bool) { return 0, false }

func recorded(handle fs.FileHandle) fs.FileHandle {
	if f, ok := handle.(*fs.LoopbackFile); ok {
		return fileHandle{f}
	}
	return handle // nil after an error
}

// Write writes to a file, also what was written to a mapping of it.
func (n *node) Write(ctx context.Context, handle fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	w, ok := handle.(fs.FileWriter)
	if !ok {
		return 0, syscall.EBADF
	}
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	m, errno := w.Write(ctx, data, off)
	n.fs.record(errno, Op{Kind: Write, File: n.fs.id(n.EmbeddedInode()), Offset: off, Data: slices.Clone(data[:m])})
	return m, errno
}

// Setattr changes the size, recorded, and what else there is, which is not.
func (n *node) Setattr(ctx context.Context, handle fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	errno := n.LoopbackNode.Setattr(ctx, handle, in, out)
	if size, ok := in.GetSize(); ok {
		n.fs.record(errno, Op{Kind: Truncate, File: n.fs.id(n.EmbeddedInode()), Offset: int64(size)})
	}
	return errno
}

// Fsync is recorded; the folder behind need not be synced for that.
func (n *node) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	n.fs.mu.Lock()
	defer n.fs.mu.Unlock()
	if n.EmbeddedInode().IsDir() {
		n.fs.record(0, Op{Kind: SyncDir, Dir: n.fs.id(n.EmbeddedInode())})
	} else {
		n.fs.record(0, Op{Kind: Sync, File: n.fs.id(n.EmbeddedInode())})
	}
	return 0
}

// OpendirHandle opens a folder.
func (n *node) OpendirHandle(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	handle, ff, errno := n.LoopbackNode.OpendirHandle(ctx, flags)
	if errno != 0 {
		return nil, 0, errno
	}
	stream, ok := handle.(dirStream)
	if !ok {
		return nil, 0, syscall.ENOTSUP
	}
	return &dirHandle{stream, n}, ff, 0
}

type dirStream interface {
	fs.FileReaddirenter
	fs.FileReleasedirer
	fs.FileSeekdirer
}

// dirHandle is an open folder.
type dirHandle struct {
	dirStream
	node *node
}

// Fsyncdir is recorded.
func (d *dirHandle) Fsyncdir(ctx context.Context, flags uint32) syscall.Errno {
	return d.node.Fsync(ctx, nil, flags)
}

// What follows is refused: a program that needs it must find it recorded first.

// Mknod is refused.
func (n *node) Mknod(context.Context, string, uint32, uint32, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return nil, syscall.ENOTSUP
}

// Symlink is refused.
func (n *node) Symlink(context.Context, string, string, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return nil, syscall.ENOTSUP
}

// Tmpfile is refused.
func (n *node) Tmpfile(context.Context, uint32, uint32, *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	return nil, nil, 0, syscall.ENOTSUP
}

// Allocate is refused.
func (n *node) Allocate(context.Context, fs.FileHandle, uint64, uint64, uint32) syscall.Errno {
	return syscall.ENOTSUP
}

// CopyFileRange is refused.
func (n *node) CopyFileRange(context.Context, fs.FileHandle, uint64, *fs.Inode, fs.FileHandle, uint64, uint64, uint64) (uint32, syscall.Errno) {
	return 0, syscall.ENOTSUP
}
