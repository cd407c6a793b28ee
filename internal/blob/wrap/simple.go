package wrap

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// Limit returns inner with at most so many operations that read (OpOpen, OpRead,
// OpStat) and that write (OpPut, OpDelete) at a time; the others wait. Lists
// are not counted: whoever goes through one uses the store meanwhile. A write
// callback must not write to the same store, for it could wait for itself.
func Limit(inner blob.Store, reads, writes int) blob.Store {
	reading, writing := semaphore.NewWeighted(int64(reads)), semaphore.NewWeighted(int64(writes))
	places := map[Op]*semaphore.Weighted{OpOpen: reading, OpRead: reading, OpStat: reading, OpPut: writing, OpDelete: writing}
	return &store{inner, func(ctx context.Context, op Op, key string, do func() (int64, error)) error {
		if free := places[op]; free != nil {
			if err := free.Acquire(ctx, 1); err != nil {
				return fmt.Errorf("%s %s: wait for other requests: %w", op, key, err)
			}
			defer free.Release(1)
		}
		_, err := do()
		return err
	}}
}

// Call is an operation that has ended.
type Call struct {
	Op       Op
	Key      string        // of OpList, the prefix
	Bytes    int64         // content that moved; of OpOpen, the object's tail
	Duration time.Duration // of OpList, with what its caller did meanwhile; of OpPut, with the write callback
	Err      error
}

// Meter returns inner with report called after each operation, by many
// goroutines at a time. The bytes of OpOpen and OpRead of a remote store are
// what was fetched.
func Meter(inner blob.Store, report func(Call)) blob.Store {
	return &store{inner, func(_ context.Context, op Op, key string, do func() (int64, error)) error {
		began := time.Now()
		n, err := do()
		report(Call{Op: op, Key: key, Bytes: n, Duration: time.Since(began), Err: err})
		return err
	}}
}

// Delay returns inner with a latency before each operation, to measure with.
func Delay(inner blob.Store, latency time.Duration) blob.Store {
	return &store{inner, func(ctx context.Context, op Op, key string, do func() (int64, error)) error {
		if err := wait(ctx, latency); err != nil {
			return fmt.Errorf("%s %s: %w", op, key, err)
		}
		_, err := do()
		return err
	}}
}

// wait returns after d, or ctx's error when that ends before.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
