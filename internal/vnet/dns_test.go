package vnet_test

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/hibernacle/hibernacle/internal/vnet"
)

// fakeDNS is a DNS server of the host's, by UDP and TCP at one port.
func fakeDNS(t testing.TB, handle dns.HandlerFunc) string {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", pc.LocalAddr().String())
	if err != nil {
		t.Skipf("the TCP port that fits is taken: %v", err)
	}
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: handle}, {Listener: ln, Handler: handle}} {
		ready, done := make(chan struct{}), make(chan struct{})
		s.NotifyStartedFunc = func() { close(ready) }
		go func() {
			defer close(done)
			s.ActivateAndServe()
		}()
		<-ready
		t.Cleanup(func() {
			s.Shutdown()
			<-done
		})
	}
	return pc.LocalAddr().String()
}

const bigRecords = 300

// zone answers: NAME.addr.example has addresses, big.example has many records,
// gone.example does not exist, broken.example is a server failure.
func zone(w dns.ResponseWriter, query *dns.Msg) {
	reply := new(dns.Msg).SetReply(query)
	q := query.Question[0]
	_, udp := w.RemoteAddr().(*net.UDPAddr)
	header := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: 30}
	switch name := strings.ToLower(q.Name); {
	case strings.HasSuffix(name, ".addr.example.") && q.Qtype == dns.TypeA:
		reply.Answer = append(reply.Answer, &dns.A{Hdr: header, A: net.IPv4(93, 184, 216, 34)})
	case strings.HasSuffix(name, ".addr.example.") && q.Qtype == dns.TypeAAAA:
		reply.Answer = append(reply.Answer, &dns.AAAA{Hdr: header, AAAA: net.ParseIP("2001:db8::1")})
	case name == "big.example." && udp:
		reply.Truncated = true
	case name == "big.example.":
		for i := range bigRecords {
			reply.Answer = append(reply.Answer, &dns.TXT{Hdr: header, Txt: []string{fmt.Sprintf("record number %d", i)}})
		}
	case name == "broken.example.":
		reply.Rcode = dns.RcodeServerFailure
	default:
		reply.Rcode = dns.RcodeNameError
	}
	w.WriteMsg(reply)
}

// ask has the guest ask the gateway.
func ask(t *testing.T, n *testNet, network string, query *dns.Msg) *dns.Msg {
	t.Helper()
	conn, err := n.guest.Dial(testContext(t), network, vnet.GatewayIP+":53")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if network == "udp" {
		conn = packetConn{conn}
	}
	client := dns.Client{Net: network, Timeout: patience, UDPSize: dns.MaxMsgSize}
	reply, _, err := client.ExchangeWithConn(query, &dns.Conn{Conn: conn, UDPSize: dns.MaxMsgSize})
	if err != nil {
		t.Fatalf("ask %s: %v", network, err)
	}
	return reply
}

// packetConn tells the DNS client that a connection carries datagrams.
type packetConn struct{ net.Conn }

func (p packetConn) ReadFrom(b []byte) (int, net.Addr, error) {
	n, err := p.Read(b)
	return n, p.RemoteAddr(), err
}

func (p packetConn) WriteTo(b []byte, _ net.Addr) (int, error) { return p.Write(b) }

