package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/page"
)

// worksetVersion is the version of working sets that this release writes and reads.
const worksetVersion = 1

const (
	worksetPrefix   = "worksets/"
	worksetMagic    = "HIBWSET\n"
	worksetHeader   = 16
	maxWorksetRuns  = 1 << 16
	maxWorksetPages = 1 << 16
	maxWorkset      = worksetHeader + 16*maxWorksetRuns + sha256.Size
)

func worksetKey(id ID) string { return worksetPrefix + string(id) }

// WorkingSet returns the pages that a guest touched first after a resume, in
// that order, all within the memory, as they were recorded when the snapshot was
// opened. The error wraps ErrMissing if none was recorded; no error stands in the way
// of a resume.
func (s *Snapshot) WorkingSet(ctx context.Context) ([]page.Run, error) {
	b, err := s.workset.wait(ctx)
	if err != nil {
		return nil, err
	}
	runs, err := parseWorkset(s.ref.ID, b)
	if err != nil {
		return nil, err
	}
	pages := uint64(pagesOf(s.manifest.metadata.MemoryBytes))
	within := runs[:0]
	for _, r := range runs {
		if r.End() <= pages {
			within = append(within, r)
		}
	}
	return within, nil
}

// SaveWorkingSet records the working set of snapshot id unless it has one. Of a
// set that is too large the first pages are kept.
func (r *Repository) SaveWorkingSet(ctx context.Context, id ID, runs []page.Run) error {
	err := r.put(ctx, worksetKey(id), encodeWorkset(runs))
	if errors.Is(err, blob.ErrExist) {
		return nil
	}
	return err
}

func readWorkset(ctx context.Context, store blob.Store, id ID) ([]page.Run, error) {
	o, b, err := readObject(ctx, store, worksetKey(id), maxWorkset)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	return parseWorkset(id, b)
}

func encodeWorkset(runs []page.Run) []byte {
	kept, pages := runs[:0:0], uint64(0)
	for _, r := range runs {
		if len(kept) == maxWorksetRuns || pages == maxWorksetPages {
			break
		}
		r.Count = min(r.Count, maxWorksetPages-pages)
		if r.Count > 0 {
			kept, pages = append(kept, r), pages+r.Count
		}
	}
	b := make([]byte, 0, worksetHeader+16*len(kept)+sha256.Size)
	b = append(b, worksetMagic...)
	b = binary.LittleEndian.AppendUint32(b, worksetVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(kept)))
	for _, r := range kept {
		b = binary.LittleEndian.AppendUint64(b, r.First)
		b = binary.LittleEndian.AppendUint64(b, r.Count)
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

// parseWorkset returns the runs in the working set b of snapshot id. Errors
// name the object and wrap ErrCorrupt or ErrVersion.
func parseWorkset(id ID, b []byte) ([]page.Run, error) {
	key := worksetKey(id)
	if len(b) < worksetHeader+sha256.Size || string(b[:8]) != worksetMagic {
		return nil, corrupt(key, "it is cut off, or no working set")
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != worksetVersion {
		return nil, unknownVersion(key, v, worksetVersion)
	}
	body, sum := b[:len(b)-sha256.Size], b[len(b)-sha256.Size:]
	if got := sha256.Sum256(body); !bytes.Equal(got[:], sum) {
		return nil, corrupt(key, "it does not fit the hash at its end")
	}
	n := int(binary.LittleEndian.Uint32(b[12:]))
	if n > maxWorksetRuns || len(body) != worksetHeader+16*n {
		return nil, corrupt(key, "%d runs do not fit its length", n)
	}
	runs, total := make([]page.Run, n), uint64(0)
	for i := range runs {
		at := body[worksetHeader+16*i:]
		r := page.Run{First: binary.LittleEndian.Uint64(at), Count: binary.LittleEndian.Uint64(at[8:])}
		if r.Count == 0 || r.Count > maxWorksetPages || r.First > 1<<32 || r.End() > 1<<32 {
			return nil, corrupt(key, "run %d is not one of pages", i)
		}
		runs[i], total = r, total+r.Count
	}
	if total > maxWorksetPages {
		return nil, corrupt(key, "it has %d pages, at most %d are possible", total, maxWorksetPages)
	}
	return runs, nil
}
