package snapshot

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
)

// benchMachine has 512 MiB, of which 150 MiB are not zero, and a snapshot.
func benchMachine(b *testing.B) (*Repository, *machine, *Snapshot) {
	b.Helper()
	r, _ := newRepository(b)
	m := newMachine(512 << 20 / page.Size)
	rnd := rand.NewChaCha8([32]byte{1})
	for i := 0; i < 150<<20; i += 1 << 20 {
		rnd.Read(m.ram[3*i : 3*i+1<<20]) // every third MiB
	}
	ref, _ := m.capture(b, r, nil)
	return r, m, open(b, r, ref)
}

// BenchmarkCapture captures 20 MiB of dirty pages, in runs of the given length,
// of which a third are equal to the parent's.
func BenchmarkCapture(b *testing.B) {
	for _, runPages := range []int{1, 16, 512} {
		b.Run(fmt.Sprintf("runs-of-%d", runPages), func(b *testing.B) {
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

func BenchmarkOpen(b *testing.B) {
	r, _, s := benchMachine(b)
	for b.Loop() {
		o, err := r.Open(b.Context(), s.Ref())
		if err != nil {
			b.Fatal(err)
		}
		o.Close()
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
