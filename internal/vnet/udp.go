package vnet

import (
	"errors"
	"net"
	"os"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	udpIdleTimeout = 60 * time.Second
	maxDatagram    = 64 << 10
)

// forwardUDP has the first datagram of every outbound UDP flow handled by openUDP.
func (n *Network) forwardUDP() {
	n.stack.SetTransportProtocolHandler(udp.ProtocolNumber, n.openUDP)
}

// openUDP opens an outbound UDP flow. Where it returns false the stack answers
// that the port is unreachable. It runs in the link's reader and never blocks:
// connecting a UDP socket sends nothing.
func (n *Network) openUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	seen := addrPort(id.LocalAddress, id.LocalPort)
	fl, err := n.flows.admit(flowUDP, seen)
	if err != nil {
		if errors.Is(err, errDenied) {
			n.deniedFlow(flowUDP, seen)
		}
		return false
	}
	host, err := n.dialOutbound(fl)
	if err != nil {
		n.flows.remove(fl)
		return false
	}
	udp.NewForwarder(n.stack, func(r *udp.ForwarderRequest) {
		wq := new(waiter.Queue)
		ep, terr := r.CreateEndpoint(wq)
		if terr != nil {
			host.Close()
			n.flows.remove(fl)
			return
		}
		go n.relayUDP(fl, gonet.NewUDPConn(wq, ep), host)
	}).HandlePacket(id, pkt)
	return true
}

// relayUDP carries datagrams both ways until the flow is idle or aborted.
func (n *Network) relayUDP(fl *flow, guest *gonet.UDPConn, host net.Conn) {
	defer n.flows.remove(fl)
	stop := func() {
		guest.Close()
		host.Close()
	}
	if !fl.onAbort(stop) {
		stop()
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.relayDatagrams(fl, host, guest)
		fl.abort()
	}()
	n.relayReplies(fl, guest, host)
	fl.abort()
	<-done
}

// relayDatagrams sends on what the guest sends. What the host refuses is lost,
// as datagrams may be.
func (n *Network) relayDatagrams(fl *flow, host net.Conn, guest *gonet.UDPConn) {
	buf := make([]byte, maxDatagram)
	for {
		got, err := guest.Read(buf)
		if err != nil {
			return
		}
		fl.lastUsed.Store(time.Now().UnixNano())
		n.meter.add(got)
		fl.usage.fromGuest(buf[:got])
		if _, err := host.Write(buf[:got]); errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// relayReplies hands the peer's datagrams to the guest until the flow was idle
// for udpIdle.
func (n *Network) relayReplies(fl *flow, guest *gonet.UDPConn, host net.Conn) {
	buf := make([]byte, maxDatagram)
	for {
		idleAt := time.Unix(0, fl.lastUsed.Load()).Add(n.udpIdle)
		if !time.Now().Before(idleAt) {
			return
		}
		_ = host.SetReadDeadline(idleAt)
		got, err := host.Read(buf)
		switch {
		case err == nil:
			fl.lastUsed.Store(time.Now().UnixNano())
			n.meter.add(got)
			fl.usage.fromPeer(got)
			if _, err := guest.Write(buf[:got]); err != nil {
				return
			}
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ECONNREFUSED):
			// Idle, perhaps; or a peer that may come up yet.
		default:
			return
		}
	}
}
