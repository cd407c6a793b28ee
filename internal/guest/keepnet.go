package guest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// repairDelay is how long the agent waits after a change of its network before
// it repairs it: a tool that takes things down to put them up otherwise has done
// so by then. It also bounds how often a guest can make it work.
const repairDelay = 200 * time.Millisecond

// reportPause is how often the console tells of it at most.
const reportPause = 10 * time.Second

// Groups of the kernel's routing messages (include/uapi/linux/rtnetlink.h).
const routeGroups = unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV4_ROUTE

// keep brings the card, its address and its routes back whenever a program
// in the guest takes them away, until ctx ends: over them the host reaches the
// agent, to hibernate the sandbox and to bring it back. A wait for the kernel's
// messages costs nothing while there are none.
func (n network) keep(ctx context.Context, log *slog.Logger) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: routeGroups}); err != nil {
		return err
	}
	card, err := findCard()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = unix.Shutdown(fd, unix.SHUT_RDWR) })
	defer stop()
	buf := make([]byte, 16<<10)
	var told time.Time
	for ctx.Err() == nil {
		lost, err := readLoss(fd, card.Index, buf, 0)
		if err != nil {
			return err
		}
		if !lost {
			continue
		}
		time.Sleep(repairDelay)
		for err == nil { // what happened meanwhile is repaired with it
			_, err = readLoss(fd, card.Index, buf, unix.MSG_DONTWAIT)
		}
		err = n.repair()
		if time.Since(told) > reportPause {
			told = time.Now()
			log.Warn("a program took the network down, or a part of it: it is set up again", "err", err)
		}
	}
	return ctx.Err()
}

// readLoss reads messages and says whether one tells of a loss.
func readLoss(fd, card int, buf []byte, flags int) (bool, error) {
	size, _, err := unix.Recvfrom(fd, buf, flags)
	switch {
	case errors.Is(err, unix.EINTR):
		return false, nil
	case errors.Is(err, unix.ENOBUFS): // there were more messages than the kernel keeps
		return true, nil
	case err != nil:
		return false, fmt.Errorf("hear of changes of the network: %w", err)
	}
	messages, err := syscall.ParseNetlinkMessage(buf[:size])
	if err != nil {
		return true, nil // one that was cut: look
	}
	for _, m := range messages {
		if isLoss(m, card) {
			return true, nil
		}
	}
	return false, nil
}

// isLoss says whether a message tells that something went away: a route, the
// card's address, or that the card or loopback is down. What a repair does makes
// none of these.
func isLoss(m syscall.NetlinkMessage, card int) bool {
	// struct ifinfomsg and ifaddrmsg have the interface's index at offset 4.
	index := -1
	if len(m.Data) >= 8 {
		index = int(int32(binary.NativeEndian.Uint32(m.Data[4:])))
	}
	switch m.Header.Type {
	case unix.RTM_DELROUTE:
		return true
	case unix.RTM_DELADDR:
		return index == card
	case unix.RTM_NEWLINK: // ifi_flags at offset 8
		return (index == card || index == loopbackIndex) && len(m.Data) >= unix.SizeofIfInfomsg && binary.NativeEndian.Uint32(m.Data[8:])&unix.IFF_UP == 0
	}
	return false
}

const loopbackIndex = 1 // its index, in every network namespace

// repair sets up the card and loopback again. What is as it should be stays, and
// a default route that somebody put in the place of the agent's does, too.
func (n network) repair() error {
	s, err := openNetlink(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer s.close()
	return errors.Join(bringLoopbackUp(s), n.configureCard(s))
}

// addRoute adds a route of a card's that the kernel makes with an address, and
// may have lost since.
func addRoute(s *netlinkSocket, index int, table, scope, kind uint8, dst netip.Prefix, source netip.Addr) error {
	payload := append([]byte(nil), wire(&unix.RtMsg{
		Family: unix.AF_INET, Dst_len: uint8(dst.Bits()), Table: table, Protocol: unix.RTPROT_KERNEL, Scope: scope, Type: kind,
	})...)
	payload = append(payload, attribute(unix.RTA_DST, dst.Masked().Addr().AsSlice())...)
	payload = append(payload, attribute(unix.RTA_PREFSRC, source.AsSlice())...)
	payload = append(payload, attribute(unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(index)))...)
	return ignoreExists(s.do(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, payload))
}
