// Package catalog keeps the durable records of a host: small values under a
// kind and a key, changed only by compare-and-swap.
//
// A record is a value with the revision at which it was last written. A
// revision is a number that grows with every write to the catalog and is never
// used twice, not even for a key that was deleted and made again, so a writer
// that names the revision it has read cannot overwrite what it has not seen.
//
// The contract is a subset of what etcd offers (get, list by prefix, and a put
// or delete on condition of a key's mod revision), so that a catalog shared by
// many nodes can take this one's place. Two things follow for callers. A write
// that failed with anything but ErrConflict or ErrNotFound may have taken
// effect all the same: read the record again. And there is no transaction over
// several records: order the writes so that each state between them can be
// recovered from.
//
// This implementation is one bbolt file (docs/formats/catalog.md), used by one
// process at a time. Every success has been fsynced.
package catalog

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

var (
	// ErrNotFound says that there is no record of that kind and key.
	ErrNotFound = errors.New("no such record")
	// ErrConflict says that the record has another revision than the one named,
	// or that it is there and was expected not to be.
	ErrConflict = errors.New("the record was changed by somebody else")
	// ErrInUse says that another process has the catalog open.
	ErrInUse = errors.New("the catalog is in use by another process")
	// ErrFormat says that the file is no catalog or one of another format.
	ErrFormat = errors.New("not a catalog that this version can read")
)

// Format is the version of the file's layout that this build writes.
const Format = 1

// lockWait bounds how long Open waits for another process to let go of the
// file: long enough for a daemon that is just ending.
const lockWait = 5 * time.Second

// The buckets of the file, and the key of metaBucket that holds the format.
var (
	metaBucket    = []byte("meta")
	recordsBucket = []byte("records") // one bucket a kind; its sequence is the last revision given out
	formatKey     = []byte("format")
)

// Record is one value and where it stands.
type Record struct {
	Key      string
	Value    []byte // the caller's own copy
	Revision uint64 // never 0
}

// Catalog is an open catalog. Its methods may be called at the same time.
type Catalog struct {
	db *bolt.DB
}

// Open opens the catalog at path, which it makes where there is none; the
// folder must exist. ErrInUse says that another process holds it, ErrFormat
// that the file is something else or newer.
func Open(path string) (*Catalog, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: lockWait, FreelistType: bolt.FreelistMapType})
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return nil, fmt.Errorf("open catalog %s: %w", path, ErrInUse)
	case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrVersionMismatch), errors.Is(err, bolterrors.ErrChecksum):
		return nil, fmt.Errorf("open catalog %s: %w: %w", path, ErrFormat, err)
	case err != nil:
		return nil, fmt.Errorf("open catalog %s: %w", path, err)
	}
	if err := db.Update(prepare); err != nil {
		db.Close()
		return nil, fmt.Errorf("open catalog %s: %w", path, err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		db.Close()
		return nil, fmt.Errorf("open catalog %s: %w", path, err)
	}
	return &Catalog{db: db}, nil
}

// prepare makes the buckets of a new file and checks the format of an old one.
func prepare(tx *bolt.Tx) error {
	meta, err := tx.CreateBucketIfNotExists(metaBucket)
	if err != nil {
		return err
	}
	if _, err := tx.CreateBucketIfNotExists(recordsBucket); err != nil {
		return err
	}
	switch v := meta.Get(formatKey); {
	case v == nil:
		return meta.Put(formatKey, binary.BigEndian.AppendUint64(nil, Format))
	case len(v) != 8:
		return fmt.Errorf("%w: its format field is %d bytes long", ErrFormat, len(v))
	case binary.BigEndian.Uint64(v) != Format:
		return fmt.Errorf("%w: it has format %d, this version reads %d", ErrFormat, binary.BigEndian.Uint64(v), Format)
	}
	return nil
}

// syncDir makes a new file's entry in its folder durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// Get returns the record of that kind and key, or ErrNotFound.
func (c *Catalog) Get(ctx context.Context, kind, key string) (Record, error) {
	if err := check(ctx, kind, key); err != nil {
		return Record{}, err
	}
	var rec Record
	err := c.db.View(func(tx *bolt.Tx) (err error) {
		rec, err = get(tx.Bucket(recordsBucket).Bucket([]byte(kind)), key)
		return err
	})
	if err != nil {
		return Record{}, fmt.Errorf("read %s %s: %w", kind, key, err)
	}
	return rec, nil
}

