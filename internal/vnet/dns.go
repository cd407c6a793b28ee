package vnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// Bounds of the resolver.
const (
	dnsPort      = 53
	dnsRate      = 200 // questions a second that are looked at; the rest is dropped
	dnsBurst     = 400
	dnsQuestions = 64 // at a time; one more is dropped
	dnsIdle      = 10 * time.Second
	dnsMaxQuery  = 4096 // bytes
	dnsMaxUDP    = 4096 // bytes of an answer by UDP, however much the guest takes
)

var dnsAddrPort = netip.AddrPortFrom(netip.MustParseAddr(GatewayIP), dnsPort)

// nameRules says what the resolver may do.
type nameRules interface {
	permitsName(name string) bool // whether a question for the name may leave
	learn(r resolution) bool      // takes an answer in; false: the guest must not see it
	refused(name string)          // is told of questions that were refused
}

// resolver is the gateway's DNS server. It reads questions from the guest by
// UDP, and by TCP from the connections that it is given.
type resolver struct {
	log      *slog.Logger
	upstream upstream
	rules    nameRules
	limiter  *rate.Limiter
	slots    chan struct{} // one for each question by UDP that is at work

	udp  *gonet.UDPConn
	stop context.CancelFunc // ends what is at work by UDP
	wg   sync.WaitGroup
}

// newResolver returns a resolver that listens at the gateway's address.
func newResolver(s *stack.Stack, log *slog.Logger, servers []string, rules nameRules) (*resolver, error) {
	local := tcpip.FullAddress{NIC: nicID, Addr: gatewayAddress, Port: dnsPort}
	udp, err := gonet.DialUDP(s, &local, nil, ipv4.ProtocolNumber)
	if err != nil {
		return nil, fmt.Errorf("listen for DNS: %w", err)
	}
	r := &resolver{
		log:      log,
		upstream: upstream{servers: servers},
		rules:    rules,
		limiter:  rate.NewLimiter(dnsRate, dnsBurst),
		slots:    make(chan struct{}, dnsQuestions),
		udp:      udp,
	}
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	r.wg.Go(func() { r.serveUDP(ctx) })
	return r, nil
}

// close ends the work by UDP and waits for it.
func (r *resolver) close() {
	r.stop()
	r.udp.Close()
	r.wg.Wait()
}

func (r *resolver) serveUDP(ctx context.Context) {
	buf := make([]byte, dnsMaxQuery)
	for {
		n, from, err := r.udp.ReadFrom(buf)
		if err != nil {
			if ctx.Err() == nil {
				r.log.Error("the resolver lost its socket", "error", err)
			}
			return
		}
		query := new(dns.Msg)
		if !r.limiter.Allow() || query.Unpack(buf[:n]) != nil {
			continue
		}
		select {
		case r.slots <- struct{}{}:
		default:
			continue
		}
		r.wg.Go(func() {
			r.replyUDP(ctx, query, from)
			<-r.slots
		})
	}
}

func (r *resolver) replyUDP(ctx context.Context, query *dns.Msg, to net.Addr) {
	reply := r.answer(ctx, query)
	if reply == nil {
		return
	}
	reply.Truncate(udpSize(query))
	if packed, err := reply.Pack(); err == nil {
		_, _ = r.udp.WriteTo(packed, to) // lost, as datagrams may be
	}
}

// udpSize is how many bytes of an answer the asker takes by UDP.
func udpSize(query *dns.Msg) int {
	size := dns.MinMsgSize
	if opt := query.IsEdns0(); opt != nil {
		size = max(size, int(opt.UDPSize()))
	}
	return min(size, dnsMaxUDP)
}

// serveConn answers the questions of one connection, one after the other,
// until the guest falls silent or ctx ends.
func (r *resolver) serveConn(ctx context.Context, conn net.Conn) {
	framed := &dns.Conn{Conn: conn}
	for {
		_ = conn.SetDeadline(time.Now().Add(dnsIdle))
		query, err := framed.ReadMsg()
		if err != nil || r.limiter.Wait(ctx) != nil {
			return
		}
		reply := r.answer(ctx, query)
		if reply == nil {
			return
		}
		_ = conn.SetDeadline(time.Now().Add(dnsIdle))
		if err := framed.WriteMsg(reply); err != nil {
			return
		}
	}
}

// answer returns the answer to a question of the guest, nil for none.
func (r *resolver) answer(ctx context.Context, query *dns.Msg) *dns.Msg {
	if query.Response {
		return nil
	}
	reply := new(dns.Msg).SetReply(query)
	reply.RecursionAvailable = true
	if opt := query.IsEdns0(); opt != nil {
		reply.SetEdns0(dnsMaxUDP, opt.Do())
	}
	if len(query.Question) != 1 || query.Opcode != dns.OpcodeQuery {
		reply.Rcode = dns.RcodeFormatError
		return reply
	}
	q := query.Question[0]
	switch {
	case answerOwn(reply, q):
	case q.Qclass != dns.ClassINET, q.Qtype == dns.TypeANY, q.Qtype == dns.TypeAXFR, q.Qtype == dns.TypeIXFR:
		reply.Rcode = dns.RcodeRefused
	case !r.rules.permitsName(canonical(q.Name)):
		r.refuse(reply, q)
	case q.Qtype == dns.TypeAAAA: // no IPv6: the name may exist, it has no such address
	default:
		r.forward(ctx, reply, query)
	}
	return reply
}

// refuse answers a question that the policy does not permit.
func (r *resolver) refuse(reply *dns.Msg, q dns.Question) {
	reply.Rcode = dns.RcodeRefused
	r.rules.refused(canonical(q.Name))
}

// forward has the host's resolvers answer.
func (r *resolver) forward(ctx context.Context, reply, query *dns.Msg) {
	got, err := r.upstream.ask(ctx, query)
	if err != nil {
		if !errors.Is(err, context.Canceled) {
			r.log.Debug("a question of the guest stays unanswered", "error", err)
		}
		reply.Rcode = dns.RcodeServerFailure
		return
	}
	q := query.Question[0]
	if !r.rules.learn(resolve(q, got.Answer)) {
		r.refuse(reply, q)
		return
	}
	reply.Rcode = got.Rcode
	reply.AuthenticatedData = got.AuthenticatedData
	reply.Answer, reply.Ns = got.Answer, got.Ns
	for _, rr := range got.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			reply.Extra = append(reply.Extra, rr)
		}
	}
}
