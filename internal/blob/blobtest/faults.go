package blobtest

import (
	"context"
	"fmt"
	"io"
	"iter"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// Op is an operation on a store.
type Op string

// The operations that can be made to fail. Write is every write to an object
// that is being put, Publish the moment when it was written whole.
const (
	OpPut     Op = "put"
	OpWrite   Op = "write"
	OpPublish Op = "publish"
	OpOpen    Op = "open"
	OpRead    Op = "read"
	OpStat    Op = "stat"
	OpList    Op = "list"
	OpDelete  Op = "delete"
)

// Faulty is a store that fails on order.
type Faulty struct {
	blob.Store

	// Fault is asked before each operation, with the key or, for OpList, the
	// prefix; an error that it returns is the operation's. It may be called at
	// the same time, and may block to hold an operation up.
	Fault func(op Op, key string) error
}

func (f *Faulty) fault(op Op, key string) error {
	if err := f.Fault(op, key); err != nil {
		return fmt.Errorf("%s %s: %w", op, key, err)
	}
	return nil
}

// Put implements blob.Store.
func (f *Faulty) Put(ctx context.Context, key string, write func(io.Writer) error) (blob.Info, error) {
	if err := f.fault(OpPut, key); err != nil {
		return blob.Info{}, err
	}
	return f.Store.Put(ctx, key, func(w io.Writer) error {
		if err := write(&faultyWriter{f, key, w}); err != nil {
			return err
		}
		return f.fault(OpPublish, key)
	})
}

type faultyWriter struct {
	f   *Faulty
	key string
	w   io.Writer
}

func (w *faultyWriter) Write(p []byte) (int, error) {
	if err := w.f.fault(OpWrite, w.key); err != nil {
		return 0, err
	}
	return w.w.Write(p)
}

// Open implements blob.Store.
func (f *Faulty) Open(ctx context.Context, key string) (blob.Object, error) {
	if err := f.fault(OpOpen, key); err != nil {
		return nil, err
	}
	o, err := f.Store.Open(ctx, key)
	if err != nil {
		return nil, err
	}
	return &faultyObject{o, f, key}, nil
}

type faultyObject struct {
	blob.Object
	f   *Faulty
	key string
}

func (o *faultyObject) ReadAt(p []byte, off int64) (int, error) {
	if err := o.f.fault(OpRead, o.key); err != nil {
		return 0, err
	}
	return o.Object.ReadAt(p, off)
}

// Stat implements blob.Store.
func (f *Faulty) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := f.fault(OpStat, key); err != nil {
		return blob.Info{}, err
	}
	return f.Store.Stat(ctx, key)
}

// List implements blob.Store.
func (f *Faulty) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	if err := f.fault(OpList, prefix); err != nil {
		return func(yield func(blob.Info, error) bool) { yield(blob.Info{}, err) }
	}
	return f.Store.List(ctx, prefix)
}

// Delete implements blob.Store.
func (f *Faulty) Delete(ctx context.Context, key string) error {
	if err := f.fault(OpDelete, key); err != nil {
		return err
	}
	return f.Store.Delete(ctx, key)
}
