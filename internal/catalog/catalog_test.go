package catalog

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	bolt "go.etcd.io/bbolt"
)

func open(t *testing.T) *Catalog {
	t.Helper()
	c, err := Open(filepath.Join(t.TempDir(), "catalog.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestCompareAndSwap(t *testing.T) {
	ctx := context.Background()
	c := open(t)
	if _, err := c.Get(ctx, "sandbox", "a"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("get of nothing: %v", err)
	}
	first, err := c.Put(ctx, "sandbox", "a", []byte("1"), 0)
	if err != nil || first == 0 {
		t.Fatalf("put: %d, %v", first, err)
	}
	if _, err := c.Put(ctx, "sandbox", "a", []byte("x"), 0); !errors.Is(err, ErrConflict) {
		t.Fatalf("second creation: %v", err)
	}
	second, err := c.Put(ctx, "sandbox", "a", []byte("2"), first)
	if err != nil || second <= first {
		t.Fatalf("swap: %d, %v", second, err)
	}
	if _, err := c.Put(ctx, "sandbox", "a", []byte("x"), first); !errors.Is(err, ErrConflict) {
		t.Fatalf("stale swap: %v", err)
	}
	if _, err := c.Put(ctx, "sandbox", "b", []byte("x"), second); !errors.Is(err, ErrNotFound) {
		t.Fatalf("swap of nothing: %v", err)
	}
	if err := c.Delete(ctx, "sandbox", "a", first); !errors.Is(err, ErrConflict) {
		t.Fatalf("stale delete: %v", err)
	}
	if err := c.Delete(ctx, "sandbox", "a", second); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(ctx, "sandbox", "a", second); !errors.Is(err, ErrNotFound) {
		t.Fatalf("second delete: %v", err)
	}
	again, err := c.Put(ctx, "sandbox", "a", []byte("3"), 0)
	if err != nil || again <= second {
		t.Fatalf("a revision came back: %d after %d, %v", again, second, err)
	}
}

func TestKindsAreApartAndSorted(t *testing.T) {
	ctx := context.Background()
	c := open(t)
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

func TestSurvivesReopening(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "catalog.db")
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	rev, err := c.Put(ctx, "sandbox", "a", []byte("1"), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(ctx, "sandbox", "a"); err == nil {
		t.Fatal("a closed catalog answered")
	}
	if c, err = Open(path); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if rec, err := c.Get(ctx, "sandbox", "a"); err != nil || rec.Revision != rev || string(rec.Value) != "1" {
		t.Fatalf("after reopening: %v, %v", rec, err)
	}
}

func TestRefusesWhatIsNoCatalog(t *testing.T) {
	dir := t.TempDir()
	junk := filepath.Join(dir, "junk")
	if err := os.WriteFile(junk, make([]byte, 1<<16), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(junk); !errors.Is(err, ErrFormat) {
		t.Errorf("zeros: %v", err)
	}
	newer := filepath.Join(dir, "newer")
	c, err := Open(newer)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket(metaBucket).Put(formatKey, binary.BigEndian.AppendUint64(nil, Format+1))
	}); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := Open(newer); !errors.Is(err, ErrFormat) {
		t.Errorf("a newer format: %v", err)
	}
}

func TestOneProcessAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "catalog.db")
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := Open(path); !errors.Is(err, ErrInUse) {
		t.Fatalf("second open: %v", err)
	}
}

// TestOneWinner lets many writers swap the same revision: one succeeds.
func TestOneWinner(t *testing.T) {
	ctx := context.Background()
	c := open(t)
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
		} else if !errors.Is(err, ErrConflict) {
			t.Error(err)
		}
	}
	if won != 1 {
		t.Fatalf("%d writers won", won)
	}
}
