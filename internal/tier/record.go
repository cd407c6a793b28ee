package tier

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Where the remote store keeps what the local one does not have.
const (
	recordPrefix   = "records/"
	templatePrefix = "templates/"
	ownerPrefix    = "owner/"
)

// The version of a record is that of the oldest release which knows all that is
// in it: one without checkpoints has version 1.
const (
	recordVersion = 2
	maxRecord     = 16 << 20 // bytes of a record
	hashLen       = 32       // hexadecimal digits of a hash in a key
)

// record is a Replica as it is kept in the remote store. See docs/formats/remote.md.
type record struct {
	Version     int            `json:"version"`
	Node        string         `json:"node"`
	WrittenAt   time.Time      `json:"written_at"`
	LastUsed    time.Time      `json:"last_used"`
	Sandbox     string         `json:"sandbox"`
	Snapshot    snapshot.Ref   `json:"snapshot"`
	Checkpoints []snapshot.Ref `json:"checkpoints,omitempty"`
	Record      []byte         `json:"record"`
	Template    templateRecord `json:"template"`
}

type templateRecord struct {
	Name    string         `json:"name"`
	Version int            `json:"version"`
	List    string         `json:"list,omitempty"` // hash in the key of the list of its files; empty: it has no files
	Record  []byte         `json:"record"`
	Bases   []snapshot.Ref `json:"bases,omitempty"`
}

func newRecord(r Replica) record {
	version := 1
	if len(r.Checkpoints) > 0 {
		version = recordVersion
	}
	return record{
		Version: version, Sandbox: r.Sandbox, Snapshot: r.Snapshot, Checkpoints: r.Checkpoints, Record: r.Record,
		Template: templateRecord{Name: r.Template.Name, Version: r.Template.Version, Record: r.Template.Record, Bases: r.Template.Bases},
	}
}

// recordKey returns the key of r's record. It depends on all that an import
// gives back, so that a change of it is another object.
func recordKey(r Replica) (string, error) {
	b, err := json.Marshal(newRecord(r))
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	key := recordPrefix + r.Sandbox + "/" + string(r.Snapshot.ID) + "/" + hex.EncodeToString(sum[:])[:hashLen]
	return key, blob.CheckKey(key)
}

// parseRecordKey returns the sandbox and the snapshot that a record's key names.
func parseRecordKey(key string) (sandbox string, id snapshot.ID, ok bool) {
	parts := strings.Split(strings.TrimPrefix(key, recordPrefix), "/")
	if !strings.HasPrefix(key, recordPrefix) || len(parts) != 3 || !isHash(parts[2]) {
		return "", "", false
	}
	id, err := snapshot.ParseID(parts[1])
	return parts[0], id, err == nil
}

func isHash(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == hashLen/2 && s == strings.ToLower(s)
}

// parseRecord decodes and checks the record in b, which has that key. The error
// names the key and wraps snapshot.ErrCorrupt or snapshot.ErrVersion.
func parseRecord(key string, b []byte) (record, error) {
	var r record
	fail := func(err error) (record, error) {
		return record{}, fmt.Errorf("%w %s in the remote store: %w", snapshot.ErrCorrupt, key, err)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return fail(err)
	}
	if r.Version < 1 || r.Version > recordVersion {
		return record{}, fmt.Errorf("%w %s in the remote store: version %d, this release reads 1 to %d", snapshot.ErrVersion, key, r.Version, recordVersion)
	}
	sandbox, id, ok := parseRecordKey(key)
	if !ok || r.Sandbox != sandbox || r.Snapshot.ID != id {
		return fail(errors.New("it is the record of another sandbox or snapshot"))
	}
	for _, ref := range slices.Concat([]snapshot.Ref{r.Snapshot}, r.Checkpoints, r.Template.Bases) {
		if _, err := snapshot.ParseID(string(ref.ID)); err != nil {
			return fail(err)
		}
		if sum, err := hex.DecodeString(ref.Manifest); err != nil || len(sum) != sha256.Size {
			return fail(fmt.Errorf("snapshot %s has no hash of a manifest", ref.ID))
		}
	}
	if t := r.Template; t.Version < 1 || t.List != "" && !isHash(t.List) {
		return fail(errors.New("its template is wrong"))
	}
	if err := blob.CheckKey(r.Template.key()); err != nil {
		return fail(err)
	}
	return r, nil
}

