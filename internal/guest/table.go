package guest

import (
	"errors"
	"sort"
	"sync"

	processpb "github.com/hibernacle/hibernacle/api/process"
)

const (
	maxEnded      = 64      // ended processes that are remembered
	maxEndedBytes = 8 << 20 // and the output kept for them, in bytes
)

var (
	errNoProcess  = errors.New("no such process")
	errNoSelector = errors.New("the request names no process: set pid or tag")
)

// table holds the processes that run, and the last that ended, so that a
// client that comes back late gets their end.
type table struct {
	mu    sync.Mutex
	live  map[uint32]*process
	ended []*process // oldest first
}

func newTable() *table { return &table{live: map[uint32]*process{}} }

// add adds a running process, unless it has ended already.
func (t *table) add(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.ended {
		if e == p {
			return
		}
	}
	t.live[p.pid] = p
}

// retire moves a process to the ended ones and forgets the oldest of them
// beyond the bounds.
func (t *table) retire(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.live[p.pid] == p {
		delete(t.live, p.pid)
	}
	t.ended = append(t.ended, p)
	bytes := 0
	for _, e := range t.ended {
		bytes += e.out.bytes()
	}
	for len(t.ended) > 1 && (len(t.ended) > maxEnded || bytes > maxEndedBytes) {
		bytes -= t.ended[0].out.bytes()
		t.ended[0] = nil
		t.ended = t.ended[1:]
	}
}

// running returns the processes that run, by pid.
func (t *table) running() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*process, 0, len(t.live))
	for _, p := range t.live {
		all = append(all, p)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].pid < all[j].pid })
	return all
}

// findRunning returns the running process that sel names.
func (t *table) findRunning(sel *processpb.ProcessSelector) (*process, error) {
	match, err := matcher(sel)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.live {
		if match(p) {
			return p, nil
		}
	}
	return nil, errNoProcess
}

// find returns the process that sel names: a running one, else the last such
// that ended.
func (t *table) find(sel *processpb.ProcessSelector) (*process, error) {
	p, err := t.findRunning(sel)
	if !errors.Is(err, errNoProcess) {
		return p, err
	}
	match, err := matcher(sel)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := len(t.ended) - 1; i >= 0; i-- {
		if match(t.ended[i]) {
			return t.ended[i], nil
		}
	}
	return nil, errNoProcess
}

func matcher(sel *processpb.ProcessSelector) (func(*process) bool, error) {
	switch s := sel.GetSelector().(type) {
	case *processpb.ProcessSelector_Pid:
		return func(p *process) bool { return p.pid == s.Pid }, nil
	case *processpb.ProcessSelector_Tag:
		return func(p *process) bool { return p.tag != nil && *p.tag == s.Tag }, nil
	}
	return nil, errNoSelector
}
