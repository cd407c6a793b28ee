package pager

import (
	"errors"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/page"
)

const testSize = 4 << 20

// mountTest mounts a server that ends with the test.
func mountTest(t testing.TB) *Server {
	t.Helper()
	s, err := Mount(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func newTestSlot(t testing.TB, size int64) *Slot {
	t.Helper()
	l, err := mountTest(t).NewSlot("ram", size)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// sourceFunc makes a function a source.
type sourceFunc func(p []byte, off int64) (int, error)

func (f sourceFunc) ReadAt(p []byte, off int64) (int, error) { return f(p, off) }

// waitFailed waits for a slot's failure and returns it.
func waitFailed(t testing.TB, l *Slot) error {
	t.Helper()
	select {
	case <-l.Failed():
		return l.Err()
	case <-time.After(time.Minute):
		t.Fatal("the slot did not fail")
		return nil
	}
}

func TestMappedReadsAreBitExact(t *testing.T) {
	const size = testSize + 5*page.Size // not a multiple of the readahead
	l := newTestSlot(t, size)
	if err := l.Bind(pattern(size)); err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: size})
	for _, r := range [][2]int64{{size - page.Size, page.Size}, {7 * page.Size, 3}, {0, size}, {0, size}} {
		if got, want := c.must(command{Op: "read", Off: r[0], Len: r[1]}).Sum, pattern(size).sum(r[0], r[1]); got != want {
			t.Errorf("bytes %d+%d have checksum %s, want %s", r[0], r[1], got, want)
		}
	}
	if s := l.Stats(); s.BytesRead != size || s.Reads < size/maxRead {
		t.Errorf("stats %+v, want each of the %d bytes read once", s, size)
	}
	c.must(command{Op: "write", Off: 0, Len: page.Size, Byte: 7})
	c.must(command{Op: "dontneed", Off: 0, Len: page.Size})
	if got, want := c.must(command{Op: "read", Len: page.Size}).Sum, pattern(size).sum(0, page.Size); got != want {
		t.Error("a write of one process reached the file")
	}
	if err := l.Err(); err != nil {
		t.Error(err)
	}
}

func TestTwoMappingsAtOnce(t *testing.T) {
	l := newTestSlot(t, testSize)
	if err := l.Bind(pattern(testSize)); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 2 {
		c := startChild(t, "toucher")
		c.must(command{Op: "map", Path: l.Path(), Len: testSize})
		wg.Go(func() {
			for off := int64(0); off < testSize; off += testSize / 16 {
				if got := c.try(command{Op: "read", Off: off, Len: testSize / 16}); got.Sum != pattern(testSize).sum(off, testSize/16) {
					t.Errorf("bytes at %d differ: %+v", off, got)
				}
			}
		})
	}
	wg.Wait()
}

func TestReadsAreServedConcurrently(t *testing.T) {
	s := mountTest(t)
	const readers = 3
	var waiting atomic.Int32
	all := make(chan struct{})
	meet := sourceFunc(func(p []byte, off int64) (int, error) { // returns when all are there
		if waiting.Add(1) == readers {
			close(all)
		}
		select {
		case <-all:
		case <-time.After(time.Minute):
			return 0, errors.New("the others were not served")
		}
		return pattern(testSize).ReadAt(p, off)
	})
	l, err := s.NewSlot("ram", testSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Bind(meet); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range int64(readers) {
		c := startChild(t, "toucher")
		c.must(command{Op: "map", Path: l.Path(), Len: testSize})
		wg.Go(func() {
			if r := c.try(command{Op: "read", Off: i * testSize / readers / page.Size * page.Size, Len: 1}); r.Fault {
				t.Error("a read failed")
			}
		})
	}
	wg.Wait()
}

func TestLateBind(t *testing.T) {
	l := newTestSlot(t, testSize)
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: testSize})
	if err := l.Bind(pattern(testSize)); err != nil {
		t.Fatal(err)
	}
	if err := l.Bind(Zero); !errors.Is(err, ErrBound) {
		t.Errorf("the second Bind returned %v, want ErrBound", err)
	}
	if got := c.must(command{Op: "read", Len: testSize}).Sum; got != pattern(testSize).sum(0, testSize) {
		t.Error("the mapping does not show the source that was bound late")
	}
}

func TestReadBeforeBindSpoilsTheSlot(t *testing.T) {
	l := newTestSlot(t, testSize)
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: testSize})
	if !c.try(command{Op: "read", Len: 1}).Fault {
		t.Fatal("reading an unbound slot was no fault")
	}
	if err := waitFailed(t, l); !errors.Is(err, ErrUnbound) {
		t.Errorf("the slot failed with %v, want ErrUnbound", err)
	}
	if err := l.Bind(Zero); !errors.Is(err, ErrUnbound) {
		t.Errorf("Bind of a spoiled slot returned %v, want ErrUnbound", err)
	}
}

