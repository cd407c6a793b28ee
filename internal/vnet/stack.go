package vnet

import (
	"fmt"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const (
	nicID = 1

	// A flow's buffers in the stack, each way. The path has no delay to speak
	// of, so a few packets of MTU in flight fill it.
	tcpBufferDefault = 256 << 10
	tcpBufferMax     = 1 << 20

	// How long the stack remembers closed connections. Nothing is reordered on
	// the link, so an old segment cannot come late.
	timeWait = 2 * time.Second
	linger   = 20 * time.Second
)

// newStack makes the stack that plays the gateway and every peer of the guest.
func newStack(l *link) (*stack.Stack, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	if err := setUp(s, l); err != nil {
		s.Destroy()
		return nil, err
	}
	return s, nil
}

func setUp(s *stack.Stack, l *link) error {
	for _, option := range []tcpip.SettableTransportProtocolOption{
		option(tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBufferDefault, Max: tcpBufferMax}),
		option(tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBufferDefault, Max: tcpBufferMax}),
		option(tcpip.TCPModerateReceiveBufferOption(true)),
		option(tcpip.TCPSACKEnabled(true)),
		option(tcpip.TCPTimeWaitTimeoutOption(timeWait)),
		option(tcpip.TCPLingerTimeoutOption(linger)),
	} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return fmt.Errorf("set up the network stack: %T: %s", option, err)
		}
	}
	if err := s.CreateNIC(nicID, l); err != nil {
		return fmt.Errorf("set up the network stack's card: %s", err)
	}
	for _, a := range []tcpip.Address{gatewayAddress, hostAddress} {
		address := tcpip.ProtocolAddress{
			Protocol:          ipv4.ProtocolNumber,
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: a, PrefixLen: Prefix},
		}
		if err := s.AddProtocolAddress(nicID, address, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("set up the gateway's address: %s", err)
		}
	}
	subnet, err := tcpip.NewSubnet(tcpip.AddrFrom4(subnetRange.Addr().As4()), tcpip.MaskFromBytes([]byte{255, 255, 255, 0}))
	if err != nil {
		return fmt.Errorf("set up the subnet: %w", err)
	}
	s.SetRouteTable([]tcpip.Route{{Destination: subnet, NIC: nicID}})
	// Take packets to any address, and answer as that address.
	s.SetPromiscuousMode(nicID, true)
	s.SetSpoofing(nicID, true)
	return nil
}

// option has its argument implement the interface by address.
func option[T any, P interface {
	*T
	tcpip.SettableTransportProtocolOption
}](v T) tcpip.SettableTransportProtocolOption {
	return P(&v)
}

// destroyStack ends the stack when the flows of the guest are gone. A flow whose
// handshake with the guest is under way ends when its endpoint is aborted, and
// that one may come into being late.
func (n *Network) destroyStack() {
	gone := make(chan struct{})
	go func() {
		n.flows.guests.Wait()
		close(gone)
	}()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for waiting := true; waiting; {
		for _, ep := range n.stack.RegisteredEndpoints() {
			ep.Abort()
		}
		select {
		case <-gone:
			waiting = false
		case <-tick.C:
		}
	}
	n.stack.Destroy()
}

func addrPort(a tcpip.Address, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4(a.As4()), port)
}
