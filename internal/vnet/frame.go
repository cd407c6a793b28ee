package vnet

import (
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

var (
	guestLinkAddress   = mustParseMAC(GuestMAC)
	gatewayLinkAddress = mustParseMAC(GatewayMAC)
	guestAddress       = mustParseAddress(GuestIP)
	gatewayAddress     = mustParseAddress(GatewayIP)
	hostAddress        = mustParseAddress(HostIP)
)

func mustParseMAC(s string) tcpip.LinkAddress {
	mac, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return tcpip.LinkAddress(mac)
}

func mustParseAddress(s string) tcpip.Address {
	return tcpip.AddrFrom4(netip.MustParseAddr(s).As4())
}

// checkEthernet says whether a frame's header, of EthernetMinimumSize bytes, is
// one that the guest's card may send to the gateway.
func checkEthernet(frame []byte) bool {
	eth := header.Ethernet(frame)
	dst := eth.DestinationAddress()
	return eth.SourceAddress() == guestLinkAddress &&
		(dst == gatewayLinkAddress || dst == header.EthernetBroadcastAddress)
}

// checkPayload says whether what a frame carries may enter the stack. The stack
// takes packets to any address (it plays every peer of the guest), so what it
// would answer in others' names has to be dropped here.
func checkPayload(protocol tcpip.NetworkProtocolNumber, payload []byte) bool {
	switch protocol {
	case header.ARPProtocolNumber:
		return checkARP(payload)
	case header.IPv4ProtocolNumber:
		return checkIPv4(payload)
	default:
		return false
	}
}

func checkARP(payload []byte) bool {
	arp := header.ARP(payload)
	if !arp.IsValid() || arp.Op() != header.ARPRequest {
		return false
	}
	target := tcpip.AddrFrom4Slice(arp.ProtocolAddressTarget())
	return tcpip.LinkAddress(arp.HardwareAddressSender()) == guestLinkAddress &&
		tcpip.AddrFrom4Slice(arp.ProtocolAddressSender()) == guestAddress &&
		(target == gatewayAddress || target == hostAddress)
}

func checkIPv4(payload []byte) bool {
	if len(payload) < header.IPv4MinimumSize {
		return false
	}
	ip := header.IPv4(payload)
	if header.IPVersion(payload) != header.IPv4Version || ip.SourceAddress() != guestAddress {
		return false
	}
	dst := ip.DestinationAddress()
	switch ip.TransportProtocol() {
	case header.TCPProtocolNumber, header.UDPProtocolNumber:
		a := netip.AddrFrom4(dst.As4())
		return dst == gatewayAddress || a == hostAlias || !containsAddr(neverRanges, a)
	case header.ICMPv4ProtocolNumber:
		return dst == gatewayAddress || dst == hostAddress
	default:
		return false
	}
}

func etherType(frame []byte) tcpip.NetworkProtocolNumber { return header.Ethernet(frame).Type() }
