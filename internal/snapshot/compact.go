package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

// CompactInput says what is compacted, and how.
type CompactInput struct {
	Ref    Ref           // the snapshot to be compacted
	ID     ID            // of the snapshot to be made: a new one
	Shared func(ID) bool // packs that others use, which stay where they are; nil: none

	// Pace is called before each MiB that is copied, and may hold it up; its error ends the compaction. nil: nothing does.
	Pace func(context.Context) error
}

// Compacted says what Compact did.
type Compacted struct {
	Packs        int          // that the old snapshot names
	PacksLeft    int          // that the new one names
	CopiedBytes  int64        // pages that were copied
	WrittenBytes int64        // of the objects of the new snapshot
	Remote       int          // packs worth rewriting that are not on the local disk: they were not fetched for it
	Faults       map[ID]error // packs of which not all pages could be read: those pages stay in them
}

// Compact makes a snapshot that holds what another does, to the byte, in fewer or better filled
// packs, and returns when it is durable. Which packs it rewrites into one of its own is the
// policy's choice (chooseVictims). Every page is verified while it is copied; in the new pack
// those of the working set come first. State and working set are copied. The metadata
// is the old snapshot's but for ID and StoredBytes; Origin names the snapshot
// that was captured, so that two with the same Origin hold the same.
//
// If no pack is worth it, nothing is written and the Ref returned is in.Ref.
// The old snapshot stays as it is, and is not collected meanwhile. On error, also when ctx ends,
// what was written has been removed; errors name the object and wrap
// ErrMissing, ErrCorrupt or ErrVersion, or blob.ErrNoSpace. The store must not collect objects of
// in.ID meanwhile.
func (r *Repository) Compact(ctx context.Context, in CompactInput) (Ref, Metadata, Compacted, error) {
	c := compaction{repo: r, in: in, old: &Snapshot{ref: in.Ref}}
	ref, err := c.run(ctx)
	err = errors.Join(err, c.old.Close())
	if err != nil {
		for _, key := range slices.Backward(c.written) { // the manifest first
			err = errors.Join(err, r.store.Delete(context.WithoutCancel(ctx), key))
		}
		return Ref{}, Metadata{}, Compacted{}, fmt.Errorf("compact snapshot %s: %w", in.Ref.ID, err)
	}
	return ref, c.manifest.metadata, c.done, nil
}

// compaction is a Compact under way.
type compaction struct {
	repo     *Repository
	in       CompactInput
	old      *Snapshot // its manifest is held; of its packs the victims are open
	manifest manifest  // the new one
	moves    []run     // of the old manifest, in the order of copying
	written  []string  // keys put so far
	done     Compacted
}

func (c *compaction) run(ctx context.Context) (Ref, error) {
	if _, err := ParseID(string(c.in.ID)); err != nil {
		return Ref{}, err
	}
	if err := c.old.openManifest(ctx, c.repo.store); err != nil {
		return Ref{}, err
	}
	old := c.old.manifest
	c.manifest = *old
	c.done.Packs, c.done.PacksLeft = len(old.packs), len(old.packs)
	victims, err := c.openVictims(ctx)
	if err != nil || victims == nil {
		return c.in.Ref, err
	}
	workset, err := c.workset(ctx)
	if err != nil {
		return Ref{}, err
	}
	c.moves = moves(old.runs, victims, workset.Members())
	packed, err := c.writePack(ctx)
	if errors.Is(err, errNoPages) {
		return c.in.Ref, nil
	} else if err != nil {
		return Ref{}, err
	}
	return c.writeRecords(ctx, workset, packed.Size)
}

// openVictims chooses the packs to be rewritten and opens them. What cannot be
// opened or would have to be fetched is left out, and the choice made again.
func (c *compaction) openVictims(ctx context.Context) (victims []bool, err error) {
	old := c.old.manifest
	c.old.packs = make([]*pack.Reader, len(old.packs))
	cache := pack.NewCache(frameCache)
	uses := make([]packUse, len(old.packs))
	for i, n := range livePages(old.runs, len(old.packs)) {
		p := old.packs[i]
		uses[i] = packUse{pages: p.summary.Pages, live: n, fixed: c.in.Shared != nil && c.in.Shared(p.id)}
	}
	for {
		victims, again := chooseVictims(uses), false
		for i, is := range victims {
			if !is || c.old.packs[i] != nil {
				continue
			}
			if uses[i].fixed, err = c.openVictim(ctx, i, cache); err != nil {
				return nil, err
			}
			again = again || uses[i].fixed
		}
		if !again {
			return victims, nil
		}
	}
}

// openVictim opens a pack, unless it must stay where it is.
func (c *compaction) openVictim(ctx context.Context, i int, cache *pack.Cache) (stays bool, err error) {
	p := &c.old.manifest.packs[i]
	o, err := c.old.hold(ctx, c.repo.store, packKey(p.id))
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if errors.Is(err, blob.ErrUnavailable) || err == nil && isRemote(o) {
		c.done.Remote++
		return true, nil
	}
	if err == nil {
		c.old.packs[i], err = pack.Open(o, o.Size(), &p.summary, cache)
		err = objectError(packKey(p.id), err)
	}
	if err != nil {
		c.fault(i, err)
	}
	return err != nil, nil
}

