package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// ReadStore returns a store in which packs that are not in local are read from
// remote, as they are encoded there and in parts. Everything else is about
// local alone: also manifests, states and working sets, which are never
// evicted, so that whether a snapshot exists is known while the remote store is down.
//
// An object from remote is a blob.RemoteObject. Errors
// name the object and the remote store; they wrap blob.ErrUnavailable if that could
// not be asked, and blob.ErrNotExist only if the object is in neither.
func ReadStore(local, remote blob.Store) blob.Store { return &readStore{local, remote} }

type readStore struct{ local, remote blob.Store }

func (s *readStore) Put(ctx context.Context, key string, write func(io.Writer) error) (blob.Info, error) {
	return s.local.Put(ctx, key, write)
}

func (s *readStore) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return s.local.List(ctx, prefix)
}

func (s *readStore) Delete(ctx context.Context, key string) error { return s.local.Delete(ctx, key) }

func (s *readStore) Open(ctx context.Context, key string) (blob.Object, error) {
	o, err := s.local.Open(ctx, key)
	if !askRemote(key, err) {
		return o, err
	}
	if o, err = s.remote.Open(ctx, key); err != nil {
		return nil, remoteError(key, err)
	}
	return &remoteObject{o, key}, nil
}

func (s *readStore) Stat(ctx context.Context, key string) (blob.Info, error) {
	info, err := s.local.Stat(ctx, key)
	if !askRemote(key, err) {
		return info, err
	}
	if info, err = s.remote.Stat(ctx, key); err != nil {
		return blob.Info{}, remoteError(key, err)
	}
	return info, nil
}

// askRemote tells whether an object of which the local store says err is one to
// look for in the remote store.
func askRemote(key string, err error) bool {
	_, isPack := snapshot.KindPack.Parse(key)
	return isPack && errors.Is(err, blob.ErrNotExist)
}

func remoteError(key string, err error) error {
	if errors.Is(err, blob.ErrNotExist) {
		return fmt.Errorf("%s is neither on the local disk nor in the remote store: %w", key, err)
	}
	return fmt.Errorf("%s is not on the local disk; remote store: %w", key, err)
}

// remoteObject is an object that is read from the remote store.
type remoteObject struct {
	blob.Object
	key string
}

var _ blob.RemoteObject = (*remoteObject)(nil)

// Remote tells that reads of the object go to the remote store.
func (o *remoteObject) Remote() bool { return true }

// Tail returns how many bytes at the end came with Open.
func (o *remoteObject) Tail() int64 {
	if r, ok := o.Object.(blob.RemoteObject); ok {
		return r.Tail()
	}
	return 0
}

// ReadAt implements io.ReaderAt.
func (o *remoteObject) ReadAt(p []byte, off int64) (int, error) {
	n, err := o.Object.ReadAt(p, off)
	if err != nil && err != io.EOF {
		err = remoteError(o.key, err)
	}
	return n, err
}
