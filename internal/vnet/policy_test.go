package vnet

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"log/slog"
)

func TestPolicy(t *testing.T) {
	own := netip.MustParseAddr("198.41.0.4") // a public address of the host's
	ownPrivate := netip.MustParseAddr("10.1.2.3")
	isHost := func(a netip.Addr) bool { return a == own || a == ownPrivate }

	// What the resolver answered before.
	bound := map[string][]string{
		"93.184.216.34": {"example.com"},
		"93.184.216.35": {"www.example.com"},
		"93.184.216.36": {"a.b.example.com"},
		"93.184.216.40": {"example.com", "evil.test"}, // of a network that serves many
		"93.184.216.41": {"evil.test"},
		"10.9.9.9":      {"example.com"}, // rebinding
		"127.0.0.1":     {"example.com"},
		"198.41.0.4":    {"example.com"},
	}
	tests := []struct {
		name        string
		profile     string
		allow, deny []string
		permits     []string
		denies      []string
	}{
		{
			name:    "default",
			permits: []string{"1.1.1.1:53", "93.184.216.34:443", "172.32.0.1:80", "100.128.0.1:80", "223.255.255.255:1"},
			denies: []string{
				"127.0.0.1:80", "127.255.255.255:80", "0.0.0.0:80", "0.1.2.3:80", "169.254.169.254:80", "10.0.0.1:80",
				"172.16.0.1:80", "172.31.255.255:80", "192.168.0.1:80", "100.64.0.1:80", "224.0.0.1:80", "239.1.1.1:80",
				"255.255.255.255:80", "240.0.0.1:80", "192.0.0.1:80", "198.18.0.1:80", "198.19.255.255:80", "198.41.0.4:80",
				HostIP + ":80", GatewayIP + ":80", GuestIP + ":80", "192.168.127.77:80", "1.1.1.1:0",
				"[::1]:80", "[2606:4700::1111]:443", "[::ffff:1.1.1.1]:443",
			},
		},
		{
			name:    "private range with a port",
			allow:   []string{"10.0.0.0/8:5432"},
			permits: []string{"10.9.9.9:5432", "1.1.1.1:80"},
			denies:  []string{"10.9.9.9:5433", "192.168.0.1:5432", "10.1.2.3:5432"},
		},
		{
			name:    "a wide rule opens private ranges, not the host",
			allow:   []string{"0.0.0.0/0"},
			permits: []string{"10.9.9.9:1", "192.168.1.1:1", "240.0.0.1:1"},
			denies: []string{
				"127.0.0.1:1", HostIP + ":1", "169.254.169.254:80", "198.41.0.4:1", "10.1.2.3:1", "224.0.0.1:1",
				"255.255.255.255:1", "0.0.0.0:1", GatewayIP + ":1",
			},
		},
		{
			name:    "the host's loopback by name",
			allow:   []string{"host:8080"},
			permits: []string{HostIP + ":8080"},
			denies:  []string{HostIP + ":8081", GatewayIP + ":8080", "198.41.0.4:8080"},
		},
		{
			name:    "the host's loopback by address",
			allow:   []string{"127.0.0.1/32:8080"},
			permits: []string{HostIP + ":8080"},
			denies:  []string{HostIP + ":8081", "127.0.0.2:8080"},
		},
		{
			name:    "an address of the host by itself",
			allow:   []string{"198.41.0.4/32:22", "10.1.2.3"},
			permits: []string{"198.41.0.4:22", "10.1.2.3:9"},
			denies:  []string{"198.41.0.4:23"},
		},
		{
			name:    "metadata by itself",
			allow:   []string{"169.254.169.254/32:80"},
			permits: []string{"169.254.169.254:80"},
			denies:  []string{"169.254.169.253:80", "169.254.169.254:81"},
		},
		{
			name:    "deny wins over what is wider or the same",
			allow:   []string{"10.0.0.0/8", "host:80", "host:81"},
			deny:    []string{"10.1.0.0/16", "1.1.1.0/24:53", "127.0.0.1/32:80"},
			permits: []string{"10.2.0.1:1", "1.1.1.1:443", HostIP + ":81"},
			denies:  []string{"10.1.0.1:1", "1.1.1.1:53", HostIP + ":80"},
		},
		{
			name:   "deny by the alias",
			allow:  []string{"host:80"},
			deny:   []string{HostIP + "/32:80"},
			denies: []string{HostIP + ":80"},
		},
		{
			name:   "nothing at all",
			deny:   []string{"0.0.0.0/0", "::/0"},
			denies: []string{"1.1.1.1:443", HostIP + ":1"},
		},
		{
			name:    "allow wins where it is narrower",
			allow:   []string{"10.1.0.0/16", "10.0.0.0/8:5432", "1.1.1.1"},
			deny:    []string{"10.0.0.0/8", "1.1.1.0/24", "10.1.9.0/24"},
			permits: []string{"10.1.0.1:1", "10.2.0.1:5432", "1.1.1.1:443"},
			denies:  []string{"10.2.0.1:1", "10.1.9.1:1", "10.1.9.1:5432", "1.1.1.2:443"},
		},
		{
			name:    "a rule that is wider in one way and narrower in another does not win",
			allow:   []string{"*:443", "1.1.1.0/24", "9.9.9.9:25"},
			deny:    []string{"8.8.8.0/24", "*:25"},
			permits: []string{"1.1.1.1:443", "1.1.1.1:80", "9.9.9.9:25"},
			denies:  []string{"8.8.8.8:443", "1.1.1.1:25"},
		},
		{
			name:    "all but some",
			deny:    []string{"*"},
			allow:   []string{"1.1.1.0/24:443", "*.example.com", "host:80", "10.0.0.0/8:22"},
			permits: []string{"1.1.1.1:443", "93.184.216.35:80", "93.184.216.36:443", HostIP + ":80", "10.9.9.9:22"},
			denies:  []string{"1.1.1.1:80", "8.8.8.8:443", "93.184.216.34:80", HostIP + ":81", "10.9.9.9:23"},
		},
		{
			name:    "one port alone",
			deny:    []string{"0.0.0.0/0"},
			allow:   []string{"*:443"},
			permits: []string{"1.1.1.1:443"},
			denies:  []string{"1.1.1.1:80", "10.9.9.9:443", HostIP + ":443", "169.254.169.254:443"},
		},
		{
			name:    "none",
			profile: "none",
			allow:   []string{"0.0.0.0/0", "*", "host:80", "10.0.0.0/8"},
			denies:  []string{"1.1.1.1:443", HostIP + ":80", "10.9.9.9:1", "93.184.216.34:443"},
		},
		{
			name:    "an empty allow-list",
			profile: "allow-list",
			denies:  []string{"1.1.1.1:443", HostIP + ":80", "10.9.9.9:1", "93.184.216.34:443"},
		},
		{
			name:    "an allow-list of names",
			profile: "allow-list",
			allow:   []string{"Example.COM.:443", "*.b.example.com"},
			permits: []string{"93.184.216.34:443", "93.184.216.40:443", "93.184.216.36:80"},
			denies: []string{
				"93.184.216.34:80", "93.184.216.35:443", "1.1.1.1:443", "10.9.9.9:443", HostIP + ":443", "127.0.0.1:443", "198.41.0.4:443",
			},
		},
		{
			name:    "an allow-list of everything public",
			profile: "allow-list",
			allow:   []string{"*"},
			permits: []string{"1.1.1.1:443", "93.184.216.34:80"},
			denies:  []string{"10.9.9.9:443", HostIP + ":443", "169.254.169.254:80"},
		},
		{
			name:    "an allow-list with holes",
			profile: "allow-list",
			allow:   []string{"*.example.com", "1.0.0.0/8", "evil.test"},
			deny:    []string{"*.b.example.com", "1.1.1.1", "93.184.216.41"},
			permits: []string{"93.184.216.35:443", "1.1.1.2:443", "93.184.216.40:443"},
			denies:  []string{"93.184.216.36:443", "1.1.1.1:443", "93.184.216.41:443"},
		},
		{
			name:    "a name that is denied closes its addresses, shared or not",
			deny:    []string{"evil.test"},
			allow:   []string{"example.com"},
			permits: []string{"93.184.216.34:443", "93.184.216.35:443", "1.1.1.1:443"},
			denies:  []string{"93.184.216.40:443", "93.184.216.41:443"},
		},
		{
			name:    "an address opens what a name closes",
			deny:    []string{"evil.test"},
			allow:   []string{"93.184.216.41"},
			permits: []string{"93.184.216.41:443"},
			denies:  []string{"93.184.216.40:443"},
		},
		{
			name:    "a name below one that is denied",
			deny:    []string{"*.example.com"},
			allow:   []string{"a.b.example.com"},
			permits: []string{"93.184.216.36:443", "93.184.216.34:443"},
			denies:  []string{"93.184.216.35:443"},
		},
		{
			name:    "a private address that is allowed as such may have a name",
			profile: "allow-list",
			allow:   []string{"example.com", "10.9.0.0/16:5432"},
			permits: []string{"10.9.9.9:5432"},
			denies:  []string{"10.9.9.9:80"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := ParsePolicy(tt.profile, tt.allow, tt.deny)
			if err != nil {
				t.Fatal(err)
			}
			permits := func(a string) bool {
				seen := netip.MustParseAddrPort(a)
				return p.permits(seen, bound[seen.Addr().String()], isHost)
			}
			for _, a := range tt.permits {
				if !permits(a) {
					t.Errorf("denies %s", a)
				}
			}
			for _, a := range tt.denies {
				if permits(a) {
					t.Errorf("permits %s", a)
				}
			}
		})
	}
}

