package pack

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/page"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pages returns n pages, of which every other compresses.
func pages(n int, seed byte) []byte {
	b := make([]byte, n*page.Size)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	for i := 0; i < n; i += 2 {
		copy(b[i*page.Size:(i+1)*page.Size], bytes.Repeat([]byte{byte(i), seed}, page.Size/2))
	}
	return b
}

func write(t testing.TB, codec Codec, content []byte, step int) ([]byte, Summary) {
	t.Helper()
	var file bytes.Buffer
	w, err := NewWriter(&file, codec)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for b := content; len(b) > 0; {
		n := min(step*page.Size, len(b))
		if err := w.Append(b[:n]); err != nil {
			t.Fatal(err)
		}
		b = b[n:]
	}
	if w.Pages() != int64(len(content)/page.Size) {
		t.Errorf("Pages() = %d", w.Pages())
	}
	s, err := w.Close()
	if err != nil {
		t.Fatal(err)
	}
	if s.Size != int64(file.Len()) || s.Pages != int64(len(content)/page.Size) {
		t.Errorf("summary %+v of %d bytes", s, file.Len())
	}
	return file.Bytes(), s
}

func TestRoundTrip(t *testing.T) {
	for _, codec := range []Codec{Raw, Zstd} {
		for _, n := range []int{1, 16, 17, 100} {
			for _, step := range []int{1, 7, 64} {
				t.Run(fmt.Sprintf("%v/%d/%d", codec, n, step), func(t *testing.T) {
					content := pages(n, 1)
					file, sum := write(t, codec, content, step)
					for _, cache := range []*Cache{nil, NewCache(0), NewCache(1 << 20)} {
						r, err := Open(bytes.NewReader(file), int64(len(file)), &sum, cache)
						if err != nil {
							t.Fatal(err)
						}
						checkReads(t, r, content)
						if err := r.Verify(nil); err != nil {
							t.Errorf("Verify: %v", err)
						}
					}
				})
			}
		}
	}
}

// checkReads reads at random places, also across frames and beyond the end.
func checkReads(t *testing.T, r *Reader, content []byte) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		off := rnd.IntN(len(content) + 1)
		p := make([]byte, rnd.IntN(3*FrameBytes))
		want := content[off:min(off+len(p), len(content))]
		for name, read := range map[string]func([]byte, int64) (int, error){"ReadAt": r.ReadAt, "Peek": r.Peek} {
			room := append(p, 0xAA) // must not be touched
			n, err := read(room[:len(p):len(p)], int64(off))
			if n != len(want) || !bytes.Equal(room[:n], want) || room[len(p)] != 0xAA {
				t.Fatalf("%s %d bytes at %d = %d, wrong bytes", name, len(p), off, n)
			}
			if n < len(p) && err != io.EOF || n == len(p) && err != nil {
				t.Fatalf("%s %d bytes at %d = %d, %v", name, len(p), off, n, err)
			}
		}
	}
	if _, err := r.ReadAt(make([]byte, 1), -1); err == nil {
		t.Error("a negative offset was read")
	}
}

// Whatever byte of a pack is changed, nobody gets wrong data.
func TestEveryFlippedByteIsFound(t *testing.T) {
	for _, codec := range []Codec{Raw, Zstd} {
		content := pages(20, 2)
		file, sum := write(t, codec, content, 3)
		step := 1
		if len(file) > 4000 {
			step = 97 // frames are long
		}
		for at := 0; at < len(file); at += step {
			bad := bytes.Clone(file)
			bad[at] ^= 0x10
			r, err := Open(bytes.NewReader(bad), int64(len(bad)), &sum, NewCache(1<<20))
			if err == nil {
				got := make([]byte, len(content))
				_, err = r.ReadAt(got, 0)
				verr := r.Verify(nil)
				if at < headerSize && err == nil { // no reader needs the header
					if !bytes.Equal(got, content) {
						t.Fatalf("%v: byte %d: wrong pages", codec, at)
					}
					err = verr
				}
				if verr == nil {
					t.Fatalf("%v: byte %d: Verify finds nothing", codec, at)
				}
			}
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
				t.Fatalf("%v: byte %d flipped: %v", codec, at, err)
			}
		}
	}
}

