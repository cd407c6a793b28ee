package vnet

import (
	"fmt"
	"net/netip"
	"slices"
)

// Profile is what a policy permits before its rules are looked at.
type Profile string

// The profiles. The empty one is ProfileInternet.
const (
	ProfileInternet  Profile = "internet"   // public addresses
	ProfileNone      Profile = "none"       // nothing at all, whatever the rules say
	ProfileAllowList Profile = "allow-list" // what Allow rules name
)

// Policy says what a sandbox may open flows to, and which names its resolver
// answers. The zero Policy permits the public internet alone: it denies loopback,
// the host's own addresses, link-local (cloud metadata), private, shared,
// benchmark and reserved ranges, multicast and broadcast.
//
// Allow opens what the profile leaves closed, Deny closes what is open. Where
// rules of both match, Deny wins, unless an Allow rule is more specific than each
// Deny rule that matches: in its target or in its port, and in neither less.
// Everything and 0.0.0.0/0 are the least specific targets, then names, the longer
// the more specific, then prefixes, likewise; a port is more specific than none.
//
// A rule by a name matches the addresses that the gateway's resolver answered for
// that name. It opens public addresses alone, as Everything does. What leads to
// the host itself or to its link is opened only by a rule made for it, never by a
// wide one: loopback by "host:PORT" or a prefix within 127.0.0.0/8, an address
// of the host by a /32, link-local by a prefix within 169.254.0.0/16. Nothing opens
// multicast, broadcast, 0.0.0.0/8 and Subnet.
type Policy struct {
	Profile Profile
	Allow   []Rule
	Deny    []Rule
}

// Ranges that are not the public internet. The order is of no consequence.
var (
	loopbackRange  = netip.MustParsePrefix("127.0.0.0/8")
	linkLocalRange = netip.MustParsePrefix("169.254.0.0/16")
	subnetRange    = netip.MustParsePrefix(Subnet)
	loopback       = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	hostAlias      = netip.MustParseAddr(HostIP)

	neverRanges = []netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/8"),   // "this host": dials loopback on Linux
		netip.MustParsePrefix("224.0.0.0/4"), // multicast
		netip.MustParsePrefix("255.255.255.255/32"),
		subnetRange,
	}
	deniedRanges = []netip.Prefix{ // by default; special-purpose registry of RFC 6890
		netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("100.64.0.0/10"),
		netip.MustParsePrefix("172.16.0.0/12"),
		netip.MustParsePrefix("192.0.0.0/24"),
		netip.MustParsePrefix("192.0.2.0/24"),
		netip.MustParsePrefix("192.88.99.0/24"),
		netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("198.18.0.0/15"),
		netip.MustParsePrefix("198.51.100.0/24"),
		netip.MustParsePrefix("203.0.113.0/24"),
		netip.MustParsePrefix("240.0.0.0/4"),
	}
)

// ParsePolicy makes a policy of a profile and rules in text. An allow rule is
// "CIDR[:PORT]", "DOMAIN[:PORT]" or "host:PORT", a deny rule one of the first two;
// a bare address means that address alone, and a DOMAIN is what Rule.Domain says.
// The error names what is wrong and wraps ErrRule.
func ParsePolicy(profile string, allow, deny []string) (Policy, error) {
	p := Policy{Profile: Profile(profile)}
	switch p.Profile {
	case "":
		p.Profile = ProfileInternet
	case ProfileInternet, ProfileNone, ProfileAllowList:
	default:
		return Policy{}, fmt.Errorf("%w: profile %q: take %s, %s or %s", ErrRule, clip(profile), ProfileInternet, ProfileNone, ProfileAllowList)
	}
	var err error
	if p.Allow, err = parseRules("allow", allow); err != nil {
		return Policy{}, err
	}
	if p.Deny, err = parseRules("deny", deny); err != nil {
		return Policy{}, err
	}
	for _, r := range p.Allow {
		if r.Prefix.Addr().Is6() {
			return Policy{}, fmt.Errorf("%w: allow %q: sandboxes have no IPv6; name IPv4 addresses", ErrRule, r)
		}
	}
	for _, r := range p.Deny {
		if r.Host {
			return Policy{}, fmt.Errorf("%w: deny %q: the host's ports are closed unless allowed; deny takes CIDR[:PORT] or DOMAIN[:PORT]", ErrRule, r)
		}
	}
	return p, nil
}

