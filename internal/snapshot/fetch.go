package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

const (
	// fetchWindow is the number of frames (8 MiB) within which a Fetch goes by
	// their place in the packs instead of by the order that was asked for.
	fetchWindow = 128

	localFetches  = 2  // requests at a time: one reads while the other decodes
	remoteFetches = 32 // so that 50 ms of latency do not bound a good network

	maxFetchErrors = 16 // that are returned: enough to see the pattern
)

// Fetch reads the pages in runs ahead of their use, roughly in the order of
// runs, and calls yield with parts of the memory image, whole pages at the byte
// offset off, each page once: zeros and verified bytes, as ReadAt would return them.
// Calls of yield do not overlap; p is valid until it returns and must not be changed,
// and its error ends the fetch. Pages beyond the memory are left out.
//
// Neighbouring frames of a pack are read with one request, several requests are
// under way at a time. A ReadAt of what is being fetched waits for it instead of reading it again.
//
// What cannot be read does not hold up the rest; the errors, which are those of ReadAt, are
// returned together. When ctx ends, Fetch returns its error as soon as yield has.
func (s *Snapshot) Fetch(ctx context.Context, runs []page.Run, yield func(off int64, p []byte) error) error {
	f := &fetch{snap: s, yield: yield}
	local, remote := s.plan(runs)
	s.background.Add(1)
	done := make(chan struct{})
	go func() {
		defer s.background.Done()
		defer close(done)
		var workers sync.WaitGroup
		f.start(ctx, &workers, local, localFetches)
		f.start(ctx, &workers, remote, remoteFetches)
		workers.Wait()
	}()
	select {
	case <-done:
	case <-ctx.Done(): // reads under way end by themselves, at the latest when the snapshot is closed
	}
	if err := f.end(ctx.Err()); err != nil {
		return fmt.Errorf("fetch pages of snapshot %s: %w", s.ref.ID, err)
	}
	return nil
}

// fetchRequest is what is read at once: frames of a pack in ascending order, or
// zero pages.
type fetchRequest struct {
	pack  uint32 // number in the manifest, or zeroPack
	wants []*want
}

// want is what is wanted of a frame: pieces of the memory. A zero run counts as
// a frame of the zero pack.
type want struct {
	pack   uint32
	frame  int64
	pieces []piece
}

// piece is count pages from guest page first on; from is the first one's place in
// its frame.
type piece struct {
	first, count, from uint32
}

// plan returns the requests that read runs, in order.
func (s *Snapshot) plan(runs []page.Run) (local, remote []fetchRequest) {
	wants := s.wants(runs)
	var wanted, stored int64 // bytes
	for _, w := range wants {
		if w.pack != zeroPack {
			for _, p := range w.pieces {
				wanted += int64(p.count) * page.Size
			}
			stored += s.packs[w.pack].Stored(w.frame)
		}
	}
	// What is read in vain to save requests is no more than what has to be read,
	// and with that no more than a quarter more than what was asked for.
	spare := max(0, min(stored, wanted*5/4-stored))
	for window := range slices.Chunk(wants, fetchWindow) {
		slices.SortFunc(window, func(a, b *want) int {
			return cmp.Or(cmp.Compare(a.pack, b.pack), cmp.Compare(a.frame, b.frame))
		})
		for len(window) > 0 {
			r := fetchRequest{pack: window[0].pack}
			n := 1
			for n < len(window) && window[n].pack == r.pack {
				n++
			}
			if r.pack != zeroPack {
				var wasted int64
				n, wasted = s.packs[r.pack].Cut(frameNumbers(window[:n]), spare)
				spare -= wasted
			}
			r.wants, window = window[:n], window[n:]
			if r.pack != zeroPack && s.packs[r.pack].Remote() {
				remote = append(remote, r)
			} else {
				local = append(local, r)
			}
		}
	}
	return local, remote
}

func frameNumbers(wants []*want) []int64 {
	frames := make([]int64, len(wants))
	for i, w := range wants {
		frames[i] = w.frame
	}
	return frames
}

