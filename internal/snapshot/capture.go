package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

// maxPacks bounds the packs that a manifest names, and with them the files that
// an open snapshot holds. A capture that would go beyond it, because compaction
// did not keep up, takes the pages of the least used packs over into its own.
const maxPacks = 32

// CaptureInput is what a capture is made of.
type CaptureInput struct {
	ID          ID          // of the snapshot to be made: a new one
	Parent      *Snapshot   // what the machine's memory was bound to; nil: zeros, for a full image. Open until Capture returns
	Metadata    Metadata    // Attempt, Generation, Key and ControlToken are taken from it, and CreatedAt if it is set
	MemoryBytes int64       // size of the machine's RAM, whole pages, the same as the parent's
	State       []byte      // vCPU and device state, at most 64 MiB
	RAM         io.ReaderAt // the paused machine's RAM; read by one goroutine, page by page, at most 1 MiB at a time
	WorkingSet  WorkingSet  // what the guest touched first since its last resume, which is stored first; empty: not known
	Dirty       []page.Run  // pages that may differ from the parent. Empty and without a parent: all pages
}

// Capture writes a snapshot and returns when it is durable. Of the dirty pages
// it leaves out those equal to the parent's and records the zero ones without
// storing them. On error it has removed what it wrote; the error wraps
// blob.ErrNoSpace if the store is full. The store must not collect objects of
// in.ID meanwhile, nor the parent's.
func (r *Repository) Capture(ctx context.Context, in CaptureInput) (Ref, Metadata, error) {
	c, err := newCapture(in)
	if err != nil {
		return Ref{}, Metadata{}, fmt.Errorf("capture snapshot %s: %w", in.ID, err)
	}
	ref, err := c.run(ctx, r)
	if err != nil {
		// Also when ctx has ended, what was written must go.
		for _, key := range c.written {
			err = errors.Join(err, r.store.Delete(context.WithoutCancel(ctx), key))
		}
		return Ref{}, Metadata{}, fmt.Errorf("capture snapshot %s: %w", in.ID, err)
	}
	return ref, c.manifest.metadata, nil
}

// capture is a capture under way.
type capture struct {
	in       CaptureInput
	dirty    []page.Run // normalised
	base     []run      // the parent's runs
	manifest manifest
	written  []string // keys put so far
}

func newCapture(in CaptureInput) (*capture, error) {
	if _, err := ParseID(string(in.ID)); err != nil {
		return nil, err
	}
	if in.MemoryBytes <= 0 || in.MemoryBytes%page.Size != 0 || in.MemoryBytes/page.Size > maxMemoryPages {
		return nil, fmt.Errorf("a memory of %d bytes is not supported", in.MemoryBytes)
	}
	pages := pagesOf(in.MemoryBytes)
	c := &capture{in: in, dirty: page.Normalize(in.Dirty)}
	for _, d := range in.Dirty {
		if d.First > uint64(pages) || d.Count > uint64(pages)-d.First {
			return nil, fmt.Errorf("dirty pages %d+%d lie outside the memory's %d pages", d.First, d.Count, pages)
		}
	}
	m := &c.manifest.metadata
	*m = in.Metadata
	m.ID, m.Parent, m.Origin, m.MemoryBytes = in.ID, "", "", in.MemoryBytes
	if m.CreatedAt.IsZero() {
		m.CreatedAt = time.Now().UTC()
	}
	if in.Parent == nil {
		c.base = []run{{count: pages, pack: zeroPack}}
		if len(c.dirty) == 0 {
			c.dirty = []page.Run{{Count: uint64(pages)}}
		}
	} else {
		p := in.Parent.manifest
		if p.metadata.MemoryBytes != in.MemoryBytes {
			return nil, fmt.Errorf("the memory has %d bytes, the parent's %d", in.MemoryBytes, p.metadata.MemoryBytes)
		}
		m.Parent, c.base, c.manifest.packs = p.metadata.ID, p.runs, append(c.manifest.packs, p.packs...)
	}
	m.DirtyBytes = int64(page.Total(c.dirty)) * page.Size
	return c, nil
}

