package vnet

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// flowKind is what a flow is to the table.
type flowKind int

const (
	flowInbound flowKind = iota // made by Dial
	flowControl                 // made by DialControl
	flowTCP                     // outbound
	flowUDP                     // outbound
	flowDNS                     // a TCP connection to the resolver
	flowKinds
)

// How many flows of a kind a guest may have open. One TCP connection more is
// answered with a reset; one UDP flow more takes the place of the idlest.
const (
	maxTCPFlows = 1024
	maxUDPFlows = 256
	maxDNSFlows = 16
)

// network is the flow's network as net.Dial and Denied name it.
func (k flowKind) network() string {
	if k == flowUDP {
		return "udp"
	}
	return "tcp"
}

var (
	errDenied  = errors.New("denied by the egress policy")
	errTooMany = errors.New("too many open flows")
)

// flow is one open flow. What it holds is closed by the functions given to
// onAbort when the flow is to end before its time.
type flow struct {
	kind     flowKind
	seen     netip.AddrPort // that the guest dials
	names    []string       // that its address was answered for when the flow was admitted
	lastUsed atomic.Int64   // UDP: unix nanoseconds of the last datagram
	usage    usage

	mu      sync.Mutex
	aborted bool
	aborts  []func()
}

func (fl *flow) outbound() bool { return fl.kind == flowTCP || fl.kind == flowUDP }

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

// flows is the table of open flows, the policy that rules them, and the names
// that the policy may need for that.
type flows struct {
	isHost func(netip.Addr) bool

	mu     sync.Mutex
	policy Policy
	bound  bindings
	open   map[*flow]struct{}
	counts [flowKinds]int
	closed bool

	guests sync.WaitGroup // one for each flow of admit, which is all but inbound ones
}

func newFlows(p Policy, isHost func(netip.Addr) bool) *flows {
	return &flows{isHost: isHost, policy: p, bound: newBindings(), open: make(map[*flow]struct{})}
}

// admit opens an outbound flow if the policy and the bounds permit it. Policy
// and table are one under the lock, so that no flow slips past a new policy. The
// caller calls remove when the flow has ended.
func (t *flows) admit(kind flowKind, seen netip.AddrPort) (*flow, error) {
	var idlest *flow
	defer func() {
		if idlest != nil {
			idlest.abort()
		}
	}()
	t.mu.Lock()
	defer t.mu.Unlock()
	names := t.bound.names(seen.Addr(), time.Now())
	switch count := t.counts[kind]; {
	case t.closed:
		return nil, ErrClosed
	case kind != flowDNS && !t.policy.permits(seen, names, t.isHost):
		return nil, errDenied
	case kind == flowTCP && count >= maxTCPFlows, kind == flowDNS && count >= maxDNSFlows:
		return nil, errTooMany
	case kind == flowUDP && count >= maxUDPFlows:
		idlest = t.idlestUDP()
		t.forget(idlest)
	}
	fl := &flow{kind: kind, seen: seen, names: names}
	fl.usage.begin()
	fl.lastUsed.Store(time.Now().UnixNano())
	t.add(fl)
	t.guests.Add(1)
	return fl, nil
}

// admitInbound opens a flow of one of the two kinds into the guest. The caller
// calls drop when the flow has ended.
func (t *flows) admitInbound(kind flowKind) (*flow, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, ErrClosed
	}
	fl := &flow{kind: kind}
	fl.usage.begin()
	t.add(fl)
	return fl, nil
}

func (t *flows) add(fl *flow) {
	t.open[fl] = struct{}{}
	t.counts[fl.kind]++
}

// forget takes a flow out of the table, which is all that bounds and policy
// look at; its goroutines may live on until remove.
func (t *flows) forget(fl *flow) {
	if _, ok := t.open[fl]; ok {
		delete(t.open, fl)
		t.counts[fl.kind]--
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
	t.guests.Done()
}

func (t *flows) idlestUDP() *flow {
	var idlest *flow
	for fl := range t.open {
		if fl.kind == flowUDP && (idlest == nil || fl.lastUsed.Load() < idlest.lastUsed.Load()) {
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

func (t *flows) permitsName(name string) bool { return t.currentPolicy().permitsName(name) }

// learn binds what an answer says, before the guest sees the answer. It returns
// false if the guest must not: the policy closes the name by now, or one that it
// stands for.
func (t *flows) learn(r resolution) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.policy.permitsName(r.name) || slices.ContainsFunc(r.chain, t.policy.closesName) {
		return false
	}
	t.bound.add(r.name, r.addrs, r.ttl, time.Now())
	return true
}

// nameOf returns the name that an address was answered for last, "" if none.
func (t *flows) nameOf(addr netip.Addr) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if names := t.bound.names(addr, time.Now()); len(names) > 0 {
		return names[0]
	}
	return ""
}

// setPolicy aborts the flows that the policy does not permit. A flow keeps the
// names that it was admitted with, however old they are by now.
func (t *flows) setPolicy(p Policy) {
	t.mu.Lock()
	t.policy = p
	var denied []*flow
	for fl := range t.open {
		if !fl.outbound() {
			continue
		}
		names := t.bound.names(fl.seen.Addr(), time.Now())
		for _, name := range fl.names {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		if !p.permits(fl.seen, names, t.isHost) {
			denied = append(denied, fl)
		}
	}
	t.mu.Unlock()
	abortAll(denied)
}

// all returns the open flows, in no order.
func (t *flows) all() []*flow {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*flow, 0, len(t.open))
	for fl := range t.open {
		all = append(all, fl)
	}
	return all
}

// reset aborts every flow.
func (t *flows) reset() { abortAll(t.all()) }

// close aborts every flow and admits no other. It does not wait.
func (t *flows) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.reset()
}

func abortAll(list []*flow) {
	for _, fl := range list {
		fl.abort()
	}
}
