package vnet_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/vnet"
	"github.com/hibernacle/hibernacle/internal/vnet/vnettest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds waits that a quiet machine ends in milliseconds.
const patience = 60 * time.Second

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// testNet is a network with a guest joined to it.
type testNet struct {
	*vnet.Network
	guest  *vnettest.Guest
	socket string
}

// newNetwork returns a network and the socket that it listens at.
func newNetwork(t testing.TB, cfg vnet.Config) (*vnet.Network, string) {
	t.Helper()
	n, err := vnet.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	dir, err := os.MkdirTemp("", "vnet")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "net.sock")
	if err := n.Listen(socket); err != nil {
		t.Fatal(err)
	}
	return n, socket
}

func newTestNet(t testing.TB, cfg vnet.Config) *testNet {
	t.Helper()
	n, socket := newNetwork(t, cfg)
	g, err := vnettest.Join(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	return &testNet{Network: n, guest: g, socket: socket}
}

func mustPolicy(t testing.TB, allow, deny []string) vnet.Policy {
	t.Helper()
	p, err := vnet.ParsePolicy("", allow, deny)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// world plays every address: it dials the listener that stands for one.
type world struct {
	mu     sync.Mutex
	at     map[string]string // "network address:port" → real "address:port"
	dialed []string
}

func (w *world) put(network, address, real string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.at == nil {
		w.at = make(map[string]string)
	}
	w.at[network+" "+address] = real
}

func (w *world) dial(ctx context.Context, network, address string) (net.Conn, error) {
	w.mu.Lock()
	w.dialed = append(w.dialed, network+" "+address)
	real, ok := w.at[network+" "+address]
	w.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("dial %s: no route", address)
	}
	return new(net.Dialer).DialContext(ctx, network, real)
}

func (w *world) calls() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.dialed...)
}

// serve accepts connections until the test ends, and breaks what is open then.
func serve(t testing.TB, ln net.Listener, handle func(net.Conn)) {
	t.Helper()
	var wg sync.WaitGroup
	var mu sync.Mutex
	open := make(map[net.Conn]struct{})
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = struct{}{}
			mu.Unlock()
			wg.Go(func() {
				handle(c)
				c.Close()
				mu.Lock()
				delete(open, c)
				mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for c := range open {
			c.SetDeadline(time.Unix(1, 0))
		}
		mu.Unlock()
		wg.Wait()
	})
}

func hostListener(t testing.TB, handle func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serve(t, ln, handle)
	return ln.Addr().String()
}

func guestListener(t testing.TB, g *vnettest.Guest, port uint16, handle func(net.Conn)) {
	t.Helper()
	ln, err := g.Listen(port)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, ln, handle)
}

func echo(c net.Conn) {
	if _, err := io.Copy(c, c); err == nil {
		closeWrite(c)
	}
}

func closeWrite(c net.Conn) error { return c.(interface{ CloseWrite() error }).CloseWrite() }

// waitFor polls a condition that nothing announces.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// exchange sends text and expects it back.
func exchange(t testing.TB, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatalf("write: %v", err)
	}
	buf := make([]byte, len(text))
	if _, err := io.ReadFull(c, buf); err != nil {
		t.Fatalf("read: %v", err)
	}
	if string(buf) != text {
		t.Fatalf("got %q back, sent %q", buf, text)
	}
}

func TestDial(t *testing.T) {
	n := newTestNet(t, vnet.Config{})
	guestListener(t, n.guest, 8080, echo)

	t.Run("echo", func(t *testing.T) {
		c, err := n.Dial(testContext(t), 8080)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		exchange(t, c, "hello")
		if err := closeWrite(c); err != nil {
			t.Fatal(err)
		}
		if rest, err := io.ReadAll(c); err != nil || len(rest) != 0 {
			t.Fatalf("after half-close: %q, %v", rest, err)
		}
	})
	t.Run("refused at once", func(t *testing.T) {
		if _, err := n.Dial(testContext(t), 81); !errors.Is(err, vnet.ErrRefused) {
			t.Fatalf("got %v, want ErrRefused", err)
		}
	})
	t.Run("context", func(t *testing.T) {
		n.guest.Disconnect()
		ctx, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
		defer cancel()
		if _, err := n.Dial(ctx, 8080); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v, want the deadline", err)
		}
	})
}

func TestDialWaitsForTheCard(t *testing.T) {
	n := newTestNet(t, vnet.Config{})
	guestListener(t, n.guest, 8080, echo)
	n.guest.Disconnect()
	waitFor(t, "link down", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		c, err := n.Dial(ctx, 81)
		if err == nil {
			c.Close()
		}
		return errors.Is(err, context.DeadlineExceeded)
	})
	dialed := make(chan error, 1)
	go func() {
		c, err := n.Dial(testContext(t), 8080)
		if err == nil {
			c.Close()
		}
		dialed <- err
	}()
	if err := n.guest.Connect(n.socket); err != nil {
		t.Fatal(err)
	}
	if err := <-dialed; err != nil {
		t.Fatal(err)
	}
}

func TestListenRefusesLongPaths(t *testing.T) {
	n, err := vnet.New(vnet.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	err = n.Listen(filepath.Join(t.TempDir(), strings.Repeat("x", 120)))
	if err == nil || !strings.Contains(err.Error(), "107") {
		t.Fatalf("got %v, want an error that names the limit", err)
	}
}

func TestCloseTwice(t *testing.T) {
	n := newTestNet(t, vnet.Config{})
	guestListener(t, n.guest, 8080, echo)
	c, err := n.Dial(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n.Close()
	n.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Fatal("connection outlived its network")
	}
	if _, err := n.Dial(testContext(t), 8080); !errors.Is(err, vnet.ErrClosed) {
		t.Fatalf("got %v, want ErrClosed", err)
	}
	if err := n.Listen(filepath.Join(filepath.Dir(n.socket), "again")); !errors.Is(err, vnet.ErrClosed) {
		t.Fatalf("got %v, want ErrClosed", err)
	}
	if _, err := os.Stat(n.socket); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("socket is left: %v", err)
	}
}

// TestSuspend: connections end, the guest hears nothing until Continue, and
// what was begun meanwhile ends with it.
func TestSuspend(t *testing.T) {
	n := newTestNet(t, vnet.Config{})
	guestListener(t, n.guest, 8080, echo)
	c, err := n.Dial(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	exchange(t, c, "before")
	n.Suspend()
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("an open connection ended with %v, not with a reset", err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := n.Dial(soon, 8080); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a guest that stands still was reached: %v", err)
	}
	n.Continue()
	again, err := n.Dial(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	exchange(t, again, "after")
}

// activity returns the figures under caps that no test comes near.
func activity(n interface {
	Activity(inboundCap, awaitCap time.Duration) vnet.Activity
}) vnet.Activity {
	return n.Activity(time.Hour, time.Hour)
}
