package pager

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
)

func TestProcessMemory(t *testing.T) {
	path := testFiles(t, testSize)["flat file"]
	c := startChild(t, "toucher")
	addr := uintptr(c.must(command{Op: "map", Path: path, Len: testSize}).Addr)
	c.must(command{Op: "write", Off: page.Size, Len: page.Size, Byte: 9})
	want := make([]byte, testSize)
	_, _ = pattern(testSize).ReadAt(want[:testSize/2], 0)
	copy(want[page.Size:], bytes.Repeat([]byte{9}, page.Size))

	mem := ProcessMemory(c.pid(), addr, testSize)
	tests := []struct {
		off, length int64
		n           int
		err         error
	}{
		{0, testSize, testSize, nil},
		{page.Size - 10, 20, 20, nil},
		{testSize - 1, 1, 1, nil},
		{testSize - 1, 2, 1, io.EOF},
		{testSize, 1, 0, io.EOF},
		{100, 0, 0, nil},
	}
	for _, tt := range tests {
		p := make([]byte, tt.length)
		n, err := mem.ReadAt(p, tt.off)
		if n != tt.n || err != tt.err {
			t.Errorf("ReadAt(%d bytes, %d) = %d, %v; want %d, %v", tt.length, tt.off, n, err, tt.n, tt.err)
		}
		if n > 0 && !bytes.Equal(p[:n], want[tt.off:tt.off+int64(n)]) {
			t.Errorf("ReadAt(%d bytes, %d) returned wrong bytes", tt.length, tt.off)
		}
	}
	if _, err := mem.ReadAt(make([]byte, 1), -1); err == nil {
		t.Error("a negative offset was accepted")
	}
}

func TestProcessMemoryFails(t *testing.T) {
	c := startChild(t, "toucher")
	addr := uintptr(c.must(command{Op: "anonymous", Len: testSize}).Addr)
	c.must(command{Op: "unmap", Off: testSize - page.Size, Len: page.Size})
	mem := ProcessMemory(c.pid(), addr, testSize)
	n, err := mem.ReadAt(make([]byte, testSize), 0)
	if n != testSize-page.Size || !errors.Is(err, ErrNotMapped) {
		t.Errorf("up to a gap: %d, %v; want %d, ErrNotMapped", n, err, testSize-page.Size)
	}
	c.kill()
	if n, err := mem.ReadAt(make([]byte, page.Size), 0); n != 0 || !errors.Is(err, ErrNoProcess) {
		t.Errorf("of a dead process: %d, %v; want ErrNoProcess", n, err)
	}
}
