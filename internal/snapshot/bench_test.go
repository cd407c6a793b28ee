package snapshot

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/page"
)

// benchMachine has 512 MiB, of which 150 MiB are not zero, and a snapshot. As in
// real guests, zstd makes what is not zero a quarter as large.
func benchMachine(b *testing.B) (*Repository, *machine, *Snapshot) {
	b.Helper()
	r, _ := newRepository(b)
	m := newMachine(512 << 20 / page.Size)
	rnd := rand.NewChaCha8([32]byte{1})
	for i := 0; i < 150<<20; i += page.Size {
		at := i + 2*(i&^(1<<20-1)) // every third MiB
		rnd.Read(m.ram[at : at+page.Size/4])
		copy(m.ram[at+page.Size/4:at+page.Size], bytes.Repeat([]byte{byte(i >> 12), 7}, page.Size))
	}
	ref, _ := m.capture(b, r, nil)
	return r, m, open(b, r, ref)
}

// BenchmarkCapture captures 20 MiB of dirty pages, in runs of the given length,
// of which a third are equal to the parent's, without and with a working set.
func BenchmarkCapture(b *testing.B) {
	for _, runPages := range []int{1, 16, 512} {
		for name, set := range map[string]WorkingSet{"": nil, "/working-set": workingSet()} {
			b.Run(fmt.Sprintf("runs-of-%d%s", runPages, name), func(b *testing.B) {
				r, m, parent := benchMachine(b)
				pages := len(m.ram) / page.Size
				rnd := rand.New(rand.NewPCG(1, 2))
				const dirty = 20 << 20 / page.Size
				for at := range dirty / runPages {
					first := at * pages / (dirty / runPages)
					m.dirty = append(m.dirty, page.Run{First: uint64(first), Count: uint64(runPages)})
					for n := first; n < first+runPages; n++ {
						if rnd.IntN(3) > 0 {
							m.ram[n*page.Size+rnd.IntN(page.Size)]++
						}
					}
				}
				b.SetBytes(20 << 20)
				for b.Loop() {
					in := m.input(parent)
					in.WorkingSet = set
					ref, _, err := r.Capture(b.Context(), in)
					if err != nil {
						b.Fatal(err)
					}
					b.StopTimer()
					if err := r.Delete(b.Context(), ref.ID); err != nil {
						b.Fatal(err)
					}
					if err := r.store.Delete(b.Context(), packKey(ref.ID)); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
			})
		}
	}
}

func BenchmarkReadAt(b *testing.B) {
	_, _, s := benchMachine(b)
	for _, size := range []int{4 << 10, 128 << 10} {
		b.Run(fmt.Sprintf("random-%dK", size>>10), func(b *testing.B) {
			rnd := rand.New(rand.NewPCG(1, 2))
			p := make([]byte, size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				off := 3*(rnd.IntN(150)<<20) + rnd.IntN(1<<20/size)*size
				if _, err := s.ReadAt(p, int64(off)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("sequential-4K", func(b *testing.B) {
		p := make([]byte, page.Size)
		b.SetBytes(page.Size)
		off := int64(0)
		for b.Loop() {
			if _, err := s.ReadAt(p, off); err != nil {
				b.Fatal(err)
			}
			off = (off + page.Size) % (1 << 20)
		}
	})
}

// BenchmarkOpen opens a snapshot with a single pack, and one with 24 in stores
// that are farther and farther away.
func BenchmarkOpen(b *testing.B) {
	r, m, s := benchMachine(b)
	opening := func(name string, r *Repository, ref Ref) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				o, err := r.Open(b.Context(), ref)
				if err != nil {
					b.Fatal(err)
				}
				o.Close()
			}
		})
	}
	opening("1-pack", r, s.Ref())
	ref := s.Ref()
	for n := range 23 {
		m.fill(100*n, byte(n))
		ref, _ = m.capture(b, r, open(b, r, ref))
	}
	for _, latency := range []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond} {
		r := r
		if latency > 0 {
			r = NewRepository(&distant{Store: r.store, latency: latency})
		}
		opening(fmt.Sprintf("24-packs/%v", latency), r, ref)
	}
}

// workingSet returns runs of 1 to 32 pages, 20 MiB in all, of the part of a
// benchMachine that is not zero, in groups that are in no order.
func workingSet() (set WorkingSet) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, mib := range rnd.Perm(50) {
		for n, end := uint64(3*mib)<<8, uint64(3*mib+1)<<8; n < end; {
			r := page.Run{First: n, Count: min(1+rnd.Uint64N(32), end-n)}
			set = append(set, Touched{Run: r})
			n = r.End() + rnd.Uint64N(48)
		}
	}
	return set
}

