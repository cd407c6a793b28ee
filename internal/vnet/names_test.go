package vnet

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func TestBindings(t *testing.T) {
	b, now := newBindings(), time.Now()
	one, two := netip.MustParseAddr("1.1.1.1"), netip.MustParseAddr("2.2.2.2")
	b.add("a.test", []netip.Addr{one, two}, 0, now)
	b.add("b.test", []netip.Addr{one}, time.Hour, now)
	b.add("c.test", []netip.Addr{two}, 1000*time.Hour, now)
	b.add("a.test", []netip.Addr{one}, 0, now.Add(time.Minute))

	tests := []struct {
		after    time.Duration
		one, two string
	}{
		{0, "a.test b.test", "c.test a.test"},
		{minRemember, "a.test b.test", "c.test"},
		{minRemember + time.Minute, "b.test", "c.test"},
		{time.Hour, "", "c.test"},
		{maxRemember, "", ""},
	}
	for _, tt := range tests {
		at := now.Add(tt.after)
		if got := strings.Join(b.names(one, at), " "); got != tt.one {
			t.Errorf("after %s: %s is %q, want %q", tt.after, one, got, tt.one)
		}
		if got := strings.Join(b.names(two, at), " "); got != tt.two {
			t.Errorf("after %s: %s is %q, want %q", tt.after, two, got, tt.two)
		}
	}
}

// Answers without end take no memory without end; what is in use stays.
func TestBindingsAreBounded(t *testing.T) {
	b, now := newBindings(), time.Now()
	used := netip.MustParseAddr("1.1.1.1")
	b.add("used.test", []netip.Addr{used}, 0, now)
	for i := range 4 * maxBindings {
		addr := netip.AddrFrom4([4]byte{8, byte(i >> 16), byte(i >> 8), byte(i)})
		b.add(fmt.Sprintf("n%d.test", i), []netip.Addr{addr}, 0, now)
		b.names(used, now)
	}
	for i := range 4 * maxNames {
		b.add(fmt.Sprintf("n%d.test", i), []netip.Addr{used}, 0, now)
	}
	if len(b.byAddr) != maxBindings || b.recent.Len() != maxBindings {
		t.Errorf("%d addresses, %d in the list, want %d", len(b.byAddr), b.recent.Len(), maxBindings)
	}
	if got := b.names(used, now); len(got) != maxNames || got[0] != fmt.Sprintf("n%d.test", 4*maxNames-1) {
		t.Errorf("an address has the names %q", got)
	}
	many := make([]netip.Addr, 10*maxAnswered)
	for i := range many {
		many[i] = netip.AddrFrom4([4]byte{9, 0, byte(i >> 8), byte(i)})
	}
	b.add("many.test", many, 0, now)
	if b.names(many[maxAnswered-1], now) == nil || b.names(many[maxAnswered], now) != nil {
		t.Errorf("not %d addresses of one answer are bound", maxAnswered)
	}
}

func rr(t testing.TB, text string) dns.RR {
	t.Helper()
	r, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestResolve(t *testing.T) {
	tests := []struct {
		name   string
		answer []string
		chain  string
		addrs  string
		ttl    time.Duration
	}{
		{"addresses", []string{"www.a.test. 60 A 1.1.1.1", "WWW.A.test. 30 A 2.2.2.2"}, "", "[1.1.1.1 2.2.2.2]", 30 * time.Second},
		{"other names", []string{"b.test. 60 A 1.1.1.1", "a.test. 60 A 2.2.2.2"}, "", "[]", maxRemember},
		{"alias", []string{"x.cdn.test. 60 A 1.1.1.1", "www.a.test. 20 CNAME b.test.", "b.test. 90 CNAME X.cdn.test.", "b.test. 60 A 9.9.9.9"},
			"b.test x.cdn.test", "[1.1.1.1]", 20 * time.Second},
		{"alias alone", []string{"www.a.test. 20 CNAME b.test."}, "b.test", "[]", 20 * time.Second},
		{"loop", []string{"www.a.test. 20 CNAME b.test.", "b.test. 20 CNAME www.a.test.", "b.test. 20 A 1.1.1.1"},
			strings.TrimSpace(strings.Repeat("b.test www.a.test ", maxChain/2)), "[]", 20 * time.Second},
		{"nothing", nil, "", "[]", maxRemember},
		{"IPv6", []string{"www.a.test. 20 AAAA 2001:db8::1"}, "", "[]", maxRemember},
	}
	for _, tt := range tests {
		var answer []dns.RR
		for _, text := range tt.answer {
			answer = append(answer, rr(t, text))
		}
		r := resolve(dns.Question{Name: "www.A.test.", Qtype: dns.TypeA, Qclass: dns.ClassINET}, answer)
		if r.name != "www.a.test" || strings.Join(r.chain, " ") != tt.chain || fmt.Sprint(r.addrs) != tt.addrs || r.ttl != tt.ttl {
			t.Errorf("%s: got %+v", tt.name, r)
		}
	}
}

// FuzzAnswer feeds messages of hostile servers to what reads them. Whatever they
// say, only the name that was asked for gets addresses, and never one that opens
// what is not public.
func FuzzAnswer(f *testing.F) {
	add := func(answer ...string) {
		m := new(dns.Msg).SetQuestion("www.a.test.", dns.TypeA)
		m.Response = true
		for _, text := range answer {
			m.Answer = append(m.Answer, rr(f, text))
		}
		packed, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(packed)
	}
	add("www.a.test. 60 A 1.1.1.1")
	add("www.a.test. 60 CNAME b.test.", "b.test. 60 A 127.0.0.1")
	add("b.test. 60 A 1.1.1.1", "www.a.test. 60 CNAME www.a.test.")
	f.Fuzz(func(t *testing.T, packed []byte) {
		m := new(dns.Msg)
		if m.Unpack(packed) != nil {
			return
		}
		policy, err := ParsePolicy("allow-list", []string{"www.a.test"}, []string{"denied.test"})
		if err != nil {
			t.Fatal(err)
		}
		table := newFlows(policy, func(netip.Addr) bool { return false })
		r := resolve(dns.Question{Name: "www.a.test.", Qtype: dns.TypeA, Qclass: dns.ClassINET}, m.Answer)
		if len(r.chain) > maxChain || len(r.addrs) > maxAnswered || r.ttl < 0 {
			t.Fatalf("without bounds: %+v", r)
		}
		if !table.learn(r) {
			if !slices.Contains(r.chain, "denied.test") {
				t.Fatalf("refused: %+v", r)
			}
			return
		}
		for _, addr := range r.addrs {
			open := policy.permits(netip.AddrPortFrom(addr, 443), table.bound.names(addr, time.Now()), table.isHost)
			if ip := net.IP(addr.AsSlice()); open && (ip.IsPrivate() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast()) {
				t.Fatalf("%s is open", addr)
			}
		}
	})
}
