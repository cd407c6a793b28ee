package wrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// Policy says how Retry tries again. The zero value is the usual one.
type Policy struct {
	// Attempts is how often an operation is tried in all; 0 stands for 5.
	Attempts int

	// Backoff is the wait before the second attempt, 0 for 100 ms. It doubles
	// with each attempt, to 32 times as much at most, less a random part of up
	// to a half.
	Backoff time.Duration

	// PutOnce says that write callbacks given to Put can't be called again.
	// Then Put is tried once. Without it, a callback must write the same bytes
	// each time it is called.
	PutOnce bool
}

// Retry returns inner with operations tried again that fail with
// blob.ErrUnavailable, unless it is blob.ErrRefused.
//   - A read goes on behind the bytes that it has.
//   - A list yields no key twice.
//   - A Put whose first attempt may have succeeded, though its answer was lost, succeeds
//     if the object that is there has the bytes that write writes.
//
// A Delete or Open that is tried again does the same again.
func Retry(inner blob.Store, p Policy) blob.Store {
	if p.Attempts == 0 {
		p.Attempts = 5
	}
	if p.Backoff == 0 {
		p.Backoff = 100 * time.Millisecond
	}
	return &retry{inner, p}
}

type retry struct {
	inner blob.Store
	Policy
}

// do calls try until it succeeds, fails for good, or the attempts are used up.
func (r *retry) do(ctx context.Context, try func() error) error {
	for attempt := 1; ; attempt++ {
		err := try()
		if !errors.Is(err, blob.ErrUnavailable) || errors.Is(err, blob.ErrRefused) || ctx.Err() != nil {
			return err
		}
		if attempt >= r.Attempts {
			return fmt.Errorf("%w (attempt %d, the last)", err, attempt)
		}
		pause := r.Backoff << min(attempt-1, 5)
		if cerr := wait(ctx, pause-rand.N(pause/2+1)); cerr != nil {
			return fmt.Errorf("%w while waiting to try again: %w", cerr, err)
		}
	}
}

func (r *retry) Put(ctx context.Context, key string, write func(io.Writer) error) (info blob.Info, err error) {
	if r.PutOnce {
		return r.inner.Put(ctx, key, write)
	}
	unclear := false // whether an earlier attempt may have put the object
	err = r.do(ctx, func() error {
		var own error // of write: it is not the store's, whatever it wraps
		info, err = r.inner.Put(ctx, key, func(w io.Writer) error {
			own = write(w)
			return own
		})
		if unclear && errors.Is(err, blob.ErrExist) {
			return r.compare(ctx, key, write, err, &info)
		}
		unclear = unclear || own == nil && errors.Is(err, blob.ErrUnavailable)
		return err
	})
	return info, err
}

// compare returns nil and fills info if the object is what write writes, taken
// if not.
func (r *retry) compare(ctx context.Context, key string, write func(io.Writer) error, taken error, info *blob.Info) error {
	o, err := r.Open(ctx, key)
	if err != nil {
		return err
	}
	defer o.Close()
	c := &comparer{there: io.NewSectionReader(o, 0, o.Size())}
	err = write(c)
	if c.err != nil {
		err = c.err
	}
	switch {
	case c.differs, err == nil && c.n != o.Size():
		return taken
	case err != nil:
		return err
	}
	*info, err = r.Stat(ctx, key)
	return err
}

var errDiffers = errors.New("another object has this key")

// comparer is a writer that fails where it is given other bytes than there are.
type comparer struct {
	there   io.Reader
	n       int64 // bytes compared
	buf     []byte
	differs bool
	err     error // of reading
}

func (c *comparer) Write(p []byte) (int, error) {
	if len(c.buf) < len(p) {
		c.buf = make([]byte, len(p))
	}
	n, err := io.ReadFull(c.there, c.buf[:len(p)])
	c.n += int64(n)
	switch {
	case !bytes.Equal(p[:n], c.buf[:n]), err == io.EOF, err == io.ErrUnexpectedEOF:
		c.differs = true
		return 0, errDiffers
	case err != nil:
		c.err = err
		return 0, err
	}
	return n, nil
}

func (r *retry) Open(ctx context.Context, key string) (o blob.Object, err error) {
	err = r.do(ctx, func() error {
		o, err = r.inner.Open(ctx, key)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &retried{newObject(ctx, o), r}, nil
}

func (r *retry) Stat(ctx context.Context, key string) (info blob.Info, err error) {
	err = r.do(ctx, func() error {
		info, err = r.inner.Stat(ctx, key)
		return err
	})
	return info, err
}

func (r *retry) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		seen := map[string]bool{}
		err := r.do(ctx, func() error {
			for info, err := range r.inner.List(ctx, prefix) {
				if err != nil {
					return err
				}
				if seen[info.Key] {
					continue
				}
				seen[info.Key] = true
				if !yield(info, nil) {
					return nil
				}
			}
			return nil
		})
		if err != nil {
			yield(blob.Info{}, err)
		}
	}
}

func (r *retry) Delete(ctx context.Context, key string) error {
	return r.do(ctx, func() error { return r.inner.Delete(ctx, key) })
}

// retried is an object of a store with retries.
type retried struct {
	*object
	retry *retry
}

func (o *retried) ReadAt(p []byte, off int64) (n int, err error) {
	err = o.retry.do(o.ctx, func() error {
		m, err := o.Object.ReadAt(p[n:], off+int64(n))
		n += m
		return err
	})
	return n, err
}
