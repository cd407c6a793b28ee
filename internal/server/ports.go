package server

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// connectPort switches the connection to a byte stream to a TCP port in the
// guest. Each direction is closed by itself.
func (s *Server) connectPort(w http.ResponseWriter, r *http.Request) {
	port, err := strconv.ParseUint(r.PathValue("port"), 10, 16)
	if err != nil || port == 0 {
		s.fail(w, r, requestError{fmt.Sprintf("%q is no port", r.PathValue("port")), "a port is a number from 1 to 65535"})
		return
	}
	if !headerHas(r.Header, "Connection", "upgrade") || !headerHas(r.Header, "Upgrade", "tcp") {
		w.Header().Set("Upgrade", "tcp")
		s.fail(w, r, errNoUpgrade)
		return
	}
	woken, err := s.wake(w, r, fmt.Sprintf("port-forward %d", port))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	remote, err := s.core.Dial(r.Context(), woken.ID, int(port))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer remote.Close()
	local, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer local.Close()
	if ow, ok := w.(*observedWriter); ok {
		ow.status = http.StatusSwitchingProtocols
	}
	answer := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
	if text := woken.String(); text != "" {
		answer += api.ResumeHeader + ": " + text + "\r\n"
	}
	if _, err := io.WriteString(local, answer+"\r\n"); err != nil {
		return
	}
	// The request's context ends when its client has no more to say: too early.
	ctx, done := s.stream(context.WithoutCancel(r.Context()))
	defer done()
	join(ctx, bufferedConn{local, buffered.Reader}, remote)
}

// headerHas tells whether one of the comma-separated values of a header is
// token.
func headerHas(h http.Header, name, token string) bool {
	for _, line := range h.Values(name) {
		for v := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(v), token) {
				return true
			}
		}
	}
	return false
}

// bufferedConn is a connection of which some bytes were read ahead.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (c bufferedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// CloseWrite ends the direction towards the peer.
func (c bufferedConn) CloseWrite() error { return closeWrite(c.Conn) }

// join copies between a and b, which leads into a guest, in both directions
// until both have ended, or ctx has, or the guest sleeps, and closes both.
func join(ctx context.Context, a, b net.Conn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { a.Close(); b.Close() })()
	defer sandbox.AfterSleep(ctx, b, cancel)()
	var wg sync.WaitGroup
	pump := func(dst, src net.Conn) {
		_, err := io.Copy(dst, src)
		if err == nil {
			err = closeWrite(dst)
		}
		if err != nil { // half of it is broken: so is the whole
			a.Close()
			b.Close()
		}
	}
	wg.Go(func() { pump(b, a) })
	wg.Go(func() { pump(a, b) })
	wg.Wait()
	a.Close()
	b.Close()
}

// closeWrite ends the sending direction of a connection, or the whole of one
// that knows no half.
func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}
