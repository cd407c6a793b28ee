package vnet

import (
	"container/list"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Bounds of what is remembered of answers. A guest that fills them loses what it
// asked for before, and has to ask again.
const (
	maxBindings  = 2048 // addresses
	maxNames     = 8    // of one address
	maxAnswered  = 64   // addresses of one answer
	maxChain     = 16   // names that lead from the one asked for to its addresses
	minRemember  = 10 * time.Minute
	maxRemember  = 24 * time.Hour
	maxNameShown = 253 // characters of a name in a report
)

// bindings remember which names the resolver answered an address for. They are
// facts, which no policy changes; what they permit is the policy's to say.
type bindings struct {
	byAddr map[netip.Addr]*list.Element
	recent *list.List // of *binding; the one used last first
}

type binding struct {
	addr  netip.Addr
	names []boundName // the one answered last first
}

type boundName struct {
	name  string
	until time.Time
}

func newBindings() bindings {
	return bindings{byAddr: make(map[netip.Addr]*list.Element), recent: list.New()}
}

// add notes that a name was answered with these addresses, for as long as that
// may be cached. Programs keep an address for somewhat longer than they should.
func (b *bindings) add(name string, addrs []netip.Addr, ttl time.Duration, now time.Time) {
	until := now.Add(min(max(ttl, minRemember), maxRemember))
	for _, addr := range addrs[:min(len(addrs), maxAnswered)] {
		b.addOne(addr, boundName{name, until})
	}
}

func (b *bindings) addOne(addr netip.Addr, bound boundName) {
	at, known := b.byAddr[addr]
	if !known {
		if b.recent.Len() == maxBindings {
			oldest := b.recent.Back()
			delete(b.byAddr, oldest.Value.(*binding).addr)
			b.recent.Remove(oldest)
		}
		at = b.recent.PushFront(&binding{addr: addr})
		b.byAddr[addr] = at
	}
	b.recent.MoveToFront(at)
	entry := at.Value.(*binding)
	entry.names = slices.DeleteFunc(entry.names, func(n boundName) bool { return n.name == bound.name })
	entry.names = slices.Insert(entry.names[:min(len(entry.names), maxNames-1)], 0, bound)
}

// names returns the names that an address was answered for lately, the last one
// first.
func (b *bindings) names(addr netip.Addr, now time.Time) []string {
	at, known := b.byAddr[addr]
	if !known {
		return nil
	}
	b.recent.MoveToFront(at)
	entry := at.Value.(*binding)
	entry.names = slices.DeleteFunc(entry.names, func(n boundName) bool { return !now.Before(n.until) })
	names := make([]string, 0, len(entry.names))
	for _, n := range entry.names {
		names = append(names, n.name)
	}
	return names
}

// canonical returns a name of a DNS message as rules hold it.
func canonical(name string) string { return strings.TrimSuffix(strings.ToLower(name), ".") }

// resolution is what an answer says of the name that was asked for.
type resolution struct {
	name  string   // that was asked for
	chain []string // names that it stands for, by way of CNAME records
	addrs []netip.Addr
	ttl   time.Duration // for which all that may be cached
}

// resolve reads the answer to a question. Records of names that the question
// does not lead to say nothing, whoever sent them.
func resolve(q dns.Question, answer []dns.RR) resolution {
	r := resolution{name: canonical(q.Name), ttl: maxRemember}
	owner := r.name
	for len(r.chain) < maxChain {
		at := slices.IndexFunc(answer, func(rr dns.RR) bool {
			_, ok := rr.(*dns.CNAME)
			return ok && canonical(rr.Header().Name) == owner
		})
		if at < 0 {
			break
		}
		cname := answer[at].(*dns.CNAME)
		owner = canonical(cname.Target)
		r.chain = append(r.chain, owner)
		r.cap(cname.Hdr.Ttl)
	}
	for _, rr := range answer {
		a, ok := rr.(*dns.A)
		if !ok || canonical(a.Hdr.Name) != owner || len(r.addrs) == maxAnswered {
			continue
		}
		if ip4 := a.A.To4(); ip4 != nil {
			r.addrs = append(r.addrs, netip.AddrFrom4([4]byte(ip4)))
			r.cap(a.Hdr.Ttl)
		}
	}
	return r
}

func (r *resolution) cap(ttl uint32) {
	r.ttl = min(r.ttl, time.Duration(ttl)*time.Second)
}
