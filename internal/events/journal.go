package events

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// The defaults of Options.
const (
	defaultSegmentBytes = 4 << 20
	defaultSegments     = 4
	defaultQueue        = 8192
)

// reserveAhead is how many ids are reserved at a time: one sync of the file is
// paid for so many events, and so many ids at most are skipped after a crash.
const reserveAhead = 1000

// Options says how much is kept. The zero value is the usual.
type Options struct {
	SegmentBytes int64        // size at which a segment is full, default 4 MiB
	Segments     int          // how many are kept, default 4
	Queue        int          // events that may wait for being written, default 8192
	Log          *slog.Logger // nil: silent
}

// Journal is an open journal. Its methods may be called at the same time.
type Journal struct {
	dir  string
	o    Options
	wake chan struct{} // holds a token when the queue has something
	done chan struct{} // closed when the writer has ended

	mu       sync.Mutex
	queue    []Event
	lost     uint64        // events that were not kept since the last gap was written
	reason   string        // why
	closed   bool          // no event is taken any more
	ended    bool          // and all are written
	segments []segment     // the oldest first; the last one is written to
	last     uint64        // id of the last event in the files, or one that was skipped after it
	changed  chan struct{} // closed, and replaced, when events were added

	// Of the writer alone.
	file     *os.File
	reserved uint64
}

// segment is one file of a journal.
type segment struct {
	first uint64 // its events have ids from this one on
	size  int64  // bytes that may be read
}

