package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// netlinkSocket speaks one netlink protocol with the kernel, one request at a time.
type netlinkSocket struct {
	fd  int
	seq uint32
	buf []byte // for answers
}

func openNetlink(protocol int) (*netlinkSocket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	// The kernel answers at once; a limit keeps a lost answer from hanging the agent.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2}); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &netlinkSocket{fd: fd, buf: make([]byte, 32<<10)}, nil
}

func (s *netlinkSocket) close() { _ = unix.Close(s.fd) }

// do makes a request that the kernel acknowledges.
func (s *netlinkSocket) do(kind uint16, flags uint16, payload []byte) error {
	if err := s.send(kind, flags|unix.NLM_F_ACK, payload); err != nil {
		return err
	}
	return s.receive(func(syscall.NetlinkMessage) error { return nil })
}

// dump makes a request that is answered with a list.
func (s *netlinkSocket) dump(kind uint16, payload []byte, each func(data []byte) error) error {
	if err := s.send(kind, unix.NLM_F_DUMP, payload); err != nil {
		return err
	}
	return s.receive(func(m syscall.NetlinkMessage) error { return each(m.Data) })
}

func (s *netlinkSocket) send(kind, flags uint16, payload []byte) error {
	s.seq++
	msg := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(payload))
	binary.NativeEndian.PutUint32(msg[0:], uint32(unix.NLMSG_HDRLEN+len(payload)))
	binary.NativeEndian.PutUint16(msg[4:], kind)
	binary.NativeEndian.PutUint16(msg[6:], flags|unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(msg[8:], s.seq)
	return unix.Sendto(s.fd, append(msg, payload...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// receive passes the messages that answer the last request on, to its end.
func (s *netlinkSocket) receive(each func(syscall.NetlinkMessage) error) error {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("netlink answer: %w", err)
		}
		messages, err := syscall.ParseNetlinkMessage(s.buf[:n])
		if err != nil {
			return fmt.Errorf("netlink answer: %w", err)
		}
		for _, m := range messages {
			if m.Header.Seq != s.seq {
				continue
			}
			switch m.Header.Type {
			case unix.NLMSG_DONE:
				return nil
			case unix.NLMSG_ERROR:
				if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 {
					return syscall.Errno(-code)
				}
				return nil
			}
			if err := each(m); err != nil {
				return err
			}
		}
	}
}

// attribute encodes a netlink attribute with its padding.
func attribute(kind uint16, value []byte) []byte {
	size := unix.SizeofRtAttr + len(value)
	a := make([]byte, (size+3)&^3)
	binary.NativeEndian.PutUint16(a[0:], uint16(size))
	binary.NativeEndian.PutUint16(a[2:], kind)
	copy(a[unix.SizeofRtAttr:], value)
	return a
}

// wire returns the bytes of a kernel structure.
func wire[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

// bringUp takes an interface up, with mtu if it is not 0.
func bringUp(s *netlinkSocket, index int, mtu uint32) error {
	payload := wire(&unix.IfInfomsg{Index: int32(index), Flags: unix.IFF_UP, Change: unix.IFF_UP})
	if mtu != 0 {
		payload = append(payload[:len(payload):len(payload)], attribute(unix.IFLA_MTU, binary.NativeEndian.AppendUint32(nil, mtu))...)
	}
	return s.do(unix.RTM_NEWLINK, 0, payload)
}

// addAddress gives an interface an IPv4 address.
func addAddress(s *netlinkSocket, index int, prefix netip.Prefix) error {
	ip := prefix.Addr().AsSlice()
	payload := append([]byte(nil), wire(&unix.IfAddrmsg{Family: unix.AF_INET, Prefixlen: uint8(prefix.Bits()), Index: uint32(index)})...)
	payload = append(payload, attribute(unix.IFA_LOCAL, ip)...)
	payload = append(payload, attribute(unix.IFA_ADDRESS, ip)...)
	return ignoreExists(s.do(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, payload))
}

// addDefaultRoute sends all that is not local to a gateway, unless there is such
// a route already.
func addDefaultRoute(s *netlinkSocket, gateway netip.Addr) error {
	payload := append([]byte(nil), wire(&unix.RtMsg{
		Family: unix.AF_INET, Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_BOOT,
		Scope: unix.RT_SCOPE_UNIVERSE, Type: unix.RTN_UNICAST,
	})...)
	payload = append(payload, attribute(unix.RTA_GATEWAY, gateway.AsSlice())...)
	return ignoreExists(s.do(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, payload))
}

func ignoreExists(err error) error {
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}
