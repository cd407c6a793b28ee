package events

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Format is the version of the segments that this build writes
// (docs/formats/events.md).
const Format = 1

// ErrFormat says that a segment is of a version that this build does not read.
var ErrFormat = errors.New("not a journal of events that this version can read")

// maxID bounds ids: programs that keep numbers as floating point can hold it.
const maxID = 1 << 53

// maxLine bounds a line of a segment, with its newline.
const maxLine = 64 << 10

const (
	formatName = "hib-events"
	suffix     = ".jsonl"
)

// line is any line of a segment: its head, an event, or a reservation.
type line struct {
	Format  string `json:"format,omitempty"` // of the head
	Version int    `json:"version,omitempty"`

	Reserved uint64 `json:"reserved,omitempty"` // ids up to this one may have been given out

	Event
}

// head returns the first line of a segment.
func head(reserved uint64) []byte {
	return fmt.Appendf(nil, "{\"format\":%q,\"version\":%d,\"reserved\":%d}\n", formatName, Format, reserved)
}

// reservation returns the line that reserves ids up to n.
func reservation(n uint64) []byte { return fmt.Appendf(nil, "{\"reserved\":%d}\n", n) }

// encode appends the line of e. Data that would make it too long is left out,
// which the line tells.
func encode(to []byte, e Event) ([]byte, error) {
	b, err := json.Marshal(e)
	if err != nil {
		return to, fmt.Errorf("encode an event of type %q: %w", e.Type, err)
	}
	if len(b)+1 > maxLine {
		e.Data = json.RawMessage(`{"truncated":true}`)
		if b, err = json.Marshal(e); err != nil || len(b)+1 > maxLine {
			return to, fmt.Errorf("an event of type %.40q is too long", e.Type)
		}
	}
	return append(append(to, b...), '\n'), nil
}

// decode reads one line without its newline.
func decode(b []byte) (line, error) {
	var l line
	if len(b) >= maxLine {
		return l, errors.New("the line is too long")
	}
	if err := json.Unmarshal(b, &l); err != nil {
		return l, err
	}
	switch {
	case l.Format != "" && l.Format != formatName, l.Format != "" && l.ID != 0:
		return l, errors.New("no head of a segment")
	case l.ID > maxID, l.Reserved > maxID:
		return l, errors.New("an id is too large")
	case l.Format == "" && l.Reserved == 0 && (l.ID == 0 || l.Type == ""):
		return l, errors.New("neither an event nor a reservation")
	}
	return l, nil
}

// segmentName returns the file name of the segment whose events have ids from
// first on.
func segmentName(first uint64) string { return fmt.Sprintf("%020d%s", first, suffix) }

// parseName is the reverse of segmentName.
func parseName(name string) (first uint64, ok bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok || len(digits) != 20 {
		return 0, false
	}
	first, err := strconv.ParseUint(digits, 10, 64)
	return first, err == nil && first > 0
}

// scanner reads the lines of a segment as far as they are whole and in order.
type scanner struct {
	r        *bufio.Reader
	last     uint64 // id of the last event
	reserved uint64 // the last reservation
	good     int64  // bytes up to here are whole lines
	begun    bool   // the head was read
}

func newScanner(r io.Reader, first uint64) *scanner {
	return &scanner{r: bufio.NewReaderSize(r, maxLine), last: first - 1}
}

// next returns the next event. io.EOF says that the segment ends here, with a
// whole line or without one; errTorn that something follows that is none.
func (s *scanner) next() (Event, error) {
	for {
		raw, err := s.r.ReadSlice('\n')
		if err == io.EOF && len(raw) == 0 {
			return Event{}, io.EOF
		}
		if err != nil {
			return Event{}, fmt.Errorf("%w: %w", errTorn, err)
		}
		l, err := decode(bytes.TrimSuffix(raw, []byte("\n")))
		switch {
		case err != nil:
			return Event{}, fmt.Errorf("%w: %w", errTorn, err)
		case !s.begun && l.Format == "", s.begun && l.Format != "":
			return Event{}, fmt.Errorf("%w: a segment begins with one head", errTorn)
		case l.Format != "" && l.Version != Format:
			return Event{}, fmt.Errorf("%w: it has version %d, this version reads %d", ErrFormat, l.Version, Format)
		case l.ID != 0 && l.ID <= s.last:
			return Event{}, fmt.Errorf("%w: event %d follows event %d", errTorn, l.ID, s.last)
		}
		s.begun = true
		s.good += int64(len(raw))
		if l.ID != 0 {
			s.last = l.ID
			return l.Event, nil
		}
		s.reserved = l.Reserved
	}
}

// errTorn says that a line is not whole, as after a crash while it was written.
var errTorn = errors.New("a line is not whole")