// destination returns the address that is really dialled for the one that the
// guest dials.
func destination(seen netip.AddrPort) netip.AddrPort {
	if seen.Addr() == hostAlias {
		return netip.AddrPortFrom(loopback, seen.Port())
	}
	return seen
}

// permits says whether a flow may be opened to the address that the guest
// dials. names are those that the address was answered for; isHost says whether
// an address is one of the host's own.
func (p Policy) permits(seen netip.AddrPort, names []string, isHost func(netip.Addr) bool) bool {
	real := destination(seen)
	addr := real.Addr()
	if !addr.Is4() || real.Port() == 0 || containsAddr(neverRanges, addr) {
		return false
	}
	madeFor := opener(addr, isHost)
	return p.decide(madeFor == nil, names,
		func(r Rule) bool {
			return r.matches(real, names) && (madeFor == nil || r.Domain == "" && madeFor(r.Prefix))
		},
		func(r Rule) bool { return r.matches(real, names) || r.matches(seen, names) })
}

// opener tells, for an address that is not public, which prefixes of Allow rules
// are made for it; nil for a public one.
func opener(addr netip.Addr, isHost func(netip.Addr) bool) func(netip.Prefix) bool {
	switch {
	case loopbackRange.Contains(addr):
		return within(loopbackRange)
	case linkLocalRange.Contains(addr):
		return within(linkLocalRange)
	case isHost(addr):
		return func(p netip.Prefix) bool { return p.IsSingleIP() }
	case containsAddr(deniedRanges, addr):
		return func(netip.Prefix) bool { return true }
	default:
		return nil
	}
}

// decide weighs the rules that match against each other. Without any, what is
// public is open if the profile says so.
func (p Policy) decide(public bool, names []string, allows, denies func(Rule) bool) bool {
	if p.Profile == ProfileNone {
		return false
	}
	var against []Rule
	for _, r := range p.Deny {
		if denies(r) {
			against = append(against, r)
		}
	}
	if public && len(against) == 0 && (p.Profile == "" || p.Profile == ProfileInternet) {
		return true
	}
	for _, r := range p.Allow {
		weaker := func(deny Rule) bool { return !r.outranks(deny, names) }
		if allows(r) && !slices.ContainsFunc(against, weaker) {
			return true
		}
	}
	return false
}

// permitsName says whether the resolver may ask for a name: where nothing that
// it could lead to is open, a question would carry data out.
func (p Policy) permitsName(name string) bool {
	return p.decide(true, []string{name},
		func(r Rule) bool { return r.breadth() == byNothing || r.covers(name) },
		func(r Rule) bool {
			return r.Port == 0 && r.covers(name) || r.breadth() == byNothing && (r.Port == 0 || r.Port == dnsPort)
		})
}

// closesName says whether a rule closes that very name: then no other name may
// lead there.
func (p Policy) closesName(name string) bool {
	closes := func(r Rule) bool { return r.Port == 0 && r.breadth() == byName && r.covers(name) }
	return slices.ContainsFunc(p.Deny, closes) && !p.permitsName(name)
}

func within(outer netip.Prefix) func(netip.Prefix) bool {
	return func(p netip.Prefix) bool { return p.Bits() >= outer.Bits() && outer.Contains(p.Addr()) }
}

func containsAddr(prefixes []netip.Prefix, a netip.Addr) bool {
	for _, p := range prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}
