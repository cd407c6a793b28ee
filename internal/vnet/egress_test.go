package vnet_test

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/hibernacle/hibernacle/internal/vnet"
)

// nameServer answers names with what the test says, and keeps the questions.
type nameServer struct {
	mu      sync.Mutex
	records map[string][]string // canonical name with its dot → records without their owner
	asked   []string
}

func (s *nameServer) set(name string, records ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.records == nil {
		s.records = map[string][]string{}
	}
	s.records[name] = records
}

func (s *nameServer) questions() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.asked...)
}

func (s *nameServer) serve(w dns.ResponseWriter, query *dns.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := strings.ToLower(query.Question[0].Name)
	s.asked = append(s.asked, name)
	reply := new(dns.Msg).SetReply(query)
	records, ok := s.records[name]
	if !ok {
		reply.Rcode = dns.RcodeNameError
	}
	for _, text := range records {
		if !strings.Contains(text, " IN ") {
			text = name + " 5 IN " + text
		}
		r, err := dns.NewRR(text)
		if err != nil {
			panic(err)
		}
		reply.Answer = append(reply.Answer, r)
	}
	w.WriteMsg(reply)
}

// egressNet is a network whose names and peers the test makes.
type egressNet struct {
	*testNet
	world
	names nameServer

	mu     sync.Mutex
	denied map[vnet.Denied]int
}

func newEgressNet(t *testing.T, policy vnet.Policy) *egressNet {
	t.Helper()
	e := &egressNet{denied: map[vnet.Denied]int{}}
	e.testNet = newTestNet(t, vnet.Config{
		Policy: policy, Dial: e.dial, Resolvers: []string{fakeDNS(t, e.names.serve)},
		OnDenied: func(d vnet.Denied) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.denied[d]++
		},
	})
	return e
}

// wasDenied says whether such an attempt was reported.
func (e *egressNet) wasDenied(proto, addr, name string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for d := range e.denied {
		if d.Proto == proto && d.Name == name && (addr == "" && !d.Addr.IsValid() || d.Addr.String() == addr) {
			return true
		}
	}
	return false
}

// lookup asks the gateway for the addresses of a name.
func (e *egressNet) lookup(t *testing.T, name string) (rcode int, addrs []string) {
	t.Helper()
	reply := ask(t, e.testNet, "udp", new(dns.Msg).SetQuestion(name, dns.TypeA))
	for _, rr := range reply.Answer {
		if a, ok := rr.(*dns.A); ok {
			addrs = append(addrs, a.A.String())
		}
	}
	return reply.Rcode, addrs
}

func (e *egressNet) resolves(t *testing.T, name, want string) {
	t.Helper()
	if rcode, got := e.lookup(t, name); rcode != dns.RcodeSuccess || strings.Join(got, " ") != want {
		t.Fatalf("%s is %s, %v, want %s", name, dns.RcodeToString[rcode], got, want)
	}
}

func (e *egressNet) refuses(t *testing.T, name string) {
	t.Helper()
	if rcode, got := e.lookup(t, name); rcode != dns.RcodeRefused || len(got) > 0 {
		t.Fatalf("%s is %s, %v, want a refusal", name, dns.RcodeToString[rcode], got)
	}
	if name := strings.TrimSuffix(strings.ToLower(name), "."); !e.wasDenied("dns", "", name) {
		t.Errorf("that %s was refused is not reported", name)
	}
}

