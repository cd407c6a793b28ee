package vnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	// dialTimeout is how long the guest waits for the answer of a peer.
	dialTimeout = 15 * time.Second
	// finishTimeout is how long a guest may take to take the rest of a
	// connection that is closed at both ends.
	finishTimeout = 10 * time.Second
	// tcpChunk is the buffer of one direction of an outbound TCP flow.
	tcpChunk = 64 << 10

	// Probes end flows whose other side has vanished without a word. Data that
	// the guest does not acknowledge is given up after as long.
	keepAliveIdle     = 2 * time.Minute
	keepAliveInterval = 30 * time.Second
	keepAliveCount    = 8
)

// forwardTCP has every connection that the guest opens handled by openTCP, each
// in a goroutine of its own.
func (n *Network) forwardTCP() {
	f := tcp.NewForwarder(n.stack, tcpBufferDefault, 2*maxTCPFlows, n.openTCP)
	n.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, f.HandlePacket)
}

// openTCP serves one connection of the guest to its end.
func (n *Network) openTCP(r *tcp.ForwarderRequest) {
	id := r.ID()
	seen := addrPort(id.LocalAddress, id.LocalPort)
	kind := flowTCP
	if seen == dnsAddrPort {
		kind = flowDNS
	}
	fl, err := n.flows.admit(kind, seen)
	if err != nil {
		r.Complete(true)
		if errors.Is(err, errDenied) {
			n.deniedFlow(kind, seen)
		}
		return
	}
	defer n.flows.remove(fl)
	if kind == flowDNS {
		n.serveDNS(fl, r)
	} else {
		n.serveTCP(fl, r)
	}
}

// serveTCP serves an outbound connection. The guest's SYN is answered when the
// peer has answered: with a reset if it cannot be reached.
func (n *Network) serveTCP(fl *flow, r *tcp.ForwarderRequest) {
	host, err := n.dialOutbound(fl)
	if err != nil {
		r.Complete(true)
		return
	}
	defer host.Close()
	if !fl.onAbort(func() { resetHost(host) }) {
		r.Complete(true)
		return
	}
	if guest, err := acceptTCP(fl, r); err == nil {
		n.splice(fl, guest, host)
		guest.finish()
	}
}

// serveDNS serves a connection to the resolver.
func (n *Network) serveDNS(fl *flow, r *tcp.ForwarderRequest) {
	if guest, err := acceptTCP(fl, r); err == nil {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		fl.onAbort(cancel)
		n.resolver.serveConn(ctx, guest)
		guest.finish()
	}
}

// dialOutbound dials the host's side of a flow; aborting the flow ends it.
func (n *Network) dialOutbound(fl *flow) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	if !fl.onAbort(cancel) {
		return nil, ErrReset
	}
	return n.dialHost(ctx, fl.kind.network(), destination(fl.seen).String())
}

// guestConn is the guest's side of a flow.
type guestConn struct {
	*gonet.TCPConn
	ep tcpip.Endpoint
}

// acceptTCP completes the handshake with the guest.
func acceptTCP(fl *flow, r *tcp.ForwarderRequest) (*guestConn, error) {
	wq := new(waiter.Queue)
	ep, terr := r.CreateEndpoint(wq)
	r.Complete(false)
	if terr != nil {
		return nil, fmt.Errorf("accept connection of the guest: %s", terr)
	}
	guest := newGuestConn(wq, ep)
	if !fl.onAbort(ep.Abort) {
		ep.Abort()
		guest.Close()
		return nil, ErrReset
	}
	return guest, nil
}

// finish closes the connection and returns when the stack has nothing more to
// keep for it: a guest that takes its data no more could pile up what is
// forgotten here. It gives the guest finishTimeout.
func (c *guestConn) finish() {
	c.Close()
	deadline := time.Now().Add(finishTimeout)
	for wait := time.Millisecond; !c.finished(); wait = min(2*wait, 100*time.Millisecond) {
		if time.Now().After(deadline) {
			c.ep.Abort()
			return
		}
		time.Sleep(wait) // the stack does not tell of this change
	}
}

func (c *guestConn) finished() bool {
	switch tcp.EndpointState(c.ep.State()) {
	case tcp.StateClose, tcp.StateError, tcp.StateTimeWait:
		return true
	default:
		return false
	}
}

func newGuestConn(wq *waiter.Queue, ep tcpip.Endpoint) *guestConn {
	ep.SocketOptions().SetKeepAlive(true)
	idle, interval := tcpip.KeepaliveIdleOption(keepAliveIdle), tcpip.KeepaliveIntervalOption(keepAliveInterval)
	unacknowledged := tcpip.TCPUserTimeoutOption(keepAliveIdle + keepAliveCount*keepAliveInterval)
	// These fail on no endpoint of TCP.
	_ = ep.SetSockOpt(&unacknowledged)
	_ = ep.SetSockOpt(&idle)
	_ = ep.SetSockOpt(&interval)
	_ = ep.SetSockOptInt(tcpip.KeepaliveCountOption, keepAliveCount)
	return &guestConn{TCPConn: gonet.NewTCPConn(wq, ep), ep: ep}
}

// splice copies both ways until both sides have said that they are done, or one
// of them broke: then the other is reset.
func (n *Network) splice(fl *flow, guest *guestConn, host net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := n.pump(host, guest, fl.usage.fromGuest); err != nil {
			fl.abort()
		}
	}()
	if err := n.pump(guest, host, func(p []byte) { fl.usage.fromPeer(len(p)) }); err != nil {
		fl.abort()
	}
	if fl.usage.peerEnded() {
		n.meter.touch() // the guest learns of it
	}
	<-done
}

// pump copies one direction to its end and passes that end on. note is told of
// what was read.
func (n *Network) pump(dst io.Writer, src io.Reader, note func([]byte)) error {
	buf := make([]byte, tcpChunk)
	for {
		got, err := src.Read(buf)
		if got > 0 {
			n.meter.add(got)
			note(buf[:got])
			if _, err := dst.Write(buf[:got]); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return closeWrite(dst)
		case err != nil:
			return err
		}
	}
}

func closeWrite(w io.Writer) error {
	if c, ok := w.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return nil
}

// resetHost closes the host's side so that its peer sees a reset.
func resetHost(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	c.Close()
}
