package vnet_test

import (
	"crypto/sha256"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"github.com/hibernacle/hibernacle/internal/vnet"
	"github.com/hibernacle/hibernacle/internal/vnet/vnettest"
)

func BenchmarkDial(b *testing.B) {
	n := newTestNet(b, vnet.Config{})
	guestListener(b, n.guest, 8080, func(net.Conn) {})
	for b.Loop() {
		c, err := n.Dial(b.Context(), 8080)
		if err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

// BenchmarkDialAfterLinkUp is what a resume waits for: a new card joins, and
// the first connection is opened and answered.
func BenchmarkDialAfterLinkUp(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		n, socket := newNetwork(b, vnet.Config{})
		g, err := vnettest.NewGuest()
		if err != nil {
			b.Fatal(err)
		}
		guestListener(b, g, 8080, echo)
		b.StartTimer()
		if err := g.Connect(socket); err != nil {
			b.Fatal(err)
		}
		c, err := n.Dial(b.Context(), 8080)
		if err != nil {
			b.Fatal(err)
		}
		c.Write([]byte{1})
		if _, err := c.Read(make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		c.Close()
		g.Close()
		n.Close()
		b.StartTimer()
	}
}

// BenchmarkTransfer moves 200 MB and compares checksums. The far end is the
// guest's stack of the tests, which shares the processors.
func BenchmarkTransfer(b *testing.B) {
	const size = 200 << 20
	sums := make(chan []byte, 1)
	swallow := func(c net.Conn) {
		h := sha256.New()
		io.Copy(h, c)
		sums <- h.Sum(nil)
	}
	w := new(world)
	w.put("tcp", public+":80", hostListener(b, swallow))
	n := newTestNet(b, vnet.Config{Dial: w.dial})
	guestListener(b, n.guest, 8080, swallow)
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(i * 7)
	}
	h := sha256.New()
	for range size / len(data) {
		h.Write(data)
	}
	for name, dial := range map[string]func() (net.Conn, error){
		"into": func() (net.Conn, error) { return n.Dial(b.Context(), 8080) },
		"out":  func() (net.Conn, error) { return n.guest.Dial(b.Context(), "tcp", public+":80") },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				c, err := dial()
				if err != nil {
					b.Fatal(err)
				}
				for range size / len(data) {
					if _, err := c.Write(data); err != nil {
						b.Fatal(err)
					}
				}
				closeWrite(c)
				if !same(h, <-sums) {
					b.Fatal("checksums differ")
				}
				c.Close()
			}
		})
	}
}

// BenchmarkIdleNetworks measures what 100 networks with a joined card hold.
func BenchmarkIdleNetworks(b *testing.B) {
	const count = 100
	for b.Loop() {
		b.StopTimer()
		dir, err := os.MkdirTemp("", "vnet")
		if err != nil {
			b.Fatal(err)
		}
		heap, goroutines := held()
		networks, cards := make([]*vnet.Network, count), make([]net.Conn, count)
		b.StartTimer()
		for i := range networks {
			if networks[i], err = vnet.New(vnet.Config{}); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		for i, n := range networks {
			socket := filepath.Join(dir, strconv.Itoa(i))
			if err := n.Listen(socket); err != nil {
				b.Fatal(err)
			}
			if cards[i], err = net.Dial("unix", socket); err != nil {
				b.Fatal(err)
			}
		}
		moreHeap, moreGoroutines := held()
		b.ReportMetric(float64(moreHeap-heap)/count, "heap-bytes/network")
		b.ReportMetric(float64(moreGoroutines-goroutines)/count, "goroutines/network")
		b.StartTimer()
		for i, n := range networks {
			n.Close()
			cards[i].Close()
		}
		b.StopTimer()
		os.RemoveAll(dir)
		b.StartTimer()
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/count, "µs-open-close/network")
}

func held() (heap, goroutines int64) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse), int64(runtime.NumGoroutine())
}
