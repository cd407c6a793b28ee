package guest

import (
	"context"
	"sync"
)

// stream tells where a piece of output came from.
type stream uint8

const (
	streamStdout stream = iota
	streamStderr
	streamPTY
)

// chunk is a piece of output. Its data is never changed.
type chunk struct {
	stream stream
	data   []byte
}

// chunkOverhead is what a chunk costs beside its data, so that a program that
// writes single bytes stays within the journal's bound.
const chunkOverhead = 64

// journal is the output of one process: the last limit bytes of it. Followers
// read it, each at its own place. What no follower needs is forgotten when
// room is needed; what one has yet to read makes the writer wait, so a client
// that reads loses nothing, however much there is. A follower that stops
// reading must leave (its caller's writes run into a deadline).
type journal struct {
	limit int

	mu        sync.Mutex
	changed   *sync.Cond
	chunks    []chunk // those numbered first, first+1, …
	first     uint64
	size      int // of chunks, with overhead
	closed    bool
	followers map[*follower]struct{}
}

// follower is one reader's place in a journal.
type follower struct {
	journal *journal
	next    uint64 // number of the chunk to read next
}

func newJournal(limit int) *journal {
	j := &journal{limit: limit, followers: map[*follower]struct{}{}}
	j.changed = sync.NewCond(&j.mu)
	return j
}

// write appends a chunk, whose data the journal keeps. It waits while the
// journal is full of what a follower has not read yet. After close it does
// nothing.
func (j *journal) write(c chunk) {
	j.mu.Lock()
	defer j.mu.Unlock()
	cost := len(c.data) + chunkOverhead
	for !j.closed {
		j.forget(cost)
		if j.size == 0 || j.size+cost <= j.limit {
			j.chunks = append(j.chunks, c)
			j.size += cost
			j.changed.Broadcast()
			return
		}
		j.changed.Wait()
	}
}

// forget drops the oldest chunks, as far as every follower has read them,
// until cost more bytes have room.
func (j *journal) forget(cost int) {
	needed := j.first + uint64(len(j.chunks))
	for f := range j.followers {
		needed = min(needed, f.next)
	}
	for j.size+cost > j.limit && j.first < needed {
		j.size -= len(j.chunks[0].data) + chunkOverhead
		j.chunks[0] = chunk{}
		j.chunks = j.chunks[1:]
		j.first++
	}
}

// close ends the journal: followers read what is left and then its end.
func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.closed {
		j.closed = true
		j.changed.Broadcast()
	}
}

// bytes returns what the journal holds in memory.
func (j *journal) bytes() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.size
}

// follow adds a follower that reads from now on, or with replay from the
// oldest chunk that is left.
func (j *journal) follow(replay bool) *follower {
	j.mu.Lock()
	defer j.mu.Unlock()
	f := &follower{journal: j, next: j.first + uint64(len(j.chunks))}
	if replay {
		f.next = j.first
	}
	j.followers[f] = struct{}{}
	return f
}

// leave removes the follower; the writer no longer waits for it.
func (f *follower) leave() {
	f.journal.mu.Lock()
	defer f.journal.mu.Unlock()
	delete(f.journal.followers, f)
	f.journal.changed.Broadcast()
}

// read returns the next chunk and waits for one. ok is false at the
// journal's end. The error is the context's.
func (f *follower) read(ctx context.Context) (c chunk, ok bool, err error) {
	j := f.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	var stop func() bool
	for {
		if i := f.next - j.first; i < uint64(len(j.chunks)) {
			f.next++
			j.changed.Broadcast() // a writer may have waited for this
			return j.chunks[i], true, nil
		}
		if j.closed {
			return chunk{}, false, nil
		}
		if err := ctx.Err(); err != nil {
			return chunk{}, false, err
		}
		if stop == nil {
			stop = context.AfterFunc(ctx, func() {
				j.mu.Lock()
				defer j.mu.Unlock()
				j.changed.Broadcast()
			})
			defer stop()
		}
		j.changed.Wait()
	}
}
