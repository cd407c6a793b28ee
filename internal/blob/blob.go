// Package blob owns the contract of a store of immutable bytes. An object is a
// sequence of bytes that was put once under a key and never changes; a Store
// keeps objects. Drivers live in subpackages; blobtest is the suite that a
// driver must pass.
package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"
)

// Errors that callers act on. Stores return them wrapped, with the key in the
// message.
var (
	ErrNotExist   = errors.New("no such object in the store")
	ErrExist      = errors.New("the object is in the store already")
	ErrInUse      = errors.New("the object is in use")
	ErrNoSpace    = errors.New("no space left in the store")
	ErrInvalidKey = errors.New("invalid object key")

	// ErrUnavailable says that the store could not be asked, or did not answer:
	// nothing is known about the object, and another try may succeed.
	ErrUnavailable = errors.New("the store is not available")

	// ErrRefused is an ErrUnavailable that lasts until somebody changes a
	// setting, here or there: another try is of no use before.
	ErrRefused = fmt.Errorf("%w: it refuses to serve", ErrUnavailable)
)

// Info describes an object.
type Info struct {
	Key     string
	Size    int64 // bytes
	ModTime time.Time
}

// Object is an object that was opened for reading. ReadAt may be called by
// many goroutines at a time, but not after Close. Where a read may last, Close
// ends those under way: they fail.
//
// ReadAt returns the object's own bytes or an error, which wraps ErrUnavailable
// like those of a Store, and ErrNotExist if the object was deleted or replaced
// in a store that does not hold it.
type Object interface {
	io.ReaderAt
	io.Closer

	// Size returns the object's length in bytes.
	Size() int64
}

// RemoteObject is what an Object may be, too, if reading it costs requests.
type RemoteObject interface {
	Object

	// Remote reports whether a read may cost a request to another machine.
	Remote() bool

	// Tail returns how many bytes at the object's end came with Open: reads
	// of these cost nothing more.
	Tail() int64
}

// Store keeps objects. Its methods may be called at the same time, also by
// other processes on the same store. Keys must satisfy CheckKey; a method that
// is given another key returns an error that wraps ErrInvalidKey.
type Store interface {
	// Put makes an object of what write writes. The object is seen whole and
	// has become durable, its entry in the store as well, or it is not seen
	// at all: Put returns an error and has removed what it wrote. The error wraps write's own
	// if there is one, ErrExist if the key is taken (by then, write may have
	// been called), ErrNoSpace if the store is full. When ctx ends, Put fails.
	// Put calls write once at most. After an ErrUnavailable that came when all
	// was written the object may be there or not; it is whole if it is.
	Put(ctx context.Context, key string, write func(io.Writer) error) (Info, error)

	// Open opens an object. A store that holds objects, as its driver says,
	// keeps it from Delete until Close; in another one an object that is
	// deleted meanwhile can't be read any more. The error wraps ErrNotExist if
	// there is none.
	Open(ctx context.Context, key string) (Object, error)

	// Stat describes an object. The error wraps ErrNotExist if there is none.
	Stat(ctx context.Context, key string) (Info, error)

	// List yields the objects whose keys begin with prefix, in no particular
	// order; "" yields all. Objects that are put or deleted meanwhile may be
	// among them or not. An error ends the sequence.
	List(ctx context.Context, prefix string) iter.Seq2[Info, error]

	// Delete removes an object durably. In a store that holds objects the
	// error wraps ErrInUse while anybody, in whatever process, has it open;
	// elsewhere whoever deletes must know that nobody needs it. An object that
	// is not there is no error.
	Delete(ctx context.Context, key string) error
}

// maxKey is the longest key in bytes.
const maxKey = 256

// CheckKey returns an error that wraps ErrInvalidKey unless key is one to eight names
// joined by slashes, each of [a-z0-9._-] with a letter or digit in front, 256
// bytes in all at most.
func CheckKey(key string) error {
	if len(key) > maxKey {
		return fmt.Errorf("%w %q…: longer than %d bytes", ErrInvalidKey, key[:32], maxKey)
	}
	names := strings.Split(key, "/")
	if len(names) > 8 {
		return fmt.Errorf("%w %q: more than 8 names", ErrInvalidKey, key)
	}
	for _, name := range names {
		if !validName(name) {
			return fmt.Errorf("%w %q", ErrInvalidKey, key)
		}
	}
	return nil
}

// CheckPrefix returns an error that wraps ErrInvalidKey if the folders in prefix
// are such that no key begins with it.
func CheckPrefix(prefix string) error {
	end := strings.LastIndexByte(prefix, '/')
	if end < 0 {
		return nil
	}
	return CheckKey(prefix[:end])
}

func validName(name string) bool {
	for i := range len(name) {
		c := name[i]
		alnum := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("._-", rune(c))) {
			return false
		}
	}
	return name != ""
}