func policyOf(t testing.TB, profile string, allow, deny []string) vnet.Policy {
	t.Helper()
	p, err := vnet.ParsePolicy(profile, allow, deny)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// An address counts as a name's only when the gateway's resolver said so.
func TestNamesOpenWhatTheyAreAnsweredWith(t *testing.T) {
	e := newEgressNet(t, policyOf(t, "allow-list", []string{"www.good.test:80", "*.below.test", "8.8.8.8:53"}, nil))
	host := hostListener(t, echo)
	for _, address := range []string{"93.0.0.1:80", "93.0.0.1:81", "93.0.0.2:80", "93.0.0.3:80", "93.0.0.4:80"} {
		e.put("tcp", address, host)
	}
	e.names.set("www.good.test.", "A 93.0.0.1", "other.test. 5 IN A 93.0.0.4")
	e.names.set("alias.below.test.", "CNAME deep.cdn.test.", "deep.cdn.test. 5 IN A 93.0.0.2")
	e.names.set("other.test.", "A 93.0.0.3")

	dialFails(t, e.testNet, "93.0.0.1:80")
	if !e.wasDenied("tcp", "93.0.0.1:80", "") {
		t.Error("a denied address is not reported")
	}
	e.resolves(t, "WWW.good.test.", "93.0.0.1 93.0.0.4")
	exchange(t, dialGuest(t, e.testNet, "tcp", "93.0.0.1:80"), "by its name")
	dialFails(t, e.testNet, "93.0.0.1:81")
	if !e.wasDenied("tcp", "93.0.0.1:81", "www.good.test") {
		t.Error("a denied port is not reported with the name")
	}
	dialFails(t, e.testNet, "93.0.0.4:80") // in the answer, but of a name that was not asked for

	e.resolves(t, "alias.below.test.", "93.0.0.2")
	exchange(t, dialGuest(t, e.testNet, "tcp", "93.0.0.2:80"), "by the name asked for")

	for _, name := range []string{"other.test.", "good.test.", "below.test.", "deep.cdn.test.", "www.good.test.evil.test."} {
		e.refuses(t, name)
	}
	dialFails(t, e.testNet, "93.0.0.3:80")
	for _, name := range e.names.questions() {
		if name != "www.good.test." && name != "alias.below.test." {
			t.Errorf("a question for %s left", name)
		}
	}
}

// What another resolver tells the guest binds nothing.
func TestOtherResolversBindNothing(t *testing.T) {
	e := newEgressNet(t, policyOf(t, "allow-list", []string{"www.good.test", "8.8.8.8:53"}, nil))
	evil := &nameServer{}
	evil.set("www.good.test.", "A 93.0.0.66")
	e.put("udp", "8.8.8.8:53", fakeDNS(t, evil.serve))
	e.put("tcp", "93.0.0.66:80", hostListener(t, echo))
	conn := dialGuest(t, e.testNet, "udp", "8.8.8.8:53")
	client := dns.Client{Timeout: patience}
	query := new(dns.Msg).SetQuestion("www.good.test.", dns.TypeA)
	if reply, _, err := client.ExchangeWithConn(query, &dns.Conn{Conn: packetConn{conn}}); err != nil || len(reply.Answer) != 1 {
		t.Fatalf("ask the other resolver: %v, %v", reply, err)
	}
	dialFails(t, e.testNet, "93.0.0.66:80")
}

// Whoever owns an allowed name cannot make it open what is not public.
func TestRebinding(t *testing.T) {
	host := hostListener(t, echo)
	_, port, _ := net.SplitHostPort(host)
	for profile, allow := range map[string][]string{
		"internet": nil, "allow-list": {"*.evil.test", "*", "10.9.0.0/16:80"},
	} {
		t.Run(profile, func(t *testing.T) {
			e := newEgressNet(t, policyOf(t, profile, allow, nil))
			e.put("tcp", "10.9.0.1:80", host)
			for i, addr := range []string{"127.0.0.1", "10.8.0.1", "169.254.169.254", "192.168.127.254", "192.168.127.1", "0.0.0.0", "192.168.1.1"} {
				name := fmt.Sprintf("n%d.evil.test.", i)
				e.names.set(name, "A "+addr)
				e.resolves(t, name, addr)
				if addr != "127.0.0.1" && addr != "0.0.0.0" { // which are the guest itself
					dialFails(t, e.testNet, net.JoinHostPort(addr, port))
				}
			}
			if calls := e.calls(); len(calls) > 0 {
				t.Errorf("the host dialled %v", calls)
			}
			e.names.set("db.evil.test.", "A 10.9.0.1")
			e.resolves(t, "db.evil.test.", "10.9.0.1")
			if allow == nil {
				dialFails(t, e.testNet, "10.9.0.1:80")
			} else { // a rule was made for it
				exchange(t, dialGuest(t, e.testNet, "tcp", "10.9.0.1:80"), "allowed by its address")
			}
		})
	}
}

// A denied name has no address, by whatever other name.
func TestDeniedNames(t *testing.T) {
	e := newEgressNet(t, vnet.Policy{})
	e.put("tcp", "93.0.0.1:80", hostListener(t, echo))
	e.names.set("www.evil.test.", "A 93.0.0.1")
	e.names.set("alias.test.", "CNAME www.evil.test.", "www.evil.test. 5 IN A 93.0.0.1")
	e.resolves(t, "www.evil.test.", "93.0.0.1")
	open := dialGuest(t, e.testNet, "tcp", "93.0.0.1:80")
	exchange(t, open, "before")

	e.SetPolicy(policyOf(t, "internet", nil, []string{"*.evil.test"}))
	if _, err := open.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("the open connection got %v, want a reset", err)
	}
	before := len(e.names.questions())
	e.refuses(t, "www.evil.test.")
	if got := e.names.questions()[before:]; len(got) > 0 {
		t.Errorf("questions left: %v", got)
	}
	e.refuses(t, "alias.test.")
	dialFails(t, e.testNet, "93.0.0.1:80")
}

