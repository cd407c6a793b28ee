package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// callStall is how long a caller may leave the agent waiting for the rest of
// its frame.
const callStall = 5 * time.Second

// calls serves control calls as frames (see guestapi.CallPort) with blocking
// system calls: no poller, no other goroutine and no HTTP run between the packet
// that comes in and the answer. Under emulation each line of code that runs for
// the first time after a resume costs.
type calls struct {
	control *controller
	socket  int            // listens
	local   netip.AddrPort // that it is bound to
	peer    netip.Addr     // whom it serves: nobody in the guest can keep it waiting
}

// listenForCalls opens the port at address for peer alone.
func listenForCalls(control *controller, address netip.AddrPort, peer netip.Addr) (*calls, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("listen at %v: %w", address, err)
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.Bind(fd, &unix.SockaddrInet4{Port: int(address.Port()), Addr: address.Addr().As4()}),
		unix.Listen(fd, 16),
	)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen at %v: %w", address, err)
	}
	return &calls{control: control, socket: fd, local: address, peer: peer}, nil
}

// serve answers one call after the other until ctx ends.
func (c *calls) serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = unix.Shutdown(c.socket, unix.SHUT_RDWR) })
	defer unix.Close(c.socket)
	defer stop()
	for {
		fd, from, err := unix.Accept4(c.socket, unix.SOCK_CLOEXEC)
		switch {
		case ctx.Err() != nil:
			if err == nil {
				unix.Close(fd)
			}
			return ctx.Err()
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
		case err != nil:
			return fmt.Errorf("accept calls: %w", err)
		default:
			c.answer(fd, from)
		}
	}
}

// answer serves one connection and closes it.
func (c *calls) answer(fd int, from unix.Sockaddr) {
	defer unix.Close(fd)
	in, ok := from.(*unix.SockaddrInet4)
	if !ok || netip.AddrFrom4(in.Addr) != c.peer {
		return
	}
	limit := unix.NsecToTimeval(callStall.Nanoseconds())
	if unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit) != nil {
		return
	}
	b, err := guestapi.ReadFrame(descriptor(fd), guestapi.MaxCall)
	if err != nil {
		return // nobody there who could be told
	}
	received := time.Now()
	answer := c.call(b, call{received: received, flow: Flow{Local: c.local, Remote: netip.AddrPortFrom(c.peer, uint16(in.Port))}})
	for len(answer) > 0 {
		n, err := unix.Write(fd, answer)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		answer = answer[max(n, 0):]
	}
}

// call decodes a call, makes it and encodes the answer.
func (c *calls) call(frame []byte, in call) []byte {
	req, err := guestapi.DecodeCall(frame)
	if err != nil {
		return guestapi.EncodeError(guestapi.StatusInvalid, err.Error())
	}
	in.token = req.Token
	var answer []byte
	switch req.Operation {
	case guestapi.OpInit, guestapi.OpInitHooks:
		var resp guestapi.InitResponse
		resp, err = c.control.init(in, req.Init)
		answer = guestapi.EncodeInitAnswer(req.Operation, resp)
	case guestapi.OpFreeze, guestapi.OpFreezeHooks:
		var resp guestapi.FreezeResponse
		resp, err = c.control.freeze(in, req.Freeze)
		answer = guestapi.EncodeFreezeAnswer(req.Operation, resp)
	}
	switch {
	case err == nil:
		return answer
	case errors.Is(err, errWrongToken):
		return guestapi.EncodeError(guestapi.StatusUnauthorized, err.Error())
	case errors.Is(err, errThawed):
		return guestapi.EncodeError(guestapi.StatusRefused, err.Error())
	case errors.Is(err, errBadRequest):
		return guestapi.EncodeError(guestapi.StatusInvalid, err.Error())
	}
	return guestapi.EncodeError(guestapi.StatusFailed, err.Error())
}

// descriptor reads from a blocking file descriptor.
type descriptor int

func (d descriptor) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(d), p)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}
