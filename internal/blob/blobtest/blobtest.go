// Package blobtest is the suite that every driver of a blob.Store must pass,
// and a store that fails on order, for the tests of those who use one.
package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// Suite is what a driver of a blob.Store must pass.
type Suite struct {
	// Open returns a handle on the store called name, which is empty at first;
	// two handles on one name stand for two processes.
	Open func(t *testing.T, name string) blob.Store

	// Unheld says that the store does not hold open objects against Delete.
	Unheld bool

	// Quick leaves out what moves much or asks often.
	Quick bool
}

// Run runs the suite.
func (s Suite) Run(t *testing.T) {
	tests := map[string]func(t *testing.T, open func() blob.Store){
		"RoundTrip":         testRoundTrip,
		"Ranges":            testRanges,
		"PutTwice":          testPutTwice,
		"PutFails":          testPutFails,
		"PutCancelled":      testPutCancelled,
		"InvisibleUntilPut": testInvisibleUntilPut,
		"Missing":           testMissing,
		"List":              testList,
		"Cancelled":         testCancelled,
		"InvalidKeys":       testInvalidKeys,
		"ConcurrentPuts":    testConcurrentPuts,
	}
	if s.Unheld {
		tests["ReadAgainstDelete"] = testReadAgainstDelete
	} else {
		tests["DeleteInUse"] = testDeleteInUse
		tests["OpenAgainstDelete"] = testOpenAgainstDelete
	}
	if !s.Quick {
		tests["Big"] = testBig
		tests["LongList"] = testLongList
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test(t, func() blob.Store { return s.Open(t, name) })
		})
	}
}

// midway is a size, in bytes, at which any driver has handed bytes on.
const midway = 9 << 20

func put(t *testing.T, s blob.Store, key string, b []byte) blob.Info {
	t.Helper()
	info, err := s.Put(t.Context(), key, writes(b))
	if err != nil {
		t.Fatalf("Put %s: %v", key, err)
	}
	return info
}

func writes(b []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	}
}

func keys(t *testing.T, s blob.Store, prefix string) []string {
	t.Helper()
	var out []string
	for info, err := range s.List(t.Context(), prefix) {
		if err != nil {
			t.Fatalf("List %q: %v", prefix, err)
		}
		out = append(out, info.Key)
	}
	slices.Sort(out)
	return out
}

func testRoundTrip(t *testing.T, open func() blob.Store) {
	s, other := open(), open()
	for _, size := range []int{0, 1, 4096, 1<<20 + 7} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			key := fmt.Sprintf("some/folder/object-%d", size)
			want := make([]byte, size)
			rand.NewChaCha8([32]byte{1}).Read(want)
			before := time.Now().Add(-time.Hour)
			info := put(t, s, key, want)
			if info.Key != key || info.Size != int64(size) || info.ModTime.Before(before) {
				t.Errorf("Put returned %+v", info)
			}
			if got, err := other.Stat(t.Context(), key); err != nil || got.Key != key || got.Size != int64(size) {
				t.Errorf("Stat = %+v, %v", got, err)
			}
			o, err := other.Open(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			defer o.Close()
			got := make([]byte, size)
			if n, err := o.ReadAt(got, 0); n != size || err != nil && err != io.EOF || !bytes.Equal(got, want) || o.Size() != int64(size) {
				t.Errorf("ReadAt = %d, %v; size %d", n, err, o.Size())
			}
			if size > 100 {
				if _, err := o.ReadAt(got[:50], 50); err != nil || !bytes.Equal(got[:50], want[50:100]) {
					t.Errorf("ReadAt in the middle: %v", err)
				}
			}
			if n, err := o.ReadAt(make([]byte, 10), int64(size)); n != 0 || err != io.EOF {
				t.Errorf("ReadAt at the end = %d, %v", n, err)
			}
		})
	}
}