// run writes pack, state file and working set at the same time, then the manifest.
func (c *capture) run(ctx context.Context, r *Repository) (Ref, error) {
	state, err := encodeState(c.in.State)
	if err != nil {
		return Ref{}, err
	}
	c.manifest.state = stateRefOf(state)
	var packed pack.Summary
	g, gctx := errgroup.WithContext(ctx)
	var stateErr, packErr, worksetErr error
	g.Go(func() error {
		stateErr = r.put(gctx, stateKey(c.in.ID), state)
		return stateErr
	})
	g.Go(func() error {
		packed, packErr = c.writePack(gctx, r)
		return packErr
	})
	if len(c.in.WorkingSet) > 0 {
		g.Go(func() error {
			worksetErr = r.put(gctx, worksetKey(c.in.ID), encodeWorkset(c.in.WorkingSet))
			return worksetErr
		})
	}
	err = g.Wait()
	if len(c.in.WorkingSet) > 0 && worksetErr == nil {
		c.written = append(c.written, worksetKey(c.in.ID))
	}
	if stateErr == nil {
		c.written = append(c.written, stateKey(c.in.ID))
	}
	if packErr == nil && packed.Pages > 0 {
		c.written = append(c.written, packKey(c.in.ID))
	}
	if err != nil {
		return Ref{}, err
	}
	c.manifest.packs = dropUnused(c.manifest.runs, c.manifest.packs)
	b, err := c.manifest.encode(packed.Size + int64(len(state)))
	if err != nil {
		return Ref{}, err
	}
	if err := r.put(ctx, manifestKey(c.in.ID), b); err != nil {
		return Ref{}, err
	}
	return Ref{ID: c.in.ID, Manifest: hashOf(b)}, nil
}

// put stores b.
func (r *Repository) put(ctx context.Context, key string, b []byte) error {
	_, err := r.store.Put(ctx, key, func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	})
	return err
}

// errNoPages ends the writing of a pack that would be empty.
var errNoPages = errors.New("no pages to store")

// writePack finds out what changed, writes the pack, if there is anything to
// be stored, and sets the manifest's runs.
func (c *capture) writePack(ctx context.Context, r *Repository) (pack.Summary, error) {
	var sum pack.Summary
	_, err := r.store.Put(ctx, packKey(c.in.ID), func(w io.Writer) error {
		pw, err := pack.NewWriter(w, pack.Raw)
		if err != nil {
			return err
		}
		defer pw.Abort()
		s := scan{capture: c, w: pw, number: uint32(len(c.manifest.packs))}
		if err := s.dirtyPages(ctx); err != nil {
			return err
		}
		c.manifest.runs = overlay(c.base, joined(s.over))
		if pw.Pages() == 0 {
			return errNoPages
		}
		if err := s.takeOver(ctx); err != nil {
			return err
		}
		sum, err = pw.Close()
		return err
	})
	switch {
	case errors.Is(err, errNoPages):
		return pack.Summary{}, nil
	case err != nil:
		return pack.Summary{}, err
	}
	c.manifest.packs = append(c.manifest.packs, packRef{id: c.in.ID, summary: sum})
	return sum, nil
}

// chunkBytes is how much is read and compared at a time, chunkPages the pages in it.
const (
	chunkBytes = 1 << 20
	chunkPages = chunkBytes / page.Size
)

// scan finds the pages to be stored.
type scan struct {
	*capture
	w      *pack.Writer
	number uint32 // of the new pack
	over   []run  // what changed against base
}

