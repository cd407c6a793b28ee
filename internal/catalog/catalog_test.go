package catalog_test

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/catalog/catalogtest"
)

func open(t *testing.T) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Open(filepath.Join(t.TempDir(), "catalog.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestContract(t *testing.T) {
	catalogtest.Run(t, func(t *testing.T) catalogtest.Catalog { return open(t) })
}

func TestMemoryKeepsTheContract(t *testing.T) {
	catalogtest.Run(t, func(*testing.T) catalogtest.Catalog { return new(catalogtest.Memory) })
}

func TestSurvivesReopening(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "catalog.db")
	c, err := catalog.Open(path)
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
	if c, err = catalog.Open(path); err != nil {
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
	if _, err := catalog.Open(junk); !errors.Is(err, catalog.ErrFormat) {
		t.Errorf("zeros: %v", err)
	}
	newer := filepath.Join(dir, "newer")
	db, err := bolt.Open(newer, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(func(tx *bolt.Tx) error {
		meta, err := tx.CreateBucket([]byte("meta"))
		if err != nil {
			return err
		}
		return meta.Put([]byte("format"), binary.BigEndian.AppendUint64(nil, catalog.Format+1))
	}); err != nil {
		t.Fatal(err)
	}
	db.Close()
	if _, err := catalog.Open(newer); !errors.Is(err, catalog.ErrFormat) {
		t.Errorf("a newer format: %v", err)
	}
}

func TestOneProcessAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "catalog.db")
	c, err := catalog.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := catalog.Open(path); !errors.Is(err, catalog.ErrInUse) {
		t.Fatalf("second open: %v", err)
	}
}

// BenchmarkPut writes a record of a sandbox's size durably.
func BenchmarkPut(b *testing.B) {
	c, err := catalog.Open(filepath.Join(b.TempDir(), "catalog.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	value, rev := make([]byte, 2000), uint64(0)
	for b.Loop() {
		if rev, err = c.Put(b.Context(), "sandbox", "a", value, rev); err != nil {
			b.Fatal(err)
		}
	}
}
