package shim

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

type halfCloser interface{ CloseWrite() error }

// Ports of guests that have streams.
const (
	portSum   = 7  // takes everything, then answers its checksum
	portPush  = 8  // sends bigTransfer bytes of pushed, then closes
	portMute  = 9  // neither reads nor writes
	portFirst = 10 // says what it has to say, ends its half, then takes everything
	portFlood = 11 // sends for ever
)

const bigTransfer = 32 << 20

// pushed is a stream of bytes that all look different.
func pushed() io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{1}), bigTransfer)
}

func streamDriver(first chan<- string) *driver {
	d := newDriver()
	d.ports = map[int]func(net.Conn){
		portSum: func(c net.Conn) {
			h := sha256.New()
			if _, err := io.Copy(h, c); err == nil {
				c.Write(h.Sum(nil))
			}
		},
		portPush: func(c net.Conn) { io.Copy(c, pushed()) },
		portMute: func(c net.Conn) {
			// Blocks until the connection is closed, without reading from it.
			raw, err := c.(*net.UnixConn).SyscallConn()
			if err == nil {
				raw.Read(func(uintptr) bool { return false })
			}
		},
		portFirst: func(c net.Conn) {
			io.WriteString(c, "that is all")
			c.(halfCloser).CloseWrite()
			b, _ := io.ReadAll(c)
			first <- string(b)
		},
		portFlood: func(c net.Conn) {
			for b := make([]byte, 64<<10); ; {
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		},
	}
	return d
}

func (g *guest) dial(port int) net.Conn {
	g.t.Helper()
	c, err := g.client.Dial(context.Background(), port)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		g.t.Fatal(err)
	}
	return c
}

func sum(t *testing.T, r io.Reader) string {
	t.Helper()
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		t.Fatal(err)
	}
	return string(h.Sum(nil))
}

func TestStreams(t *testing.T) {
	first := make(chan string, 1)
	r := newRig(t, rigOptions{driver: streamDriver(first)})
	r.boot()

	t.Run("big transfer in, the caller ends its half", func(t *testing.T) {
		c := r.dial(portSum)
		if _, err := io.Copy(c, pushed()); err != nil {
			t.Fatal(err)
		}
		if err := c.(halfCloser).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		if err != nil || string(got) != sum(t, pushed()) {
			t.Errorf("the guest got other bytes (%v)", err)
		}
	})
	t.Run("big transfer out", func(t *testing.T) {
		if got := sum(t, r.dial(portPush)); got != sum(t, pushed()) {
			t.Error("the caller got other bytes")
		}
	})
	t.Run("the guest ends its half first", func(t *testing.T) {
		c := r.dial(portFirst)
		got, err := io.ReadAll(c)
		if err != nil || string(got) != "that is all" {
			t.Fatalf("%q, %v", got, err)
		}
		if _, err := io.WriteString(c, "well then"); err != nil {
			t.Fatal(err)
		}
		if err := c.(halfCloser).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got := <-first; got != "well then" {
			t.Errorf("the guest got %q", got)
		}
	})
	t.Run("refused port", func(t *testing.T) {
		if _, err := r.client.Dial(context.Background(), 4); !errors.Is(err, ErrRefused) || Code(err) != CodeGuest {
			t.Errorf("%v, want ErrRefused", err)
		}
	})
	t.Run("bytes sent with the order", func(t *testing.T) {
		conn, err := r.client.connect(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "CONNECT guest:7 HTTP/1.1\r\nHost: guest:7\r\n\r\nearly"); err != nil {
			t.Fatal(err)
		}
		if err := conn.(halfCloser).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(conn)
		if head, got, ok := strings.Cut(string(answer), "\r\n\r\n"); !ok || head != "HTTP/1.1 200 OK" || got != sum(t, strings.NewReader("early")) {
			t.Errorf("%q, %v", answer, err)
		}
	})
}

// TestDialTakesTime: a caller that does not want to wait gets its own error,
// and the shim stops trying.
func TestDialTakesTime(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	r.capture(1)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := r.client.Dial(ctx, 8000); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want the caller's deadline", err)
	}
	r.thaw(1)
	r.goesOn()
}