func TestACorruptFrameSparesTheOthers(t *testing.T) {
	content := pages(40, 3)
	file, sum := write(t, Raw, content, 16)
	file[headerSize+FrameBytes+5] ^= 1 // frame 1 of 3
	r, err := Open(bytes.NewReader(file), int64(len(file)), &sum, NewCache(1<<20))
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 16)
	for _, off := range []int64{0, 2 * FrameBytes} {
		if _, err := r.ReadAt(got, off); err != nil || !bytes.Equal(got, content[off:off+16]) {
			t.Errorf("read at %d: %v", off, err)
		}
	}
	for range 2 { // the failure is not kept, and stays one
		if _, err := r.ReadAt(got, FrameBytes); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "frame 1") {
			t.Errorf("read of the corrupt frame: %v", err)
		}
	}
	if n, err := r.ReadAt(make([]byte, 2*FrameBytes), 0); n != FrameBytes || !errors.Is(err, ErrCorrupt) {
		t.Errorf("read across = %d, %v", n, err)
	}
}

func TestCutOff(t *testing.T) {
	file, sum := write(t, Raw, pages(20, 4), 16)
	for _, n := range []int{0, 1, headerSize, len(file) / 2, len(file) - 1} {
		for _, want := range []*Summary{nil, &sum} {
			if _, err := Open(bytes.NewReader(file[:n]), int64(n), want, nil); !errors.Is(err, ErrCorrupt) {
				t.Errorf("cut to %d bytes: %v", n, err)
			}
		}
		// The store's idea of the size may be stale.
		if _, err := Open(bytes.NewReader(file[:n]), int64(len(file)), &sum, nil); !errors.Is(err, ErrCorrupt) {
			t.Errorf("cut to %d bytes behind our back: %v", n, err)
		}
	}
}

func TestNotTheRecordedPack(t *testing.T) {
	_, sum := write(t, Raw, pages(20, 5), 16)
	other, _ := write(t, Raw, pages(20, 6), 16)
	if _, err := Open(bytes.NewReader(other), int64(len(other)), &sum, nil); !errors.Is(err, ErrCorrupt) {
		t.Errorf("Open: %v", err)
	}
}

func TestOtherVersionsAreRefusedInWords(t *testing.T) {
	for _, version := range []uint32{1, Version + 1} {
		file, sum := write(t, Raw, pages(1, 7), 1)
		binary.LittleEndian.PutUint32(file[len(file)-trailerSize+16:], version)
		for _, want := range []*Summary{nil, &sum} {
			_, err := Open(bytes.NewReader(file), int64(len(file)), want, nil)
			if !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), fmt.Sprintf("version %d,", version)) {
				t.Errorf("Open: %v", err)
			}
		}
	}
}

// Who knows which pack it must be opens it with a single read.
func TestOpenReadsOnce(t *testing.T) {
	file, sum := write(t, Zstd, pages(100, 7), 16)
	f := &countingFile{ReaderAt: bytes.NewReader(file)}
	if _, err := Open(f, int64(len(file)), &sum, nil); err != nil || f.reads != 1 {
		t.Errorf("Open read %d times, %v", f.reads, err)
	}
}

// A pack is the same pack in any codec; one page more or other bytes make another.
func TestSumDoesNotDependOnTheCodec(t *testing.T) {
	content := pages(33, 7)
	_, raw := write(t, Raw, content, 16)
	file, zstd := write(t, Zstd, content, 5)
	if raw.Size == zstd.Size || !raw.Same(zstd) {
		t.Errorf("raw %+v, zstd %+v", raw, zstd)
	}
	raw.Size = 0 // as a manifest records it
	if r, err := Open(bytes.NewReader(file), int64(len(file)), &raw, nil); err != nil || r.Summary() != zstd {
		t.Errorf("Open: %v", err)
	}
	for name, other := range map[string][]byte{
		"a page less": content[:32*page.Size],
		"zeros":       make([]byte, len(content)),
	} {
		if _, sum := write(t, Raw, other, 16); sum.Same(raw) {
			t.Errorf("%s: the same sum", name)
		}
	}
}