// BenchmarkFetch reads a working set, whose pages are scattered over the pack:
// as a prefetch without Fetch does it, run by run, and with Fetch.
func BenchmarkFetch(b *testing.B) {
	local, _, s := benchMachine(b)
	ref, set := s.Ref(), workingSet().Members()
	far := recoded(b, local).store
	read := map[string]func(s *Snapshot) error{
		"ReadAt": func(s *Snapshot) error {
			p := make([]byte, chunkBytes)
			for _, r := range set {
				if _, err := s.ReadAt(p[:r.Bytes()], r.Offset()); err != nil {
					return err
				}
			}
			return nil
		},
		"Fetch": func(s *Snapshot) error {
			return s.Fetch(b.Context(), set, func(int64, []byte) error { return nil })
		},
	}
	for name, store := range map[string]*distant{
		"warm": nil, "cold": nil,
		"remote-5ms":  {Store: far, latency: 5 * time.Millisecond},
		"remote-20ms": {Store: far, latency: 20 * time.Millisecond},
		"remote-50ms": {Store: far, latency: 50 * time.Millisecond},
	} {
		for how, read := range read {
			b.Run(name+"/"+how, func(b *testing.B) {
				r := local
				if store != nil {
					r = NewRepository(store)
				}
				b.SetBytes(int64(page.Total(set)) * page.Size)
				for b.Loop() {
					b.StopTimer()
					s := open(b, r, ref)
					if name == "cold" {
						evict(b, local, packKey(ref.ID))
					}
					if store != nil {
						store.bytes.Store(0)
					}
					b.StartTimer()
					if err := read(s); err != nil {
						b.Fatal(err)
					}
				}
				if store != nil {
					b.ReportMetric(float64(store.bytes.Load())/float64(page.Total(set)*page.Size), "read/set")
				}
			})
		}
	}
}

// evict takes an object out of the host's page cache.
func evict(b *testing.B, r *Repository, key string) {
	b.Helper()
	o, err := r.store.Open(b.Context(), key)
	if err != nil {
		b.Fatal(err)
	}
	defer o.Close()
	if err := unix.Fadvise(int(o.(interface{ Fd() uintptr }).Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkManifest is a 4 GiB image in runs of four pages, from 48 packs.
func BenchmarkManifest(b *testing.B) {
	m := sample()
	const pages = 4 << 30 / page.Size
	m.metadata.MemoryBytes = 4 << 30
	m.packs, m.runs = nil, nil
	for i := range maxPacks {
		p := sample().packs[1]
		p.id = ID(fmt.Sprintf("%026d", i))
		p.summary.Pages = pages
		m.packs = append(m.packs, p)
	}
	for n := uint32(0); n < pages; n += 4 {
		m.runs = append(m.runs, run{first: n, count: 4, pack: n / 4 % maxPacks, packPage: n})
	}
	file, err := m.encode(0)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("encode", func(b *testing.B) {
		for b.Loop() {
			m.encode(0)
		}
	})
	b.Run("parse", func(b *testing.B) {
		b.SetBytes(int64(len(file)))
		for b.Loop() {
			if _, err := parseManifest(goldenID, file); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("overlay", func(b *testing.B) {
		var over []run
		for n := uint32(1); n < pages; n += 200 {
			over = append(over, run{first: n, count: 1, pack: maxPacks, packPage: n})
		}
		for b.Loop() {
			overlay(m.runs, over)
		}
	})
}
