package pager

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
)

// BenchmarkMount measures from Mount to a file that another process could open.
func BenchmarkMount(b *testing.B) {
	dir := b.TempDir()
	for b.Loop() {
		s, err := Mount(dir, nil)
		if err != nil {
			b.Fatal(err)
		}
		l, err := s.NewSlot("ram", page.Size)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := os.Stat(l.Path()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// BenchmarkMountAsUser is the same by an unprivileged process.
func BenchmarkMountAsUser(b *testing.B) {
	needUserMounts(b)
	dir := nobodysFolder(b)
	pager := startChild(b, "server", asNobody)
	var took, closing float64
	for b.Loop() {
		took += float64(pager.must(command{Op: "mount", Path: dir, Len: page.Size}).Took)
		closing += float64(pager.must(command{Op: "close"}).Took)
	}
	b.ReportMetric(took/float64(b.N), "ns/mount")
	b.ReportMetric(closing/float64(b.N), "ns/close")
	b.ReportMetric(0, "ns/op")
}

func BenchmarkClose(b *testing.B) {
	dir := b.TempDir()
	for b.Loop() {
		b.StopTimer()
		s, err := Mount(dir, nil)
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkMiss measures a page fault of a fresh mapping that becomes a READ,
// per 4 KiB page touched, by readahead. "scattered" touches pages at random,
// "local" runs of 16 pages at random places, as guests do, and "sequential"
// one page after the other. The source costs next to nothing.
func BenchmarkMiss(b *testing.B) {
	const size, touched = 512 << 20, 4096 * page.Size
	for _, readAhead := range []int{4, 8, 16, 32, 64, 128} {
		for _, how := range []string{"scattered", "local", "sequential"} {
			b.Run(fmt.Sprintf("%s/%dKiB", how, readAhead), func(b *testing.B) {
				var took, read, reads float64
				for b.Loop() {
					t, s := touchFresh(b, how, readAhead<<10, size, touched)
					took, read, reads = took+t, read+float64(s.BytesRead), reads+float64(s.Reads)
				}
				n := float64(b.N) * touched / page.Size
				b.ReportMetric(took/n, "ns/page")
				b.ReportMetric(read/n/page.Size, "read/touched")
				b.ReportMetric(reads/n, "READs/page")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// touchFresh lets a child touch pages of a new slot, and returns how long that
// took, in ns, and what it cost.
func touchFresh(b *testing.B, how string, readAhead int, size, touched int64) (float64, Stats) {
	b.Helper()
	s, err := mount(b.TempDir(), nil, readAhead)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	l, err := s.NewSlot("ram", size)
	if err != nil {
		b.Fatal(err)
	}
	if err := l.Bind(Zero); err != nil {
		b.Fatal(err)
	}
	c := startChild(b, "toucher")
	defer c.stop()
	c.must(command{Op: "map", Path: l.Path(), Len: size})
	c.must(command{Op: "read", Len: page.Size}) // the first request costs more
	r := c.must(command{Op: how, Len: touched, Seed: 1})
	return float64(r.Took), l.Stats()
}

// BenchmarkPush measures pushes of 1 MiB.
func BenchmarkPush(b *testing.B) {
	const size = 512 << 20
	l := newTestSlot(b, size)
	if err := l.Bind(Zero); err != nil {
		b.Fatal(err)
	}
	c := startChild(b, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: size})
	buf := make([]byte, 1<<20)
	b.SetBytes(int64(len(buf)))
	off := int64(0)
	for b.Loop() {
		if err := l.Push(off, buf); err != nil {
			b.Fatal(err)
		}
		off = (off + int64(len(buf))) % size
	}
}

// BenchmarkDirty scans a mapping of 2 GiB with 2,000 scattered dirty pages and
// 64 MiB read.
func BenchmarkDirty(b *testing.B) {
	const size, written = 2 << 30, 2000
	c, addr := bigMapping(b, size)
	c.must(command{Op: "sequential", Len: 64 << 20})
	rnd := rand.New(rand.NewPCG(1, 1))
	for range written {
		c.must(command{Op: "write", Off: rnd.Int64N(size), Len: 1, Byte: 1})
	}
	b.Run("Dirty", func(b *testing.B) {
		for b.Loop() {
			if _, err := Dirty(c.pid(), addr, size); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("pagemap", func(b *testing.B) {
		f, err := os.Open("/proc/" + strconv.Itoa(c.pid()) + "/pagemap")
		if err != nil {
			b.Fatal(err)
		}
		defer f.Close()
		for b.Loop() {
			if _, err := readPagemap(f, addr, size, dirtyPages); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkProcessMemory reads dirty memory by pieces of that many KiB.
func BenchmarkProcessMemory(b *testing.B) {
	const size = 256 << 20
	c, addr := bigMapping(b, size)
	c.must(command{Op: "write", Len: size, Byte: 1})
	mem := ProcessMemory(c.pid(), addr, size)
	for _, kib := range []int64{4, 64, 1024, 8192} {
		b.Run(fmt.Sprintf("%dKiB", kib), func(b *testing.B) {
			buf := make([]byte, kib<<10)
			b.SetBytes(kib << 10)
			off := int64(0)
			for b.Loop() {
				if _, err := mem.ReadAt(buf, off); err != nil {
					b.Fatal(err)
				}
				off = (off + kib<<10) % size
			}
		})
	}
}

// bigMapping returns a child that maps a sparse file of size bytes.
func bigMapping(b *testing.B, size int64) (*child, uintptr) {
	b.Helper()
	path := filepath.Join(b.TempDir(), "flat")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, size)); err != nil {
		b.Fatal(err)
	}
	c := startChild(b, "toucher")
	return c, uintptr(c.must(command{Op: "map", Path: path, Len: size}).Addr)
}
