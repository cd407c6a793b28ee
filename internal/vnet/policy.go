package vnet

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// MaxRules is how many rules each list of a policy may have.
const MaxRules = 1024

// ErrRule is wrapped by the errors of ParsePolicy.
var ErrRule = errors.New("bad egress rule")

// Rule matches addresses that outbound flows go to.
type Rule struct {
	// Host is set for a rule of the form "host:PORT", which means that port of
	// the host's own loopback. Prefix is then that address.
	Host   bool
	Prefix netip.Prefix
	Port   uint16 // 0: every port
}

// String returns the rule as ParsePolicy takes it.
func (r Rule) String() string {
	switch {
	case r.Host:
		return fmt.Sprintf("host:%d", r.Port)
	case r.Port == 0:
		return r.Prefix.String()
	case r.Prefix.Addr().Is6():
		return fmt.Sprintf("[%s]:%d", r.Prefix, r.Port)
	default:
		return fmt.Sprintf("%s:%d", r.Prefix, r.Port)
	}
}

func (r Rule) matches(a netip.AddrPort) bool {
	return (r.Port == 0 || r.Port == a.Port()) && r.Prefix.Contains(a.Addr())
}

// Policy says which addresses a sandbox may open flows to. The zero Policy
// permits the public internet alone: it denies loopback, the host's own
// addresses, link-local (cloud metadata), private, shared, benchmark and
// reserved ranges, multicast and broadcast.
//
// Allow opens what that default denies, Deny closes what is open, and wins over
// Allow. What leads to the host itself or to its link is opened only by a rule
// made for it, never by a wide one: loopback by "host:PORT" or a prefix within
// 127.0.0.0/8, an address of the host by a /32, link-local by a prefix within
// 169.254.0.0/16. Nothing opens multicast, broadcast, 0.0.0.0/8 and Subnet.
type Policy struct {
	Allow []Rule
	Deny  []Rule
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

// ParsePolicy makes a policy of rules in text. An allow rule is "CIDR[:PORT]" or
// "host:PORT", a deny rule "CIDR[:PORT]"; a bare address means that address
// alone. The error names the rule, says what is wrong, and wraps ErrRule.
func ParsePolicy(allow, deny []string) (Policy, error) {
	var p Policy
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
			return Policy{}, fmt.Errorf("%w: deny %q: the host's ports are closed unless allowed; deny takes CIDR[:PORT]", ErrRule, r)
		}
	}
	return p, nil
}

func parseRules(list string, texts []string) ([]Rule, error) {
	if len(texts) > MaxRules {
		return nil, fmt.Errorf("%w: %d %s rules, at most %d are possible", ErrRule, len(texts), list, MaxRules)
	}
	var rules []Rule
	for _, text := range texts {
		r, err := parseRule(text)
		if err != nil {
			return nil, fmt.Errorf("%w: %s %q: %w", ErrRule, list, clip(text), err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// clip bounds text of unknown origin for an error.
func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "…"
	}
	return s
}

func parseRule(text string) (Rule, error) {
	target, port, err := splitPort(text)
	if err != nil {
		return Rule{}, err
	}
	if target == "host" {
		if port == 0 {
			return Rule{}, errors.New(`the host's port is missing, write host:PORT`)
		}
		return Rule{Host: true, Prefix: netip.PrefixFrom(loopback, 32), Port: port}, nil
	}
	prefix, err := parsePrefix(target)
	if err != nil {
		return Rule{}, err
	}
	return Rule{Prefix: prefix, Port: port}, nil
}

// splitPort takes ":PORT" off the end of a rule; port 0 means that none was
// given. An IPv6 prefix with a port stands in brackets.
func splitPort(text string) (target string, port uint16, err error) {
	target, digits := text, ""
	if inner, ok := strings.CutPrefix(text, "["); ok {
		if target, digits, ok = strings.Cut(inner, "]"); !ok {
			return "", 0, errors.New(`"[" without "]"`)
		}
		if digits == "" {
			return target, 0, nil
		}
		if digits, ok = strings.CutPrefix(digits, ":"); !ok {
			return "", 0, errors.New(`expected ":PORT" after "]"`)
		}
	} else if strings.Count(text, ":") == 1 {
		target, digits, _ = strings.Cut(text, ":")
	} else {
		return text, 0, nil
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("%q is no port between 1 and 65535", clip(digits))
	}
	return target, uint16(n), nil
}

func parsePrefix(text string) (netip.Prefix, error) {
	if !strings.Contains(text, "/") {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("%q is no address: expected CIDR[:PORT] or host:PORT (names are not supported)", clip(text))
		}
		text = fmt.Sprintf("%s/%d", addr, addr.BitLen())
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is no CIDR, such as 10.1.0.0/16", clip(text))
	}
	if prefix.Addr().Is4In6() {
		return netip.Prefix{}, errors.New("write IPv4 addresses without the ::ffff: before them")
	}
	if masked := prefix.Masked(); masked != prefix {
		return netip.Prefix{}, fmt.Errorf("the address has bits behind its prefix; write %s, or %s/%d for that address alone",
			masked, prefix.Addr(), prefix.Addr().BitLen())
	}
	return prefix, nil
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
// dials. isHost says whether an address is one of the host's own.
func (p Policy) permits(seen netip.AddrPort, isHost func(netip.Addr) bool) bool {
	real := destination(seen)
	addr := real.Addr()
	if !addr.Is4() || real.Port() == 0 || containsAddr(neverRanges, addr) {
		return false
	}
	for _, r := range p.Deny {
		if r.matches(real) || r.matches(seen) {
			return false
		}
	}
	var fits func(netip.Prefix) bool // is an allow rule made for such an address
	switch {
	case loopbackRange.Contains(addr):
		fits = within(loopbackRange)
	case linkLocalRange.Contains(addr):
		fits = within(linkLocalRange)
	case isHost(addr):
		fits = func(p netip.Prefix) bool { return p.IsSingleIP() }
	case containsAddr(deniedRanges, addr):
		fits = func(netip.Prefix) bool { return true }
	default:
		return true
	}
	for _, r := range p.Allow {
		if r.matches(real) && fits(r.Prefix) {
			return true
		}
	}
	return false
}

// permitsDNS says whether the resolver may forward questions: a policy that
// denies every address would otherwise leak through names.
func (p Policy) permitsDNS() bool {
	for _, r := range p.Deny {
		if r.Prefix.Addr().Is4() && r.Prefix.Bits() == 0 && (r.Port == 0 || r.Port == 53) {
			return false
		}
	}
	return true
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