func TestDNS(t *testing.T) {
	n := newTestNet(t, vnet.Config{Resolvers: []string{fakeDNS(t, zone)}})
	tests := []struct {
		name  string
		qtype uint16
		rcode int
		want  string // of the only record's last column; "" for none
	}{
		{"www.addr.example.", dns.TypeA, dns.RcodeSuccess, "93.184.216.34"},
		{"WwW.aDDr.example.", dns.TypeA, dns.RcodeSuccess, "93.184.216.34"},
		{"www.addr.example.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{"gone.example.", dns.TypeA, dns.RcodeNameError, ""},
		{"broken.example.", dns.TypeA, dns.RcodeServerFailure, ""},
		{"www.addr.example.", dns.TypeANY, dns.RcodeRefused, ""},
		{"addr.example.", dns.TypeAXFR, dns.RcodeRefused, ""},
		{"host.hib.internal.", dns.TypeA, dns.RcodeSuccess, vnet.HostIP},
		{"HOST.hib.internal.", dns.TypeA, dns.RcodeSuccess, vnet.HostIP},
		{"host.hib.internal.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{"gateway.hib.internal.", dns.TypeA, dns.RcodeSuccess, vnet.GatewayIP},
		{"hib.internal.", dns.TypeA, dns.RcodeSuccess, ""},
		{"other.hib.internal.", dns.TypeA, dns.RcodeNameError, ""},
		{"254.127.168.192.in-addr.arpa.", dns.TypePTR, dns.RcodeSuccess, "host.hib.internal."},
		{"1.127.168.192.in-addr.arpa.", dns.TypePTR, dns.RcodeSuccess, "gateway.hib.internal."},
		{"9.127.168.192.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, ""},
	}
	for _, network := range []string{"udp", "tcp"} {
		for _, tt := range tests {
			t.Run(fmt.Sprintf("%s %s %s", network, tt.name, dns.TypeToString[tt.qtype]), func(t *testing.T) {
				reply := ask(t, n, network, new(dns.Msg).SetQuestion(tt.name, tt.qtype))
				if reply.Rcode != tt.rcode {
					t.Fatalf("got %s", dns.RcodeToString[reply.Rcode])
				}
				got := ""
				if len(reply.Answer) > 0 {
					columns := strings.Fields(reply.Answer[0].String())
					got = columns[len(columns)-1]
				}
				if got != tt.want || len(reply.Answer) > 1 {
					t.Fatalf("got %v, want %q", reply.Answer, tt.want)
				}
			})
		}
	}
	if a := activity(n); a.Bytes != 0 || a.Outbound != 0 {
		t.Errorf("DNS counts as activity: %+v", a)
	}
}

func TestDNSLargeAnswers(t *testing.T) {
	n := newTestNet(t, vnet.Config{Resolvers: []string{fakeDNS(t, zone)}})
	query := func() *dns.Msg { return new(dns.Msg).SetQuestion("big.example.", dns.TypeTXT) }

	if reply := ask(t, n, "tcp", query()); len(reply.Answer) != bigRecords || reply.Truncated {
		t.Errorf("by TCP: %d records, truncated %t", len(reply.Answer), reply.Truncated)
	}
	for size, least := range map[uint16]int{0: 1, 4096: 50, 65535: 50} {
		m := query()
		if size > 0 {
			m.SetEdns0(size, false)
		}
		reply := ask(t, n, "udp", m)
		if got := len(reply.Answer); !reply.Truncated || got < least || got == bigRecords {
			t.Errorf("by UDP with room for %d bytes: %d records, truncated %t", size, got, reply.Truncated)
		}
	}
}

func TestDNSWithoutServers(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := silent.LocalAddr().String()
	silent.Close()
	for name, servers := range map[string][]string{"none": {}, "dead": {gone}} {
		t.Run(name, func(t *testing.T) {
			n := newTestNet(t, vnet.Config{Resolvers: servers})
			reply := ask(t, n, "udp", new(dns.Msg).SetQuestion("www.addr.example.", dns.TypeA))
			if reply.Rcode != dns.RcodeServerFailure {
				t.Fatalf("got %s", dns.RcodeToString[reply.Rcode])
			}
		})
	}
	t.Run("the second answers", func(t *testing.T) {
		n := newTestNet(t, vnet.Config{Resolvers: []string{gone, fakeDNS(t, zone)}})
		reply := ask(t, n, "udp", new(dns.Msg).SetQuestion("www.addr.example.", dns.TypeA))
		if reply.Rcode != dns.RcodeSuccess || len(reply.Answer) != 1 {
			t.Fatalf("got %v", reply)
		}
	})
}

func TestDNSUnderThePolicy(t *testing.T) {
	n := newTestNet(t, vnet.Config{
		Policy:    mustPolicy(t, nil, []string{"0.0.0.0/0"}),
		Resolvers: []string{fakeDNS(t, func(dns.ResponseWriter, *dns.Msg) { t.Error("a question left") })},
	})
	if reply := ask(t, n, "udp", new(dns.Msg).SetQuestion("secret.addr.example.", dns.TypeA)); reply.Rcode != dns.RcodeRefused {
		t.Errorf("got %s", dns.RcodeToString[reply.Rcode])
	}
	if reply := ask(t, n, "udp", new(dns.Msg).SetQuestion("host.hib.internal.", dns.TypeA)); len(reply.Answer) != 1 {
		t.Errorf("own name: %v", reply)
	}
}

// The resolver survives what is no question, and a flood.
func TestDNSNonsense(t *testing.T) {
	n := newTestNet(t, vnet.Config{Resolvers: []string{fakeDNS(t, zone)}})
	c := dialGuest(t, n, "udp", vnet.GatewayIP+":53")
	answer := new(dns.Msg).SetReply(new(dns.Msg).SetQuestion("x.example.", dns.TypeA))
	packed, err := answer.Pack()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range [][]byte{{}, {0}, make([]byte, 12), []byte(strings.Repeat("\xff", 4000)), packed} {
		c.Write(b)
	}
	question, err := new(dns.Msg).SetQuestion("www.addr.example.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	for range 5000 {
		c.Write(question)
	}
	for range 64 { // more than are served at a time
		if c, err := n.guest.Dial(testContext(t), "tcp", vnet.GatewayIP+":53"); err == nil {
			defer c.Close()
			c.Write([]byte{0xff})
		}
	}
	waitFor(t, "an answer after the flood", func() bool {
		conn := dialGuest(t, n, "udp", vnet.GatewayIP+":53")
		defer conn.Close()
		client := dns.Client{Timeout: time.Second}
		reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion("www.addr.example.", dns.TypeA), &dns.Conn{Conn: packetConn{conn}})
		return err == nil && len(reply.Answer) == 1
	})
}
