// Package vnettest plays a guest for tests of internal/vnet and of what is built
// on it: a TCP/IP stack behind a card that speaks the VMM's stream framing,
// without a VM. It shares no code with the network that it is joined to.
package vnettest

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/hibernacle/hibernacle/internal/vnet"
)

const nicID = 1

// Guest is a guest's end of a network: card and stack.
type Guest struct {
	stack *stack.Stack
	card  *channel.Endpoint

	mu     sync.Mutex
	conn   net.Conn
	closed bool
	wg     sync.WaitGroup
	stop   context.CancelFunc
	watch  func(frame []byte)
}

// NewGuest returns a guest whose card is not joined to a network. Its addresses
// are those that vnet gives to guests.
func NewGuest() (*Guest, error) {
	mac, err := net.ParseMAC(vnet.GuestMAC)
	if err != nil {
		return nil, err
	}
	g := &Guest{
		stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
		}),
		card: channel.New(4096, vnet.MTU+header.EthernetMinimumSize, tcpip.LinkAddress(mac)),
	}
	if err := g.stack.CreateNIC(nicID, ethernet.New(g.card)); err != nil {
		return nil, errors.New(err.String())
	}
	address := tcpip.ProtocolAddress{
		Protocol:          ipv4.ProtocolNumber,
		AddressWithPrefix: tcpip.AddressWithPrefix{Address: parse(vnet.GuestIP), PrefixLen: vnet.Prefix},
	}
	if err := g.stack.AddProtocolAddress(nicID, address, stack.AddressProperties{}); err != nil {
		return nil, errors.New(err.String())
	}
	g.stack.SetRouteTable([]tcpip.Route{
		{Destination: address.AddressWithPrefix.Subnet(), NIC: nicID},
		{Destination: header.IPv4EmptySubnet, Gateway: parse(vnet.GatewayIP), NIC: nicID},
	})
	ctx, stop := context.WithCancel(context.Background())
	g.stop = stop
	g.wg.Add(1)
	go g.send(ctx)
	return g, nil
}

// Join makes a guest and joins its card to the network at a Unix socket.
func Join(socket string) (*Guest, error) {
	g, err := NewGuest()
	if err != nil {
		return nil, err
	}
	if err := g.Connect(socket); err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// Connect joins the card to the network at a Unix socket, in place of the stream
// that it had.
func (g *Guest) Connect(socket string) error {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	g.Disconnect()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.conn = conn
	g.wg.Add(1)
	go g.receive(conn)
	return nil
}

// Disconnect takes the card off the network.
func (g *Guest) Disconnect() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conn != nil {
		g.conn.Close()
		g.conn = nil
	}
}

// Close ends the guest without a word to its peers.
func (g *Guest) Close() {
	g.mu.Lock()
	again := g.closed
	g.closed = true
	g.mu.Unlock()
	if again {
		return
	}
	g.Disconnect()
	g.stop()
	g.wg.Wait()
	g.stack.Destroy()
	g.card.Close()
}

// Watch has f called with every frame that the card gets, before the stack gets
// it. Call it before Connect.
func (g *Guest) Watch(f func(frame []byte)) { g.watch = f }

// receive reads the frames of a stream into the stack.
func (g *Guest) receive(conn net.Conn) {
	defer g.wg.Done()
	r := bufio.NewReaderSize(conn, 128<<10)
	for {
		var size [4]byte
		if _, err := io.ReadFull(r, size[:]); err != nil {
			return
		}
		frame := make([]byte, binary.BigEndian.Uint32(size[:]))
		if _, err := io.ReadFull(r, frame); err != nil {
			return
		}
		if g.watch != nil {
			g.watch(frame)
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
		g.card.InjectInbound(0, pkt) // the Ethernet header says the protocol
		pkt.DecRef()
	}
}

// send writes the stack's packets to the stream of the moment.
func (g *Guest) send(ctx context.Context) {
	defer g.wg.Done()
	for {
		pkt := g.card.ReadContext(ctx)
		if pkt == nil {
			return
		}
		view := pkt.ToView()
		_ = g.SendFrame(view.AsSlice()) // lost without a stream
		view.Release()
		pkt.DecRef()
	}
}

// SendFrame sends a frame behind its length.
func (g *Guest) SendFrame(frame []byte) error {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(frame)), uint32(len(frame)))
	return g.SendBytes(append(b, frame...))
}

// SendBytes writes bytes to the stream as they are.
func (g *Guest) SendBytes(b []byte) error {
	g.mu.Lock()
	conn := g.conn
	g.mu.Unlock()
	if conn == nil {
		return net.ErrClosed
	}
	_, err := conn.Write(b)
	return err
}

// Listen listens at a TCP port of the guest.
func (g *Guest) Listen(port uint16) (net.Listener, error) {
	ln, err := gonet.ListenTCP(g.stack, tcpip.FullAddress{NIC: nicID, Addr: parse(vnet.GuestIP), Port: port}, ipv4.ProtocolNumber)
	if err != nil {
		return nil, err
	}
	return listener{ln}, nil
}

// listener wakes its Accept when it is closed.
type listener struct{ *gonet.TCPListener }

func (l listener) Close() error {
	l.Shutdown()
	return l.TCPListener.Close()
}

// Dial opens a TCP connection ("tcp") or a UDP socket ("udp") to "address:port".
func (g *Guest) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	remote := tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(to.Addr().As4()), Port: to.Port()}
	switch network {
	case "tcp":
		return gonet.DialContextTCP(ctx, g.stack, remote, ipv4.ProtocolNumber)
	case "udp":
		return gonet.DialUDP(g.stack, nil, &remote, ipv4.ProtocolNumber)
	default:
		return nil, fmt.Errorf("dial %s: unknown network", network)
	}
}

func parse(s string) tcpip.Address { return tcpip.AddrFrom4(netip.MustParseAddr(s).As4()) }
