package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

var loopback = netip.MustParseAddr("127.0.0.1")

// serveCalls lets the guest serve calls for peer and returns how to reach it.
func (g *guestUnderTest) serveCalls(t *testing.T, peer netip.Addr) func() net.Conn {
	t.Helper()
	c, err := listenForCalls(g.agent.control, netip.AddrPortFrom(loopback, 0), peer)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- c.serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; !errors.Is(err, context.Canceled) {
			t.Errorf("served until %v", err)
		}
	})
	addr, err := unix.Getsockname(c.socket)
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(addr.(*unix.SockaddrInet4).Port)
	return func() net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp4", netip.AddrPortFrom(loopback, port).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
}

// TestCallsOverFrames: they do what they do over HTTP, whose calls see it.
func TestCallsOverFrames(t *testing.T) {
	g := newGuest(t, nil)
	dial := g.serveCalls(t, loopback)
	ctx := testContext(t)
	if _, err := guestapi.InitOver(ctx, dial(), "", bootRequest()); err != nil {
		t.Fatal(err)
	}
	g.system.calls = nil
	conn := dial()
	resp, err := guestapi.InitOver(ctx, conn, "token", resumeRequest(2))
	if got := strings.Join(g.system.calls, " "); err != nil || got != "clock entropy sockets publish thaw" || resp.SocketsDestroyed != 3 {
		t.Errorf("%+v, %v after %s", resp, err, got)
	}
	if late := time.Since(g.system.clock); late < -time.Second || late > patience {
		t.Errorf("the clock is %v off", late)
	}
	if g.system.kept.Remote.String() != conn.LocalAddr().String() {
		t.Errorf("spared was the connection from %v, not %v", g.system.kept.Remote, conn.LocalAddr())
	}
	if _, err := guestapi.FreezeOver(ctx, dial(), "token", guestapi.FreezeRequest{Attempt: 1, Deadline: time.Minute}); err != nil || !g.system.isFrozen() {
		t.Errorf("freeze: %v, frozen %v", err, g.system.isFrozen())
	}
	if _, err := g.control.Thaw(ctx, "token", guestapi.ThawRequest{Attempt: 1}); err != nil || g.system.isFrozen() {
		t.Errorf("thaw: %v, frozen %v", err, g.system.isFrozen())
	}
}

func TestCallsOverFramesAreRefused(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	dial := g.serveCalls(t, loopback)
	ctx := testContext(t)
	freeze := func(token string, attempt uint64) error {
		_, err := guestapi.FreezeOver(ctx, dial(), token, guestapi.FreezeRequest{Attempt: attempt, Deadline: time.Minute})
		return err
	}
	if _, err := g.control.Thaw(ctx, "token", guestapi.ThawRequest{Attempt: 3}); err != nil {
		t.Fatal(err)
	}
	if err := freeze("wrong", 4); !errors.Is(err, guestapi.ErrUnauthorized) {
		t.Errorf("a wrong token: %v", err)
	}
	if err := freeze("token", 3); !errors.Is(err, guestapi.ErrRefused) {
		t.Errorf("a thawed attempt: %v", err)
	}
	if err := freeze("token", 0); err == nil || !strings.Contains(err.Error(), "attempt 0") {
		t.Errorf("attempt 0: %v", err)
	}
	conn := dial()
	if _, err := conn.Write([]byte{1, 0, 0, 0, 99}); err != nil {
		t.Fatal(err)
	}
	if b, err := guestapi.ReadFrame(conn, 1000); err != nil || guestapi.Status(b[0]) != guestapi.StatusInvalid {
		t.Errorf("an unknown operation: %q, %v", b, err)
	}
	if g.system.isFrozen() {
		t.Error("the guest is frozen")
	}
}

// TestStrangersAreNotHeard: who is not the host is sent away at once.
func TestStrangersAreNotHeard(t *testing.T) {
	g := newGuest(t, nil)
	dial := g.serveCalls(t, netip.MustParseAddr("192.168.127.1"))
	if b, err := io.ReadAll(dial()); len(b) > 0 {
		t.Errorf("it was told %q, %v", b, err)
	}
}
