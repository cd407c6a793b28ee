package vnet_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/hibernacle/hibernacle/internal/vnet"
	"github.com/hibernacle/hibernacle/internal/vnet/vnettest"
)

const otherMAC = "02:68:69:62:00:99"

func mac(s string) tcpip.LinkAddress {
	m, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return tcpip.LinkAddress(m)
}

func ip(s string) tcpip.Address { return tcpip.AddrFrom4(netip.MustParseAddr(s).As4()) }

func frame(src, dst string, protocol tcpip.NetworkProtocolNumber, payload []byte) []byte {
	b := make([]byte, header.EthernetMinimumSize+len(payload))
	header.Ethernet(b).Encode(&header.EthernetFields{SrcAddr: mac(src), DstAddr: mac(dst), Type: protocol})
	copy(b[header.EthernetMinimumSize:], payload)
	return b
}

func arpRequest(op header.ARPOp, senderMAC, sender, target string) []byte {
	a := header.ARP(make([]byte, header.ARPSize))
	a.SetIPv4OverEthernet()
	a.SetOp(op)
	copy(a.HardwareAddressSender(), mac(senderMAC))
	s, tgt := ip(sender), ip(target)
	copy(a.ProtocolAddressSender(), s.AsSlice())
	copy(a.ProtocolAddressTarget(), tgt.AsSlice())
	return a
}

func packet(protocol tcpip.TransportProtocolNumber, src, dst string, payload []byte) []byte {
	b := make([]byte, header.IPv4MinimumSize+len(payload))
	h := header.IPv4(b)
	h.Encode(&header.IPv4Fields{TotalLength: uint16(len(b)), TTL: 64, Protocol: uint8(protocol), SrcAddr: ip(src), DstAddr: ip(dst)})
	h.SetChecksum(^h.CalculateChecksum())
	copy(b[header.IPv4MinimumSize:], payload)
	return b
}

func ping(src, dst string) []byte {
	b := header.ICMPv4(make([]byte, header.ICMPv4MinimumSize+8))
	b.SetType(header.ICMPv4Echo)
	b.SetChecksum(^checksum.Checksum(b, 0))
	return packet(header.ICMPv4ProtocolNumber, src, dst, b)
}

func TestCheckFrame(t *testing.T) {
	const arp, ip4, ip6 = header.ARPProtocolNumber, header.IPv4ProtocolNumber, header.IPv6ProtocolNumber
	const broadcast = "ff:ff:ff:ff:ff:ff"
	tcp, udp := header.TCPProtocolNumber, header.UDPProtocolNumber
	tests := []struct {
		name  string
		frame []byte
		want  bool
	}{
		{"TCP to the world", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, packet(tcp, vnet.GuestIP, public, nil)), true},
		{"UDP to the gateway", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, packet(udp, vnet.GuestIP, vnet.GatewayIP, nil)), true},
		{"TCP to the host alias", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, packet(tcp, vnet.GuestIP, vnet.HostIP, nil)), true},
		{"ARP for the gateway", frame(vnet.GuestMAC, broadcast, arp, arpRequest(header.ARPRequest, vnet.GuestMAC, vnet.GuestIP, vnet.GatewayIP)), true},
		{"ARP for the host alias", frame(vnet.GuestMAC, broadcast, arp, arpRequest(header.ARPRequest, vnet.GuestMAC, vnet.GuestIP, vnet.HostIP)), true},
		{"ping of the gateway", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, ping(vnet.GuestIP, vnet.GatewayIP)), true},

		{"other source card", frame(otherMAC, vnet.GatewayMAC, ip4, packet(tcp, vnet.GuestIP, public, nil)), false},
		{"the gateway's card as source", frame(vnet.GatewayMAC, vnet.GatewayMAC, ip4, packet(tcp, vnet.GuestIP, public, nil)), false},
		{"other source address", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, packet(tcp, "192.168.127.3", public, nil)), false},
		{"the gateway's address as source", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, packet(tcp, vnet.GatewayIP, vnet.GatewayIP, nil)), false},
		{"other destination card", frame(vnet.GuestMAC, otherMAC, ip4, packet(tcp, vnet.GuestIP, public, nil)), false},
		{"to itself", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, packet(tcp, vnet.GuestIP, vnet.GuestIP, nil)), false},
		{"broadcast", frame(vnet.GuestMAC, broadcast, ip4, packet(udp, vnet.GuestIP, "255.255.255.255", nil)), false},
		{"subnet broadcast", frame(vnet.GuestMAC, broadcast, ip4, packet(udp, vnet.GuestIP, "192.168.127.255", nil)), false},
		{"multicast", frame(vnet.GuestMAC, broadcast, ip4, packet(udp, vnet.GuestIP, "224.0.0.251", nil)), false},
		{"ping of the world", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, ping(vnet.GuestIP, public)), false},
		{"another transport", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, packet(132, vnet.GuestIP, public, nil)), false},
		{"IPv6", frame(vnet.GuestMAC, vnet.GatewayMAC, ip6, make([]byte, 40)), false},
		{"VLAN", frame(vnet.GuestMAC, vnet.GatewayMAC, 0x8100, make([]byte, 40)), false},
		{"ARP for itself", frame(vnet.GuestMAC, broadcast, arp, arpRequest(header.ARPRequest, vnet.GuestMAC, vnet.GuestIP, vnet.GuestIP)), false},
		{"ARP in another's name", frame(vnet.GuestMAC, broadcast, arp, arpRequest(header.ARPRequest, vnet.GuestMAC, vnet.GatewayIP, vnet.GatewayIP)), false},
		{"ARP of another card", frame(vnet.GuestMAC, broadcast, arp, arpRequest(header.ARPRequest, otherMAC, vnet.GuestIP, vnet.GatewayIP)), false},
		{"ARP reply", frame(vnet.GuestMAC, vnet.GatewayMAC, arp, arpRequest(header.ARPReply, vnet.GuestMAC, vnet.GuestIP, vnet.GatewayIP)), false},
		{"short ARP", frame(vnet.GuestMAC, broadcast, arp, make([]byte, 27)), false},
		{"short IPv4", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, make([]byte, 19)), false},
		{"IPv4 of another version", frame(vnet.GuestMAC, vnet.GatewayMAC, ip4, make([]byte, 20)), false},
		{"no frame", make([]byte, 13), false},
	}
	for _, tt := range tests {
		if got := vnet.CheckFrame(tt.frame); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}

