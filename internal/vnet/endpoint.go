package vnet

import (
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// The methods by which link is the stack's link endpoint. The card is the only
// neighbour, so packets carry no link header through the stack and no address
// is ever resolved: frameWriter addresses every frame to the guest.
var _ stack.LinkEndpoint = (*link)(nil)

// WritePackets queues packets for the card and drops what finds no room or no
// card. It never blocks: the stack calls it with locks held.
func (l *link) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	l.mu.Lock()
	up := l.conn != nil
	l.mu.Unlock()
	slice := pkts.AsSlice()
	if !up || l.muted.Load() {
		return len(slice), nil
	}
	for _, pkt := range slice {
		select {
		case l.out <- pkt.IncRef():
		default:
			pkt.DecRef()
		}
	}
	return len(slice), nil
}

// Attach takes the stack's side.
func (l *link) Attach(d stack.NetworkDispatcher) { l.dispatcher = d }

// IsAttached says whether the stack's side is known.
func (l *link) IsAttached() bool { return l.dispatcher != nil }

// MTU is the length of the longest IP packet.
func (l *link) MTU() uint32 { return MTU }

// SetMTU is not supported.
func (l *link) SetMTU(uint32) {}

// MaxHeaderLength is 0: frameWriter makes the headers.
func (l *link) MaxHeaderLength() uint16 { return 0 }

// LinkAddress is the gateway's.
func (l *link) LinkAddress() tcpip.LinkAddress { return gatewayLinkAddress }

// SetLinkAddress is not supported.
func (l *link) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities says that checksums of received packets need no check: they came
// through memory.
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// ARPHardwareType is Ethernet.
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }

// AddHeader does nothing, see MaxHeaderLength.
func (l *link) AddHeader(*stack.PacketBuffer) {}

// ParseHeader does nothing, see MaxHeaderLength.
func (l *link) ParseHeader(*stack.PacketBuffer) bool { return true }

// Wait does nothing: close waits.
func (l *link) Wait() {}

// Close does nothing: the network closes its link by close.
func (l *link) Close() {}

// SetOnCloseAction is not needed.
func (l *link) SetOnCloseAction(func()) {}