func TestPolicyOfNames(t *testing.T) {
	tests := []struct {
		profile     string
		allow, deny []string
		asks        []string
		refuses     []string
	}{
		{asks: []string{"example.com", "com", ""}},
		{deny: []string{"1.1.1.1", "0.0.0.0/0:80", "*:80", "example.com:80"}, asks: []string{"example.com"}},
		{deny: []string{"0.0.0.0/0"}, refuses: []string{"example.com"}},
		{deny: []string{"0.0.0.0/0:53"}, allow: []string{"example.com"}, refuses: []string{"example.com"}},
		{deny: []string{"*"}, allow: []string{"10.0.0.0/8", "1.1.1.1"}, refuses: []string{"example.com"}},
		{deny: []string{"*"}, allow: []string{"*.example.com:443"}, asks: []string{"a.b.example.com"}, refuses: []string{"example.com", "anexample.com", "b.test"}},
		{deny: []string{"*"}, allow: []string{"*:443"}, asks: []string{"example.com"}},
		{deny: []string{"*.evil.test", "evil.test"}, allow: []string{"good.evil.test"}, asks: []string{"example.com", "good.evil.test", "a.good.test"}, refuses: []string{"evil.test", "a.evil.test", "a.good.evil.test"}},
		{profile: "none", allow: []string{"*", "example.com"}, refuses: []string{"example.com"}},
		{profile: "allow-list", refuses: []string{"example.com"}},
		{profile: "allow-list", allow: []string{"1.1.1.1"}, refuses: []string{"example.com"}},
		{profile: "allow-list", allow: []string{"example.com"}, asks: []string{"example.com"}, refuses: []string{"www.example.com", "example.com.evil.test"}},
		{profile: "allow-list", allow: []string{"*"}, deny: []string{"example.com"}, asks: []string{"www.example.com"}, refuses: []string{"example.com"}},
	}
	for _, tt := range tests {
		p, err := ParsePolicy(tt.profile, tt.allow, tt.deny)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range tt.asks {
			if !p.permitsName(name) {
				t.Errorf("%q, allow %q, deny %q: refuses to ask for %q", tt.profile, tt.allow, tt.deny, name)
			}
		}
		for _, name := range tt.refuses {
			if p.permitsName(name) {
				t.Errorf("%q, allow %q, deny %q: asks for %q", tt.profile, tt.allow, tt.deny, name)
			}
		}
	}
}