// dirtyPages goes through the dirty pages, first those of the working set.
func (s *scan) dirtyPages(ctx context.Context) error {
	now, before := make([]byte, chunkBytes), make([]byte, chunkBytes)
	for _, d := range workingSetFirst(s.dirty, s.in.WorkingSet.Members()) {
		for n := d.First; n < d.End(); n += chunkPages {
			if err := ctx.Err(); err != nil {
				return err
			}
			size := int(min(chunkBytes, (d.End()-n)*page.Size))
			off := int64(n) * page.Size
			if m, err := s.in.RAM.ReadAt(now[:size], off); m < size {
				return fmt.Errorf("read page %d of guest memory: %w", n+uint64(m/page.Size), err)
			}
			unknown := s.parentPages(before[:size], off)
			if err := s.chunk(uint32(n), now[:size], before[:size], unknown); err != nil {
				return err
			}
		}
	}
	return nil
}

// parentPages reads what the parent has at off into buf. It returns which pages
// cannot be read, nil if none: those count as changed, and the child heals what the
// parent lost. So it is with pages that would have to be fetched from afar
// while the guest stands still.
//
// These bytes are not verified. A page that is found equal is right, since it was
// compared with the guest's; that its frame is whole is verified when it is read.
func (s *scan) parentPages(buf []byte, off int64) (unknown []bool) {
	if s.in.Parent == nil {
		clear(buf)
		return nil
	}
	if n, _ := s.in.Parent.peek(buf, off); n == len(buf) {
		return nil
	}
	unknown = make([]bool, len(buf)/page.Size)
	for i := range unknown {
		p := buf[i*page.Size:][:page.Size]
		n, _ := s.in.Parent.peek(p, off+int64(i*page.Size))
		unknown[i] = n < len(p)
	}
	return unknown
}

// chunk records the pages in now, the first of which is guest page first;
// before holds what the parent has there, except for those that are unknown.
func (s *scan) chunk(first uint32, now, before []byte, unknown []bool) error {
	pages := uint32(len(now) / page.Size)
	classify := func(i uint32) kind {
		p := now[i*page.Size:][:page.Size]
		switch {
		case (unknown == nil || !unknown[i]) && bytes.Equal(p, before[i*page.Size:][:page.Size]):
			return equal
		case bytes.Equal(p, zeroChunk[:page.Size]):
			return zeroed
		}
		return stored
	}
	for i := uint32(0); i < pages; {
		start := i
		kind := classify(i)
		for i++; i < pages && classify(i) == kind; i++ {
		}
		r := run{first: first + start, count: i - start, pack: zeroPack}
		switch kind {
		case equal:
			continue
		case stored:
			r.pack, r.packPage = s.number, uint32(s.w.Pages())
			if err := s.w.Append(now[start*page.Size : i*page.Size]); err != nil {
				return err
			}
		}
		s.over = append(s.over, r)
	}
	return nil
}

// kind says what a capture does with a dirty page.
type kind int

const (
	equal  kind = iota // to the parent's: nothing
	zeroed             // recorded
	stored
)

// takeOver stores pages of the parent's packs, those with the fewest pages in
// use first, until there are no more than maxPacks. What is not local or cannot be read stays
// where it is: that is for the reader of that page to tell.
func (s *scan) takeOver(ctx context.Context) error {
	live := livePages(s.manifest.runs, int(s.number)+1)
	victims := leastUsed(live[:s.number], maxPacks-1, func(pack int) bool { return s.in.Parent.packs[pack].Remote() })
	if victims == nil {
		return nil
	}
	s.over = s.over[:0]
	buf := make([]byte, chunkBytes)
	for _, r := range s.manifest.runs {
		if r.pack == zeroPack || r.pack == s.number || !victims[r.pack] {
			continue
		}
		for ; r.count > 0; r = r.skip(min(r.count, chunkPages)) {
			if err := ctx.Err(); err != nil {
				return err
			}
			part := buf[:min(chunkBytes, int64(r.count)*page.Size)]
			if n, _ := s.in.Parent.ReadAt(part, int64(r.first)*page.Size); n < len(part) {
				continue
			}
			s.over = appendRun(s.over, run{first: r.first, count: pagesOf(int64(len(part))), pack: s.number, packPage: uint32(s.w.Pages())})
			if err := s.w.Append(part); err != nil {
				return err
			}
		}
	}
	s.manifest.runs = overlay(s.manifest.runs, s.over)
	return nil
}