// TestNobodyReads: neither a caller that does not read what the guest sends
// nor a guest that does not read what it is sent keeps others, or a capture, waiting.
func TestNobodyReads(t *testing.T) {
	r := newRig(t, rigOptions{driver: streamDriver(nil)})
	r.boot()
	flood := r.dial(portFlood)
	mute := r.dial(portMute)
	if err := mute.SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(mute, pushed()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a guest that does not read was sent everything: %v", err)
	}
	events, err := r.client.connect(context.Background()) // neither does this one
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	if _, err := io.WriteString(events, "GET /v1/events HTTP/1.1\r\nHost: shim\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if got := sum(t, r.dial(portPush)); got != sum(t, pushed()) {
		t.Error("the caller got other bytes")
	}
	for attempt := uint64(1); attempt < 20; attempt++ {
		r.capture(attempt)
		r.thaw(attempt)
	}
	r.goesOn()
	// The streams stand.
	if n, err := io.ReadFull(flood, make([]byte, 1<<20)); err != nil {
		t.Errorf("after %d bytes: %v", n, err)
	}
}

// TestStreamsEndWithTheMachine: whether it is released or ends by itself.
func TestStreamsEndWithTheMachine(t *testing.T) {
	for name, end := range map[string]func(r *rig){
		"release": func(r *rig) { r.end() },
		"crash":   func(r *rig) { r.driver.Machines()[0].Crash(vmm.ReasonCrashed) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, rigOptions{driver: streamDriver(nil)})
			r.boot()
			quiet, flood := r.dial(portSum), r.dial(portFlood)
			if _, err := quiet.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(flood, make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
			end(r)
			for name, c := range map[string]net.Conn{"quiet": quiet, "flood": flood} {
				if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("the %s stream does not end", name)
				}
			}
		})
	}
}

// TestSpliceErrors: an error in one direction ends both.
func TestSpliceErrors(t *testing.T) {
	a, ourA, err := connPair()
	if err != nil {
		t.Fatal(err)
	}
	b, ourB, err := connPair()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		splice(ourA, ourB)
	}()
	b.Close() // cannot be written to any more
	for err == nil {
		_, err = a.Write(make([]byte, 1<<10))
	}
	<-done
	a.Close()
	ourA.Close()
	ourB.Close()
}

func TestConsole(t *testing.T) {
	path := filepath.Join(tempDir(t), "console")
	c := &console{}
	write := func(s string) {
		t.Helper()
		if n, err := c.Write([]byte(s)); n != len(s) || err != nil {
			t.Fatalf("Write: %d, %v", n, err)
		}
	}
	read := func(path string) string {
		t.Helper()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	write(strings.Repeat("a", consoleHeld))
	write("early\n")
	if tail := c.tail(); len(tail) != consoleHeld || !strings.HasSuffix(tail, "aearly\n") {
		t.Errorf("%d bytes are held", len(tail))
	}
	if err := c.attach(path); err != nil {
		t.Fatal(err)
	}
	write("late\n")
	if got := read(path); len(got) != consoleHeld+5 || !strings.HasSuffix(got, "early\nlate\n") {
		t.Errorf("the file holds %d bytes", len(got))
	}
	for range 3 {
		write(strings.Repeat("b", consoleLimit*2/3))
	}
	if got := len(read(path)) + len(read(path+".1")); got > 2*consoleLimit {
		t.Errorf("%d bytes are kept, the bound is %d each", got, consoleLimit)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	write("behind the end")

	// What stands in the file from before stays, and counts.
	c = &console{}
	if err := c.attach(path); err != nil {
		t.Fatal(err)
	}
	write("again\n")
	if got := read(path); !strings.HasPrefix(got, "bbb") || !strings.HasSuffix(got, "again\n") {
		t.Errorf("the file holds %d other bytes", len(got))
	}
	// A folder in the way of the rotation: what is printed is lost, no more.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(path, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	write(strings.Repeat("c", consoleLimit))
	write("lost")
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}