// A new policy holds at once, for what is open and for what was answered before.
func TestSetPolicyOfNames(t *testing.T) {
	e := newEgressNet(t, policyOf(t, "allow-list", []string{"one.test"}, nil))
	ended := make(chan error, 1)
	e.put("tcp", "93.0.0.1:80", hostListener(t, func(c net.Conn) {
		_, err := io.Copy(c, c)
		ended <- err
	}))
	e.put("tcp", "93.0.0.2:80", hostListener(t, echo))
	e.names.set("one.test.", "A 93.0.0.1")
	e.names.set("two.test.", "A 93.0.0.2")
	e.resolves(t, "one.test.", "93.0.0.1")
	e.refuses(t, "two.test.")
	one := dialGuest(t, e.testNet, "tcp", "93.0.0.1:80")
	exchange(t, one, "open")

	e.SetPolicy(policyOf(t, "allow-list", []string{"one.test", "two.test"}, nil))
	exchange(t, one, "still open")
	dialFails(t, e.testNet, "93.0.0.2:80") // not asked for yet
	e.resolves(t, "two.test.", "93.0.0.2")
	two := dialGuest(t, e.testNet, "tcp", "93.0.0.2:80")
	exchange(t, two, "open too")

	e.SetPolicy(policyOf(t, "allow-list", []string{"two.test"}, nil))
	if _, err := one.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("the guest got %v, want a reset", err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the peer got an ordinary end, want a reset")
		}
	case <-time.After(patience):
		t.Error("the peer was told nothing")
	}
	exchange(t, two, "still open")
	dialFails(t, e.testNet, "93.0.0.1:80")

	e.SetPolicy(policyOf(t, "none", []string{"two.test"}, nil))
	if _, err := two.Read(make([]byte, 1)); err == nil {
		t.Error("a connection outlives the profile none")
	}
	e.refuses(t, "two.test.")

	e.SetPolicy(policyOf(t, "allow-list", []string{"one.test"}, nil))
	exchange(t, dialGuest(t, e.testNet, "tcp", "93.0.0.1:80"), "known from before")
}

// An answer that comes after the policy changed is the new policy's.
func TestSetPolicyDuringAQuestion(t *testing.T) {
	asked, goOn := make(chan struct{}), make(chan struct{})
	n := newTestNet(t, vnet.Config{Resolvers: []string{fakeDNS(t, func(w dns.ResponseWriter, query *dns.Msg) {
		close(asked)
		<-goOn
		reply := new(dns.Msg).SetReply(query)
		r, _ := dns.NewRR("late.test. 5 IN A 93.0.0.1")
		reply.Answer = []dns.RR{r}
		w.WriteMsg(reply)
	})}})
	go func() {
		<-asked
		n.SetPolicy(policyOf(t, "none", nil, nil))
		close(goOn)
	}()
	if reply := ask(t, n, "tcp", new(dns.Msg).SetQuestion("late.test.", dns.TypeA)); reply.Rcode != dns.RcodeRefused || len(reply.Answer) > 0 {
		t.Errorf("got %v", reply)
	}
}

func TestSetPolicyClosesUDP(t *testing.T) {
	e := newEgressNet(t, vnet.Policy{})
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan string, 100)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 100)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			got <- string(buf[:n])
			pc.WriteTo(buf[:n], from)
		}
	}()
	t.Cleanup(func() { pc.Close(); <-done })
	e.put("udp", "93.0.0.1:1000", pc.LocalAddr().String())
	c := dialGuest(t, e.testNet, "udp", "93.0.0.1:1000")
	exchange(t, c, "open")
	<-got
	e.SetPolicy(policyOf(t, "none", nil, nil))
	waitFor(t, "a datagram is denied", func() bool {
		c.Write([]byte("closed"))
		return e.wasDenied("udp", "93.0.0.1:1000", "")
	})
	select {
	case text := <-got:
		t.Errorf("%q came through", text)
	default:
	}
}

// A guest that asks and dials without end finds its network as it was.
func TestEgressUnderAFlood(t *testing.T) {
	e := newEgressNet(t, policyOf(t, "allow-list", []string{"*.flood.test", "www.good.test"}, nil))
	e.put("tcp", "93.0.0.1:80", hostListener(t, echo))
	e.names.set("www.good.test.", "A 93.0.0.1")
	for i := range 100 {
		e.names.set(fmt.Sprintf("n%d.flood.test.", i), fmt.Sprintf("A 93.1.0.%d", i))
	}
	questions := dialGuest(t, e.testNet, "udp", vnet.GatewayIP+":53")
	for i := range 5000 {
		m, err := new(dns.Msg).SetQuestion(fmt.Sprintf("n%d.flood.test.", i%150), dns.TypeA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		questions.Write(m)
	}
	for i := range 500 {
		c := dialGuest(t, e.testNet, "udp", fmt.Sprintf("93.2.0.%d:%d", i%250, 1+i))
		c.Write([]byte("x"))
		c.Close()
	}
	waitFor(t, "an answer", func() bool {
		conn := dialGuest(t, e.testNet, "udp", vnet.GatewayIP+":53")
		defer conn.Close()
		client := dns.Client{Timeout: time.Second}
		reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion("www.good.test.", dns.TypeA), &dns.Conn{Conn: packetConn{conn}})
		return err == nil && len(reply.Answer) == 1
	})
	exchange(t, dialGuest(t, e.testNet, "tcp", "93.0.0.1:80"), "as before")
}