// get reads one record of a kind's bucket, which may be nil.
func get(kind *bolt.Bucket, key string) (Record, error) {
	if kind == nil {
		return Record{}, ErrNotFound
	}
	v := kind.Get([]byte(key))
	if v == nil {
		return Record{}, ErrNotFound
	}
	return decode(key, v)
}

// decode takes a stored value apart: 8 bytes of revision, big endian, then the value.
func decode(key string, v []byte) (Record, error) {
	if len(v) < 8 {
		return Record{}, fmt.Errorf("%w: the entry is %d bytes long", ErrFormat, len(v))
	}
	return Record{Key: key, Value: append([]byte(nil), v[8:]...), Revision: binary.BigEndian.Uint64(v)}, nil
}

// Put writes value if the record's revision is still ifRevision (0: if there
// is no such record) and returns the new revision; otherwise ErrConflict, or
// ErrNotFound where a revision was named and there is no record.
func (c *Catalog) Put(ctx context.Context, kind, key string, value []byte, ifRevision uint64) (uint64, error) {
	if err := check(ctx, kind, key); err != nil {
		return 0, err
	}
	var revision uint64
	err := c.db.Update(func(tx *bolt.Tx) error {
		records := tx.Bucket(recordsBucket)
		b, err := records.CreateBucketIfNotExists([]byte(kind))
		if err != nil {
			return err
		}
		if err := compare(b, key, ifRevision); err != nil {
			return err
		}
		if revision, err = records.NextSequence(); err != nil {
			return err
		}
		stored := binary.BigEndian.AppendUint64(make([]byte, 0, 8+len(value)), revision)
		return b.Put([]byte(key), append(stored, value...))
	})
	if err != nil {
		return 0, fmt.Errorf("write %s %s: %w", kind, key, err)
	}
	return revision, nil
}

// Delete removes the record if its revision is still ifRevision; otherwise
// ErrConflict, or ErrNotFound where there is none.
func (c *Catalog) Delete(ctx context.Context, kind, key string, ifRevision uint64) error {
	if err := check(ctx, kind, key); err != nil {
		return err
	}
	err := c.db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket(recordsBucket).Bucket([]byte(kind))
		if b == nil || b.Get([]byte(key)) == nil {
			return ErrNotFound
		}
		if err := compare(b, key, ifRevision); err != nil {
			return err
		}
		return b.Delete([]byte(key))
	})
	if err != nil {
		return fmt.Errorf("delete %s %s: %w", kind, key, err)
	}
	return nil
}

// compare returns nil if the record has revision want, 0 meaning that there is none.
func compare(b *bolt.Bucket, key string, want uint64) error {
	rec, err := get(b, key)
	switch {
	case errors.Is(err, ErrNotFound) && want == 0:
		return nil
	case err != nil:
		return err
	case rec.Revision != want:
		return fmt.Errorf("%w: it has revision %d, not %d", ErrConflict, rec.Revision, want)
	}
	return nil
}

// List returns the records of a kind, sorted by key: all of one instant.
func (c *Catalog) List(ctx context.Context, kind string) ([]Record, error) {
	if err := check(ctx, kind, "*"); err != nil {
		return nil, err
	}
	var list []Record
	err := c.db.View(func(tx *bolt.Tx) error {
		b := tx.Bucket(recordsBucket).Bucket([]byte(kind))
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, v []byte) error {
			rec, err := decode(string(k), v)
			if err != nil {
				return fmt.Errorf("%s: %w", k, err)
			}
			list = append(list, rec)
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", kind, err)
	}
	return list, nil
}

// Close closes the file. Calls under way end first; later ones fail.
func (c *Catalog) Close() error { return c.db.Close() }

// check refuses a call whose context has ended or whose names are empty.
func check(ctx context.Context, kind, key string) error {
	if kind == "" || key == "" {
		return fmt.Errorf("a record needs a kind and a key, not %q and %q", kind, key)
	}
	return ctx.Err()
}
