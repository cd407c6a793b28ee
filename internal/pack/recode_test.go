package pack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
)

func TestRecode(t *testing.T) {
	contents := map[string][]byte{
		"one page":       pages(1, 1),
		"many frames":    pages(5*requestFrames*FramePages+3, 2),
		"very sparse":    bytes.Repeat([]byte{1}, 3*requestFrames*FrameBytes),
		"incompressible": append(pages(2, 3)[page.Size:], pages(2, 4)[page.Size:]...),
	}
	for name, content := range contents {
		for _, from := range []Codec{Raw, Zstd} {
			for _, to := range []Codec{Raw, Zstd} {
				t.Run(fmt.Sprintf("%s/%v to %v", name, from, to), func(t *testing.T) {
					file, sum := write(t, from, content, 16)
					want, wantSum := write(t, to, content, 16)
					src, err := Open(bytes.NewReader(file), int64(len(file)), &sum, nil)
					if err != nil {
						t.Fatal(err)
					}
					var got bytes.Buffer
					s, err := Recode(t.Context(), &got, src, to)
					if err != nil || s != wantSum || !s.Same(sum) {
						t.Fatalf("recoded to %+v, %v, want %+v", s, err, wantSum)
					}
					if !bytes.Equal(got.Bytes(), want) {
						t.Error("the file is not the one that a capture would have written with this codec")
					}
				})
			}
		}
	}
}

func TestRecodeFails(t *testing.T) {
	file, sum := write(t, Raw, pages(40*FramePages, 1), 16)
	open := func(change func(file []byte)) *Reader {
		file := bytes.Clone(file)
		src, err := Open(bytes.NewReader(file), int64(len(file)), &sum, nil)
		if err != nil {
			t.Fatal(err)
		}
		change(file)
		return src
	}
	none := func([]byte) {}
	t.Run("corrupt frame", func(t *testing.T) {
		src := open(func(file []byte) { file[headerSize+17*FrameBytes+5] ^= 1 })
		_, err := Recode(t.Context(), io.Discard, src, Zstd)
		if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "frame 17") {
			t.Errorf("the error is %v", err)
		}
	})
	t.Run("full disk", func(t *testing.T) {
		full := errors.New("full")
		if _, err := Recode(t.Context(), &failingWriter{5 * FrameBytes, full}, open(none), Raw); !errors.Is(err, full) {
			t.Errorf("the error is %v", err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Recode(ctx, io.Discard, open(none), Raw); !errors.Is(err, context.Canceled) {
			t.Errorf("the error is %v", err)
		}
	})
	t.Run("unknown codec", func(t *testing.T) {
		if _, err := Recode(t.Context(), io.Discard, open(none), 7); err == nil {
			t.Error("it was taken")
		}
	})
}

func BenchmarkRecode(b *testing.B) {
	content := pages(5120, 1) // 20 MiB
	for _, from := range []Codec{Raw, Zstd} {
		file, sum := write(b, from, content, 16)
		for _, to := range []Codec{Raw, Zstd} {
			b.Run(fmt.Sprintf("%v-to-%v", from, to), func(b *testing.B) {
				src, err := Open(bytes.NewReader(file), int64(len(file)), &sum, nil)
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(len(content)))
				for b.Loop() {
					if _, err := Recode(b.Context(), io.Discard, src, to); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
