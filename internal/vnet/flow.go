package vnet

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
)

// How many outbound flows a guest may have open. One TCP connection more is
// answered with a reset; one UDP flow more takes the place of the idlest.
const (
	maxTCPFlows = 1024
	maxUDPFlows = 256
)

// Protocols of flows, as Denied names them.
const (
	protoTCP = "tcp"
	protoUDP = "udp"
)

var (
	errDenied  = errors.New("denied by the egress policy")
	errTooMany = errors.New("too many open flows")
)

// flow is one open flow. What it holds is closed by the functions given to
// onAbort when the flow is to end before its time.
type flow struct {
	proto    string
	inbound  bool
	seen     netip.AddrPort // outbound: that the guest dials
	lastUsed atomic.Int64   // outbound UDP: unix nanoseconds of the last datagram

	mu      sync.Mutex
	aborted bool
	aborts  []func()
}

// onAbort has f called once if the flow is aborted. It returns false, and does
// not call f, when that has happened already.
func (fl *flow) onAbort(f func()) bool {
	fl.mu.Lock()
	defer fl.mu.Unlock()
	if fl.aborted {
		return false
	}
	fl.aborts = append(fl.aborts, f)
	return true
}

func (fl *flow) abort() {
	fl.mu.Lock()
	aborts := fl.aborts
	fl.aborted, fl.aborts = true, nil
	fl.mu.Unlock()
	for _, f := range aborts {
		f()
	}
}

// flows is the table of open flows and the policy that rules them.
type flows struct {
	isHost func(netip.Addr) bool

	mu     sync.Mutex
	policy Policy
	open   map[*flow]struct{}
	tcp    int // outbound
	udp    int // outbound
	in     int // inbound
	closed bool

	outbound sync.WaitGroup // one for each flow of admit
}

func newFlows(p Policy, isHost func(netip.Addr) bool) *flows {
	return &flows{isHost: isHost, policy: p, open: make(map[*flow]struct{})}
}

// admit opens an outbound flow if the policy and the bounds permit it. Policy
// and table are one under the lock, so that no flow slips past a new policy. The
// caller calls remove when the flow has ended.
func (t *flows) admit(proto string, seen netip.AddrPort) (*flow, error) {
	var idlest *flow
	defer func() {
		if idlest != nil {
			idlest.abort()
		}
	}()
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return nil, ErrClosed
	case !t.policy.permits(seen, t.isHost):
		return nil, errDenied
	case proto == protoTCP && t.tcp >= maxTCPFlows:
		return nil, errTooMany
	case proto == protoUDP && t.udp >= maxUDPFlows:
		if idlest = t.idlestUDP(); idlest == nil {
			return nil, errTooMany
		}
		t.forget(idlest)
	}
	fl := &flow{proto: proto, seen: seen}
	t.add(fl)
	t.outbound.Add(1)
	return fl, nil
}

// admitInbound opens a flow into the guest. The caller calls drop when the flow
// has ended.
func (t *flows) admitInbound() (*flow, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, ErrClosed
	}
	fl := &flow{proto: protoTCP, inbound: true}
	t.add(fl)
	return fl, nil
}

func (t *flows) add(fl *flow) {
	t.open[fl] = struct{}{}
	*t.counter(fl)++
}

func (t *flows) counter(fl *flow) *int {
	switch {
	case fl.inbound:
		return &t.in
	case fl.proto == protoTCP:
		return &t.tcp
	default:
		return &t.udp
	}
}

// forget takes a flow out of the table, which is all that bounds and policy
// look at; its goroutines may live on until remove.
func (t *flows) forget(fl *flow) {
	if _, ok := t.open[fl]; ok {
		delete(t.open, fl)
		*t.counter(fl)--
	}
}

// drop ends a flow of admitInbound. It may be called again.
func (t *flows) drop(fl *flow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forget(fl)
}

// remove ends a flow of admit. It is called once, when no goroutine of the flow
// is left.
func (t *flows) remove(fl *flow) {
	t.drop(fl)
	t.outbound.Done()
}

func (t *flows) idlestUDP() *flow {
	var idlest *flow
	for fl := range t.open {
		if fl.proto == protoUDP && (idlest == nil || fl.lastUsed.Load() < idlest.lastUsed.Load()) {
			idlest = fl
		}
	}
	return idlest
}

func (t *flows) currentPolicy() Policy {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.policy
}

func (t *flows) permitsDNS() bool { return t.currentPolicy().permitsDNS() }

func (t *flows) setPolicy(p Policy) {
	t.mu.Lock()
	t.policy = p
	var denied []*flow
	for fl := range t.open {
		if !fl.inbound && !p.permits(fl.seen, t.isHost) {
			denied = append(denied, fl)
		}
	}
	t.mu.Unlock()
	abortAll(denied)
}

// reset aborts every flow.
func (t *flows) reset() {
	t.mu.Lock()
	all := make([]*flow, 0, len(t.open))
	for fl := range t.open {
		all = append(all, fl)
	}
	t.mu.Unlock()
	abortAll(all)
}

// close aborts every flow and admits no other. It does not wait.
func (t *flows) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.reset()
}

func (t *flows) counts() (inbound, outbound int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.in, t.tcp + t.udp
}

func abortAll(list []*flow) {
	for _, fl := range list {
		fl.abort()
	}
}