// Open opens the journal in the folder dir, which it makes where it is missing.
// A line that a crash left unfinished is cut off. ErrFormat says that a newer
// version wrote it. Close it.
func Open(dir string, o Options) (*Journal, error) {
	if o.SegmentBytes <= 0 {
		o.SegmentBytes = defaultSegmentBytes
	}
	if o.Segments <= 0 {
		o.Segments = defaultSegments
	}
	if o.Queue <= 0 {
		o.Queue = defaultQueue
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	j := &Journal{dir: dir, o: o, wake: make(chan struct{}, 1), done: make(chan struct{}), changed: make(chan struct{})}
	if err := j.load(); err != nil {
		return nil, fmt.Errorf("open the journal of events %s: %w", dir, err)
	}
	go j.write()
	return j, nil
}

// Append adds an event behind all others. It gives it its id, and a time where
// it has none. It does not wait for the disk: where more events wait than the
// queue takes, the event is dropped, and a gap tells of it.
func (j *Journal) Append(e Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC()
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return
	}
	if len(j.queue) >= j.o.Queue {
		j.lose(1, "more happened at once than could be written")
		return
	}
	j.queue = append(j.queue, e)
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// lose counts events that are not kept. j.mu is held.
func (j *Journal) lose(n uint64, reason string) {
	j.lost += n
	j.reason = reason
}

// Last returns the id behind which the next event will be.
func (j *Journal) Last() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

// Close writes what waits and ends the journal. Subscriptions deliver what is
// there and then end with io.EOF. Idempotent.
func (j *Journal) Close() {
	j.mu.Lock()
	if !j.closed {
		j.closed = true
		close(j.wake)
	}
	j.mu.Unlock()
	<-j.done
}

// load reads the folder: where the journal ends, and which ids may have been
// given out.
func (j *Journal) load() error {
	if err := os.MkdirAll(j.dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(j.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if first, ok := parseName(e.Name()); ok {
			j.segments = append(j.segments, segment{first: first})
		}
	}
	slices.SortFunc(j.segments, func(a, b segment) int { return cmp.Compare(a.first, b.first) })
	for i := range j.segments {
		if err := j.loadSegment(&j.segments[i]); err != nil {
			return err
		}
	}
	if len(j.segments) == 0 {
		return j.begin(1)
	}
	// Ids that are reserved may have been seen by somebody, though what they
	// stood for was lost with the host's power.
	j.last = max(j.last, j.reserved)
	end := j.segments[len(j.segments)-1]
	if end.size == 0 { // a crash left it without its head
		j.segments = j.segments[:len(j.segments)-1]
		return j.begin(max(end.first, j.last+1))
	}
	j.file, err = os.OpenFile(j.path(end), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	return j.file.Truncate(end.size)
}

// loadSegment finds out how far a segment is whole.
func (j *Journal) loadSegment(s *segment) error {
	f, err := os.Open(j.path(*s))
	if err != nil {
		return err
	}
	defer f.Close()
	j.last = max(j.last, s.first-1)
	sc := newScanner(f, s.first)
	for err == nil {
		_, err = sc.next()
	}
	if errors.Is(err, ErrFormat) {
		return fmt.Errorf("segment %s: %w; move the folder away to begin with a new one", segmentName(s.first), err)
	}
	if err != io.EOF {
		j.o.Log.Warn("the journal of events is cut off where it is damaged", "segment", segmentName(s.first), "offset", sc.good, "error", err)
	}
	s.size = sc.good
	j.last = max(j.last, sc.last)
	if sc.begun {
		j.reserved = sc.reserved // the latest counts: an orderly end takes the rest back
	}
	return nil
}

func (j *Journal) path(s segment) string { return filepath.Join(j.dir, segmentName(s.first)) }

// begin starts a segment for ids from first on, and removes the oldest ones
// that are too many.
func (j *Journal) begin(first uint64) error {
	if j.file != nil {
		j.file.Close()
		j.file = nil
	}
	s := segment{first: first}
	f, err := os.OpenFile(j.path(s), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	h := head(max(j.reserved, first-1))
	if _, err = f.Write(h); err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = syncDir(j.dir)
	}
	if err != nil {
		f.Close()
		os.Remove(j.path(s))
		return err
	}
	s.size = int64(len(h))
	j.file, j.reserved = f, max(j.reserved, first-1)
	j.mu.Lock()
	if n := len(j.segments); n > 0 && j.segments[n-1].first == first {
		j.segments = j.segments[:n-1]
	}
	j.segments = append(j.segments, s)
	surplus := j.segments[:max(0, len(j.segments)-j.o.Segments)]
	j.segments = slices.Clone(j.segments[len(surplus):])
	j.last = max(j.last, first-1)
	j.mu.Unlock()
	for _, old := range surplus {
		if err := os.Remove(j.path(old)); err != nil {
			j.o.Log.Warn("an old segment of the journal of events is left", "error", err)
		}
	}
	return nil
}

// write writes what waits in the queue, until the journal is closed.
func (j *Journal) write() {
	defer close(j.done)
	failing := false
	for range j.wake {
		j.mu.Lock()
		batch, lost, reason := j.queue, j.lost, j.reason
		j.queue, j.lost = nil, 0
		j.mu.Unlock()
		if len(batch) == 0 && lost == 0 {
			continue
		}
		kept, err := j.commit(batch, lost, reason)
		if err == nil {
			failing = false
			continue
		}
		if !failing {
			failing = true
			j.o.Log.Error("events are lost: the journal can't be written", "error", err)
		}
		j.mu.Lock()
		if kept == 0 {
			j.lose(lost, reason)
		}
		j.lose(uint64(len(batch)-kept), "the journal could not be written")
		j.mu.Unlock()
	}
	j.end()
}

// writeBatch bounds how many events one write takes.
const writeBatch = 256

// commit puts events into the file and shows them to subscribers. It returns
// how many were kept.
func (j *Journal) commit(batch []Event, lost uint64, reason string) (kept int, err error) {
	for kept < len(batch) || lost > 0 {
		part := batch[kept:min(len(batch), kept+writeBatch)]
		if err := j.commitPart(part, lost, reason); err != nil {
			return kept, err
		}
		kept, lost = kept+len(part), 0
	}
	return kept, nil
}

func (j *Journal) commitPart(part []Event, lost uint64, reason string) error {
	if err := j.rotate(); err != nil {
		return err
	}
	if need := j.last + uint64(len(part)) + 1; need > j.reserved {
		if err := j.reserve(need + reserveAhead); err != nil {
			return err
		}
	}
	id := j.last
	var text []byte
	if lost > 0 {
		id++
		text, _ = encode(text, gap(id, time.Now(), Gap{Lost: lost, Reason: reason}))
	}
	for _, e := range part {
		id++
		e.ID = id
		longer, err := encode(text, e)
		if err != nil { // a fault of who made the event
			j.o.Log.Error("an event is lost", "error", err)
		}
		text = longer
	}
	return j.put(text, id)
}

// rotate begins the next segment where the last one is full, or where writing
// to it failed so that nobody knows what is at its end.
func (j *Journal) rotate() error {
	j.mu.Lock()
	size := j.segments[len(j.segments)-1].size
	j.mu.Unlock()
	if j.file != nil && size < j.o.SegmentBytes {
		return nil
	}
	if j.file != nil {
		if err := j.file.Sync(); err != nil {
			return err
		}
	}
	return j.begin(j.last + 1)
}

// reserve makes it durable that ids up to n may be given out.
func (j *Journal) reserve(n uint64) error {
	if err := j.put(reservation(n), j.last); err != nil {
		return err
	}
	if err := j.file.Sync(); err != nil {
		return err
	}
	j.reserved = n
	return nil
}

// put appends whole lines, the last event of which has id last, and lets
// subscribers see them.
func (j *Journal) put(text []byte, last uint64) error {
	if _, err := j.file.Write(text); err != nil {
		return errors.Join(err, j.undo())
	}
	j.mu.Lock()
	j.segments[len(j.segments)-1].size += int64(len(text))
	j.last = last
	close(j.changed)
	j.changed = make(chan struct{})
	j.mu.Unlock()
	return nil
}

// undo takes back a write that failed halfway. Where it can't, the segment is
// given up: the next write begins another.
func (j *Journal) undo() error {
	j.mu.Lock()
	size := j.segments[len(j.segments)-1].size
	j.mu.Unlock()
	err := j.file.Truncate(size)
	if err != nil {
		j.file.Close()
		j.file = nil
	}
	return err
}

// end makes everything durable, and gives back the ids that were reserved and
// not used.
func (j *Journal) end() {
	if j.file != nil {
		var err error
		if 0 < j.last && j.last < j.reserved {
			err = j.put(reservation(j.last), j.last)
		}
		if err = errors.Join(err, j.file.Sync(), j.file.Close()); err != nil {
			j.o.Log.Warn("the end of the journal of events may not be durable", "error", err)
		}
	}
	j.mu.Lock()
	j.ended = true
	close(j.changed)
	j.mu.Unlock()
}

// syncDir makes the entries of a folder durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
