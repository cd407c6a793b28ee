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
	// tcpChunk is the buffer of one direction of an outbound TCP flow.
	tcpChunk = 64 << 10

	// Probes end flows whose other side has vanished without a word.
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

// openTCP serves one outbound connection to its end. The guest's SYN is
// answered when the peer has answered: with a reset if it cannot be reached.
func (n *Network) openTCP(r *tcp.ForwarderRequest) {
	id := r.ID()
	seen := addrPort(id.LocalAddress, id.LocalPort)
	fl, err := n.flows.admit(protoTCP, seen)
	if err != nil {
		r.Complete(true)
		if errors.Is(err, errDenied) {
			n.denials.add(protoTCP, seen)
		}
		return
	}
	defer n.flows.remove(fl)
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
	guest, err := acceptTCP(r)
	if err != nil {
		return
	}
	defer guest.Close()
	if !fl.onAbort(guest.ep.Abort) {
		guest.ep.Abort()
		return
	}
	n.splice(fl, guest, host)
}

// dialOutbound dials the host's side of a flow; aborting the flow ends it.
func (n *Network) dialOutbound(fl *flow) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	if !fl.onAbort(cancel) {
		return nil, ErrReset
	}
	return n.dialHost(ctx, fl.proto, destination(fl.seen).String())
}

// guestConn is the guest's side of a flow.
type guestConn struct {
	*gonet.TCPConn
	ep tcpip.Endpoint
}

// acceptTCP completes the handshake with the guest.
func acceptTCP(r *tcp.ForwarderRequest) (*guestConn, error) {
	wq := new(waiter.Queue)
	ep, err := r.CreateEndpoint(wq)
	r.Complete(false)
	if err != nil {
		return nil, fmt.Errorf("accept connection of the guest: %s", err)
	}
	return newGuestConn(wq, ep), nil
}

func newGuestConn(wq *waiter.Queue, ep tcpip.Endpoint) *guestConn {
	ep.SocketOptions().SetKeepAlive(true)
	idle, interval := tcpip.KeepaliveIdleOption(keepAliveIdle), tcpip.KeepaliveIntervalOption(keepAliveInterval)
	// These fail on no endpoint of TCP.
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
		if err := n.pump(host, guest); err != nil {
			fl.abort()
		}
	}()
	if err := n.pump(guest, host); err != nil {
		fl.abort()
	}
	<-done
}

// pump copies one direction to its end and passes that end on.
func (n *Network) pump(dst io.Writer, src io.Reader) error {
	buf := make([]byte, tcpChunk)
	for {
		got, err := src.Read(buf)
		if got > 0 {
			if _, err := dst.Write(buf[:got]); err != nil {
				return err
			}
			n.meter.add(got)
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
