package vnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// The stack repeats an unanswered question after 1, 3, 7, 15… seconds: too late
// for a guest that boots meanwhile. So the first tries are short; a guest that
// needs longer than that to answer is met by the last one.
const (
	shortTry   = 2 * time.Second
	shortTries = 8
)

// Reasons to try again.
var (
	errLinkEnded  = errors.New("the guest's card is gone")
	errUnanswered = errors.New("the guest did not answer")
)

// Dial opens a TCP connection from the gateway to a port of the guest. It waits
// for the guest's card to be joined and for the guest to answer as long as ctx
// lets it, and fails at once with ErrRefused where nobody listens. The
// connection counts as activity until it is closed or was silent for too long
// (see Activity); it has CloseWrite, and Reset breaks it.
func (n *Network) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	return n.dialGuest(ctx, port, flowInbound)
}

// DialControl is Dial for calls of the host's own, to the agent: they do not
// count as activity.
func (n *Network) DialControl(ctx context.Context, port uint16) (net.Conn, error) {
	return n.dialGuest(ctx, port, flowControl)
}

func (n *Network) dialGuest(ctx context.Context, port uint16, kind flowKind) (net.Conn, error) {
	if !n.track() {
		return nil, ErrClosed
	}
	defer n.wg.Done()
	fl, err := n.flows.admitInbound(kind)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	fl.onAbort(func() { cancel(ErrReset) })
	guest, err := n.connect(ctx, port)
	if err != nil {
		n.flows.drop(fl)
		return nil, fmt.Errorf("dial port %d of the guest: %w", port, err)
	}
	c := &inboundConn{guestConn: guest, flows: n.flows, flow: fl}
	if kind == flowInbound {
		c.meter = &n.meter
		c.note(0)
	}
	if !fl.onAbort(c.abort) {
		c.abort()
		c.Close()
		return nil, fmt.Errorf("dial port %d of the guest: %w", port, ErrReset)
	}
	return c, nil
}

// connect connects, and again when the card is replaced before the guest has
// answered.
func (n *Network) connect(ctx context.Context, port uint16) (*guestConn, error) {
	for try := 0; ; try++ {
		ended, err := n.link.waitUp(ctx)
		if err != nil {
			return nil, err
		}
		tryCtx, cancel := ctx, func() {}
		if try < shortTries {
			tryCtx, cancel = context.WithTimeoutCause(ctx, shortTry, errUnanswered)
		}
		c, err := n.connectOnce(tryCtx, port, ended)
		cancel()
		if !errors.Is(err, errLinkEnded) && !errors.Is(err, errUnanswered) {
			return c, err
		}
	}
}

// connectOnce does what gonet's dialler does, and keeps the endpoint.
func (n *Network) connectOnce(ctx context.Context, port uint16, ended <-chan struct{}) (*guestConn, error) {
	wq := new(waiter.Queue)
	ep, terr := n.stack.NewEndpoint(tcp.ProtocolNumber, ipv4.ProtocolNumber, wq)
	if terr != nil {
		return nil, errors.New(terr.String())
	}
	entry, connected := waiter.NewChannelEntry(waiter.WritableEvents)
	wq.EventRegister(&entry)
	defer wq.EventUnregister(&entry)

	terr = ep.Bind(tcpip.FullAddress{NIC: nicID, Addr: gatewayAddress})
	if terr == nil {
		terr = ep.Connect(tcpip.FullAddress{NIC: nicID, Addr: guestAddress, Port: port})
	}
	if _, started := terr.(*tcpip.ErrConnectStarted); started {
		select {
		case <-ctx.Done():
			ep.Abort()
			ep.Close()
			return nil, context.Cause(ctx)
		case <-ended:
			ep.Abort()
			ep.Close()
			return nil, errLinkEnded
		case <-connected:
		}
		terr = ep.LastError()
	}
	if terr != nil {
		ep.Close()
		if _, refused := terr.(*tcpip.ErrConnectionRefused); refused {
			return nil, ErrRefused
		}
		return nil, errors.New(terr.String())
	}
	return newGuestConn(wq, ep), nil
}

// inboundConn is a connection into the guest.
type inboundConn struct {
	*guestConn
	meter *meter // nil: a control connection
	flows *flows
	flow  *flow

	released sync.Once
}

// Read reads what the guest sent.
func (c *inboundConn) Read(p []byte) (int, error) {
	n, err := c.guestConn.Read(p)
	if n > 0 {
		c.note(n)
	}
	return n, err
}

// Write sends to the guest.
func (c *inboundConn) Write(p []byte) (int, error) {
	n, err := c.guestConn.Write(p)
	if n > 0 {
		c.note(n)
	}
	return n, err
}

// note counts n bytes, either way.
func (c *inboundConn) note(n int) {
	if c.meter != nil {
		c.meter.add(n)
		c.flow.usage.pass()
	}
}

// Close closes the connection; what was written is still delivered.
func (c *inboundConn) Close() error {
	c.guestConn.Close()
	c.release()
	return nil
}

// abort resets the connection. Its holder closes it, sooner or later.
func (c *inboundConn) abort() {
	c.ep.Abort()
	c.release()
}

func (c *inboundConn) release() {
	c.released.Do(func() {
		if c.meter != nil {
			c.meter.touch()
		}
		c.flows.drop(c.flow)
	})
}

// Count makes a connection to the guest that came by another way count as one
// of Dial. Reset does not break it.
func (n *Network) Count(c net.Conn) (net.Conn, error) {
	fl, err := n.flows.admitInbound(flowInbound)
	if err != nil {
		return nil, err
	}
	n.meter.touch()
	return &countedConn{Conn: c, network: n, flow: fl}, nil
}

// countedConn is a connection of Count.
type countedConn struct {
	net.Conn
	network *Network
	flow    *flow
	once    sync.Once
}

func (c *countedConn) note(n int) {
	if n > 0 {
		c.network.meter.add(n)
		c.flow.usage.pass()
	}
}

// Read reads what the guest sent.
func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.note(n)
	return n, err
}

// Write sends to the guest.
func (c *countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.note(n)
	return n, err
}

// CloseWrite ends the sending half, or all of a connection that has no halves.
func (c *countedConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

// Close closes the connection.
func (c *countedConn) Close() error {
	c.once.Do(func() {
		c.network.meter.touch()
		c.network.flows.drop(c.flow)
	})
	return c.Conn.Close()
}
