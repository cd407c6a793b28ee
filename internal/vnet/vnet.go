// Package vnet owns the network of one sandbox: a user-space TCP/IP stack that
// stands where a router would, joined to the guest's card by the VMM's stream
// socket. It needs no privilege, no tap device and no packet filter, and there
// is no path between two sandboxes but the one that their policies open.
//
// # Nouns
//
//   - The link is the stream connection of the guest's card: Ethernet frames,
//     each behind its length as 32 bits in network order (QEMU's "-netdev
//     stream"). There is one card at a time; a new connection replaces the old.
//   - A flow is one TCP connection or one pair of UDP addresses between the guest
//     and a peer. Inbound flows are made by Dial, outbound flows by the guest.
//   - The gateway is the guest's router and resolver. It answers ARP, ICMP echo
//     and DNS, and nothing else.
//   - The host alias is an address that stands for the host's own loopback, named
//     HostName. It leads nowhere unless the policy names a port of it.
//   - A Policy rules every outbound flow, by the address that is really dialled
//     and by the names that the gateway's resolver answered that address for, and
//     every question to that resolver.
//
// Every sandbox sees the same addresses, so that a snapshot can be resumed
// anywhere and clones never clash. IPv6 is not routed: the resolver answers AAAA
// questions with no address, so that programs use IPv4 at once.
//
// The guest is hostile: frames of another source than its own are dropped,
// lengths, flows, buffers and questions are bounded, and what breaks the stream
// ends the link of this network alone.
package vnet

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// The addresses that every sandbox sees.
const (
	GuestIP    = "192.168.127.2"     // of the guest's card
	GuestMAC   = "02:68:69:62:00:02" // of the guest's card; frames from another are dropped
	GatewayIP  = "192.168.127.1"     // default route and resolver of the guest
	GatewayMAC = "02:68:69:62:00:01" // may be a permanent neighbour entry in the guest
	HostIP     = "192.168.127.254"   // the host alias
	Subnet     = "192.168.127.0/24"  // never reached beyond these three addresses
	Prefix     = 24                  // bits of the subnet's mask
	MTU        = 65000               // bytes of an IP packet; set it on the guest's card too
)

// The names that the gateway's resolver answers itself.
const (
	HostName    = "host.hib.internal"    // HostIP
	GatewayName = "gateway.hib.internal" // GatewayIP
)

// Errors that callers act on.
var (
	ErrClosed  = errors.New("network is closed")
	ErrRefused = errors.New("connection refused by the guest")
	ErrReset   = errors.New("network was reset")
)

// Config configures a Network. The zero value is a network that may reach
// public addresses.
type Config struct {
	Policy Policy
	Log    *slog.Logger // nil: silent

	// OnDenied is told of each outbound flow and each question for a name that the
	// policy denied: as often as a hostile guest likes. It must not block and must
	// not call the network. May be nil.
	OnDenied func(Denied)

	// Dial opens the host's side of an outbound flow: network is "tcp" or "udp",
	// address an IPv4 address and port that the policy permits. It must give up
	// when ctx ends; for UDP it must not block at all. Nil: a net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// Resolvers are the DNS servers ("address:port") that answer the guest's
	// questions. Nil: those of the host's /etc/resolv.conf, read anew each time.
	Resolvers []string
}

// Denied is what a guest tried and the policy did not permit.
type Denied struct {
	Proto string         // "tcp" or "udp"; "dns" for a question that the resolver refused
	Addr  netip.AddrPort // that the guest dialled; zero for a question
	Name  string         // that was asked for, or that the address was answered for last; "" if none
}

// Network is the network of one sandbox. Its methods may be called at any time
// from any goroutine.
type Network struct {
	log      *slog.Logger
	stack    *stack.Stack
	link     *link
	flows    *flows
	meter    meter
	onDenied func(Denied)
	resolver *resolver
	dialHost func(ctx context.Context, network, address string) (net.Conn, error)

	udpIdle time.Duration // after which a UDP flow without a datagram is closed

	mu        sync.Mutex
	listeners []net.Listener
	closed    bool
	destroyed chan struct{}  // closed when Close is done
	wg        sync.WaitGroup // all but the guest's flows, which flows counts
}

