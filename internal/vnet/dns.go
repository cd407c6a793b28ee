package vnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
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
	dnsConns     = 16 // TCP connections at a time; one more is closed
	dnsIdle      = 10 * time.Second
	dnsMaxQuery  = 4096 // bytes
	dnsMaxUDP    = 4096 // bytes of an answer by UDP, however much the guest takes
)

// resolver is the gateway's DNS server. It reads questions from the guest by
// UDP and TCP and has them answered by answer.
type resolver struct {
	log      *slog.Logger
	upstream upstream
	permits  func() bool // whether the policy lets questions leave
	limiter  *rate.Limiter
	slots    chan struct{} // one for each question at work

	stop context.CancelFunc // ends the context that listen makes

	mu     sync.Mutex
	closed bool
	udp    *gonet.UDPConn
	tcp    *gonet.TCPListener
	conns  map[net.Conn]struct{}
	wg     sync.WaitGroup
}

func newResolver(log *slog.Logger, servers []string, permits func() bool) *resolver {
	return &resolver{
		log:      log,
		upstream: upstream{servers: servers},
		permits:  permits,
		limiter:  rate.NewLimiter(dnsRate, dnsBurst),
		slots:    make(chan struct{}, dnsQuestions),
		stop:     func() {},
		conns:    make(map[net.Conn]struct{}),
	}
}

func (r *resolver) listen(s *stack.Stack) error {
	local := tcpip.FullAddress{NIC: nicID, Addr: gatewayAddress, Port: dnsPort}
	var err error
	if r.udp, err = gonet.DialUDP(s, &local, nil, ipv4.ProtocolNumber); err != nil {
		return fmt.Errorf("listen for DNS by UDP: %w", err)
	}
	if r.tcp, err = gonet.ListenTCP(s, local, ipv4.ProtocolNumber); err != nil {
		return fmt.Errorf("listen for DNS by TCP: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	r.wg.Add(2)
	go r.serveUDP(ctx)
	go r.serveTCP(ctx)
	return nil
}

// reset closes the connections of the guest.
func (r *resolver) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.Close()
	}
}

// close ends the resolver and waits for its goroutines.
func (r *resolver) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.stop()
	if r.udp != nil {
		r.udp.Close()
	}
	if r.tcp != nil {
		r.tcp.Shutdown()
		r.tcp.Close()
	}
	r.reset()
	r.wg.Wait()
}

func (r *resolver) serveUDP(ctx context.Context) {
	defer r.wg.Done()
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
		r.wg.Add(1)
		go func() {
			defer r.wg.Done()
			defer func() { <-r.slots }()
			r.replyUDP(ctx, query, from)
		}()
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

func (r *resolver) serveTCP(ctx context.Context) {
	defer r.wg.Done()
	for {
		conn, err := r.tcp.Accept()
		if err != nil {
			if ctx.Err() == nil {
				r.log.Error("the resolver lost its listener", "error", err)
			}
			return
		}
		if !r.hold(conn) {
			conn.Close()
			continue
		}
		go func() {
			defer r.wg.Done()
			defer r.release(conn)
			r.serveConn(ctx, conn)
		}()
	}
}

// hold notes an open connection, if there is room for it.
func (r *resolver) hold(conn net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || len(r.conns) >= dnsConns {
		return false
	}
	r.conns[conn] = struct{}{}
	r.wg.Add(1)
	return true
}

func (r *resolver) release(conn net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, conn)
	conn.Close()
}

// serveConn answers the questions of one connection, one after the other.
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
	case !r.permits():
		reply.Rcode = dns.RcodeRefused
	case q.Qtype == dns.TypeAAAA: // no IPv6: the name may exist, it has no such address
	default:
		r.forward(ctx, reply, query)
	}
	return reply
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
	reply.Rcode = got.Rcode
	reply.AuthenticatedData = got.AuthenticatedData
	reply.Answer, reply.Ns = got.Answer, got.Ns
	for _, rr := range got.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			reply.Extra = append(reply.Extra, rr)
		}
	}
}