// wants returns what runs want, each frame once, in the order in which runs
// need them first.
func (s *Snapshot) wants(runs []page.Run) []*want {
	type key struct {
		pack  uint32
		frame int64
	}
	var out []*want
	byFrame := make(map[key]*want)
	take := func(r run) {
		if r.pack == zeroPack {
			out = append(out, &want{pack: zeroPack, pieces: []piece{{first: r.first, count: r.count}}})
			return
		}
		for r.count > 0 {
			k := key{r.pack, int64(r.packPage / pack.FramePages)}
			p := piece{first: r.first, from: r.packPage % pack.FramePages}
			p.count = min(r.count, pack.FramePages-p.from)
			w := byFrame[k]
			if w == nil {
				w = &want{pack: k.pack, frame: k.frame}
				byFrame[k] = w
				out = append(out, w)
			}
			w.pieces = append(w.pieces, p)
			r = r.skip(p.count)
		}
	}
	pages := uint64(pagesOf(s.manifest.metadata.MemoryBytes))
	seen := make([]uint64, (pages+63)/64) // bits
	unseen := func(n uint64) bool { return seen[n/64]&(1<<(n%64)) == 0 }
	for _, r := range runs {
		end := min(r.End(), pages)
		for n := r.First; n < end; {
			if !unseen(n) {
				n++
				continue
			}
			first := n
			for ; n < end && unseen(n); n++ {
				seen[n/64] |= 1 << (n % 64)
			}
			s.eachRun(uint32(first), uint32(n), take)
		}
	}
	return out
}

// eachRun calls do with the parts of the manifest's runs between two guest pages.
func (s *Snapshot) eachRun(first, end uint32, do func(run)) {
	for i := find(s.manifest.runs, first); first < end; i++ {
		r := s.manifest.runs[i]
		r = r.skip(first - r.first)
		r.count = min(r.count, end-first)
		first = r.end()
		do(r)
	}
}

// fetch is a Fetch under way.
type fetch struct {
	snap *Snapshot

	mu     sync.Mutex
	yield  func(off int64, p []byte) error
	ended  bool
	failed error // of yield
	errs   []error
}

// start starts up to n workers that go through requests in order.
func (f *fetch) start(ctx context.Context, workers *sync.WaitGroup, requests []fetchRequest, n int) {
	next := make(chan fetchRequest, len(requests))
	for _, r := range requests {
		next <- r
	}
	close(next)
	for range min(n, len(requests)) {
		workers.Go(func() {
			buf := make([]byte, 0, chunkBytes)
			for r := range next {
				if ctx.Err() != nil || !f.send(f.read(r, buf)) {
					return
				}
			}
		})
	}
}

// part is a part of the memory image: pages from guest page first on.
type part struct {
	first uint32
	pages []byte
}

func (p part) end() uint32 { return p.first + pagesOf(int64(len(p.pages))) }

// read reads what a request wants. The parts that it returns may lie in buf.
func (f *fetch) read(r fetchRequest, buf []byte) (parts []part) {
	if r.pack == zeroPack {
		for _, w := range r.wants {
			for p := w.pieces[0]; p.count > 0; {
				n := min(p.count, chunkPages)
				parts = append(parts, part{p.first, zeroChunk[:n*page.Size]})
				p.first, p.count = p.first+n, p.count-n
			}
		}
		return parts
	}
	for i, frame := range f.snap.packs[r.pack].Fetch(frameNumbers(r.wants)) {
		w := r.wants[i]
		if frame.Err != nil {
			f.fault(w, frame.Err)
			continue
		}
		for _, p := range w.pieces {
			parts = append(parts, part{p.first, frame.Pages[p.from*page.Size:][:p.count*page.Size]})
		}
	}
	return join(parts, buf[:0])
}

// zeroChunk is only read.
var zeroChunk [chunkBytes]byte

// join sorts parts and makes one of neighbours, in buf as far as its capacity reaches.
func join(parts []part, buf []byte) (joined []part) {
	slices.SortFunc(parts, func(a, b part) int { return cmp.Compare(a.first, b.first) })
	for i := 0; i < len(parts); {
		p := part{parts[i].first, append(buf, parts[i].pages...)}
		for i++; i < len(parts) && parts[i].first == p.end(); i++ {
			p.pages = append(p.pages, parts[i].pages...)
		}
		joined = append(joined, p)
		if used := len(p.pages); used <= cap(buf) {
			buf = buf[used:used]
		}
	}
	return joined
}

// send yields parts and reports whether to go on.
func (f *fetch) send(parts []part) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range parts {
		if f.ended || f.failed != nil {
			return false
		}
		f.failed = f.yield(int64(p.first)*page.Size, p.pages)
	}
	return !f.ended && f.failed == nil
}

// fault notes that what w wants cannot be read.
func (f *fetch) fault(w *want, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.errs) < maxFetchErrors {
		err = fmt.Errorf("frame %d: %w", w.frame, err)
		f.errs = append(f.errs, f.snap.readError(w.pieces[0].first, w.pack, err))
	}
}

// end makes sure that yield is not called any more, and returns what went wrong.
func (f *fetch) end(err error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	return errors.Join(append([]error{err, f.failed}, f.errs...)...)
}
