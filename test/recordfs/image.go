package recordfs

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
)

// Image is the state of a file system after a number of operations: what
// programs see, and what is known to be durable.
type Image struct {
	files map[ID]*file
	dirs  map[ID]*dir
}

// file is a file's content.
type file struct {
	now, durable []byte
	pending      []Op // writes and truncates since the last sync
}

// dir is a folder's names.
type dir struct {
	now, durable map[string]ID
	pending      []change // since the last sync
}

// change is one step that a file system makes whole: names set, or removed (-1).
type change map[string]ID

const removed ID = -1

// NewImage returns an empty file system.
func NewImage() *Image {
	i := &Image{files: make(map[ID]*file), dirs: make(map[ID]*dir)}
	i.dirs[0] = newDir()
	return i
}

func newDir() *dir { return &dir{now: make(map[string]ID), durable: make(map[string]ID)} }

// Apply carries out the next operation.
func (i *Image) Apply(op Op) {
	switch op.Kind {
	case Create:
		i.files[op.File] = &file{}
		i.dirs[op.Dir].change(change{op.Name: op.File})
	case Mkdir:
		i.dirs[op.File] = newDir()
		i.dirs[op.Dir].change(change{op.Name: op.File})
	case Link:
		i.dirs[op.Dir].change(change{op.Name: op.File})
	case Unlink:
		i.dirs[op.Dir].change(change{op.Name: removed})
	case Rename:
		id := i.dirs[op.Dir].now[op.Name]
		if op.Dir == op.NewDir {
			i.dirs[op.Dir].change(change{op.Name: removed, op.NewName: id})
		} else {
			i.dirs[op.NewDir].change(change{op.NewName: id})
			i.dirs[op.Dir].change(change{op.Name: removed})
		}
	case Write, Truncate:
		f := i.files[op.File]
		f.now = apply(f.now, op)
		f.pending = append(f.pending, op)
	case Sync:
		f := i.files[op.File]
		f.durable, f.pending = bytes.Clone(f.now), nil
	case SyncDir:
		d := i.dirs[op.Dir]
		d.durable, d.pending = maps.Clone(d.now), nil
	default:
		panic(fmt.Sprintf("operation of unknown kind %q", op.Kind))
	}
}

func (d *dir) change(c change) {
	c.apply(d.now)
	d.pending = append(d.pending, c)
}

func (c change) apply(names map[string]ID) {
	for name, id := range c {
		if id == removed {
			delete(names, name)
		} else {
			names[name] = id
		}
	}
}

// apply returns content after a write or truncate.
func apply(content []byte, op Op) []byte {
	end := op.Offset + int64(len(op.Data))
	if op.Kind == Truncate && end < int64(len(content)) {
		return content[:end:end]
	}
	if grow := end - int64(len(content)); grow > 0 {
		content = append(content, make([]byte, grow)...)
	}
	copy(content[op.Offset:], op.Data)
	return content
}

// Keep says how much survives of what was not synced.
type Keep int

// How much survives.
const (
	None Keep = iota
	All
	Some // each block of each write, each change of a folder or not, at random
)

// Loss is what a loss of power does.
type Loss struct {
	Content Keep       // of files
	Names   Keep       // in folders
	Rand    *rand.Rand // for Some
}

// Build writes into the empty folder to what the disk holds if power is lost
// now.
func (i *Image) Build(to string, loss Loss) error { return i.build(0, to, loss, make(map[ID]string)) }

// build writes one folder; links holds where files were written already.
func (i *Image) build(id ID, to string, loss Loss, links map[ID]string) error {
	names := i.dirs[id].surviving(loss)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		child, path := names[name], filepath.Join(to, name)
		if i.dirs[child] != nil {
			if err := os.Mkdir(path, 0o700); err != nil {
				return err
			}
			if err := i.build(child, path, loss, links); err != nil {
				return err
			}
			continue
		}
		if other, ok := links[child]; ok {
			if err := os.Link(other, path); err != nil {
				return err
			}
			continue
		}
		links[child] = path
		if err := os.WriteFile(path, i.files[child].surviving(loss), 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (d *dir) surviving(loss Loss) map[string]ID {
	switch loss.Names {
	case None:
		return d.durable
	case All:
		return d.now
	}
	names := maps.Clone(d.durable)
	for _, c := range d.pending {
		if loss.Rand.IntN(2) == 0 {
			c.apply(names)
		}
	}
	return names
}

// blockSize is what a disk writes as a whole at least.
const blockSize = 512

func (f *file) surviving(loss Loss) []byte {
	switch loss.Content {
	case None:
		return f.durable
	case All:
		return f.now
	}
	content := bytes.Clone(f.durable)
	for _, op := range f.pending {
		if op.Kind == Truncate {
			if loss.Rand.IntN(2) == 0 {
				content = apply(content, op)
			}
			continue
		}
		for len(op.Data) > 0 {
			n := min(blockSize, len(op.Data))
			if loss.Rand.IntN(2) == 0 {
				content = apply(content, Op{Kind: Write, Offset: op.Offset, Data: op.Data[:n]})
			}
			op.Data, op.Offset = op.Data[n:], op.Offset+int64(n)
		}
	}
	return content
}