func TestSourceErrorIsAFault(t *testing.T) {
	broken := errors.New("pack 7 is broken")
	short := pattern(testSize / 2)
	tests := []struct {
		name string
		src  io.ReaderAt
		want error
	}{
		{"error", sourceFunc(func([]byte, int64) (int, error) { return 0, broken }), broken},
		{"too short", short, io.ErrUnexpectedEOF},
		{"some bytes and an error", sourceFunc(func(p []byte, _ int64) (int, error) { return len(p) / 2, broken }), broken},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := newTestSlot(t, testSize)
			if err := l.Bind(tt.src); err != nil {
				t.Fatal(err)
			}
			c := startChild(t, "toucher")
			c.must(command{Op: "map", Path: l.Path(), Len: testSize})
			if !c.try(command{Op: "read", Off: testSize - page.Size, Len: 1}).Fault {
				t.Fatal("the error of the source was no fault")
			}
			err := waitFailed(t, l)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), "slot ram") {
				t.Errorf("the slot failed with %v, want %v of slot ram", err, tt.want)
			}
			c.try(command{Op: "read", Len: 1}) // the first failure is kept
			if again := l.Err(); again != err {
				t.Errorf("the failure changed to %v", again)
			}
		})
	}
}

func TestPushedBytesNeedNoRequest(t *testing.T) {
	l := newTestSlot(t, testSize)
	want := make([]byte, testSize/2)
	_, _ = pattern(testSize).ReadAt(want, 0)
	if err := l.Push(0, want); err == nil {
		t.Error("Push to an unbound slot succeeded")
	}
	if err := l.Bind(pattern(testSize)); err != nil {
		t.Fatal(err)
	}
	if err := l.Push(0, want); err == nil {
		t.Error("Push to a file that nobody opened succeeded")
	}
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: testSize})
	if err := l.Push(0, want); err != nil {
		t.Fatal(err)
	}
	if got := c.must(command{Op: "read", Len: testSize / 2}).Sum; got != pattern(testSize).sum(0, testSize/2) {
		t.Error("the pushed bytes are not what is read")
	}
	if s := l.Stats(); s.Reads != 0 {
		t.Errorf("%d requests were made for pushed bytes", s.Reads)
	}
	for _, bad := range []struct{ off, length int64 }{{1, page.Size}, {0, 1}, {-page.Size, page.Size}, {testSize, page.Size}} {
		if err := l.Push(bad.off, make([]byte, bad.length)); err == nil {
			t.Errorf("Push of %d bytes at %d succeeded", bad.length, bad.off)
		}
	}
}

func TestTheFileCannotBeChanged(t *testing.T) {
	l := newTestSlot(t, testSize)
	if err := l.Bind(Zero); err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "toucher")
	for _, op := range []string{"truncate", "pwrite", "fallocate"} {
		if r := c.try(command{Op: op, Path: l.Path()}); r.Error == "" {
			t.Errorf("%s succeeded", op)
		}
	}
	if err := os.Remove(l.Path()); err == nil {
		t.Error("the file could be removed")
	}
	if info, err := os.Stat(l.Path()); err != nil || info.Size() != testSize {
		t.Errorf("the file is %v, %v afterwards", info, err)
	}
}

func TestNewSlotRefuses(t *testing.T) {
	s := mountTest(t)
	if _, err := s.NewSlot("taken", page.Size); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		size int64
	}{{"taken", page.Size}, {"", page.Size}, {"a/b", page.Size}, {"..", page.Size}, {"x", 0}, {"x", -page.Size}, {"x", page.Size + 1}}
	for _, tt := range tests {
		if _, err := s.NewSlot(tt.name, tt.size); err == nil {
			t.Errorf("a slot %q of %d bytes was made", tt.name, tt.size)
		}
	}
}

// sparse is a source that is zero but for its last page, and says so.
type sparse struct{ sourceFunc }

func (sparse) Zeros(first, n uint64) uint64 {
	return min(n, testPages-1-min(first, testPages-1))
}

// TestZerosAhead: behind a read of zeros the zeros that follow need no
// request, and what is not zero is read as it is.
func TestZerosAhead(t *testing.T) {
	last := pattern(page.Size)
	src := sparse{func(p []byte, off int64) (int, error) {
		clear(p)
		if n := testSize - page.Size - off; n < int64(len(p)) {
			_, _ = last.ReadAt(p[max(0, n):], max(0, -n))
		}
		return len(p), nil
	}}
	l := newTestSlot(t, testSize)
	if err := l.Bind(src); err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: l.Path(), Len: testSize})
	c.must(command{Op: "read", Off: 0, Len: page.Size})
	for deadline := time.Now().Add(10 * time.Second); l.Stats().ZeroPages == 0; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("nothing was pushed: %+v", l.Stats())
		}
	}
	if got := c.must(command{Op: "read", Off: testSize - page.Size, Len: page.Size}).Sum; got != last.sum(0, page.Size) {
		t.Error("the last page is not its own")
	}
}
