package pack

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/hibernacle/hibernacle/internal/page"
)

// Reader reads a pack: it is an io.ReaderAt over the pack's pages, decoded, of
// which pack page n is at byte n·page.Size. Every frame is verified whenever it
// is read from the file. Methods may be called at the same time.
type Reader struct {
	file    io.ReaderAt
	remote  bool // each read of file costs a request
	summary Summary
	index   []byte // verified; entries are decoded as they are needed
	cache   *Cache
	decoder *zstd.Decoder // nil until a frame is compressed
	decOnce sync.Once
	decErr  error
}

// Open opens the pack in file, which is size bytes long, and verifies its index,
// but reads no pages. If want is not nil, the pack must be that one; this saves a
// read, so that Open makes only one. Decoded frames are kept in cache, which other
// Readers may share; if it is nil, the last one is kept. A file whose method
// Remote() bool says so is taken for one of which each read costs a request: then
// all frames that were read are kept. The Reader does not close file. Errors wrap
// ErrCorrupt if the bytes are wrong, ErrVersion if this release does not read such packs.
func Open(file io.ReaderAt, size int64, want *Summary, cache *Cache) (*Reader, error) {
	var pages int64
	if want != nil {
		pages = want.Pages
	} else {
		end, err := readTrailer(file, size, trailerSize)
		if err != nil {
			return nil, err
		}
		pages = int64(binary.LittleEndian.Uint64(end))
	}
	if pages < 1 || pages > MaxPages || size < headerSize+1+tailSize(pages) {
		return nil, corrupt("%d bytes are too few for a pack of %d pages", size, pages)
	}
	tail, err := readTrailer(file, size, tailSize(pages))
	if err != nil {
		return nil, err
	}
	index, at := tail[:len(tail)-trailerSize], size-int64(len(tail))
	if !bytes.Equal(tail, appendTrailer(index[:len(index):len(index)], pages, at)) {
		return nil, corrupt("its index or trailer is not what was written for %d pages", pages)
	}
	r := &Reader{
		file:    file,
		summary: Summary{Size: size, Pages: pages, Sum: sumOf(pages, index)},
		index:   index,
		cache:   cache,
	}
	if r.cache == nil {
		r.cache = NewCache(0)
	}
	if f, ok := file.(interface{ Remote() bool }); ok {
		r.remote = f.Remote()
	}
	if want != nil && !r.summary.Same(*want) {
		return nil, corrupt("it is the pack with the sum %v, wanted is %v", r.summary.Sum, want.Sum)
	}
	if err := r.checkIndex(at); err != nil {
		return nil, err
	}
	return r, nil
}

// readTrailer reads the last n bytes of file, which hold the trailer, and checks
// that they are the end of a pack that this release reads.
func readTrailer(file io.ReaderAt, size, n int64) ([]byte, error) {
	if size < headerSize+trailerSize {
		return nil, corrupt("it is cut off, it has %d bytes", size)
	}
	tail := make([]byte, n)
	if err := readFull(file, tail, size-n); err != nil {
		return nil, err
	}
	end := tail[n-trailerSize:]
	if string(end[24:checksumAt]) != trailerMagic {
		return nil, corrupt("its trailer is missing: cut off, or no pack")
	}
	if v := binary.LittleEndian.Uint32(end[16:]); v != Version {
		return nil, fmt.Errorf("%w: version %d, this release reads version %d", ErrVersion, v, Version)
	}
	return tail, nil
}

// checkIndex checks that the frames lie back to back between header and index,
// each with a plausible length.
func (r *Reader) checkIndex(end int64) error {
	next := int64(headerSize)
	for i := range r.frames() {
		e := r.entry(i)
		b := r.index[i*entrySize:]
		if b[13] != 0 || b[14] != 0 || b[15] != 0 {
			return corrupt("the index entry of frame %d is wrong", i)
		}
		if e.codec > Zstd {
			return corrupt("frame %d has the unknown %v", i, e.codec)
		}
		if e.offset != next || e.stored < 1 || e.stored > maxStored || e.codec == Raw && int(e.stored) != r.frameLen(i) {
			return corrupt("frame %d is recorded with %d bytes at %d", i, e.stored, e.offset)
		}
		next += int64(e.stored)
	}
	if next != end {
		return corrupt("the frames end at %d, the index begins at %d", next, end)
	}
	return nil
}

// Summary describes the pack.
func (r *Reader) Summary() Summary { return r.summary }

func (r *Reader) frames() int64 { return frames(r.summary.Pages) }

// frameLen returns the decoded length of frame i in bytes.
func (r *Reader) frameLen(i int64) int {
	return int(min(FramePages, r.summary.Pages-i*FramePages)) * page.Size
}

func (r *Reader) entry(i int64) entry {
	b := r.index[i*entrySize:]
	e := entry{
		offset: int64(binary.LittleEndian.Uint64(b)),
		stored: int32(binary.LittleEndian.Uint32(b[8:])),
		codec:  Codec(b[12]),
	}
	copy(e.sum[:], b[entrySumAt:])
	return e
}

// ReadAt implements io.ReaderAt. An error names the frame and wraps ErrCorrupt
// if the frame's bytes do not fit its hash; p then holds nothing that is
// promised.
func (r *Reader) ReadAt(p []byte, off int64) (int, error) {
	return r.read(p, off, r.readFrame)
}

