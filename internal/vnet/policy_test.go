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

	tests := []struct {
		name        string
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
			name:    "deny wins",
			allow:   []string{"10.0.0.0/8", "host:80", "host:81"},
			deny:    []string{"10.1.0.0/16", "1.1.1.0/24:53", "127.0.0.1/32:80"},
			permits: []string{"10.2.0.1:1", "1.1.1.1:443", HostIP + ":81"},
			denies:  []string{"10.1.0.1:1", "1.1.1.1:53", HostIP + ":80"},
		},
		{
			name:   "deny by the alias",
			allow:  []string{"host:80"},
			deny:   []string{HostIP + "/32"},
			denies: []string{HostIP + ":80"},
		},
		{
			name:   "nothing at all",
			deny:   []string{"0.0.0.0/0", "::/0"},
			denies: []string{"1.1.1.1:443", HostIP + ":1"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := ParsePolicy(tt.allow, tt.deny)
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range tt.permits {
				if !p.permits(netip.MustParseAddrPort(a), isHost) {
					t.Errorf("denies %s", a)
				}
			}
			for _, a := range tt.denies {
				if p.permits(netip.MustParseAddrPort(a), isHost) {
					t.Errorf("permits %s", a)
				}
			}
		})
	}
}

func TestPolicyRulesDNS(t *testing.T) {
	for deny, want := range map[string]bool{"": true, "1.1.1.1": true, "0.0.0.0/0:80": true, "0.0.0.0/0": false, "0.0.0.0/0:53": false} {
		var rules []string
		if deny != "" {
			rules = []string{deny}
		}
		p, err := ParsePolicy(nil, rules)
		if err != nil {
			t.Fatal(err)
		}
		if p.permitsDNS() != want {
			t.Errorf("deny %q: permitsDNS = %t", deny, !want)
		}
	}
}

func TestParsePolicyErrors(t *testing.T) {
	tests := []struct {
		list, rule string
		want       string // in the error
	}{
		{"allow", "", "no address"},
		{"allow", "example.com", "names are not supported"},
		{"allow", "example.com:443", "names are not supported"},
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
		_, err := ParsePolicy(allow, deny)
		if !errors.Is(err, ErrRule) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.list) {
			t.Errorf("%s %q: got %v, want an error with %q", tt.list, tt.rule, err, tt.want)
		}
	}
	if _, err := ParsePolicy(make([]string, MaxRules+1), nil); !errors.Is(err, ErrRule) {
		t.Errorf("too many rules: got %v", err)
	}
}

func FuzzParsePolicy(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "10.0.0.0/8:80", "host:80", "1.2.3.4", "[::/0]:53", "::1", "[", "]:", ":", "host"} {
		f.Add(s, true)
		f.Add(s, false)
	}
	none := func(netip.Addr) bool { return false }
	f.Fuzz(func(t *testing.T, text string, allow bool) {
		list := []string{text}
		parse := func(l []string) (Policy, error) { return ParsePolicy(nil, l) }
		if allow {
			parse = func(l []string) (Policy, error) { return ParsePolicy(l, nil) }
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
		for _, never := range []string{"0.0.0.0:1", "255.255.255.255:1", "224.0.0.1:1", GatewayIP + ":1"} {
			if p.permits(netip.MustParseAddrPort(never), none) {
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
