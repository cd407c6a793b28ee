package pack

import (
	"bytes"
	"io"
)

// A request is for so many bytes of the file at most, and so many frames: both
// bound the memory that it takes. Bytes between two frames that nobody asked for
// are cheaper than another request up to requestHole.
const (
	requestBytes  = 1 << 20
	requestFrames = 16
	requestHole   = 64 << 10
)

// Frame is a frame that was fetched.
type Frame struct {
	Pages []byte // verified, must not be changed
	Err   error
}

// Fetch reads the given frames, which are in ascending order, with one read of the file
// from the first to the last that nobody else has or is reading; see Cut. While it
// reads, a ReadAt of one of them waits for it. What it read of a remote pack stays
// in the cache. It returns what became of each frame.
func (r *Reader) Fetch(frames []int64) []Frame {
	out := make([]Frame, len(frames))
	claims := make([]*cached, len(frames))
	var mine []int // of frames
	for k, i := range frames {
		f, isMine := r.cache.claim(frameKey{r, i}, true)
		if claims[k] = f; isMine {
			mine = append(mine, k)
		}
	}
	read := make([]int64, len(mine))
	for k, m := range mine {
		read[k] = frames[m]
	}
	// All are settled before anything else is waited for: others wait for these.
	r.readFrames(read, func(k int, pages []byte, err error) {
		if r.remote && err == nil && r.entry(read[k]).codec == Raw {
			pages = bytes.Clone(pages) // a frame in the cache must not hold on to the others
		}
		r.cache.settle(claims[mine[k]], pages, err, r.remote)
	})
	for k, f := range claims {
		<-f.ready
		out[k] = Frame{Pages: f.pages, Err: f.err}
	}
	return out
}

// readFrames reads the given frames, in ascending order, with one read of the
// file, and yields of each, by its number among frames, the verified pages or what is
// wrong with it.
func (r *Reader) readFrames(frames []int64, yield func(k int, pages []byte, err error)) {
	if len(frames) == 0 {
		return
	}
	last := r.entry(frames[len(frames)-1])
	begin := r.entry(frames[0]).offset
	b := make([]byte, last.offset+int64(last.stored)-begin)
	n, err := r.file.ReadAt(b, begin)
	if err == nil || err == io.EOF { // if bytes are missing
		err = corrupt("it is cut off at %d", begin+int64(n))
	}
	for k, i := range frames {
		e := r.entry(i)
		from, to := e.offset-begin, e.offset-begin+int64(e.stored)
		if int64(n) < to {
			yield(k, nil, err)
			continue
		}
		var p []byte
		if e.codec != Raw {
			p = make([]byte, r.frameLen(i))
		}
		pages, err := r.decode(p, b[from:to:to], e)
		yield(k, pages, err)
	}
}

// Cut returns how many of the given frames, which are in ascending order, a Fetch should
// read at once, and how many bytes between them, that nobody asked for, it then
// reads in vain: budget at most.
func (r *Reader) Cut(frames []int64, budget int64) (n int, wasted int64) {
	first := r.entry(frames[0])
	end := first.offset + int64(first.stored)
	for n = 1; n < min(len(frames), requestFrames); n++ {
		e := r.entry(frames[n])
		hole := e.offset - end
		if hole > min(requestHole, budget-wasted) || e.offset+int64(e.stored)-first.offset > requestBytes {
			break
		}
		wasted += hole
		end = e.offset + int64(e.stored)
	}
	return n, wasted
}

// Stored returns how many bytes of the file frame i takes.
func (r *Reader) Stored(i int64) int64 { return int64(r.entry(i).stored) }
