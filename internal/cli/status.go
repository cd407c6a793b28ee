package cli

import (
	"fmt"
	"io"
	"time"
)

// statusLine tells what is going on right now: in one line that is written
// over on a terminal, and at most once in some seconds elsewhere.
type statusLine struct {
	w        io.Writer
	terminal bool
	last     time.Time
}

func newStatus(w io.Writer) *statusLine {
	_, is := terminal(w)
	return &statusLine{w: w, terminal: is}
}

// statusPause is the least time between two lines where there is no terminal.
const statusPause = 5 * time.Second

func (s *statusLine) set(text string) {
	text = printable(text)
	switch {
	case s.terminal:
		fmt.Fprintf(s.w, "\r\x1b[K%s", text)
	case time.Since(s.last) >= statusPause:
		fmt.Fprintln(s.w, text)
		s.last = time.Now()
	}
}

// end clears the line.
func (s *statusLine) end() {
	if s.terminal {
		fmt.Fprint(s.w, "\r\x1b[K")
	}
}
