package guest

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's sock_diag interface (include/uapi/linux/sock_diag.h and
// inet_diag.h), which the system package does not name.
const (
	getTCPSockets = 18 // the older request, which lists both families at once
	sockDestroy   = 21

	tcpListen = 10
	tcpClose  = 7
	tcpWait   = 6 // TIME_WAIT: nobody holds it any more
)

// sockID is struct inet_diag_sockid. Ports and addresses are in network order.
type sockID struct {
	SourcePort, DestPort [2]byte
	Source, Dest         [16]byte
	Interface            uint32
	Cookie               [2]uint32
}

// sockRequest is struct inet_diag_req_v2.
type sockRequest struct {
	Family, Protocol, Extensions, _ uint8
	States                          uint32
	ID                              sockID
}

// tcpRequest is struct inet_diag_req, of getTCPSockets.
type tcpRequest struct {
	_      [4]uint8
	ID     sockID
	States uint32
	_      uint32
}

// sockMessage is the part of struct inet_diag_msg that is looked at.
type sockMessage struct {
	Family, State, Timer, Retransmits uint8
	ID                                sockID
}

func (id *sockID) flow(family uint8) Flow {
	return Flow{
		Local:  netip.AddrPortFrom(diagAddr(family, id.Source), binary.BigEndian.Uint16(id.SourcePort[:])),
		Remote: netip.AddrPortFrom(diagAddr(family, id.Dest), binary.BigEndian.Uint16(id.DestPort[:])),
	}
}

func diagAddr(family uint8, raw [16]byte) netip.Addr {
	if family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(raw[:4]))
	}
	return netip.AddrFrom16(raw).Unmap()
}

// plain returns the flow without the IPv6 form of IPv4 addresses.
func (f Flow) plain() Flow {
	unmap := func(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
	return Flow{Local: unmap(f.Local), Remote: unmap(f.Remote)}
}

// leavesGuest says if a flow's other end is outside.
func (f Flow) leavesGuest() bool {
	return !f.Local.Addr().IsLoopback() && !f.Remote.Addr().IsLoopback() && f.Local.Addr() != f.Remote.Addr()
}

// destroySockets resets every connected TCP socket whose other end is outside
// the guest, but keep's, and returns how many.
func destroySockets(s *netlinkSocket, keep Flow) (int, error) {
	count := 0
	doomed, failed := outsideSockets(s, keep.plain())
	for i := range doomed {
		err := s.do(sockDestroy, 0, wire(&doomed[i]))
		switch {
		case err == nil:
			count++
		case !errors.Is(err, unix.ENOENT): // it went by itself
			failed = errors.Join(failed, err)
		}
	}
	return count, failed
}

// outsideSockets lists the sockets that are to be destroyed.
func outsideSockets(s *netlinkSocket, keep Flow) ([]sockRequest, error) {
	all := tcpRequest{States: 0xfff &^ (1<<tcpListen | 1<<tcpClose | 1<<tcpWait)}
	var doomed []sockRequest
	err := s.dump(getTCPSockets, wire(&all), func(data []byte) error {
		if len(data) < int(unsafe.Sizeof(sockMessage{})) {
			return errors.New("a sock_diag message is too short")
		}
		var m sockMessage
		copy(wire(&m), data)
		if f := m.ID.flow(m.Family); f.leavesGuest() && f != keep {
			doomed = append(doomed, sockRequest{Family: m.Family, Protocol: unix.IPPROTO_TCP, States: 1 << m.State, ID: m.ID})
		}
		return nil
	})
	return doomed, err
}