// failingWriter takes n bytes, and then no more.
type failingWriter struct {
	n   int
	err error
}

func (w *failingWriter) Write(p []byte) (int, error) {
	if len(p) > w.n {
		return w.n, w.err
	}
	w.n -= len(p)
	return len(p), nil
}

func TestWriterReportsAFullDisk(t *testing.T) {
	full := errors.New("full")
	for _, room := range []int{0, headerSize, headerSize + 100, headerSize + 3*FrameBytes, headerSize + 200*page.Size} {
		w, err := NewWriter(&failingWriter{room, full}, Raw)
		if err != nil {
			t.Fatal(err)
		}
		for range 200 {
			if err := w.Append(pages(1, 8)); err != nil && !errors.Is(err, full) {
				t.Errorf("Append: %v", err)
			}
		}
		if _, err := w.Close(); !errors.Is(err, full) {
			t.Errorf("Close after %d bytes: %v", room, err)
		}
		w.Abort()
	}
}

func TestWriterMisuse(t *testing.T) {
	w, err := NewWriter(io.Discard, Raw)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Append(make([]byte, 5)); err == nil {
		t.Error("part of a page was taken")
	}
	if _, err := w.Close(); err == nil {
		t.Error("an empty pack was written")
	}
	if _, err := w.Close(); err == nil {
		t.Error("closed twice")
	}
	if _, err := NewWriter(io.Discard, 7); err == nil {
		t.Error("an unknown codec was taken")
	}
}

// countingFile counts reads.
type countingFile struct {
	io.ReaderAt
	mu    sync.Mutex
	reads int
}

func (f *countingFile) ReadAt(p []byte, off int64) (int, error) {
	f.mu.Lock()
	f.reads++
	f.mu.Unlock()
	return f.ReaderAt.ReadAt(p, off)
}