// New returns a network without a link: Listen gives it one.
func New(cfg Config) (*Network, error) {
	log := cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	dial := cfg.Dial
	if dial == nil {
		dial = (&net.Dialer{KeepAlive: keepAliveIdle}).DialContext
	}
	link := newLink(log)
	s, err := newStack(link)
	if err != nil {
		return nil, err
	}
	n := &Network{
		log:      log,
		stack:    s,
		link:     link,
		flows:    newFlows(cfg.Policy, newHostAddresses(net.InterfaceAddrs, log).contains),
		onDenied: cfg.OnDenied,
		dialHost: dial,
		udpIdle:  udpIdleTimeout,

		destroyed: make(chan struct{}),
	}
	n.meter.touch()
	n.resolver, err = newResolver(s, log, cfg.Resolvers, resolverRules{n})
	if err != nil {
		s.Destroy()
		return nil, err
	}
	n.forwardTCP()
	n.forwardUDP()
	return n, nil
}

// resolverRules are the rules of a network for its resolver.
type resolverRules struct{ n *Network }

func (r resolverRules) permitsName(name string) bool { return r.n.flows.permitsName(name) }
func (r resolverRules) learn(res resolution) bool    { return r.n.flows.learn(res) }
func (r resolverRules) refused(name string)          { r.n.denied(Denied{Proto: "dns", Name: name}) }

// deniedFlow reports a flow that the policy denied.
func (n *Network) deniedFlow(kind flowKind, seen netip.AddrPort) {
	if n.onDenied != nil {
		n.denied(Denied{Proto: kind.network(), Addr: seen, Name: n.flows.nameOf(seen.Addr())})
	}
}

func (n *Network) denied(d Denied) {
	if n.onDenied != nil {
		d.Name = d.Name[:min(len(d.Name), maxNameShown)]
		n.onDenied(d)
	}
}

// Policy returns the policy in force.
func (n *Network) Policy() Policy { return n.flows.currentPolicy() }

// SetPolicy puts a policy in force for every flow and every question from now on,
// and closes the open flows that it denies, with a reset to both sides. What was
// answered before stays known: a flow to an address is judged by all names that it
// was answered for lately, whatever policy was in force then.
func (n *Network) SetPolicy(p Policy) { n.flows.setPolicy(p) }

// Reset closes every flow, inbound and outbound, with a reset to both sides.
// New flows may follow at once.
func (n *Network) Reset() { n.flows.reset() }

// Suspend closes every flow as Reset does, and drops what is for the guest from
// now on: it stands still, and would get stale packets later. Continue ends that.
func (n *Network) Suspend() {
	n.link.muted.Store(true)
	n.flows.reset()
	n.link.drain()
}

// Continue ends a Suspend. Flows that were begun meanwhile are closed.
func (n *Network) Continue() {
	n.flows.reset()
	n.link.muted.Store(false)
}

// Close ends the network: it closes the listeners, the link and every flow, and
// returns when no goroutine of it is left. It may be called again.
func (n *Network) Close() error {
	n.mu.Lock()
	listeners, again := n.listeners, n.closed
	n.listeners, n.closed = nil, true
	n.mu.Unlock()
	if again {
		<-n.destroyed
		return nil
	}

	for _, ln := range listeners {
		ln.Close()
	}
	n.flows.close()
	n.resolver.close()
	n.link.close()
	n.wg.Wait()
	n.destroyStack()
	close(n.destroyed)
	return nil
}

// track counts a goroutine that Close waits for. It returns false when the
// network is closed; otherwise the goroutine calls wg.Done.
func (n *Network) track() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.wg.Add(1)
	return true
}