func TestParsePolicyErrors(t *testing.T) {
	tests := []struct {
		list, rule string
		want       string // in the error
	}{
		{"allow", "", "no address"},
		{"allow", "intranet", "no dot"},
		{"allow", "localhost:80", "no dot"},
		{"allow", "example..com", "no name"},
		{"allow", "-example.com", "no name"},
		{"allow", "exa mple.com", "no name"},
		{"allow", "bücher.example", "xn--"},
		{"allow", "https://example.com", "URL"},
		{"allow", "example.com/path", "no CIDR"},
		{"allow", "*example.com", "stands alone"},
		{"allow", "www.*.com", "stands alone"},
		{"allow", "*.*.com", "stands alone"},
		{"allow", "*.", "stands alone"},
		{"deny", "host.hib.internal:80", "host:PORT"},
		{"deny", "*.hib.internal", "host:PORT"},
		{"allow", "10.0.0", "no address"},
		{"allow", "10.0.0.256:80", "no address"},
		{"allow", strings.Repeat("a.", 127) + "example", "253"},
		{"allow", "10.0.0.0/33", "no CIDR"},
		{"allow", "10.1.2.3/8", "write 10.0.0.0/8, or 10.1.2.3/32"},
		{"allow", "10.0.0.0/8:0", "no port"},
		{"allow", "10.0.0.0/8:65536", "no port"},
		{"allow", "10.0.0.0/8:http", "no port"},
		{"allow", "10.0.0.0/8:", "no port"},
		{"allow", "host", "port is missing"},
		{"allow", "host:", "no port"},
		{"allow", "2001:db8::/32", "no IPv6"},
		{"allow", "[2001:db8::/32]:80", "no IPv6"},
		{"allow", "::ffff:1.2.3.4/128", "::ffff:"},
		{"allow", "fe80::1%eth0", "no address"},
		{"deny", "[::1", `without "]"`},
		{"deny", "[::1]80", `":PORT"`},
		{"deny", "host:80", "deny takes"},
		{"deny", strings.Repeat("x", 1000), "…"},
	}
	for _, tt := range tests {
		var allow, deny []string
		if tt.list == "allow" {
			allow = []string{tt.rule}
		} else {
			deny = []string{tt.rule}
		}
		_, err := ParsePolicy("", allow, deny)
		if !errors.Is(err, ErrRule) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.list) {
			t.Errorf("%s %q: got %v, want an error with %q", tt.list, tt.rule, err, tt.want)
		}
	}
	if _, err := ParsePolicy("", make([]string, MaxRules+1), nil); !errors.Is(err, ErrRule) {
		t.Errorf("too many rules: got %v", err)
	}
	if _, err := ParsePolicy("all", nil, nil); !errors.Is(err, ErrRule) || !strings.Contains(err.Error(), "allow-list") {
		t.Errorf("an unknown profile: got %v", err)
	}
}

