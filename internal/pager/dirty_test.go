package pager

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/page"
)

// dirtyOf returns what Dirty says of a child's memory after checking that both
// ways to ask the kernel agree.
func dirtyOf(t testing.TB, c *child, addr uint64, length int64) []page.Run {
	t.Helper()
	runs, err := Dirty(c.pid(), uintptr(addr), length)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", c.pid()))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	read, err := readPagemap(f, uintptr(addr), length, dirtyPages)
	if err != nil {
		t.Fatal(err)
	}
	scanned, err := scanPagemap(f, uintptr(addr), length, dirtyPages)
	if errors.Is(err, unix.ENOTTY) {
		scanned, err = read, nil // an older kernel
	}
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(runs, read) || !slices.Equal(read, scanned) {
		t.Errorf("Dirty says %d pages, %.200v…; pagemap %d, %.200v…; PAGEMAP_SCAN %d, %.200v…", page.Total(runs), fmt.Sprint(runs),
			page.Total(read), fmt.Sprint(read), page.Total(scanned), fmt.Sprint(scanned))
	}
	return runs
}

// testFiles are the kinds of file a VMM's memory is mapped from, of pattern in
// the first half and a hole in the second.
func testFiles(t *testing.T, size int64) map[string]string {
	t.Helper()
	l := newTestSlot(t, size)
	half := sourceFunc(func(p []byte, off int64) (int, error) {
		clear(p)
		if off < size/2 {
			_, _ = pattern(size).ReadAt(p[:min(int64(len(p)), size/2-off)], off)
		}
		return len(p), nil
	})
	if err := l.Bind(half); err != nil {
		t.Fatal(err)
	}
	flat := filepath.Join(t.TempDir(), "flat")
	content := make([]byte, size/2)
	_, _ = half.ReadAt(content, 0)
	if err := errors.Join(os.WriteFile(flat, content, 0o600), os.Truncate(flat, size)); err != nil {
		t.Fatal(err)
	}
	return map[string]string{"slot": l.Path(), "flat file": flat}
}

// Swapped pages are not covered: that needs a host with swap.
func TestDirty(t *testing.T) {
	const pages = testSize / page.Size
	at := func(p int64) int64 { return p * page.Size }
	tests := []struct {
		name string
		do   []command
		want []page.Run
	}{
		{"untouched", nil, nil},
		{"read", []command{{Op: "read", Len: testSize}}, nil},
		{"read in the hole", []command{{Op: "read", Off: at(pages - 3), Len: 1}}, nil},
		{"written", []command{{Op: "write", Off: at(3) + 100, Len: page.Size, Byte: 1}}, []page.Run{{First: 3, Count: 2}}},
		{"written in the hole", []command{{Op: "write", Off: at(pages - 1), Len: 1, Byte: 1}}, []page.Run{{First: pages - 1, Count: 1}}},
		{"read, then written", []command{{Op: "read", Len: testSize}, {Op: "write", Off: 0, Len: 1}, {Op: "write", Off: at(2), Len: 1}},
			[]page.Run{{First: 0, Count: 1}, {First: 2, Count: 1}}},
		{"written with the same", []command{{Op: "rewrite", Off: at(8), Len: 2 * page.Size}}, []page.Run{{First: 8, Count: 2}}},
		{"zeros written in the hole", []command{{Op: "rewrite", Off: at(pages - 2), Len: page.Size}}, []page.Run{{First: pages - 2, Count: 1}}},
		{"written, dropped", []command{{Op: "write", Off: at(5), Len: 2 * page.Size, Byte: 1}, {Op: "dontneed", Off: at(6), Len: page.Size}},
			[]page.Run{{First: 5, Count: 1}}},
		{"written, dropped, read", []command{{Op: "write", Off: at(5), Len: page.Size, Byte: 1}, {Op: "dontneed", Off: at(5), Len: page.Size},
			{Op: "read", Len: testSize}}, nil},
		{"written in a read-only part", []command{{Op: "write", Off: at(5), Len: page.Size, Byte: 1}, {Op: "protect", Off: at(4), Len: 4 * page.Size}},
			[]page.Run{{First: 5, Count: 1}}},
	}
	for kind, path := range testFiles(t, testSize) {
		for _, tt := range tests {
			t.Run(kind+"/"+tt.name, func(t *testing.T) {
				c := startChild(t, "toucher")
				c.must(command{Op: "map", Path: path, Len: testSize})
				for _, do := range tt.do {
					c.must(do)
				}
				addr, length, err := Mapping(c.pid(), path)
				if err != nil || length != testSize {
					t.Fatalf("Mapping: length %d, %v", length, err)
				}
				if got := dirtyOf(t, c, uint64(addr), length); !slices.Equal(got, tt.want) {
					t.Errorf("dirty: %v, want %v", got, tt.want)
				}
			})
		}
	}
}

func TestDirtyCountsTheZeroPage(t *testing.T) {
	c := startChild(t, "toucher")
	addr := c.must(command{Op: "anonymous", Len: testSize}).Addr
	c.must(command{Op: "read", Off: 3 * page.Size, Len: page.Size}) // maps the zero page
	if got, want := dirtyOf(t, c, addr, testSize), []page.Run{{First: 3, Count: 1}}; !slices.Equal(got, want) {
		t.Errorf("dirty: %v, want %v", got, want)
	}
}

// More runs than one answer of PAGEMAP_SCAN holds, at random.
func TestDirtyOfManyRuns(t *testing.T) {
	const size, pages = 128 << 20, 128 << 20 / page.Size
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	path := filepath.Join(t.TempDir(), "flat")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, size)); err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "toucher")
	addr := c.must(command{Op: "map", Path: path, Len: size}).Addr
	var want []page.Run
	for p := uint64(0); p < pages; p += 1 + rnd.Uint64N(5) {
		want = append(want, page.Run{First: p, Count: 1})
	}
	for _, r := range want {
		c.must(command{Op: "write", Off: r.Offset(), Len: 1, Byte: 1})
	}
	if got := dirtyOf(t, c, addr, size); !slices.Equal(got, page.Normalize(want)) {
		t.Errorf("%d dirty runs with %d pages, want %d", len(got), page.Total(got), len(want))
	}
}

func TestDirtyRefuses(t *testing.T) {
	c := startChild(t, "toucher")
	addr := uintptr(c.must(command{Op: "anonymous", Len: testSize}).Addr)
	c.must(command{Op: "unmap", Off: testSize / 2, Len: page.Size})
	if _, err := Dirty(c.pid(), addr, testSize); !errors.Is(err, ErrNotMapped) {
		t.Errorf("a range with a gap: %v, want ErrNotMapped", err)
	}
	if _, err := Dirty(c.pid(), addr+1, page.Size); err == nil {
		t.Error("an unaligned range was accepted")
	}
	c.kill()
	if _, err := Dirty(c.pid(), addr, page.Size); !errors.Is(err, ErrNoProcess) {
		t.Errorf("a dead process: %v, want ErrNoProcess", err)
	}
}

func TestProbeDirty(t *testing.T) {
	if err := ProbeDirty(); err != nil {
		t.Error(err)
	}
}
