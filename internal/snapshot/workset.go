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

const (
	worksetPrefix   = "worksets/"
	worksetMagic    = "HIBWSET\n"
	worksetVersion  = 2 // that this release writes and reads
	worksetHeader   = 16
	maxWorksetRuns  = 1 << 16
	maxWorksetPages = 1 << 16
	maxWorkset      = worksetHeader + 16*maxWorksetRuns + sha256.Size
)

// WorkingSet lists the pages that a guest touched first after a resume, in that
// order, each page once.
type WorkingSet []Touched

// Touched is a run of pages with the same history.
type Touched struct {
	page.Run
	// Idle is for how many resumes in a row the guest has left the pages alone.
	// Candidate marks pages that were touched once and are not prefetched yet.
	Idle uint8
}

// Candidate is the Idle of pages that are remembered, but no members of the set yet.
const Candidate = 255

// Append adds page p to the set and returns the result. Its last run is extended
// where it is adjacent and alike.
func (w WorkingSet) Append(p uint64, idle uint8) WorkingSet {
	if k := len(w); k > 0 && w[k-1].End() == p && w[k-1].Idle == idle {
		w[k-1].Count++
		return w
	}
	return append(w, Touched{page.Run{First: p, Count: 1}, idle})
}

// Members returns the pages to prefetch, in order: all but the candidates.
func (w WorkingSet) Members() []page.Run {
	var runs []page.Run
	for _, t := range w {
		if t.Idle != Candidate {
			runs = append(runs, t.Run)
		}
	}
	return runs
}

func worksetKey(id ID) string { return worksetPrefix + string(id) }

// WorkingSet returns the pages that a guest touched first after a resume, in
// that order, all within the memory, as they were recorded when the snapshot was
// opened. The error wraps ErrMissing if none was recorded; no error stands in the way
// of a resume.
func (s *Snapshot) WorkingSet(ctx context.Context) (WorkingSet, error) {
	b, err := s.workset.wait(ctx)
	if err != nil {
		return nil, err
	}
	set, err := parseWorkset(s.ref.ID, b)
	if err != nil {
		return nil, err
	}
	pages := uint64(pagesOf(s.manifest.metadata.MemoryBytes))
	within := set[:0]
	for _, t := range set {
		if t.End() <= pages {
			within = append(within, t)
		}
	}
	return within, nil
}

// SaveWorkingSet records the working set of snapshot id unless it has one. Of a
// set that is too large the first pages are kept.
func (r *Repository) SaveWorkingSet(ctx context.Context, id ID, set WorkingSet) error {
	err := r.put(ctx, worksetKey(id), encodeWorkset(set))
	if errors.Is(err, blob.ErrExist) {
		return nil
	}
	return err
}

func readWorkset(ctx context.Context, store blob.Store, id ID) (WorkingSet, error) {
	o, b, err := readObject(ctx, store, worksetKey(id), maxWorkset)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	return parseWorkset(id, b)
}

func encodeWorkset(set WorkingSet) []byte {
	kept, pages := set[:0:0], uint64(0)
	for _, t := range set {
		if len(kept) == maxWorksetRuns || pages == maxWorksetPages {
			break
		}
		t.Count = min(t.Count, maxWorksetPages-pages)
		if t.Count > 0 {
			kept, pages = append(kept, t), pages+t.Count
		}
	}
	b := make([]byte, 0, worksetHeader+16*len(kept)+sha256.Size)
	b = append(b, worksetMagic...)
	b = binary.LittleEndian.AppendUint32(b, worksetVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(kept)))
	for _, t := range kept {
		b = binary.LittleEndian.AppendUint64(b, t.First)
		b = binary.LittleEndian.AppendUint32(b, uint32(t.Count))
		b = binary.LittleEndian.AppendUint32(b, uint32(t.Idle))
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

// parseWorkset returns the working set in b, that of snapshot id. Errors name
// the object and wrap ErrCorrupt or ErrVersion.
func parseWorkset(id ID, b []byte) (WorkingSet, error) {
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
	set, total := make(WorkingSet, n), uint64(0)
	for i := range set {
		at := body[worksetHeader+16*i:]
		r := page.Run{First: binary.LittleEndian.Uint64(at), Count: uint64(binary.LittleEndian.Uint32(at[8:]))}
		idle := binary.LittleEndian.Uint32(at[12:])
		if r.Count == 0 || r.Count > maxWorksetPages || r.First > 1<<32 || r.End() > 1<<32 || idle > Candidate {
			return nil, corrupt(key, "run %d is not one of pages", i)
		}
		set[i], total = Touched{r, uint8(idle)}, total+r.Count
	}
	if total > maxWorksetPages {
		return nil, corrupt(key, "it has %d pages, at most %d are possible", total, maxWorksetPages)
	}
	return set, nil
}
