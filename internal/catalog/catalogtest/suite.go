package catalogtest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/hibernacle/hibernacle/internal/catalog"
)

// Catalog is what the suite tests.
type Catalog interface {
	Get(ctx context.Context, kind, key string) (catalog.Record, error)
	Put(ctx context.Context, kind, key string, value []byte, ifRevision uint64) (uint64, error)
	Delete(ctx context.Context, kind, key string, ifRevision uint64) error
	List(ctx context.Context, kind string) ([]catalog.Record, error)
}

// Run tests an implementation of the contract; open returns an empty catalog.
func Run(t *testing.T, open func(*testing.T) Catalog) {
	t.Run("CompareAndSwap", func(t *testing.T) { testCompareAndSwap(t, open(t)) })
	t.Run("KindsAreApartAndSorted", func(t *testing.T) { testKinds(t, open(t)) })
	t.Run("OneWinner", func(t *testing.T) { testOneWinner(t, open(t)) })
	t.Run("EndedContext", func(t *testing.T) { testEndedContext(t, open(t)) })
}

func testCompareAndSwap(t *testing.T, c Catalog) {
	ctx := t.Context()
	if _, err := c.Get(ctx, "sandbox", "a"); !errors.Is(err, catalog.ErrNotFound) {
		t.Fatalf("get of nothing: %v", err)
	}
	first, err := c.Put(ctx, "sandbox", "a", []byte("1"), 0)
	if err != nil || first == 0 {
		t.Fatalf("put: %d, %v", first, err)
	}
	if _, err := c.Put(ctx, "sandbox", "a", []byte("x"), 0); !errors.Is(err, catalog.ErrConflict) {
		t.Fatalf("second creation: %v", err)
	}
	second, err := c.Put(ctx, "sandbox", "a", []byte("2"), first)
	if err != nil || second <= first {
		t.Fatalf("swap: %d, %v", second, err)
	}
	if _, err := c.Put(ctx, "sandbox", "a", []byte("x"), first); !errors.Is(err, catalog.ErrConflict) {
		t.Fatalf("stale swap: %v", err)
	}
	if _, err := c.Put(ctx, "sandbox", "b", []byte("x"), second); !errors.Is(err, catalog.ErrNotFound) {
		t.Fatalf("swap of nothing: %v", err)
	}
	if err := c.Delete(ctx, "sandbox", "a", first); !errors.Is(err, catalog.ErrConflict) {
		t.Fatalf("stale delete: %v", err)
	}
	if err := c.Delete(ctx, "sandbox", "a", second); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(ctx, "sandbox", "a", second); !errors.Is(err, catalog.ErrNotFound) {
		t.Fatalf("second delete: %v", err)
	}
	again, err := c.Put(ctx, "sandbox", "a", []byte("3"), 0)
	if err != nil || again <= second {
		t.Fatalf("a revision came back: %d after %d, %v", again, second, err)
	}
}

func testKinds(t *testing.T, c Catalog) {
	ctx := t.Context()
	for _, key := range []string{"c", "a", "b"} {
		if _, err := c.Put(ctx, "sandbox", key, []byte(key), 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Put(ctx, "template", "a", nil, 0); err != nil {
		t.Fatal(err)
	}
	list, err := c.List(ctx, "sandbox")
	if err != nil || len(list) != 3 || list[0].Key != "a" || list[2].Key != "c" || string(list[1].Value) != "b" {
		t.Fatalf("list: %v, %v", list, err)
	}
	if list, err := c.List(ctx, "nothing"); err != nil || len(list) != 0 {
		t.Fatalf("list of nothing: %v, %v", list, err)
	}
	if rec, err := c.Get(ctx, "template", "a"); err != nil || len(rec.Value) != 0 {
		t.Fatalf("empty value: %v, %v", rec, err)
	}
}

// testOneWinner lets many writers swap the same revision: one succeeds.
func testOneWinner(t *testing.T, c Catalog) {
	ctx := t.Context()
	rev, err := c.Put(ctx, "sandbox", "a", []byte("0"), 0)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	errs := make([]error, 16)
	for i := range errs {
		wg.Go(func() { _, errs[i] = c.Put(ctx, "sandbox", "a", fmt.Append(nil, i), rev) })
	}
	wg.Wait()
	won := 0
	for _, err := range errs {
		if err == nil {
			won++
		} else if !errors.Is(err, catalog.ErrConflict) {
			t.Error(err)
		}
	}
	if won != 1 {
		t.Fatalf("%d writers won", won)
	}
}

func testEndedContext(t *testing.T, c Catalog) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Put(ctx, "sandbox", "a", nil, 0); !errors.Is(err, context.Canceled) {
		t.Fatalf("put: %v", err)
	}
	if _, err := c.Get(t.Context(), "sandbox", "a"); !errors.Is(err, catalog.ErrNotFound) {
		t.Fatalf("it was written: %v", err)
	}
}