// The gateway answers ARP and ping for itself, and for nobody else.
func TestGatewayAnswers(t *testing.T) {
	n, socket := newNetwork(t, vnet.Config{})
	_ = n
	frames := make(chan []byte, 100)
	g, err := vnettest.NewGuest()
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	g.Watch(func(f []byte) { frames <- bytes.Clone(f) })
	if err := g.Connect(socket); err != nil {
		t.Fatal(err)
	}
	next := func() header.Ethernet {
		select {
		case f := <-frames:
			return f
		case <-testContext(t).Done():
			t.Fatal("no answer")
			return nil
		}
	}
	const broadcast = "ff:ff:ff:ff:ff:ff"
	arp := func(target string) []byte {
		return frame(vnet.GuestMAC, broadcast, header.ARPProtocolNumber, arpRequest(header.ARPRequest, vnet.GuestMAC, vnet.GuestIP, target))
	}
	for _, ignored := range []string{vnet.GuestIP, "192.168.127.77", public} {
		g.SendFrame(arp(ignored))
		g.SendFrame(frame(vnet.GuestMAC, vnet.GatewayMAC, header.IPv4ProtocolNumber, ping(vnet.GuestIP, ignored)))
	}
	for _, mine := range []string{vnet.GatewayIP, vnet.HostIP} {
		g.SendFrame(arp(mine))
		f := next()
		reply := header.ARP(f[header.EthernetMinimumSize:])
		if f.Type() != header.ARPProtocolNumber || reply.Op() != header.ARPReply ||
			tcpip.LinkAddress(reply.HardwareAddressSender()) != mac(vnet.GatewayMAC) ||
			tcpip.AddrFrom4Slice(reply.ProtocolAddressSender()) != ip(mine) {
			t.Errorf("ARP for %s: %x", mine, f)
		}
		g.SendFrame(frame(vnet.GuestMAC, vnet.GatewayMAC, header.IPv4ProtocolNumber, ping(vnet.GuestIP, mine)))
		f = next()
		echo := header.IPv4(f[header.EthernetMinimumSize:])
		if f.Type() != header.IPv4ProtocolNumber || echo.SourceAddress() != ip(mine) ||
			header.ICMPv4(echo.Payload()).Type() != header.ICMPv4EchoReply {
			t.Errorf("ping of %s: %x", mine, f)
		}
	}
}

func TestBrokenStreams(t *testing.T) {
	size := func(n uint32, rest ...byte) []byte { return append(binary.BigEndian.AppendUint32(nil, n), rest...) }
	tests := []struct {
		name  string
		bytes []byte
		cut   bool // the link ends
	}{
		{"no frame", size(0), false},
		{"one byte", size(1, 0), false},
		{"header alone", size(14, make([]byte, 14)...), false},
		{"beyond the MTU", size(vnet.MTU+15, make([]byte, vnet.MTU+15)...), false},
		{"longest of QEMU", size(69632, make([]byte, 69632)...), false},
		{"beyond QEMU", size(69633), true},
		{"4 GiB", size(1<<32 - 1), true},
		{"text", []byte("GET / HTTP/1.1\r\n\r\n"), true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := newTestNet(t, vnet.Config{})
			guestListener(t, n.guest, 8080, echo)
			if err := n.guest.SendBytes(tt.bytes); err != nil {
				t.Fatal(err)
			}
			if tt.cut {
				waitFor(t, "link ends", func() bool { return n.guest.SendBytes([]byte{0, 0, 0, 0}) != nil })
				if err := n.guest.Connect(n.socket); err != nil {
					t.Fatal(err)
				}
			}
			c, err := n.Dial(testContext(t), 8080)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			exchange(t, c, "hello")
		})
	}
}

