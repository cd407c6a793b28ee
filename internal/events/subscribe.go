package events

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// Subscription is a place in a journal. It is used by one goroutine at a time.
type Subscription struct {
	j      *Journal
	filter Filter
	after  uint64 // id of the last event that was looked at
	gap    string // why events before the next one are missing; "" if they are not

	seg  segment // that file is of
	file *os.File
	scan *scanner
}

// Subscribe returns a subscription to the events behind the one with the id
// after that pass the filter; after = 0 begins with the oldest one that is kept.
// Where events behind after are gone, or after was never given out (it is of
// another journal), the first event is a gap. Close it.
func (j *Journal) Subscribe(after uint64, f Filter) *Subscription {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := &Subscription{j: j, filter: f, after: after}
	oldest := j.segments[0].first
	switch {
	case after == 0:
		s.after = oldest - 1
	case after > j.last:
		s.after, s.gap = oldest-1, fmt.Sprintf("event %d was never given out here", after)
	}
	return s
}

// Close lets go of the journal.
func (s *Subscription) Close() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

// After returns the id of the last event that was looked at: a subscription
// from there on delivers the same as this one.
func (s *Subscription) After() uint64 { return s.after }

// Next waits for the next event. It returns the context's error where that
// ends first, and io.EOF behind the last event of a journal that is closed.
func (s *Subscription) Next(ctx context.Context) (Event, error) {
	for {
		s.j.mu.Lock()
		changed, ended := s.j.changed, s.j.ended
		s.j.mu.Unlock()
		e, err := s.Ready()
		if err != io.EOF || ended {
			return e, err
		}
		select {
		case <-ctx.Done():
			return Event{}, ctx.Err()
		case <-changed:
		}
	}
}

// Ready returns the next event that is there already, or io.EOF.
func (s *Subscription) Ready() (Event, error) {
	for {
		e, err := s.read()
		if err != nil {
			return Event{}, err
		}
		s.after = e.ID
		if s.filter.Match(&e) {
			return e, nil
		}
	}
}

// read returns the next event, whether it passes or not.
func (s *Subscription) read() (Event, error) {
	for {
		seg, next, first, last := s.locate()
		if first > s.after+1 && s.gap == "" {
			s.gap = fmt.Sprintf("events before %d are not kept any more", first)
		}
		if s.gap != "" {
			e := gap(first-1, time.Now(), Gap{First: first, Reason: s.gap})
			s.gap, s.after = "", first-1
			return e, nil
		}
		if last <= s.after {
			return Event{}, io.EOF
		}
		err := s.open(seg)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was removed just now: there is a gap
		}
		if err != nil {
			return Event{}, fmt.Errorf("read the journal of events: %w", err)
		}
		e, err := s.scan.next()
		switch {
		case err == nil && e.ID <= s.after:
			continue
		case err == nil:
			return e, nil
		case err != io.EOF:
			return Event{}, fmt.Errorf("read the journal of events: %w", err)
		case next == 0:
			return Event{}, io.EOF
		}
		s.after = max(s.after, next-1) // on to the next segment
	}
}

// locate returns the segment that holds what is behind s.after, the first id
// of the segment after it (0: there is none), and the first and last ids of
// the journal.
func (s *Subscription) locate() (seg segment, next, first, last uint64) {
	s.j.mu.Lock()
	defer s.j.mu.Unlock()
	all := s.j.segments
	for i := range all {
		if i == 0 || all[i].first <= s.after+1 {
			seg, next = all[i], 0
			if i+1 < len(all) {
				next = all[i+1].first
			}
		}
	}
	return seg, next, all[0].first, s.j.last
}

// open makes s.scan read the segment up to what is written of it by now.
func (s *Subscription) open(seg segment) error {
	if s.file == nil || s.seg.first != seg.first || seg.size < s.scan.good {
		f, err := os.Open(s.j.path(seg))
		if err != nil {
			return err
		}
		s.Close()
		s.file, s.seg, s.scan = f, segment{first: seg.first}, newScanner(nil, seg.first)
	}
	if s.seg.size != seg.size {
		// Lines are added whole, so what was not read begins with a line.
		s.seg.size = seg.size
		s.scan.r.Reset(io.NewSectionReader(s.file, s.scan.good, seg.size-s.scan.good))
	}
	return nil
}