// fault notes the first thing that is wrong with a pack.
func (c *compaction) fault(i int, err error) {
	if c.done.Faults == nil {
		c.done.Faults = make(map[ID]error)
	}
	if id := c.old.manifest.packs[i].id; c.done.Faults[id] == nil {
		c.done.Faults[id] = err
	}
}

// workset returns the old snapshot's working set, none if it has none that is
// any good: a resume would do without it as well.
func (c *compaction) workset(ctx context.Context) (WorkingSet, error) {
	set, err := c.old.WorkingSet(ctx)
	if errors.Is(err, ErrMissing) || errors.Is(err, ErrCorrupt) || errors.Is(err, ErrVersion) {
		return nil, nil
	}
	return set, err
}

// moves returns the parts of runs that lie in victims, in the order in which
// the new pack shall hold them.
func moves(runs []run, victims []bool, workset []page.Run) []run {
	var pages []page.Run
	for _, r := range runs {
		if r.pack != zeroPack && victims[r.pack] {
			pages = append(pages, page.Run{First: uint64(r.first), Count: uint64(r.count)})
		}
	}
	var out []run
	for _, p := range workingSetFirst(pages, workset) {
		for next := uint32(p.First); uint64(next) < p.End(); {
			r := runs[find(runs, next)]
			r = r.skip(next - r.first)
			r.count = min(r.count, uint32(p.End())-next)
			out = append(out, r)
			next = r.end()
		}
	}
	return out
}

// writePack copies the pages and sets the new manifest's runs and packs. The
// error is errNoPages if no page could be read.
func (c *compaction) writePack(ctx context.Context) (sum pack.Summary, err error) {
	old := c.old.manifest
	var over []run
	_, err = c.repo.store.Put(ctx, packKey(c.in.ID), func(w io.Writer) error {
		pw, err := pack.NewWriter(w, pack.Raw)
		if err != nil {
			return err
		}
		defer pw.Abort()
		if over, err = c.copyPages(ctx, pw); err != nil {
			return err
		}
		if pw.Pages() == 0 {
			return errNoPages
		}
		c.done.CopiedBytes = pw.Pages() * page.Size
		sum, err = pw.Close()
		return err
	})
	if err != nil {
		return pack.Summary{}, err
	}
	c.written = append(c.written, packKey(c.in.ID))
	slices.SortFunc(over, func(a, b run) int { return cmp.Compare(a.first, b.first) })
	c.manifest.runs = overlay(old.runs, over)
	c.manifest.packs = append(slices.Clone(old.packs), packRef{id: c.in.ID, summary: sum})
	c.manifest.packs = dropUnused(c.manifest.runs, c.manifest.packs)
	return sum, nil
}

// copyPages copies what is to be moved, and returns where it is in the new pack.
// What cannot be read stays where it is.
func (c *compaction) copyPages(ctx context.Context, w *pack.Writer) (over []run, err error) {
	number := uint32(len(c.old.manifest.packs))
	buf := make([]byte, chunkBytes)
	unpaced := int64(chunkBytes) // bytes since Pace was called
	for _, m := range c.moves {
		for ; m.count > 0; m = m.skip(min(m.count, chunkPages)) {
			part := buf[:min(chunkBytes, int64(m.count)*page.Size)]
			if unpaced += int64(len(part)); unpaced >= chunkBytes {
				unpaced = 0
				if err := c.pace(ctx); err != nil {
					return nil, err
				}
			}
			if n, err := c.old.packs[m.pack].ReadAt(part, int64(m.packPage)*page.Size); n < len(part) {
				c.fault(int(m.pack), objectError(packKey(c.old.manifest.packs[m.pack].id), err))
				continue
			}
			over = append(over, run{first: m.first, count: pagesOf(int64(len(part))), pack: number, packPage: uint32(w.Pages())})
			if err := w.Append(part); err != nil {
				return nil, err
			}
		}
	}
	return over, nil
}

func (c *compaction) pace(ctx context.Context) error {
	if c.in.Pace != nil {
		if err := c.in.Pace(ctx); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// writeRecords writes state and working set, and then the manifest.
func (c *compaction) writeRecords(ctx context.Context, workset WorkingSet, packBytes int64) (Ref, error) {
	content, err := c.old.State(ctx)
	if err != nil {
		return Ref{}, err
	}
	state, err := encodeState(content)
	if err != nil {
		return Ref{}, err
	}
	if err := c.put(ctx, stateKey(c.in.ID), state); err != nil {
		return Ref{}, err
	}
	if len(workset) > 0 {
		if err := c.put(ctx, worksetKey(c.in.ID), encodeWorkset(workset)); err != nil {
			return Ref{}, err
		}
	}
	m := &c.manifest
	m.state = stateRefOf(state)
	m.metadata.ID, m.metadata.Origin = c.in.ID, m.metadata.Content()
	b, err := m.encode(packBytes + int64(len(state)))
	if err != nil {
		return Ref{}, err
	}
	if err := c.put(ctx, manifestKey(c.in.ID), b); err != nil {
		return Ref{}, err
	}
	c.done.PacksLeft, c.done.WrittenBytes = len(m.packs), m.metadata.StoredBytes
	return Ref{ID: c.in.ID, Manifest: hashOf(b)}, nil
}

func (c *compaction) put(ctx context.Context, key string, b []byte) error {
	err := c.repo.put(ctx, key, b)
	if err == nil {
		c.written = append(c.written, key)
	}
	return err
}
