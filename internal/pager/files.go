package pager

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/hibernacle/hibernacle/internal/page"
)

// forever is how long the kernel may keep names and attributes, in seconds:
// they never change.
const forever = 1 << 30

// fileSystem answers FUSE requests: a root folder with one file per slot.
// Requests that it does not know get ENOSYS.
type fileSystem struct {
	fuse.RawFileSystem
	uid, gid uint32

	mu     sync.RWMutex
	closed bool
	byName map[string]*Slot
	byNode map[uint64]*Slot
	last   uint64 // highest node id in use; none is used twice
}

func newFileSystem(uid, gid uint32) *fileSystem {
	return &fileSystem{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		uid:           uid, gid: gid,
		byName: make(map[string]*Slot),
		byNode: make(map[uint64]*Slot),
		last:   fuse.FUSE_ROOT_ID,
	}
}

// add makes the slot name of size bytes.
func (fs *fileSystem) add(name string, size int64) (*Slot, error) {
	if name == "" || strings.HasPrefix(name, ".") || strings.ContainsAny(name, "/\x00\n") || len(name) > 255 {
		return nil, fmt.Errorf("%q is no name for a file", name)
	}
	if size <= 0 || size%page.Size != 0 {
		return nil, fmt.Errorf("size %d is not a positive multiple of %d", size, page.Size)
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.closed {
		return nil, ErrClosed
	}
	if fs.byName[name] != nil {
		return nil, errors.New("the name is in use")
	}
	fs.last++
	l := newSlot(name, size, fs.last)
	fs.byName[name], fs.byNode[l.node] = l, l
	return l, nil
}

// close makes add and every slot's Bind and Push fail with ErrClosed.
func (fs *fileSystem) close() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.closed = true
	for _, l := range fs.byNode {
		l.close()
	}
}

// fail makes every slot fail with err, unless the server was closed.
func (fs *fileSystem) fail(err error) {
	fs.mu.RLock()
	defer fs.mu.RUnlock()
	if fs.closed {
		return
	}
	for _, l := range fs.byNode {
		l.mu.Lock()
		_ = l.fail(fmt.Errorf("slot %s: %w", l.name, err))
		l.mu.Unlock()
	}
}

func (fs *fileSystem) slot(node uint64) *Slot {
	fs.mu.RLock()
	defer fs.mu.RUnlock()
	return fs.byNode[node]
}

// attr fills in the attributes of a node, and tells whether there is one.
func (fs *fileSystem) attr(node uint64, out *fuse.Attr) bool {
	out.Ino, out.Nlink, out.Blksize = node, 1, page.Size
	out.Uid, out.Gid = fs.uid, fs.gid
	if node == fuse.FUSE_ROOT_ID {
		out.Mode, out.Nlink = syscall.S_IFDIR|0o700, 2
		return true
	}
	l := fs.slot(node)
	if l == nil {
		return false
	}
	out.Mode = syscall.S_IFREG | 0o600
	out.Size = uint64(l.size)
	out.Blocks = out.Size / 512
	return true
}

func (fs *fileSystem) String() string { return fsName }

func (fs *fileSystem) Lookup(_ <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	fs.mu.RLock()
	l := fs.byName[name]
	fs.mu.RUnlock()
	if l == nil || header.NodeId != fuse.FUSE_ROOT_ID {
		return fuse.ENOENT
	}
	out.NodeId, out.Generation = l.node, 1
	out.EntryValid, out.AttrValid = forever, forever
	fs.attr(l.node, &out.Attr)
	return fuse.OK
}

func (fs *fileSystem) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	if !fs.attr(in.NodeId, &out.Attr) {
		return fuse.ENOENT
	}
	out.AttrValid = forever
	return fuse.OK
}

// SetAttr refuses truncation, and any other change.
func (fs *fileSystem) SetAttr(<-chan struct{}, *fuse.SetAttrIn, *fuse.AttrOut) fuse.Status {
	return fuse.EPERM
}

// Open allows writing, as VMMs open the file of a private mapping so; Write
// does not.
func (fs *fileSystem) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if fs.slot(in.NodeId) == nil {
		return fuse.ENOENT
	}
	// Without a FLUSH at each close a killed process need not wait for the pager
	// before it can end, and its pager may be hung, or itself.
	out.OpenFlags = fuse.FOPEN_KEEP_CACHE | fuse.FOPEN_NOFLUSH
	return fuse.OK
}

func (fs *fileSystem) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	l := fs.slot(in.NodeId)
	if l == nil || in.Offset > math.MaxInt64 {
		return nil, fuse.EIO
	}
	n, err := l.read(buf, int64(in.Offset))
	if err != nil {
		return nil, fuse.EIO
	}
	return fuse.ReadResultData(buf[:n]), fuse.OK
}

func (fs *fileSystem) Write(<-chan struct{}, *fuse.WriteIn, []byte) (uint32, fuse.Status) {
	return 0, fuse.EIO
}

func (fs *fileSystem) Writev(<-chan struct{}, *fuse.WriteIn, [][]byte) (uint32, fuse.Status) {
	return 0, fuse.EIO
}

// ReadDir shows an empty folder: nobody needs a listing.
func (fs *fileSystem) ReadDir(<-chan struct{}, *fuse.ReadIn, *fuse.DirEntryList) fuse.Status {
	return fuse.OK
}

func (fs *fileSystem) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	out.Bsize, out.Frsize, out.NameLen = page.Size, page.Size, 255
	return fuse.OK
}