func TestManyReadersOfAFrameReadItOnce(t *testing.T) {
	content := pages(64, 9)
	file, sum := write(t, Zstd, content, 16)
	f := &countingFile{ReaderAt: bytes.NewReader(file)}
	r, err := Open(f, int64(len(file)), &sum, NewCache(2*FrameBytes))
	if err != nil {
		t.Fatal(err)
	}
	f.reads = 0
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			got := make([]byte, page.Size)
			if _, err := r.ReadAt(got, int64(i)*page.Size); err != nil || !bytes.Equal(got, content[i*page.Size:(i+1)*page.Size]) {
				t.Errorf("page %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if f.reads != 1 {
		t.Errorf("the frame was read %d times", f.reads)
	}
	for i := range 4 { // more than the cache holds
		if _, err := r.ReadAt(make([]byte, 1), int64(i)*FrameBytes); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(r.cache.frames); n != 2 || r.cache.recent.Len() != 2 {
		t.Errorf("the cache holds %d frames", n)
	}
}

// The golden file was written by the first release with this format version;
// it must be readable for ever.
func TestGolden(t *testing.T) {
	path := filepath.Join("testdata", "v2.pack")
	content := append(bytes.Repeat([]byte{1}, FrameBytes), pages(2, 1)[page.Size:]...) // a zstd frame and a raw one
	if *update {
		file, _ := write(t, Zstd, content, 1)
		if err := os.WriteFile(path, file, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(bytes.NewReader(file), int64(len(file)), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := r.Summary().Sum.String(), "add022bacc4e7af3d04b497e88402cd9fb9c4926ea740d6efddcce8205a8bc8a"; got != want {
		t.Errorf("sum %s, want %s", got, want)
	}
	checkReads(t, r, content)
}

// FuzzOpen reads arbitrary files: it must end with an error or with pages, but
// never panic or allocate without bound.
func FuzzOpen(f *testing.F) {
	for _, codec := range []Codec{Raw, Zstd} {
		file, _ := write(f, codec, bytes.Repeat([]byte{1}, 2*page.Size), 1)
		f.Add(file, int64(2))
	}
	f.Fuzz(func(t *testing.T, file []byte, wanted int64) {
		file = reseal(file)
		r, err := Open(bytes.NewReader(file), int64(len(file)), nil, NewCache(FrameBytes))
		if _, werr := Open(bytes.NewReader(file), int64(len(file)), &Summary{Pages: wanted}, nil); !errors.Is(werr, ErrCorrupt) && !errors.Is(werr, ErrVersion) {
			t.Errorf("Open as a pack with the sum 0: %v", werr)
		}
		if err != nil {
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
				t.Errorf("Open: %v", err)
			}
			return
		}
		sum := r.Summary()
		if _, err := Open(bytes.NewReader(file), int64(len(file)), &sum, nil); err != nil {
			t.Errorf("Open as what it is: %v", err)
		}
		p := make([]byte, 2*FrameBytes)
		r.ReadAt(p, 0)
		r.ReadAt(p[:10], r.Summary().Pages*page.Size-20)
		r.Peek(p, 0)
		whole := r.Verify(nil) == nil
		fetched := r.Fetch([]int64{0, frames(sum.Pages) - 1}[:min(2, frames(sum.Pages))])
		if whole && fetched[0].Err != nil {
			t.Errorf("Fetch of a pack that verifies: %v", fetched[0].Err)
		}
		switch s, err := Recode(t.Context(), io.Discard, r, Raw); {
		case whole && (err != nil || !s.Same(sum)):
			t.Errorf("Recode of a pack that verifies: %+v, %v, want %+v", s, err, sum)
		case err != nil && !errors.Is(err, ErrCorrupt):
			t.Errorf("Recode: %v", err)
		}
	})
}

// reseal makes the checksum of a mutated file right where its trailer can be
// followed, so that mutations get beyond it.
func reseal(file []byte) []byte {
	if len(file) < headerSize+trailerSize {
		return file
	}
	file = bytes.Clone(file)
	pages := binary.LittleEndian.Uint64(file[len(file)-trailerSize:])
	if pages > MaxPages || tailSize(int64(pages)) > int64(len(file)) {
		return file
	}
	sum := sha256.Sum256(file[int64(len(file))-tailSize(int64(pages)) : len(file)-sha256.Size])
	return append(file[:len(file)-sha256.Size], sum[:]...)
}

func BenchmarkWrite(b *testing.B) {
	content := pages(5120, 1) // 20 MiB
	for _, codec := range []Codec{Raw, Zstd} {
		b.Run(codec.String(), func(b *testing.B) {
			b.SetBytes(int64(len(content)))
			for b.Loop() {
				w, err := NewWriter(io.Discard, codec)
				if err != nil {
					b.Fatal(err)
				}
				if err := w.Append(content); err != nil {
					b.Fatal(err)
				}
				if _, err := w.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkReadAt(b *testing.B) {
	content := pages(5120, 1)
	for _, codec := range []Codec{Raw, Zstd} {
		bytesFile, sum := write(b, codec, content, 16)
		path := filepath.Join(b.TempDir(), "pack")
		if err := os.WriteFile(path, bytesFile, 0o600); err != nil {
			b.Fatal(err)
		}
		file, err := os.Open(path)
		if err != nil {
			b.Fatal(err)
		}
		defer file.Close()
		for _, size := range []int{4 << 10, 128 << 10} {
			b.Run(fmt.Sprintf("%v/random-%dK", codec, size>>10), func(b *testing.B) {
				r, err := Open(file, sum.Size, &sum, NewCache(1<<20))
				if err != nil {
					b.Fatal(err)
				}
				rnd := rand.New(rand.NewPCG(1, 2))
				p := make([]byte, size)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := r.ReadAt(p, int64(rnd.IntN(len(content)/size))*int64(size)); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
