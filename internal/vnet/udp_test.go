package vnet_test

import (
	"net"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/vnet"
)

// hostEcho answers every datagram with itself.
func hostEcho(t testing.TB) string {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 64<<10)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			pc.WriteTo(buf[:n], from)
		}
	}()
	t.Cleanup(func() {
		pc.Close()
		<-done
	})
	return pc.LocalAddr().String()
}

func exchangeDatagram(t testing.TB, c net.Conn, size int) {
	t.Helper()
	sent := make([]byte, size)
	for i := range sent {
		sent[i] = byte(i)
	}
	if _, err := c.Write(sent); err != nil {
		t.Fatalf("send: %v", err)
	}
	c.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 64<<10)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	if string(buf[:n]) != string(sent) {
		t.Fatalf("%d bytes came back otherwise than the %d sent", n, size)
	}
}

func TestOutboundUDP(t *testing.T) {
	w := new(world)
	w.put("udp", public+":7", hostEcho(t))
	denied := make(chan vnet.Denied, 10)
	n := newTestNet(t, vnet.Config{Dial: w.dial, OnDenied: func(d vnet.Denied) { denied <- d }})

	c := dialGuest(t, n, "udp", public+":7")
	for _, size := range []int{0, 1, 1400, 64900} {
		exchangeDatagram(t, c, size)
	}
	if a := activity(n); a.Bytes != 2*(1+1400+64900) || a.Outbound != 1 {
		t.Errorf("activity %+v", a)
	}

	c = dialGuest(t, n, "udp", private+":7")
	c.Write([]byte("x"))
	select {
	case d := <-denied:
		if d.Proto != "udp" || d.Addr.String() != private+":7" {
			t.Fatalf("reported %v", d)
		}
	case <-time.After(patience):
		t.Fatal("not reported")
	}
	waitFor(t, "word that the port is unreachable", func() bool {
		_, err := c.Write([]byte("x"))
		return err != nil
	})

	n.Reset()
	waitFor(t, "flows end", func() bool { return activity(n).Outbound == 0 })
}

func TestUDPFlowsAreBounded(t *testing.T) {
	const bound = 256
	w := new(world)
	w.put("udp", public+":7", hostEcho(t))
	n := newTestNet(t, vnet.Config{Dial: w.dial})
	first := dialGuest(t, n, "udp", public+":7")
	exchangeDatagram(t, first, 1)
	for range bound {
		exchangeDatagram(t, dialGuest(t, n, "udp", public+":7"), 1)
	}
	if a := activity(n); a.Outbound > bound {
		t.Fatalf("%d flows open, at most %d are allowed", a.Outbound, bound)
	}
	waitFor(t, "the evicted flow opens anew", func() bool {
		first.Write([]byte("x"))
		first.SetReadDeadline(time.Now().Add(time.Second))
		_, err := first.Read(make([]byte, 1))
		return err == nil
	})
}

func TestUDPFlowsIdleOut(t *testing.T) {
	w := new(world)
	w.put("udp", public+":7", hostEcho(t))
	n := newTestNet(t, vnet.Config{Dial: w.dial})
	n.SetUDPIdle(300 * time.Millisecond)
	c := dialGuest(t, n, "udp", public+":7")
	exchangeDatagram(t, c, 10)
	waitFor(t, "idle flow ends", func() bool { return activity(n).Outbound == 0 })
	exchangeDatagram(t, c, 10)
}