// readRecord reads the record with that key from the remote store.
func (t *Tier) readRecord(ctx context.Context, key string) (record, error) {
	b, err := t.fetch(ctx, key, maxRecord)
	if err != nil {
		return record{}, err
	}
	return parseRecord(key, b)
}

// maxReading bounds the records that are read at a time.
const maxReading = 8

// readRecords reads all records of the remote store. take is called for each, or
// with the error of the one that cannot be read, by one goroutine at a time; an error of it
// ends the reading.
func (t *Tier) readRecords(ctx context.Context, take func(sandbox string, r record, err error) error) error {
	keys, err := t.loadRecords(ctx)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxReading)
	var mu sync.Mutex
	for sandbox, ofSandbox := range keys {
		for key := range ofSandbox {
			g.Go(func() error {
				if err := ctx.Err(); err != nil {
					return err
				}
				r, err := t.readRecord(ctx, key)
				mu.Lock()
				defer mu.Unlock()
				return take(sandbox, r, err)
			})
		}
	}
	return g.Wait()
}

// fetch returns the content of an encoded object of the remote store.
func (t *Tier) fetch(ctx context.Context, key string, limit int64) ([]byte, error) {
	o, err := t.cfg.Remote.Open(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("remote store: %w", err)
	}
	defer o.Close()
	return decode(o, key, limit)
}

// putRemote puts what write writes, the same at each call, into the remote store
// unless the key is taken: then it is there already. It returns the bytes that
// the store took.
func (t *Tier) putRemote(ctx context.Context, key string, write func(io.Writer) error) (int64, error) {
	info, err := t.cfg.Remote.Put(ctx, key, write)
	switch {
	case errors.Is(err, blob.ErrExist):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("remote store: %w", err)
	}
	return info.Size, nil
}

// putRecord writes the record of r, whose template's files are in the list.
func (t *Tier) putRecord(ctx context.Context, key string, r Replica, list string) error {
	rec := newRecord(r)
	rec.Node, rec.WrittenAt, rec.LastUsed, rec.Template.List = t.cfg.Node, time.Now().UTC(), r.LastUsed.UTC(), list
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	if len(b) > maxRecord {
		return fmt.Errorf("the record of sandbox %s has %d bytes, at most %d can be kept", r.Sandbox, len(b), maxRecord)
	}
	_, err = t.putRemote(ctx, key, func(w io.Writer) error {
		_, err := encode(w, bytes.NewReader(b))
		return err
	})
	return err
}

// knowRecords makes sure that the remote store is this node's and that its
// records are known.
func (t *Tier) knowRecords(ctx context.Context) error {
	if err := t.own(ctx); err != nil {
		t.mu.Lock()
		t.records = nil // another node may change them
		t.mu.Unlock()
		return err
	}
	t.mu.Lock()
	known := t.records != nil
	t.mu.Unlock()
	if known {
		return nil
	}
	records, err := t.loadRecords(ctx)
	if err != nil {
		return err
	}
	t.mu.Lock()
	t.records = records
	t.mu.Unlock()
	return nil
}

// deleteRecords deletes all records of a sandbox but the one with the key keep.
// The records are known and nothing is collected meanwhile.
func (t *Tier) deleteRecords(ctx context.Context, sandbox, keep string) error {
	t.mu.Lock()
	keys := slices.Sorted(maps.Keys(t.records[sandbox]))
	t.mu.Unlock()
	for _, key := range keys {
		if key == keep {
			continue
		}
		if err := failpoint.Hit(ctx, fpReplaced); err != nil {
			return err
		}
		if err := t.cfg.Remote.Delete(ctx, key); err != nil {
			return fmt.Errorf("remote store: %w", err)
		}
		t.mu.Lock()
		delete(t.records[sandbox], key)
		if len(t.records[sandbox]) == 0 {
			delete(t.records, sandbox)
		}
		t.mu.Unlock()
	}
	return nil
}

// loadRecords returns the keys of the records in the remote store by sandbox.
func (t *Tier) loadRecords(ctx context.Context) (map[string]map[string]bool, error) {
	out := make(map[string]map[string]bool)
	for info, err := range t.cfg.Remote.List(ctx, recordPrefix) {
		if err != nil {
			return nil, fmt.Errorf("remote store: %w", err)
		}
		if sandbox, _, ok := parseRecordKey(info.Key); ok {
			if out[sandbox] == nil {
				out[sandbox] = make(map[string]bool)
			}
			out[sandbox][info.Key] = true
		}
	}
	return out, nil
}