func FuzzParsePolicy(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "10.0.0.0/8:80", "host:80", "1.2.3.4", "[::/0]:53", "::1", "[", "]:", ":", "host", "*", "*:443", "example.com", "*.Example.com.:1", "_a.b", "000.0."} {
		f.Add(s, true)
		f.Add(s, false)
	}
	none := func(netip.Addr) bool { return false }
	f.Fuzz(func(t *testing.T, text string, allow bool) {
		list := []string{text}
		parse := func(l []string) (Policy, error) { return ParsePolicy("", nil, l) }
		if allow {
			parse = func(l []string) (Policy, error) { return ParsePolicy("", l, nil) }
		}
		p, err := parse(list)
		if err != nil {
			if !errors.Is(err, ErrRule) {
				t.Fatalf("error of another kind: %v", err)
			}
			return
		}
		rule := append(p.Allow, p.Deny...)[0]
		again, err := parse([]string{rule.String()})
		if err != nil || append(again.Allow, again.Deny...)[0] != rule {
			t.Fatalf("%q reads as %v, written as %q that reads as %v, %v", text, rule, rule.String(), again, err)
		}
		if rule.Domain != "" {
			for _, private := range []string{"127.0.0.1:1", "169.254.169.254:80", "10.0.0.1:22"} {
				if p.permits(netip.MustParseAddrPort(private), []string{rule.Domain, strings.Replace(rule.Domain, "*", "a", 1)}, none) {
					t.Fatalf("%q permits %s", text, private)
				}
			}
		}
		for _, never := range []string{"0.0.0.0:1", "255.255.255.255:1", "224.0.0.1:1", GatewayIP + ":1"} {
			if p.permits(netip.MustParseAddrPort(never), []string{"a.example.com"}, none) {
				t.Fatalf("%q permits %s", text, never)
			}
		}
	})
}

func TestHostAddresses(t *testing.T) {
	fail := errors.New("no netlink")
	var addrs []net.Addr
	var err error
	h := newHostAddresses(func() ([]net.Addr, error) { return addrs, err }, slog.New(slog.DiscardHandler))

	err = fail
	if !h.contains(netip.MustParseAddr("1.1.1.1")) {
		t.Error("unknown addresses of the host: nothing may be dialled")
	}
	ip, network, _ := net.ParseCIDR("198.41.0.4/24")
	addrs, err = []net.Addr{&net.IPNet{IP: ip, Mask: network.Mask}}, nil
	for a, want := range map[string]bool{"198.41.0.4": true, "198.41.0.255": true, "198.41.0.5": false} {
		if h.contains(netip.MustParseAddr(a)) != want {
			t.Errorf("contains(%s) = %t", a, !want)
		}
	}
	h.read = time.Now().Add(-2 * hostAddressesAge)
	addrs = nil
	if h.contains(netip.MustParseAddr("198.41.0.4")) {
		t.Error("an address that the host lost is believed for ever")
	}
}
