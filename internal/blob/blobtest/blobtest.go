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
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// Run runs the suite. open returns a handle on the store called name, which is
// empty at first; two handles on one name stand for two processes.
func Run(t *testing.T, open func(t *testing.T, name string) blob.Store) {
	tests := map[string]func(t *testing.T, open func() blob.Store){
		"RoundTrip":         testRoundTrip,
		"PutTwice":          testPutTwice,
		"PutFails":          testPutFails,
		"PutCancelled":      testPutCancelled,
		"InvisibleUntilPut": testInvisibleUntilPut,
		"Missing":           testMissing,
		"List":              testList,
		"DeleteInUse":       testDeleteInUse,
		"InvalidKeys":       testInvalidKeys,
		"ConcurrentPuts":    testConcurrentPuts,
		"OpenAgainstDelete": testOpenAgainstDelete,
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test(t, func() blob.Store { return open(t, name) })
		})
	}
}

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
	_, err := s.Put(t.Context(), "a/b", func(w io.Writer) error {
		if _, err := w.Write([]byte("half")); err != nil {
			return err
		}
		return fmt.Errorf("wrapped: %w", mine)
	})
	if !errors.Is(err, mine) {
		t.Errorf("Put: %v", err)
	}
	if got := keys(t, s, ""); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
	put(t, s, "a/b", []byte("whole")) // the key is still free
}

func testPutCancelled(t *testing.T, open func() blob.Store) {
	s := open()
	ctx, cancel := context.WithCancel(t.Context())
	_, err := s.Put(ctx, "a/b", func(w io.Writer) error {
		cancel()
		_, err := w.Write([]byte("x"))
		return err
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Put: %v", err)
	}
	if got := keys(t, s, ""); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
}

func testInvisibleUntilPut(t *testing.T, open func() blob.Store) {
	s, other := open(), open()
	_, err := s.Put(t.Context(), "a/b", func(w io.Writer) error {
		if _, err := w.Write(make([]byte, 1<<20)); err != nil {
			return err
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
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var err error
	for _, err = range s.List(ctx, "") {
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled List: %v", err)
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
	const writers = 8
	errs := make([]error, writers)
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			_, errs[i] = open().Put(t.Context(), "a/b", writes(bytes.Repeat([]byte{byte(i)}, 1000)))
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
	o, err := s.Open(t.Context(), "a/b")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	got := make([]byte, 1000)
	if o.ReadAt(got, 0); !bytes.Equal(got, bytes.Repeat([]byte{byte(winner)}, 1000)) {
		t.Errorf("the object is not that of writer %d", winner)
	}
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
