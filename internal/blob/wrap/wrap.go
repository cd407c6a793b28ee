// Package wrap adds to any blob.Store what it lacks for use over a network, as
// stores around it: Retry, Limit, Meter and Delay. They pass blobtest's suite
// around a store that does, and keep what its objects say as blob.RemoteObject.
//
// They may be put around each other. Retry around Limit around Meter is the
// useful order: a call that waits for its next attempt takes no place, and
// every attempt is metered.
package wrap

import (
	"context"
	"io"
	"iter"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// Op names an operation on a store.
type Op string

// The operations. OpRead is a ReadAt that is not served by the object's tail.
const (
	OpPut    Op = "put"
	OpOpen   Op = "open"
	OpRead   Op = "read"
	OpStat   Op = "stat"
	OpList   Op = "list"
	OpDelete Op = "delete"
)

// around is called instead of an operation, and calls do to have it done. do
// returns the bytes that moved. around returns do's error, or its own without
// having called do. ctx is the operation's; for OpRead it lasts until the
// object is closed.
type around func(ctx context.Context, op Op, key string, do func() (int64, error)) error

// store has around called for each operation.
type store struct {
	inner  blob.Store
	around around
}

func (s *store) Put(ctx context.Context, key string, write func(io.Writer) error) (info blob.Info, err error) {
	err = s.around(ctx, OpPut, key, func() (int64, error) {
		info, err = s.inner.Put(ctx, key, write)
		return info.Size, err
	})
	return info, err
}

func (s *store) Open(ctx context.Context, key string) (opened blob.Object, err error) {
	err = s.around(ctx, OpOpen, key, func() (int64, error) {
		if opened, err = s.inner.Open(ctx, key); err != nil {
			return 0, err
		}
		return tail(opened), nil
	})
	if err != nil {
		return nil, err
	}
	o := newObject(ctx, opened)
	return &wrapped{object: o, around: s.around, key: key}, nil
}

func (s *store) Stat(ctx context.Context, key string) (info blob.Info, err error) {
	err = s.around(ctx, OpStat, key, func() (int64, error) {
		info, err = s.inner.Stat(ctx, key)
		return 0, err
	})
	return info, err
}

func (s *store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		told := false
		err := s.around(ctx, OpList, prefix, func() (int64, error) {
			for info, err := range s.inner.List(ctx, prefix) {
				if more := yield(info, err); err != nil || !more {
					told = true
					return 0, err
				}
			}
			return 0, nil
		})
		if err != nil && !told {
			yield(blob.Info{}, err)
		}
	}
}

func (s *store) Delete(ctx context.Context, key string) error {
	return s.around(ctx, OpDelete, key, func() (int64, error) { return 0, s.inner.Delete(ctx, key) })
}

// wrapped is an object of a store.
type wrapped struct {
	*object
	around around
	key    string
}

// ReadAt has around called unless the read costs no request.
func (o *wrapped) ReadAt(p []byte, off int64) (n int, err error) {
	far := min(off+int64(len(p)), o.Size()-o.Tail()) - off // bytes before the tail
	if off >= 0 && far <= 0 {
		return o.Object.ReadAt(p, off)
	}
	err = o.around(o.ctx, OpRead, o.key, func() (int64, error) {
		n, err = o.Object.ReadAt(p, off)
		return min(int64(n), far), skipEOF(err)
	})
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

// object is an open object with a context for its reads, which Close ends.
type object struct {
	blob.Object
	ctx context.Context
	end context.CancelFunc
}

var _ blob.RemoteObject = (*object)(nil)

// newObject takes the values of ctx, not its end.
func newObject(ctx context.Context, inner blob.Object) *object {
	o := &object{Object: inner}
	o.ctx, o.end = context.WithCancel(context.WithoutCancel(ctx))
	return o
}

func (o *object) Remote() bool {
	r, ok := o.Object.(blob.RemoteObject)
	return ok && r.Remote()
}

func (o *object) Tail() int64 { return tail(o.Object) }

func tail(o blob.Object) int64 {
	if r, ok := o.(blob.RemoteObject); ok {
		return r.Tail()
	}
	return 0
}

func (o *object) Close() error {
	o.end()
	return o.Object.Close()
}

func skipEOF(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}
