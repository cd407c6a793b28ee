package pack

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/hibernacle/hibernacle/internal/page"
)

// Writer writes a pack. Its methods are called by one goroutine; frames are
// hashed and encoded by others meanwhile. Every Writer must be ended by Close
// or Abort.
type Writer struct {
	codec   Codec
	encoder *zstd.Encoder
	current *frame // being filled; nil: none
	pages   int64
	free    chan *frame // frames that may be filled; bounds the memory used
	work    chan *frame // to be hashed and encoded, by anybody
	queue   chan *frame // to be written, in order
	workers sync.WaitGroup
	done    chan struct{} // closed when the writing goroutine has ended
	ended   bool

	failed chan struct{} // closed when err is set, before done is
	out    output
}

// output is what the writing goroutine owns until done is closed.
type output struct {
	w      io.Writer
	offset int64
	index  []byte
	err    error
}

// frame is a frame on its way to the file.
type frame struct {
	pages  []byte // cap FrameBytes
	stored []byte // what is written: pages, or coded
	coded  []byte // room for the encoder
	entry  entry
	ready  chan struct{} // gets one value when entry and stored are set
}

// NewWriter returns a Writer that writes a pack to w, all of whose frames are
// of the given codec; a frame that zstd does not make smaller is stored raw.
func NewWriter(w io.Writer, codec Codec) (*Writer, error) {
	pw := &Writer{codec: codec, out: output{w: w}}
	switch codec {
	case Raw:
	case Zstd:
		enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)), zstd.WithEncoderCRC(false),
			zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(FrameBytes))
		if err != nil {
			return nil, fmt.Errorf("write pack: %w", err)
		}
		pw.encoder = enc
	default:
		return nil, fmt.Errorf("write pack: cannot write %v", codec)
	}
	n := runtime.GOMAXPROCS(0)
	depth := 4 * n
	pw.free = make(chan *frame, depth)
	pw.work = make(chan *frame, depth)
	pw.queue = make(chan *frame, depth)
	pw.done = make(chan struct{})
	pw.failed = make(chan struct{})
	for range depth {
		pw.free <- &frame{ready: make(chan struct{}, 1)}
	}
	for range n {
		pw.workers.Go(pw.encodeFrames)
	}
	go pw.writeFrames()
	return pw, nil
}

// Pages returns the number of pages appended so far: the pack page that the
// next one will be.
func (w *Writer) Pages() int64 { return w.pages }

// Append adds the pages in p, a multiple of the page size, which the Writer
// does not keep. An error is that of an earlier write to the file.
func (w *Writer) Append(p []byte) error {
	if len(p)%page.Size != 0 {
		return fmt.Errorf("write pack: %d bytes are no whole pages", len(p))
	}
	if w.pages+int64(len(p)/page.Size) > MaxPages {
		return fmt.Errorf("write pack: more than %d pages", int64(MaxPages))
	}
	for len(p) > 0 {
		if w.current == nil {
			select {
			case w.current = <-w.free:
			case <-w.failed:
				return w.out.err
			}
			if w.current.pages == nil {
				w.current.pages = make([]byte, 0, FrameBytes)
			}
		}
		f := w.current
		n := min(len(p), FrameBytes-len(f.pages))
		f.pages = append(f.pages, p[:n]...)
		p = p[n:]
		w.pages += int64(n / page.Size)
		if len(f.pages) == FrameBytes {
			w.flush()
		}
	}
	return nil
}

// flush passes the current frame on. There is always room in both channels:
// they take as many frames as there are.
func (w *Writer) flush() {
	if w.current != nil {
		w.work <- w.current
		w.queue <- w.current
		w.current = nil
	}
}

// Close writes what is missing of the pack, which must have at least one page,
// and describes it.
func (w *Writer) Close() (Summary, error) {
	if w.ended {
		return Summary{}, errors.New("write pack: closed twice")
	}
	w.flush()
	w.end()
	if w.out.err != nil {
		return Summary{}, w.out.err
	}
	if w.pages == 0 {
		return Summary{}, errors.New("write pack: it has no pages")
	}
	s := Summary{Pages: w.pages, Sum: sumOf(w.pages, w.out.index)}
	w.out.write(appendTrailer(w.out.index, w.pages, w.out.offset))
	s.Size = w.out.offset
	return s, w.out.err
}

// Abort ends a pack that is not wanted any more. After Close it does nothing.
func (w *Writer) Abort() {
	if !w.ended {
		w.end()
	}
}

// end waits until all goroutines have ended.
func (w *Writer) end() {
	w.ended = true
	close(w.work)
	close(w.queue)
	w.workers.Wait()
	<-w.done
	if w.encoder != nil {
		w.encoder.Close()
	}
}

// encodeFrames hashes and encodes frames until there are no more.
func (w *Writer) encodeFrames() {
	for f := range w.work {
		f.entry = entry{codec: Raw, sum: sha256.Sum256(f.pages)}
		f.stored = f.pages
		if w.codec == Zstd {
			f.coded = w.encoder.EncodeAll(f.pages, f.coded[:0])
			if len(f.coded) < len(f.pages) {
				f.entry.codec, f.stored = Zstd, f.coded
			}
		}
		f.entry.stored = int32(len(f.stored))
		f.ready <- struct{}{}
	}
}

// writeFrames writes the frames in order until there are no more; after an
// error it only takes them.
func (w *Writer) writeFrames() {
	defer close(w.done)
	w.out.write(header())
	reported := false
	for {
		if w.out.err != nil && !reported {
			reported = true
			close(w.failed)
		}
		f, ok := <-w.queue
		if !ok {
			return
		}
		<-f.ready
		f.entry.offset = w.out.offset
		w.out.index = f.entry.append(w.out.index)
		w.out.write(f.stored)
		f.pages = f.pages[:0]
		w.free <- f
	}
}

func (o *output) write(p []byte) {
	if o.err != nil {
		return
	}
	n, err := o.w.Write(p)
	if err != nil {
		o.err = fmt.Errorf("write pack: %w", err)
	}
	o.offset += int64(n)
}
