package vnet

import (
	"cmp"
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

// Everything is the domain of a rule that matches every flow and every name.
const Everything = "*"

// Rule matches what outbound flows go to: by address, or by the name that the
// gateway's resolver gave the guest the address for.
type Rule struct {
	// Host is set for a rule of the form "host:PORT", which means that port of
	// the host's own loopback. Prefix is then that address.
	Host   bool
	Prefix netip.Prefix // of a rule by address
	Domain string       // of a rule by name: "example.com" alone, "*.example.com" for every name below, or Everything
	Port   uint16       // 0: every port
}

// String returns the rule as ParsePolicy takes it.
func (r Rule) String() string {
	target := r.Domain
	switch {
	case r.Host:
		target = "host"
	case r.Domain == "" && r.Port != 0 && r.Prefix.Addr().Is6():
		target = "[" + r.Prefix.String() + "]"
	case r.Domain == "":
		target = r.Prefix.String()
	}
	if r.Port == 0 {
		return target
	}
	return fmt.Sprintf("%s:%d", target, r.Port)
}

// matches says whether a flow to that address, which was answered for those
// names, is one of the rule's.
func (r Rule) matches(a netip.AddrPort, names []string) bool {
	if r.Port != 0 && r.Port != a.Port() {
		return false
	}
	if r.Domain == "" {
		return r.Prefix.Contains(a.Addr())
	}
	if r.Domain == Everything {
		return true
	}
	for _, name := range names {
		if r.covers(name) {
			return true
		}
	}
	return false
}

// covers says whether a rule by a name covers that name.
func (r Rule) covers(name string) bool {
	if suffix, ok := strings.CutPrefix(r.Domain, "*"); ok {
		return strings.HasSuffix(name, suffix) && len(name) > len(suffix)
	}
	return r.Domain != "" && r.Domain == name
}

// breadth is how a rule picks its targets, from wide to narrow.
type breadth int

const (
	byNothing breadth = iota // Everything, 0.0.0.0/0
	byName
	byAddress
)

func (r Rule) breadth() breadth {
	switch {
	case r.Domain == Everything, r.Domain == "" && r.Prefix.Bits() == 0 && r.Prefix.Addr().Is4():
		return byNothing
	case r.Domain != "":
		return byName
	default:
		return byAddress
	}
}

// outranks says whether an Allow rule holds against a Deny rule that matches the
// same flow: it must be the more specific one in its target or in its port, and
// not the less specific one in the other. names are those of the flow.
func (r Rule) outranks(deny Rule, names []string) bool {
	if r.Port == 0 && deny.Port != 0 {
		return false
	}
	narrower := r.compareTargets(deny, names)
	return narrower > 0 || narrower == 0 && r.Port != 0 && deny.Port == 0
}

// compareTargets returns 1 if the rule's target is more specific than that of
// the Deny rule, 0 if it is as specific, else -1. A name says less than an
// address: it is whoever owns the name that says where it leads.
func (r Rule) compareTargets(deny Rule, names []string) int {
	class := r.breadth()
	if c := cmp.Compare(class, deny.breadth()); c != 0 {
		return c
	}
	switch class {
	case byAddress:
		return cmp.Compare(r.Prefix.Bits(), deny.Prefix.Bits())
	case byName:
		for _, name := range names {
			if deny.covers(name) && !r.covers(name) {
				return -1
			}
		}
		// Both cover one name, so the longer one is the narrower.
		return cmp.Compare(len(strings.TrimPrefix(r.Domain, "*")), len(strings.TrimPrefix(deny.Domain, "*")))
	default:
		return 0
	}
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
	if strings.Contains(text, "://") {
		return Rule{}, fmt.Errorf("it is a URL; a rule is %s", ruleForms)
	}
	target, port, err := splitPort(text)
	if err != nil {
		return Rule{}, err
	}
	switch {
	case target == "host" && port == 0:
		return Rule{}, errors.New(`the host's port is missing, write host:PORT`)
	case target == "host":
		return Rule{Host: true, Prefix: netip.PrefixFrom(loopback, 32), Port: port}, nil
	case isAddress(target):
		prefix, err := parsePrefix(target)
		return Rule{Prefix: prefix, Port: port}, err
	default:
		domain, err := parseDomain(target)
		return Rule{Domain: domain, Port: port}, err
	}
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

// isAddress says whether a target is meant as an address rather than as a name:
// no name ends in a number.
func isAddress(target string) bool {
	if strings.ContainsAny(target, ":/") {
		return true
	}
	target = strings.TrimSuffix(target, ".")
	last := target[strings.LastIndexByte(target, '.')+1:]
	return last != "" && strings.Trim(last, "0123456789") == ""
}

func parsePrefix(text string) (netip.Prefix, error) {
	if !strings.Contains(text, "/") {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("%q is no address; a rule is %s", clip(text), ruleForms)
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

// ruleForms is what a rule may look like, for errors.
const ruleForms = "CIDR[:PORT], DOMAIN[:PORT] or host:PORT"

// The bounds of a name (RFC 1035).
const (
	maxName  = 253 // without the dot at its end
	maxLabel = 63
)

// parseDomain returns a domain as rules hold it: in lower case, without the dot
// at its end.
func parseDomain(text string) (string, error) {
	if text == Everything {
		return text, nil
	}
	name := strings.ToLower(strings.TrimSuffix(text, "."))
	plain := strings.TrimPrefix(name, "*.")
	if len(plain) > maxName {
		return "", fmt.Errorf("a name has at most %d characters", maxName)
	}
	if strings.Contains(plain, "*") {
		return "", fmt.Errorf(`"*" stands alone or for what is below a name, as in *.example.com`)
	}
	for label := range strings.SplitSeq(plain, ".") {
		if !isLabel(label) {
			return "", fmt.Errorf("%q is no name of letters, digits and '-' (write others as xn--…), and no address; a rule is %s", clip(text), ruleForms)
		}
	}
	switch {
	case !strings.Contains(name, "."):
		return "", fmt.Errorf("%q has no dot; a rule is %s", clip(text), ruleForms)
	case plain == strings.TrimSuffix(ownZone, "."), strings.HasSuffix("."+plain, "."+strings.TrimSuffix(ownZone, ".")):
		return "", fmt.Errorf("%q is a name of the gateway; for a port of the host write host:PORT", clip(text))
	}
	return name, nil
}

func isLabel(s string) bool {
	if s == "" || len(s) > maxLabel || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-_") == ""
}
