package s3_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/blob/s3"
	"github.com/hibernacle/hibernacle/internal/blob/s3/s3test"
	"github.com/hibernacle/hibernacle/internal/blob/wrap"
)

func open(t *testing.T, cfg s3.Config) *s3.Store {
	t.Helper()
	s, err := s3.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// config returns a config of an empty store on a server, in a bucket of its own
// and below a prefix.
func config(t *testing.T, server *s3test.Server, bucket, prefix string) s3.Config {
	t.Helper()
	cfg, err := server.Config(t.Context(), strings.ToLower(bucket), prefix)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func TestConformance(t *testing.T) {
	server := s3test.Start(t)
	for _, prefix := range []string{"", "below/a-prefix"} {
		t.Run(prefix, func(t *testing.T) {
			blobtest.Suite{Unheld: true, Quick: prefix == "", Open: func(t *testing.T, name string) blob.Store {
				return open(t, config(t, server, name+"-"+prefix[:min(1, len(prefix))]+"0", prefix))
			}}.Run(t)
		})
	}
}

func TestCleanRemovesOnlyOldUploadsOfThisStore(t *testing.T) {
	server := s3test.Start(t)
	mine := open(t, config(t, server, "clean", "mine"))
	other := open(t, config(t, server, "clean", "other"))
	mine.BeginUpload(t, "a/b")
	other.BeginUpload(t, "a/b")
	if err := mine.Clean(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := mine.Uploads(t); n != 2 {
		t.Errorf("%d uploads after Clean, which takes only old ones", n)
	}
	mine.CleanBefore(t, time.Now().Add(time.Hour))
	if n := mine.Uploads(t); n != 1 {
		t.Errorf("%d uploads are left", n)
	}
	if _, err := mine.Put(t.Context(), "a/b", writes([]byte("x"))); err != nil {
		t.Errorf("the key is not free: %v", err)
	}
}

// A Put that fails midway leaves no upload, one that succeeds neither.
func TestPutLeavesNoUpload(t *testing.T) {
	server := s3test.Start(t)
	s := open(t, config(t, server, "leaves", ""))
	mine := errors.New("mine")
	put := func(key string, end error) error {
		_, err := s.Put(t.Context(), key, func(w io.Writer) error {
			_, err := w.Write(make([]byte, 20<<20))
			if n := s.Uploads(t); n != 1 {
				t.Errorf("%d uploads midway", n)
			}
			return errors.Join(err, end)
		})
		if n := s.Uploads(t); n != 0 {
			t.Errorf("%d uploads are left", n)
		}
		return err
	}
	if err := put("a", mine); !errors.Is(err, mine) {
		t.Errorf("Put: %v", err)
	}
	if err := put("a", nil); err != nil {
		t.Errorf("Put: %v", err)
	}
	if err := put("a", nil); !errors.Is(err, blob.ErrExist) {
		t.Errorf("Put: %v", err)
	}
}

// Put needs the memory of a part, however large the object is.
func TestPutInConstantMemory(t *testing.T) {
	server := s3test.Start(t)
	s := open(t, config(t, server, "memory", ""))
	var peak uint64
	_, err := s.Put(t.Context(), "a", func(w io.Writer) error {
		p := make([]byte, 1<<20)
		for range 100 {
			if _, err := w.Write(p); err != nil {
				return err
			}
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			peak = max(peak, m.HeapAlloc)
		}
		return nil
	})
	if err != nil || peak > 40<<20 {
		t.Errorf("%d bytes of heap for an object of 100 MiB: %v", peak, err)
	}
}

func TestReadOnlyCredentials(t *testing.T) {
	server := s3test.Start(t)
	cfg := config(t, server, "shared", "p")
	owner := open(t, cfg)
	content := random(300 << 10)
	if _, err := owner.Put(t.Context(), "a/b", writes(content)); err != nil {
		t.Fatal(err)
	}
	cfg, err := server.ReadOnly(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, cfg)
	o, err := s.Open(t.Context(), "a/b")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	got := make([]byte, len(content))
	if _, err := o.ReadAt(got, 0); err != nil && err != io.EOF || !bytes.Equal(got, content) {
		t.Errorf("ReadAt: %v", err)
	}
	if info, err := s.Stat(t.Context(), "a/b"); err != nil || info.Size != o.Size() {
		t.Errorf("Stat = %+v, %v", info, err)
	}
	if _, err := s.Open(t.Context(), "a/c"); !errors.Is(err, blob.ErrNotExist) {
		t.Errorf("Open of what is missing: %v", err)
	}
	for _, err := range s.List(t.Context(), "a/") {
		if err != nil {
			t.Errorf("List: %v", err)
		}
	}
	_, putErr := s.Put(t.Context(), "a/c", writes(content))
	for op, err := range map[string]error{"Put": putErr, "Delete": s.Delete(t.Context(), "a/b")} {
		if !errors.Is(err, blob.ErrRefused) || !strings.Contains(err.Error(), "permissions") {
			t.Errorf("%s: %v", op, err)
		}
	}
	if _, err := owner.Stat(t.Context(), "a/b"); err != nil {
		t.Errorf("the object is gone: %v", err)
	}
}

// What only a person can mend is told in words, and not tried again.
func TestRefusals(t *testing.T) {
	server := s3test.Start(t)
	good := config(t, server, "refusals", "")
	for name, c := range map[string]struct {
		spoil func(*s3.Config)
		word  string
	}{
		"secret": {func(c *s3.Config) { c.SecretKey = "wrong-hidden" }, "AWS_SECRET_ACCESS_KEY"},
		"key":    {func(c *s3.Config) { c.AccessKey = "nobody-hidden" }, "AWS_ACCESS_KEY_ID"},
		"bucket": {func(c *s3.Config) { c.Bucket = "no-such-bucket" }, "no such bucket"},
		"region": {func(c *s3.Config) { c.Region = "elsewhere-1" }, "region"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := good
			c.spoil(&cfg)
			attempts := 0
			s := wrap.Retry(wrap.Meter(open(t, cfg), func(wrap.Call) { attempts++ }), wrap.Policy{})
			_, openErr := s.Open(t.Context(), "a")
			_, statErr := s.Stat(t.Context(), "a")
			_, putErr := s.Put(t.Context(), "a", writes([]byte("x")))
			var listErr error
			for _, listErr = range s.List(t.Context(), "") {
			}
			for op, err := range map[string]error{"Open": openErr, "Stat": statErr, "Put": putErr, "List": listErr, "Delete": s.Delete(t.Context(), "a")} {
				if !errors.Is(err, blob.ErrRefused) || !errors.Is(err, blob.ErrUnavailable) || errors.Is(err, blob.ErrNotExist) ||
					!strings.Contains(err.Error(), c.word) || strings.Contains(err.Error(), "wrong-hidden") {
					t.Errorf("%s: %v", op, err)
				}
			}
			if attempts != 5 {
				t.Errorf("%d attempts of 5 operations", attempts)
			}
		})
	}
}

// An object that was replaced under a reader gives no bytes of the other one.
func TestReplacedObject(t *testing.T) {
	server := s3test.Start(t)
	s := open(t, config(t, server, "replaced", ""))
	put := func(b byte) {
		if _, err := s.Put(t.Context(), "a", writes(bytes.Repeat([]byte{b}, 300<<10))); err != nil {
			t.Fatal(err)
		}
	}
	put(1)
	o, err := s.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if err := s.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	for _, state := range []string{"deleted", "replaced"} {
		if n, err := o.ReadAt(make([]byte, 10), 0); n != 0 || !errors.Is(err, blob.ErrNotExist) {
			t.Errorf("%s: ReadAt = %d, %v", state, n, err)
		}
		if state == "deleted" {
			put(2)
		}
	}
}

func BenchmarkRead(b *testing.B) {
	server := s3test.Start(b)
	cfg, err := server.Config(b.Context(), "bench", "")
	if err != nil {
		b.Fatal(err)
	}
	s, err := s3.Open(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := s.Put(b.Context(), "a", writes(random(16<<20))); err != nil {
		b.Fatal(err)
	}
	for _, size := range []int64{64 << 10, 1 << 20, 8 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			o, err := s.Open(b.Context(), "a")
			if err != nil {
				b.Fatal(err)
			}
			defer o.Close()
			p := make([]byte, size)
			b.SetBytes(size)
			for b.Loop() {
				if _, err := o.ReadAt(p, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
