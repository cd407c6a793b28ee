package shim

import (
	"context"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/vnet"
)

// EgressRequest puts an egress policy in force, see vnet.ParsePolicy.
type EgressRequest struct {
	Profile string   `json:"profile"` // "" is vnet.ProfileInternet
	Allow   []string `json:"allow,omitempty"`
	Deny    []string `json:"deny,omitempty"`
}

// Denied is what the guest tried and its egress policy did not permit.
type Denied struct {
	Proto string `json:"proto"`          // "tcp" or "udp"; "dns" for a name that was not looked up; DeniedOther
	Addr  string `json:"addr,omitempty"` // IP address that the guest dialled
	Port  int    `json:"port,omitempty"`
	Name  string `json:"name,omitempty"` // that was asked for, or that the address was answered for last
	Count int64  `json:"count"`          // of such attempts since they were told of last
}

// DeniedOther is the Proto of a Denied that counts the attempts which were too
// many and too various to be told one by one.
const DeniedOther = "other"

// egress puts a policy in force, for open connections too. It takes no turn: a
// capture under way must not hold it up. One that cannot be read changes nothing.
func (h *host) egress(_ context.Context, req EgressRequest) (struct{}, error) {
	h.mu.Lock()
	err := h.check([]Phase{PhaseRunning, PhaseCapturing, PhaseSealed, PhaseParked})
	network := h.net
	h.mu.Unlock()
	if err != nil {
		return struct{}{}, err
	}
	policy, err := egressPolicy(req)
	if err != nil {
		return struct{}{}, err
	}
	network.SetPolicy(policy)
	return struct{}{}, nil
}

func egressPolicy(req EgressRequest) (vnet.Policy, error) {
	policy, err := vnet.ParsePolicy(req.Profile, req.Allow, req.Deny)
	if err != nil {
		return vnet.Policy{}, errorf(CodeInvalid, "egress policy: %v", err)
	}
	return policy, nil
}

// Bounds of what is told of denied attempts, however many a guest makes.
const (
	maxDenied   = 16          // kinds of attempts told at a time
	denialPause = time.Second // from one time to the next
)

// denials gathers denied attempts until somebody listens. Each is told once, to
// one listener.
type denials struct {
	wake chan struct{} // holds a token while there is something to tell

	mu      sync.Mutex
	pending []Denied // different ones, at most maxDenied
	others  int64
}

func newDenials() *denials { return &denials{wake: make(chan struct{}, 1)} }

// add takes an attempt in. It is called as often as the guest likes.
func (d *denials) add(a vnet.Denied) {
	next := Denied{Proto: a.Proto, Name: a.Name, Count: 1}
	if a.Addr.IsValid() {
		next.Addr, next.Port = a.Addr.Addr().String(), int(a.Addr.Port())
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
	for i, known := range d.pending {
		if known.Count = 1; known == next {
			d.pending[i].Count++
			return
		}
	}
	if len(d.pending) == maxDenied {
		d.others++
		return
	}
	d.pending = append(d.pending, next)
}

// take returns what was gathered, in the order of first attempts.
func (d *denials) take() []Denied {
	d.mu.Lock()
	defer d.mu.Unlock()
	told := d.pending
	if d.others > 0 {
		told = append(told, Denied{Proto: DeniedOther, Count: d.others})
	}
	d.pending, d.others = nil, 0
	return told
}
