package cli

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/hibernacle/hibernacle/api"
)

// progress shows how long work comes on: bars on a terminal, plain lines
// elsewhere.
type progress struct {
	w    io.Writer
	bars *mpb.Progress // nil: no terminal

	// message is read by the bars' own goroutines, which must not wait for mu.
	message atomic.Value

	mu    sync.Mutex
	phase string
	text  string
	bar   *mpb.Bar
	tenth int64 // of the phase, that was told last
}

func newProgress(w io.Writer) *progress {
	p := &progress{w: w}
	if _, ok := terminal(w); ok {
		p.bars = mpb.New(mpb.WithOutput(w), mpb.WithWidth(48))
	}
	return p
}

// update shows one line of a long answer.
func (p *progress) update(u api.Progress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	u.Phase, u.Message = printable(u.Phase), printable(u.Message)
	if p.bars == nil {
		p.line(u)
		return
	}
	if p.bar == nil || u.Phase != p.phase {
		p.finishBar()
		p.phase = u.Phase
		p.bar = p.newBar(u)
	}
	if u.Message != "" {
		p.message.Store(u.Message)
	}
	if u.Total > 0 {
		p.bar.SetTotal(u.Total, false)
	}
	p.bar.SetCurrent(u.Done)
}

// newBar begins a bar for a phase: with bytes where the total is known.
func (p *progress) newBar(u api.Progress) *mpb.Bar {
	p.message.Store("")
	name := decor.Name(u.Phase+" ", decor.WC{W: 12, C: decor.DindentRight})
	message := decor.Any(func(decor.Statistics) string { return " " + p.message.Load().(string) })
	if u.Total > 0 {
		return p.bars.AddBar(u.Total, mpb.PrependDecorators(name),
			mpb.AppendDecorators(decor.Counters(decor.SizeB1024(0), "% .1f / % .1f"), message))
	}
	return p.bars.AddSpinner(0, mpb.PrependDecorators(name), mpb.AppendDecorators(decor.Elapsed(decor.ET_STYLE_GO), message))
}

func (p *progress) finishBar() {
	if p.bar != nil {
		p.bar.SetTotal(-1, true)
		p.bar = nil
	}
}

// line prints what is new: a phase, a message, or another tenth of the total.
func (p *progress) line(u api.Progress) {
	var tenth int64
	if u.Total > 0 {
		tenth = u.Done * 10 / u.Total
	}
	if u.Phase == p.phase && u.Message == p.text && tenth == p.tenth {
		return
	}
	p.phase, p.text, p.tenth = u.Phase, u.Message, tenth
	line := u.Phase
	if u.Message != "" {
		line += ": " + u.Message
	}
	if u.Total > 0 {
		line += fmt.Sprintf(" %d%%", u.Done*100/u.Total)
	}
	fmt.Fprintln(p.w, line)
}

// end completes what is shown.
func (p *progress) end() {
	if p.bars == nil {
		return
	}
	p.mu.Lock()
	p.finishBar()
	p.mu.Unlock()
	p.bars.Wait()
}

// reader shows how much of total bytes (-1: unknown) was read from r. Only on
// a terminal: copies are silent elsewhere.
func (p *progress) reader(name string, r io.Reader, total int64) io.Reader {
	if p.bars == nil {
		return r
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bar = p.newBar(api.Progress{Phase: name, Total: max(0, total)})
	watched, err := p.bar.ProxyReader(r)
	if err != nil { // the bars have ended
		return r
	}
	return struct{ io.Reader }{watched}
}
