package pack

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
)

// farFile is a countingFile in a remote store.
type farFile struct{ countingFile }

func (*farFile) Remote() bool { return true }

func TestFetch(t *testing.T) {
	content := pages(10*FramePages+3, 1)
	for _, codec := range []Codec{Raw, Zstd} {
		file, sum := write(t, codec, content, 16)
		near := &countingFile{ReaderAt: bytes.NewReader(file)}
		far := &farFile{countingFile{ReaderAt: bytes.NewReader(file)}}
		t.Run("local "+codec.String(), func(t *testing.T) {
			r, err := Open(near, int64(len(file)), &sum, NewCache(1<<20))
			if err != nil {
				t.Fatal(err)
			}
			checkFetch(t, r, near, content)
			if n := len(r.cache.frames); n != 1 { // that which checkFetch read before
				t.Errorf("%d frames of a local pack were kept", n)
			}
		})
		t.Run("remote "+codec.String(), func(t *testing.T) {
			r, err := Open(far, int64(len(file)), &sum, NewCache(1<<20))
			if err != nil {
				t.Fatal(err)
			}
			checkFetch(t, r, &far.countingFile, content)
			far.reads = 0
			for _, p := range [][]byte{make([]byte, page.Size), make([]byte, FrameBytes)} {
				if _, err := r.ReadAt(p, 7*FrameBytes); err != nil || !bytes.Equal(p, content[7*FrameBytes:][:len(p)]) {
					t.Errorf("read of %d bytes that were fetched: %v", len(p), err)
				}
			}
			if far.reads != 0 {
				t.Errorf("%d reads of what was fetched", far.reads)
			}
			p := make([]byte, page.Size)
			if _, err := r.Peek(p, 7*FrameBytes); err != nil || !bytes.Equal(p, content[7*FrameBytes:][:len(p)]) {
				t.Errorf("Peek of what was fetched: %v", err)
			}
			if _, err := r.Peek(p, 6*FrameBytes); err == nil || far.reads != 0 {
				t.Errorf("Peek of what was not fetched: %v, %d reads", err, far.reads)
			}
		})
	}
}

// checkFetch fetches some frames, of which one is in the cache, with one read.
func checkFetch(t *testing.T, r *Reader, file *countingFile, content []byte) {
	t.Helper()
	if _, err := r.ReadAt(make([]byte, 1), 5*FrameBytes); err != nil {
		t.Fatal(err)
	}
	file.reads = 0
	frames := []int64{2, 3, 5, 7, 10}
	for k, f := range r.Fetch(frames) {
		want := content[frames[k]*FrameBytes:]
		if want = want[:min(FrameBytes, len(want))]; f.Err != nil || !bytes.Equal(f.Pages, want) {
			t.Errorf("frame %d: %d bytes, %v", frames[k], len(f.Pages), f.Err)
		}
	}
	if file.reads != 1 {
		t.Errorf("%d reads", file.reads)
	}
}

func TestFetchTellsDamageFrameByFrame(t *testing.T) {
	file, sum := write(t, Raw, pages(8*FramePages, 1), 16)
	r, err := Open(bytes.NewReader(file), int64(len(file)), &sum, NewCache(1<<20))
	if err != nil {
		t.Fatal(err)
	}
	file[headerSize+2*FrameBytes] ^= 1
	for k, f := range r.Fetch([]int64{1, 2, 3}) {
		if bad := k == 1; bad != errors.Is(f.Err, ErrCorrupt) || bad != (f.Pages == nil) {
			t.Errorf("frame %d: %v", k+1, f.Err)
		}
	}
	cut := bytes.NewReader(file[:headerSize+5*FrameBytes+7])
	r.file = cut
	for k, f := range r.Fetch([]int64{4, 5}) {
		if bad := k == 1; bad != errors.Is(f.Err, ErrCorrupt) || bad && !strings.Contains(f.Err.Error(), "cut off") {
			t.Errorf("frame %d of a file that was cut: %v", k+4, f.Err)
		}
	}
}

func TestCut(t *testing.T) {
	file, sum := write(t, Raw, pages(60*FramePages, 1), 16)
	r, err := Open(bytes.NewReader(file), int64(len(file)), &sum, nil)
	if err != nil {
		t.Fatal(err)
	}
	var many []int64
	for i := range int64(60) {
		many = append(many, i)
	}
	tests := []struct {
		frames []int64
		budget int64 // frames
		n      int
		wasted int64 // frames
	}{
		{[]int64{4}, 9, 1, 0},
		{[]int64{4, 5, 6}, 0, 3, 0},
		{[]int64{4, 6, 7}, 0, 1, 0},
		{[]int64{4, 6, 7, 9}, 1, 3, 1},
		{[]int64{4, 6, 7, 9}, 2, 4, 2},
		{[]int64{4, 7, 8}, 9, 1, 0}, // the hole is too large
		{many, 0, requestFrames, 0},
		{[]int64{0, 2, 4, 6, 8, 10, 12, 14, 16}, 30, 8, 7}, // 1 MiB at most
	}
	for _, test := range tests {
		n, wasted := r.Cut(test.frames, test.budget*FrameBytes)
		if n != test.n || wasted != test.wasted*FrameBytes {
			t.Errorf("Cut(%v, %d frames) = %d, %d bytes", test.frames, test.budget, n, wasted)
		}
	}
	small, sum := write(t, Zstd, bytes.Repeat([]byte{1}, 60*FrameBytes), 16)
	if r, err = Open(bytes.NewReader(small), int64(len(small)), &sum, nil); err != nil {
		t.Fatal(err)
	}
	if n, _ := r.Cut(many, 0); n != requestFrames {
		t.Errorf("%d small frames in a request", n)
	}
}