// testRanges reads at, around and behind everything where a store may have a
// seam, in objects of sizes around one.
func testRanges(t *testing.T, open func() blob.Store) {
	s := open()
	const seam = 128 << 10
	for _, size := range []int64{0, 1, seam - 1, seam, seam + 1, 3*seam + 5} {
		want := make([]byte, size)
		rand.NewChaCha8([32]byte{2}).Read(want)
		key := fmt.Sprintf("object-%d", size)
		put(t, s, key, want)
		o, err := s.Open(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		for _, off := range []int64{0, 1, size / 2, size - seam - 1, size - seam, size - seam + 1, size - 1, size, size + 1, size + seam} {
			for _, n := range []int64{0, 1, 100, seam, size - off - 1, size - off, size - off + 1} {
				if off < 0 || n < 0 {
					continue
				}
				p := make([]byte, n)
				got, err := o.ReadAt(p, off)
				here := max(0, min(n, size-off))
				switch {
				case int64(got) != here, here > 0 && !bytes.Equal(p[:here], want[off:off+here]):
					t.Errorf("size %d: ReadAt %d at %d = %d, %v", size, n, off, got, err)
				case here < n && err != io.EOF, err != nil && err != io.EOF:
					t.Errorf("size %d: ReadAt %d at %d: %v", size, n, off, err)
				}
			}
		}
		if n, err := o.ReadAt(make([]byte, 1), -1); n != 0 || err == nil || err == io.EOF {
			t.Errorf("ReadAt at -1 = %d, %v", n, err)
		}
	}
}

// testBig streams an object of 64 MiB in and reads it back from many goroutines.
func testBig(t *testing.T, open func() blob.Store) {
	s := open()
	const size, step = 64 << 20, 1 << 20
	content := func(at int64, p []byte) { rand.NewChaCha8([32]byte{byte(at / step), byte(at / step >> 8)}).Read(p) }
	info, err := s.Put(t.Context(), "big", func(w io.Writer) error {
		p := make([]byte, step)
		for at := int64(0); at < size; at += step {
			content(at, p)
			// Pieces of odd lengths, as they come.
			for _, piece := range [][]byte{p[:777], p[777:]} {
				if _, err := w.Write(piece); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil || info.Size != size {
		t.Fatalf("Put = %+v, %v", info, err)
	}
	o, err := s.Open(t.Context(), "big")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if o.Size() != size {
		t.Errorf("Size = %d", o.Size())
	}
	var wg sync.WaitGroup
	for first := range int64(4) {
		wg.Go(func() {
			got, want := make([]byte, step), make([]byte, step)
			for at := first * step; at < size; at += 4 * step {
				content(at, want)
				if n, err := o.ReadAt(got, at); n != step || err != nil && err != io.EOF || !bytes.Equal(got, want) {
					t.Errorf("ReadAt at %d = %d, %v", at, n, err)
				}
			}
		})
	}
	wg.Wait()
}

func testPutTwice(t *testing.T, open func() blob.Store) {
	s := open()
	put(t, s, "a/b", []byte("first"))
	if _, err := open().Put(t.Context(), "a/b", writes([]byte("second"))); !errors.Is(err, blob.ErrExist) {
		t.Errorf("second Put: %v", err)
	}
	o, err := s.Open(t.Context(), "a/b")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	got := make([]byte, o.Size())
	if o.ReadAt(got, 0); string(got) != "first" {
		t.Errorf("content is %q", got)
	}
}

func testPutFails(t *testing.T, open func() blob.Store) {
	s := open()
	mine := errors.New("the writer's own error")
	for _, size := range []int{0, 4, midway} {
		_, err := s.Put(t.Context(), "a/b", func(w io.Writer) error {
			if _, err := w.Write(make([]byte, size)); err != nil {
				return err
			}
			return fmt.Errorf("wrapped: %w", mine)
		})
		if !errors.Is(err, mine) {
			t.Errorf("Put that fails after %d bytes: %v", size, err)
		}
		if got := keys(t, s, ""); len(got) != 0 {
			t.Errorf("left behind: %v", got)
		}
	}
	put(t, s, "a/b", []byte("whole")) // the key is still free
}

func testPutCancelled(t *testing.T, open func() blob.Store) {
	s := open()
	for _, size := range []int{1, midway} {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := s.Put(ctx, "a/b", func(w io.Writer) error {
			if _, err := w.Write(make([]byte, size)); err != nil {
				return err
			}
			cancel()
			_, err := w.Write(make([]byte, size))
			return err
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Put cancelled after %d bytes: %v", size, err)
		}
		if got := keys(t, s, ""); len(got) != 0 {
			t.Errorf("left behind: %v", got)
		}
	}
	put(t, s, "a/b", nil) // the key is still free
}

// testCancelled calls everything with a context that has ended.
func testCancelled(t *testing.T, open func() blob.Store) {
	s := open()
	put(t, s, "a/b", []byte("x"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, openErr := s.Open(ctx, "a/b")
	_, putErr := s.Put(ctx, "a/c", writes(nil))
	for op, err := range map[string]error{"Open": openErr, "Put": putErr} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", op, err)
		}
	}
	var err error
	for _, err = range s.List(ctx, "") {
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("List: %v", err)
	}
	if got := keys(t, s, ""); !slices.Equal(got, []string{"a/b"}) {
		t.Errorf("listed: %v", got)
	}
}

func testInvisibleUntilPut(t *testing.T, open func() blob.Store) {
	s, other := open(), open()
	calls := 0
	_, err := s.Put(t.Context(), "a/b", func(w io.Writer) error {
		if _, err := w.Write(make([]byte, 1<<20)); err != nil {
			return err
		}
		if calls++; calls > 1 {
			return nil // a store that tries again may have put it by now
		}
		if _, err := other.Stat(t.Context(), "a/b"); !errors.Is(err, blob.ErrNotExist) {
			t.Errorf("Stat meanwhile: %v", err)
		}
		if got := keys(t, other, ""); len(got) != 0 {
			t.Errorf("listed meanwhile: %v", got)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := keys(t, other, ""); !slices.Equal(got, []string{"a/b"}) {
		t.Errorf("listed: %v", got)
	}
}

func testMissing(t *testing.T, open func() blob.Store) {
	s := open()
	put(t, s, "a/b", nil)
	for _, key := range []string{"a", "a/c", "a/b/c", "b"} {
		if _, err := s.Open(t.Context(), key); !errors.Is(err, blob.ErrNotExist) {
			t.Errorf("Open %s: %v", key, err)
		}
		if _, err := s.Stat(t.Context(), key); !errors.Is(err, blob.ErrNotExist) {
			t.Errorf("Stat %s: %v", key, err)
		}
		if err := s.Delete(t.Context(), key); err != nil {
			t.Errorf("Delete %s: %v", key, err)
		}
	}
}

func testList(t *testing.T, open func() blob.Store) {
	s := open()
	all := []string{"packs/a1", "packs/a2", "packs/b1", "states/a1", "top"}
	for _, key := range all {
		put(t, s, key, []byte(key))
	}
	for prefix, want := range map[string][]string{
		"":         all,
		"packs/":   all[:3],
		"packs/a":  all[:2],
		"packs/a1": all[:1],
		"pack":     all[:3],
		"t":        all[4:],
		"none":     nil,
		"none/at/": nil,
		"../":      nil,
	} {
		if got := keys(t, s, prefix); !slices.Equal(got, want) {
			t.Errorf("List %q = %v, want %v", prefix, got, want)
		}
	}
	for range s.List(t.Context(), "") {
		break // must be allowed
	}
}

// testLongList lists more objects than a service tells in one answer.
func testLongList(t *testing.T, open func() blob.Store) {
	s := open()
	const writers, each = 8, 140
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for j := range each {
				key := fmt.Sprintf("packs/%d-%03d", i, j)
				if _, err := s.Put(t.Context(), key, writes([]byte(key))); err != nil {
					t.Errorf("Put %s: %v", key, err)
				}
			}
		})
	}
	put(t, s, "other", nil)
	wg.Wait()
	for prefix, want := range map[string]int{"": writers*each + 1, "packs/": writers * each, "packs/3": each, "packs/3-00": 10} {
		got := keys(t, s, prefix)
		if len(slices.Compact(got)) != want {
			t.Errorf("List %q: %d keys, want %d", prefix, len(got), want)
		}
	}
}

func testDeleteInUse(t *testing.T, open func() blob.Store) {
	s, other := open(), open()
	put(t, s, "a/b", []byte("x"))
	var objects []blob.Object
	for range 2 {
		o, err := s.Open(t.Context(), "a/b")
		if err != nil {
			t.Fatal(err)
		}
		objects = append(objects, o)
	}
	for _, o := range objects {
		for _, deleter := range []blob.Store{s, other} {
			if err := deleter.Delete(t.Context(), "a/b"); !errors.Is(err, blob.ErrInUse) {
				t.Errorf("Delete of an open object: %v", err)
			}
		}
		if _, err := o.ReadAt(make([]byte, 1), 0); err != nil {
			t.Errorf("ReadAt: %v", err)
		}
		if err := o.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if err := other.Delete(t.Context(), "a/b"); err != nil {
		t.Errorf("Delete: %v", err)
	}
	if got := keys(t, s, ""); len(got) != 0 {
		t.Errorf("listed: %v", got)
	}
}

func testInvalidKeys(t *testing.T, open func() blob.Store) {
	s := open()
	for _, key := range []string{"", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", ".tmp/x", "A", "a b", "a\x00", "a\\b", "ä", string(make([]byte, 500))} {
		_, openErr := s.Open(t.Context(), key)
		_, putErr := s.Put(t.Context(), key, writes(nil))
		_, statErr := s.Stat(t.Context(), key)
		for op, err := range map[string]error{"Open": openErr, "Put": putErr, "Stat": statErr, "Delete": s.Delete(t.Context(), key)} {
			if !errors.Is(err, blob.ErrInvalidKey) {
				t.Errorf("%s %q: %v", op, key, err)
			}
		}
	}
}

// testConcurrentPuts lets many put the same key: one must win, and its object
// must be whole.
func testConcurrentPuts(t *testing.T, open func() blob.Store) {
	s := open()
	for _, size := range []int{1000, midway} {
		const writers = 4
		key := fmt.Sprintf("a/%d", size)
		errs := make([]error, writers)
		var wg sync.WaitGroup
		for i := range writers {
			wg.Go(func() {
				_, errs[i] = open().Put(t.Context(), key, writes(bytes.Repeat([]byte{byte(i)}, size)))
			})
		}
		wg.Wait()
		winner := -1
		for i, err := range errs {
			switch {
			case err == nil && winner < 0:
				winner = i
			case !errors.Is(err, blob.ErrExist):
				t.Errorf("writer %d: %v", i, err)
			}
		}
		o, err := s.Open(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		got := make([]byte, size)
		if _, err := o.ReadAt(got, 0); err != nil && err != io.EOF || !bytes.Equal(got, bytes.Repeat([]byte{byte(winner)}, size)) {
			t.Errorf("%d bytes: the object is not that of writer %d (%v)", size, winner, err)
		}
	}
}

// testReadAgainstDelete reads, deletes and puts one key, with another content
// each time: who reads has the bytes of one object or ErrNotExist.
func testReadAgainstDelete(t *testing.T, open func() blob.Store) {
	const rounds, size = 15, 300 << 10
	var done atomic.Bool
	var reader, writer sync.WaitGroup
	reader.Go(func() {
		s := open()
		for whole := 0; whole < rounds && !t.Failed(); {
			o, err := s.Open(t.Context(), "a/b")
			if errors.Is(err, blob.ErrNotExist) {
				continue
			} else if err != nil {
				t.Errorf("Open: %v", err)
				return
			}
			got := make([]byte, size)
			half, herr := o.ReadAt(got[:size/2], 0)
			rest, rerr := o.ReadAt(got[half:], int64(half))
			o.Close()
			switch {
			case errors.Is(herr, blob.ErrNotExist) || errors.Is(rerr, blob.ErrNotExist):
			case herr != nil || rerr != nil && rerr != io.EOF || half+rest != size || !bytes.Equal(got, bytes.Repeat(got[:1], size)):
				t.Errorf("read %d and %d bytes, of one object: %t; %v, %v", half, rest, bytes.Equal(got, bytes.Repeat(got[:1], size)), herr, rerr)
			default:
				whole++
			}
		}
	})
	writer.Go(func() {
		s := open()
		for i := 0; !done.Load(); i++ {
			if _, err := s.Put(t.Context(), "a/b", writes(bytes.Repeat([]byte{byte(i)}, size))); err != nil {
				t.Errorf("Put: %v", err)
				return
			}
			for range 3 { // lets readers through, too
				if _, err := s.Stat(t.Context(), "a/b"); err != nil {
					t.Errorf("Stat: %v", err)
				}
			}
			if err := s.Delete(t.Context(), "a/b"); err != nil {
				t.Errorf("Delete: %v", err)
				return
			}
		}
	})
	reader.Wait()
	done.Store(true)
	writer.Wait()
}

// testOpenAgainstDelete opens, deletes and puts one key at the same time: who has
// opened it reads it whole, and nobody deletes it meanwhile.
func testOpenAgainstDelete(t *testing.T, open func() blob.Store) {
	const rounds = 100
	content := bytes.Repeat([]byte("content "), 1000)
	stop := make(chan struct{})
	var readers, deleter sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			s := open()
			for range rounds {
				o, err := s.Open(t.Context(), "a/b")
				if errors.Is(err, blob.ErrNotExist) {
					if _, err := s.Put(t.Context(), "a/b", writes(content)); err != nil && !errors.Is(err, blob.ErrExist) {
						t.Errorf("Put: %v", err)
					}
					continue
				} else if err != nil {
					t.Errorf("Open: %v", err)
					return
				}
				got := make([]byte, o.Size())
				if _, err := o.ReadAt(got, 0); err != nil && err != io.EOF || !bytes.Equal(got, content) {
					t.Errorf("read %d bytes: %v", len(got), err)
				}
				if _, err := s.Stat(t.Context(), "a/b"); err != nil {
					t.Errorf("deleted while open: %v", err)
				}
				o.Close()
			}
		})
	}
	deleter.Go(func() {
		s := open()
		for {
			select {
			case <-stop:
				return
			default:
				if err := s.Delete(t.Context(), "a/b"); err != nil && !errors.Is(err, blob.ErrInUse) {
					t.Errorf("Delete: %v", err)
				}
			}
		}
	})
	readers.Wait()
	close(stop)
	deleter.Wait()
}