// Peek is ReadAt without the promise that the bytes are right: it saves the
// verification where it can. Nor does it ask a remote store: of its packs it
// reads what is in the cache, anything else is an error. It is for comparing only.
// A page that is found equal to one held in memory may be taken from the pack
// later, since that read is verified.
func (r *Reader) Peek(p []byte, off int64) (int, error) {
	return r.read(p, off, r.peekFrame)
}

// Remote reports whether each read of the pack's file costs a request.
func (r *Reader) Remote() bool { return r.remote }

// read cuts a read into parts of one frame each.
func (r *Reader) read(p []byte, off int64, frame func(p []byte, i int64, from int) error) (int, error) {
	if off < 0 {
		return 0, errors.New("read pack: negative offset")
	}
	n := 0
	for n < len(p) {
		if off >= r.summary.Pages*page.Size {
			return n, io.EOF
		}
		i, from := off/FrameBytes, int(off%FrameBytes)
		m := min(len(p)-n, r.frameLen(i)-from)
		if err := frame(p[n:n+m], i, from); err != nil {
			return n, fmt.Errorf("frame %d: %w", i, err)
		}
		n += m
		off += int64(m)
	}
	return n, nil
}

// readFrame reads a part of frame i that begins at byte from. A whole frame of a
// local pack is read straight into p and not kept: who reads so much at a time does
// not come back for it.
func (r *Reader) readFrame(p []byte, i int64, from int) error {
	key := frameKey{r, i}
	if len(p) == r.frameLen(i) && !r.remote {
		if pages := r.cache.peek(key, true); pages != nil {
			copy(p, pages)
			return nil
		}
		return r.load(p, i)
	}
	pages, err := r.cache.get(key, func() ([]byte, error) {
		b := make([]byte, r.frameLen(i))
		return b, r.load(b, i)
	})
	if err != nil {
		return err
	}
	copy(p, pages[from:])
	return nil
}

// errFar says that a frame would have to be fetched.
var errFar = errors.New("it is in a remote store")

// peekFrame is readFrame, unverified if the frame is stored raw, and of a remote
// pack only what is in the cache.
func (r *Reader) peekFrame(p []byte, i int64, from int) error {
	e := r.entry(i)
	switch {
	case r.remote:
		pages := r.cache.peek(frameKey{r, i}, false)
		if pages == nil {
			return errFar
		}
		copy(p, pages[from:])
		return nil
	case e.codec != Raw:
		return r.readFrame(p, i, from)
	}
	return readFull(r.file, p, e.offset+int64(from))
}

// load reads, decodes and verifies frame i into p, which is as long as it.
func (r *Reader) load(p []byte, i int64) error {
	e := r.entry(i)
	stored := p
	if e.codec != Raw {
		stored = make([]byte, e.stored)
	}
	if err := readFull(r.file, stored, e.offset); err != nil {
		return err
	}
	_, err := r.decode(p, stored, e)
	return err
}

// decode returns the verified pages of a frame that is stored as e says: a raw
// frame's are stored itself, others are decoded into p, which is as long as the pages.
func (r *Reader) decode(p, stored []byte, e entry) ([]byte, error) {
	pages := stored
	if e.codec == Zstd {
		pages = p
		if err := r.unzstd(p, stored); err != nil {
			return nil, err
		}
	}
	if sha256.Sum256(pages) != e.sum {
		return nil, corrupt("its bytes do not fit their hash")
	}
	return pages, nil
}

func (r *Reader) unzstd(p, stored []byte) error {
	r.decOnce.Do(func() {
		r.decoder, r.decErr = zstd.NewReader(nil, zstd.WithDecoderConcurrency(0),
			zstd.WithDecoderMaxMemory(FrameBytes), zstd.WithDecoderMaxWindow(1<<20))
	})
	if r.decErr != nil {
		return r.decErr
	}
	// Decoding cannot grow beyond the decoder's limit of one frame.
	out, err := r.decoder.DecodeAll(stored, p[:0:len(p)])
	if err != nil {
		return corrupt("zstd: %v", err)
	}
	if len(out) != len(p) {
		return corrupt("it decodes to %d bytes instead of %d", len(out), len(p))
	}
	copy(p, out)
	return nil
}

// Verify reads the whole pack and verifies its header and every frame. It goes on
// behind a corrupt frame; the error joins what it found. progress, if not nil, is called with the
// number of bytes of the file that were read since the last call; an error
// from it ends the reading.
func (r *Reader) Verify(progress func(n int64) error) error {
	var errs []error
	head := make([]byte, headerSize)
	if err := readFull(r.file, head, 0); err != nil {
		errs = append(errs, err)
	} else if !bytes.Equal(head, header()) {
		errs = append(errs, corrupt("its header is wrong"))
	}
	buf := make([]byte, FrameBytes)
	for i := range r.frames() {
		if err := r.load(buf[:r.frameLen(i)], i); err != nil {
			if len(errs) < 16 { // enough to see the pattern
				errs = append(errs, fmt.Errorf("frame %d: %w", i, err))
			}
		}
		if progress != nil {
			if err := progress(int64(r.entry(i).stored)); err != nil {
				return err
			}
		}
	}
	return errors.Join(errs...)
}

// readFull reads len(p) bytes at off; the end of the file comes too early for
// that if the pack is cut off.
func readFull(file io.ReaderAt, p []byte, off int64) error {
	n, err := file.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == io.EOF || err == nil {
		return corrupt("it is cut off at %d", off+int64(n))
	}
	return err
}
