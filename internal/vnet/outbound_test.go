package vnet_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/vnet"
)

const (
	public  = "93.184.216.34"
	private = "10.9.9.9"
)

// dialFails dials from the guest and expects a reset, not a time-out.
func dialFails(t *testing.T, n *testNet, address string) {
	t.Helper()
	ctx := testContext(t)
	c, err := n.guest.Dial(ctx, "tcp", address)
	if err == nil {
		c.Close()
		t.Fatalf("dial %s: no error", address)
	}
	if ctx.Err() != nil {
		t.Fatalf("dial %s: no answer came", address)
	}
}

func dialGuest(t *testing.T, n *testNet, network, address string) net.Conn {
	t.Helper()
	c, err := n.guest.Dial(testContext(t), network, address)
	if err != nil {
		t.Fatalf("dial %s %s: %v", network, address, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestOutboundTCP(t *testing.T) {
	w := new(world)
	host := hostListener(t, echo)
	_, port, _ := net.SplitHostPort(host)
	w.put("tcp", public+":80", host)
	w.put("tcp", private+":80", host)
	w.put("tcp", private+":81", host)
	w.put("tcp", host, host)

	denied := make(chan vnet.Denied, 100)
	n := newTestNet(t, vnet.Config{
		Policy:   mustPolicy(t, []string{private + "/32:80", "host:" + port}, nil),
		Dial:     w.dial,
		OnDenied: func(d vnet.Denied) { denied <- d },
	})

	for _, address := range []string{public + ":80", private + ":80", vnet.HostIP + ":" + port} {
		t.Run("open "+address, func(t *testing.T) {
			exchange(t, dialGuest(t, n, "tcp", address), "hello")
		})
	}
	for _, address := range []string{
		private + ":81", "10.9.9.8:80", vnet.HostIP + ":1", vnet.GatewayIP + ":80", "169.254.169.254:80", "192.168.1.1:80",
	} {
		t.Run("denied "+address, func(t *testing.T) {
			before := len(w.calls())
			dialFails(t, n, address)
			if calls := w.calls(); len(calls) != before {
				t.Fatalf("the host dialled %v", calls[before:])
			}
			select {
			case d := <-denied:
				if d.Proto != "tcp" || d.Addr.String() != address {
					t.Fatalf("reported %v", d)
				}
			case <-time.After(patience):
				t.Fatal("not reported")
			}
		})
	}
	t.Run("unreachable", func(t *testing.T) { dialFails(t, n, public+":81") })
}

func TestHalfClose(t *testing.T) {
	w := new(world)
	// This peer answers when the guest has said all, and says bye after that.
	w.put("tcp", public+":1", hostListener(t, func(c net.Conn) {
		all, err := io.ReadAll(c)
		fmt.Fprintf(c, "%d bytes, %v", len(all), err)
	}))
	// This peer says all at once and listens after that.
	heard := make(chan string, 1)
	w.put("tcp", public+":2", hostListener(t, func(c net.Conn) {
		io.WriteString(c, "welcome")
		closeWrite(c)
		all, _ := io.ReadAll(c)
		heard <- string(all)
	}))
	n := newTestNet(t, vnet.Config{Dial: w.dial})

	c := dialGuest(t, n, "tcp", public+":1")
	io.WriteString(c, "question")
	closeWrite(c)
	if got, err := io.ReadAll(c); err != nil || string(got) != "8 bytes, <nil>" {
		t.Fatalf("guest closed first: %q, %v", got, err)
	}

	c = dialGuest(t, n, "tcp", public+":2")
	if got, err := io.ReadAll(c); err != nil || string(got) != "welcome" {
		t.Fatalf("peer closed first: %q, %v", got, err)
	}
	io.WriteString(c, "thanks")
	closeWrite(c)
	select {
	case got := <-heard:
		if got != "thanks" {
			t.Fatalf("peer heard %q", got)
		}
	case <-time.After(patience):
		t.Fatal("peer heard nothing")
	}
	waitFor(t, "flows end", func() bool { return activity(n).Outbound == 0 })
}

func TestResetsPassThrough(t *testing.T) {
	w := new(world)
	fromGuest := make(chan error, 1)
	w.put("tcp", public+":1", hostListener(t, func(c net.Conn) {
		_, err := io.Copy(io.Discard, c)
		fromGuest <- err
	}))
	w.put("tcp", public+":2", hostListener(t, func(c net.Conn) {
		io.ReadFull(c, make([]byte, 1))
		c.(*net.TCPConn).SetLinger(0)
	}))
	n := newTestNet(t, vnet.Config{Dial: w.dial})

	c := dialGuest(t, n, "tcp", public+":2")
	io.WriteString(c, "x")
	if _, err := io.ReadAll(c); err == nil {
		t.Fatal("peer's reset reached the guest as an ordinary end")
	}
	waitFor(t, "flow ends", func() bool { return activity(n).Outbound == 0 })

	dialGuest(t, n, "tcp", public+":1")
	waitFor(t, "flow opens", func() bool { return activity(n).Outbound == 1 })
	n.Reset()
	select {
	case err := <-fromGuest:
		if err == nil {
			t.Fatal("Reset reached the peer as an ordinary end")
		}
	case <-time.After(patience):
		t.Fatal("Reset did not reach the peer")
	}
}

func TestSetPolicyClosesWhatItDenies(t *testing.T) {
	w := new(world)
	host := hostListener(t, echo)
	w.put("tcp", public+":80", host)
	w.put("tcp", private+":80", host)
	n := newTestNet(t, vnet.Config{Dial: w.dial, Policy: mustPolicy(t, []string{private}, nil)})
	guestListener(t, n.guest, 8080, echo)

	kept := dialGuest(t, n, "tcp", public+":80")
	cut := dialGuest(t, n, "tcp", private+":80")
	inbound, err := n.Dial(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer inbound.Close()
	exchange(t, kept, "a")
	exchange(t, cut, "b")

	n.SetPolicy(vnet.Policy{})
	if _, err := cut.Read(make([]byte, 1)); err == nil {
		t.Fatal("denied flow is open")
	}
	exchange(t, kept, "c")
	exchange(t, inbound, "d")
	dialFails(t, n, private+":80")

	n.SetPolicy(mustPolicy(t, nil, []string{"0.0.0.0/0"}))
	if _, err := kept.Read(make([]byte, 1)); err == nil {
		t.Fatal("denied flow is open")
	}
	exchange(t, inbound, "e")
	waitFor(t, "flows end", func() bool { return activity(n).Outbound == 0 })
}

// A flow that is being dialled when the policy changes must not come to life.
func TestSetPolicyStopsADialUnderWay(t *testing.T) {
	dialing := make(chan struct{})
	n := newTestNet(t, vnet.Config{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		close(dialing)
		<-ctx.Done()
		return nil, ctx.Err()
	}})
	failed := make(chan error, 1)
	go func() {
		c, err := n.guest.Dial(testContext(t), "tcp", public+":80")
		if err == nil {
			c.Close()
		}
		failed <- err
	}()
	<-dialing
	n.SetPolicy(mustPolicy(t, nil, []string{public}))
	if err := <-failed; err == nil {
		t.Fatal("flow came to life")
	}
}

func TestReset(t *testing.T) {
	w := new(world)
	w.put("tcp", public+":80", hostListener(t, echo))
	n := newTestNet(t, vnet.Config{Dial: w.dial})
	guestListener(t, n.guest, 8080, echo)
	out := dialGuest(t, n, "tcp", public+":80")
	in, err := n.Dial(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	control, err := n.DialControl(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	exchange(t, out, "a")
	exchange(t, in, "b")
	exchange(t, control, "c")
	n.Reset()
	for name, c := range map[string]net.Conn{"outbound": out, "inbound": in, "control": control} {
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: got %v, want a reset", name, err)
		}
		c.Close()
	}
	if a := activity(n); a.Open != 0 {
		t.Errorf("%d connections counted as open", a.Open)
	}
	again, err := n.Dial(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	exchange(t, again, "d")
	exchange(t, dialGuest(t, n, "tcp", public+":80"), "e")
}

func TestActivity(t *testing.T) {
	w := new(world)
	w.put("tcp", public+":80", hostListener(t, echo))
	n := newTestNet(t, vnet.Config{Dial: w.dial})
	guestListener(t, n.guest, 8080, echo)

	// look returns what changed besides the time.
	look := func() vnet.Activity {
		a := activity(n)
		a.Idle = 0
		return a
	}
	// active checks that what f does counts as activity.
	active := func(what string, f func()) {
		t.Helper()
		before, begun := activity(n).Idle, time.Now()
		f()
		if idle := activity(n).Idle; idle >= before+time.Since(begun) {
			t.Errorf("%s does not count: idle for %v, before it %v", what, idle, before)
		}
	}

	start, began := look(), activity(n).Idle
	control, err := n.DialControl(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	exchange(t, control, "not counted")
	if a := look(); a != start {
		t.Fatalf("control traffic counts: %+v, was %+v", a, start)
	}
	if idle := activity(n).Idle; idle <= began {
		t.Fatalf("control traffic is activity: idle for %v, before it %v", idle, began)
	}
	var c net.Conn
	active("a dial", func() { c, err = n.Dial(testContext(t), 8080) })
	if err != nil {
		t.Fatal(err)
	}
	if a := look(); a.Open != 1 || a.Inbound != 1 {
		t.Fatalf("after Dial: %+v", a)
	}
	active("payload", func() { exchange(t, c, "1234") })
	if a := look(); a.Bytes != 8 {
		t.Fatalf("after 4 bytes each way: %+v", a)
	}
	if a := n.Activity(0, 0); a.Open != 0 || a.Inbound != 1 {
		t.Fatalf("a connection beyond the cap counts: %+v", a)
	}
	active("a close", func() { c.Close(); c.Close() })
	if a := look(); a.Open != 0 || a.Inbound != 0 {
		t.Fatalf("after Close: %+v", a)
	}
	active("a touch", n.Touch)
	out := dialGuest(t, n, "tcp", public+":80")
	exchange(t, out, "12")
	waitFor(t, "outbound payload counts", func() bool { return activity(n).Bytes == 12 })
	if a := look(); a.Outbound != 1 || a.Open != 0 || a.Awaiting != 0 {
		t.Fatalf("with an outbound flow that was answered: %+v", a)
	}
}

// An outbound flow awaits a reply from what the guest sent to what the peer
// sends, or to its end.
func TestAwaiting(t *testing.T) {
	for _, end := range []string{"a reply", "its close"} {
		t.Run(end, func(t *testing.T) {
			release := make(chan struct{})
			w := new(world)
			w.put("tcp", public+":80", hostListener(t, func(c net.Conn) {
				if _, err := c.Read(make([]byte, 16)); err != nil {
					t.Error(err)
				}
				<-release
				if end == "a reply" {
					c.Write([]byte("pong"))
					io.Copy(io.Discard, c)
				}
			}))
			n := newTestNet(t, vnet.Config{Dial: w.dial})
			c := dialGuest(t, n, "tcp", public+":80")
			if a := activity(n); a.Outbound != 1 || a.Awaiting != 0 {
				t.Fatalf("a silent flow: %+v", a)
			}
			if _, err := c.Write([]byte("ping")); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "the flow awaits a reply", func() bool { return activity(n).Awaiting == 1 })
			if a := n.Activity(time.Hour, 0); a.Awaiting != 0 {
				t.Fatalf("a question beyond the cap counts: %+v", a)
			}
			close(release)
			waitFor(t, "the flow awaits nothing", func() bool { return activity(n).Awaiting == 0 })
		})
	}
}

// Large transfers both ways at once come through whole.
func TestTransfersAreWhole(t *testing.T) {
	size := int64(32 << 20)
	if testing.Short() {
		size = 1 << 20
	}
	sums := make(chan []byte, 1)
	swallow := func(c net.Conn) {
		h := sha256.New()
		io.Copy(h, c)
		sums <- h.Sum(nil)
	}
	w := new(world)
	w.put("tcp", public+":80", hostListener(t, swallow))
	n := newTestNet(t, vnet.Config{Dial: w.dial})
	guestListener(t, n.guest, 8080, swallow)

	in, err := n.Dial(testContext(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	for name, c := range map[string]net.Conn{"into the guest": in, "out of the guest": dialGuest(t, n, "tcp", public+":80")} {
		h := sha256.New()
		sendRandom(t, io.MultiWriter(c, h), size)
		closeWrite(c)
		if !same(h, <-sums) {
			t.Errorf("%s: checksums differ", name)
		}
	}
}

func sendRandom(t testing.TB, w io.Writer, size int64) {
	t.Helper()
	if _, err := io.CopyN(w, rand.Reader, size); err != nil {
		t.Fatal(err)
	}
}

func same(h hash.Hash, sum []byte) bool { return string(h.Sum(nil)) == string(sum) }

func TestTCPFlowsAreBounded(t *testing.T) {
	const bound = 1024
	var wg sync.WaitGroup
	w := new(world)
	w.put("tcp", public+":80", hostListener(t, func(c net.Conn) { io.Copy(io.Discard, c) }))
	n := newTestNet(t, vnet.Config{Dial: w.dial})
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range bound / 8 {
				if c, err := n.guest.Dial(testContext(t), "tcp", public+":80"); err == nil {
					t.Cleanup(func() { c.Close() })
				}
			}
		}()
	}
	wg.Wait()
	waitFor(t, "all flows open", func() bool { return activity(n).Outbound == bound })
	dialFails(t, n, public+":80")
	n.Reset()
	waitFor(t, "no flow left", func() bool { return activity(n).Outbound == 0 })
	exchange(t, dialGuest(t, n, "tcp", vnet.GatewayIP+":53"), "")
}

// A flow that both ends closed leaves the table as soon as the guest has taken
// all of it.
func TestClosedFlowsEnd(t *testing.T) {
	w := new(world)
	w.put("tcp", public+":80", hostListener(t, func(c net.Conn) { c.Write(make([]byte, 64<<10)) }))
	n := newTestNet(t, vnet.Config{Dial: w.dial})
	for range 50 {
		c := dialGuest(t, n, "tcp", public+":80")
		if got, err := io.Copy(io.Discard, c); err != nil || got != 64<<10 {
			t.Fatalf("%d bytes, %v", got, err)
		}
		c.Close()
	}
	waitFor(t, "flows end", func() bool { return activity(n).Outbound == 0 })
}