// A new VMM takes the place of the old one, whether that is gone or not.
func TestReconnect(t *testing.T) {
	n := newTestNet(t, vnet.Config{})
	guestListener(t, n.guest, 8080, echo)
	c, err := n.Dial(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	exchange(t, c, "before")
	for range 3 {
		if err := n.guest.Connect(n.socket); err != nil {
			t.Fatal(err)
		}
		exchange(t, c, "the stack lives on, and so do its connections")
	}
	n.Reset()
	c.Close()

	second, err := vnettest.Join(n.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	guestListener(t, second, 8080, echo)
	waitFor(t, "the second card answers", func() bool {
		c, err := n.Dial(testContext(t), 8080)
		if err != nil {
			return false
		}
		defer c.Close()
		exchange(t, c, "after")
		return true
	})
	waitFor(t, "the first card is cut off", func() bool { return n.guest.SendBytes([]byte{0, 0, 0, 0}) != nil })
}

// A guest that stops reading (its vCPUs are paused) stops nobody else.
func TestGuestThatDoesNotRead(t *testing.T) {
	n, socket := newNetwork(t, vnet.Config{})
	card, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer card.Close()
	arp := frame(vnet.GuestMAC, "ff:ff:ff:ff:ff:ff", header.ARPProtocolNumber, arpRequest(header.ARPRequest, vnet.GuestMAC, vnet.GuestIP, vnet.GatewayIP))
	arp = append(binary.BigEndian.AppendUint32(nil, uint32(len(arp))), arp...)
	for range 20000 { // far more answers than socket and queue hold
		if _, err := card.Write(arp); err != nil {
			t.Fatal(err)
		}
	}
	n.Reset()
	n.Close()
}

func FuzzStream(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1"))
	f.Add(frame(vnet.GuestMAC, vnet.GatewayMAC, header.IPv4ProtocolNumber, packet(header.TCPProtocolNumber, vnet.GuestIP, public, make([]byte, 20))))
	f.Add(frame(vnet.GuestMAC, vnet.GatewayMAC, header.IPv4ProtocolNumber, packet(header.UDPProtocolNumber, vnet.GuestIP, vnet.GatewayIP, make([]byte, 20))))
	f.Add(frame(vnet.GuestMAC, vnet.GatewayMAC, header.IPv4ProtocolNumber, ping(vnet.GuestIP, vnet.GatewayIP)))
	f.Add(frame(vnet.GuestMAC, vnet.GatewayMAC, header.ARPProtocolNumber, arpRequest(header.ARPRequest, vnet.GuestMAC, vnet.GuestIP, vnet.GatewayIP)))
	n := newTestNet(f, vnet.Config{Policy: mustPolicy(f, nil, []string{"0.0.0.0/0"})})
	guestListener(f, n.guest, 8080, echo)
	f.Fuzz(func(t *testing.T, b []byte) {
		if n.guest.SendFrame(b) != nil || n.guest.SendBytes(b) != nil || n.guest.SendBytes([]byte{0xff, 0xff, 0xff, 0xff}) != nil {
			// The link ended already.
		}
		if err := n.guest.Connect(n.socket); err != nil {
			t.Fatal(err)
		}
		c, err := n.Dial(testContext(t), 8080)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		exchange(t, c, "alive")
	})
}

// A guest that boots while Dial waits is met soon after it is up: the question
// is repeated at a steady pace, not ever more rarely.
func TestDialRepeatsItsQuestion(t *testing.T) {
	n, socket := newNetwork(t, vnet.Config{})
	card, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer card.Close()
	ctx, cancel := context.WithCancel(testContext(t))
	failed := make(chan error, 1)
	go func() {
		_, err := n.Dial(ctx, 8080)
		failed <- err
	}()
	card.SetReadDeadline(time.Now().Add(patience))
	ports := make(map[uint16]int) // SYNs by source port: each try has one of its own
	for len(ports) < 2 {
		var size [4]byte
		if _, err := io.ReadFull(card, size[:]); err != nil {
			t.Fatal(err)
		}
		f := make([]byte, binary.BigEndian.Uint32(size[:]))
		if _, err := io.ReadFull(card, f); err != nil {
			t.Fatal(err)
		}
		syn := header.TCP(header.IPv4(f[header.EthernetMinimumSize:]).Payload())
		if syn.Flags() != header.TCPFlagSyn || syn.DestinationPort() != 8080 {
			t.Fatalf("got %x", f)
		}
		ports[syn.SourcePort()]++
	}
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want the context's end", err)
	}
}
