package s3_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/blob/s3"
	"github.com/hibernacle/hibernacle/internal/blob/s3/faultproxy"
	"github.com/hibernacle/hibernacle/internal/blob/s3/s3test"
	"github.com/hibernacle/hibernacle/internal/blob/wrap"
)

// patience is the time-out of stores behind a proxy. It is short, for tests
// wait for it, and long enough for a busy machine.
const patience = 2 * time.Second

// through returns cfg with a proxy in the way.
func through(proxy *faultproxy.Proxy, cfg s3.Config) s3.Config {
	cfg.Endpoint = "http://" + proxy.Address
	cfg.Timeout = patience
	return cfg
}

// decorated puts every wrapper around a store.
func decorated(s blob.Store) blob.Store {
	limited := wrap.Limit(wrap.Meter(wrap.Delay(s, time.Microsecond), func(wrap.Call) {}), 8, 8)
	return wrap.Retry(limited, wrap.Policy{Attempts: 10, Backoff: time.Millisecond})
}

// firstTime lets each different request fail once: retries always succeed in
// the end, and nothing succeeds without.
func firstTime(kind faultproxy.Kind) func(*http.Request) faultproxy.Fault {
	var mu sync.Mutex
	seen := map[string]bool{}
	return func(r *http.Request) faultproxy.Fault {
		query := r.URL.Query()
		query.Del("uploadId")                                // another one with each attempt
		_, end, _ := strings.Cut(r.Header.Get("Range"), "-") // a read goes on where it stopped
		id := strings.Join([]string{r.Method, r.URL.Path, query.Encode(), end}, " ")
		mu.Lock()
		defer mu.Unlock()
		if seen[id] {
			return faultproxy.Fault{}
		}
		seen[id] = true
		return faultproxy.Fault{Kind: kind, Latency: time.Millisecond}
	}
}

func TestConformanceDecorated(t *testing.T) {
	server := s3test.Start(t)
	blobtest.Suite{Unheld: true, Open: func(t *testing.T, name string) blob.Store {
		return decorated(open(t, config(t, server, name, "p")))
	}}.Run(t)
}

func TestConformanceThroughFaults(t *testing.T) {
	server := s3test.Start(t)
	for i, kind := range faultproxy.Kinds {
		if kind == faultproxy.Slow || kind == faultproxy.BlackHole {
			continue // each costs its time-out: see TestFaults
		}
		t.Run(string(kind), func(t *testing.T) {
			proxy := faultproxy.Start(t, server.Address)
			proxy.Set(firstTime(kind))
			blobtest.Suite{Unheld: true, Quick: true, Open: func(t *testing.T, name string) blob.Store {
				return decorated(open(t, through(proxy, config(t, server, fmt.Sprintf("%s-%d", name, i), "p"))))
			}}.Run(t)
		})
	}
}

func random(size int) []byte {
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{9}).Read(b)
	return b
}

func writes(b []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	}
}

// everything does each operation once, on objects of one and of many parts, and
// returns what failed.
func everything(ctx context.Context, s blob.Store, prefix string, small, big []byte) error {
	var errs []error
	for name, content := range map[string][]byte{"small": small, "big": big} {
		key := prefix + "/" + name
		if _, err := s.Put(ctx, key, writes(content)); err != nil {
			errs = append(errs, err)
			continue
		}
		if info, err := s.Stat(ctx, key); err != nil {
			errs = append(errs, err)
		} else if info.Size != int64(len(content)) {
			errs = append(errs, fmt.Errorf("WRONG size of %s: %d", key, info.Size))
		}
		o, err := s.Open(ctx, key)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		got := make([]byte, len(content))
		n, err := o.ReadAt(got, 0)
		if !bytes.Equal(got[:n], content[:n]) || err == nil && n != len(content) {
			errs = append(errs, fmt.Errorf("WRONG bytes of %s", key))
		}
		if err != nil && err != io.EOF {
			errs = append(errs, err)
		}
		o.Close()
	}
	listed := 0
	for _, err := range s.List(ctx, prefix+"/") {
		if err != nil {
			errs = append(errs, err)
		} else {
			listed++
		}
	}
	if len(errs) == 0 && listed != 2 {
		errs = append(errs, fmt.Errorf("WRONG list: %d objects", listed))
	}
	return errors.Join(append(errs, s.Delete(ctx, prefix+"/small"), s.Delete(ctx, prefix+"/big"))...)
}

// TestFaults holds each fault against each operation: once, then retries help;
// then for good, and each operation fails in bounded time with an error that
// says that the store is not available; then all is well again.
func TestFaults(t *testing.T) {
	server := s3test.Start(t)
	small := random(1000)
	for _, kind := range faultproxy.Kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			big := random(9 << 20)
			if kind == faultproxy.BlackHole || kind == faultproxy.Slow {
				big = big[:300<<10] // what is larger may take half a minute
			}
			proxy := faultproxy.Start(t, server.Address)
			cfg := through(proxy, config(t, server, "faults", strings.ReplaceAll(string(kind), " ", "-")))
			cfg.Timeout = time.Second
			s := decorated(open(t, cfg))
			proxy.Set(firstTime(kind))
			if err := everything(t.Context(), s, "once", small, big); err != nil {
				t.Errorf("failing once: %v", err)
			}

			proxy.Always(faultproxy.Fault{Kind: kind})
			few := wrap.Retry(open(t, cfg), wrap.Policy{Attempts: 2, Backoff: time.Millisecond})
			err := everything(t.Context(), few, "always", small, big)
			if err == nil || !errors.Is(err, blob.ErrUnavailable) || strings.Contains(err.Error(), "WRONG") {
				t.Errorf("failing for good: %v", err)
			}
			t.Logf("failing for good: %v", err)

			proxy.Set(nil)
			if err := everything(t.Context(), s, "after", small, big); err != nil {
				t.Errorf("well again: %v", err)
			}
		})
	}
}

// A server that is not there is not available, and is again once it has come back.
func TestServerThatIsDown(t *testing.T) {
	server := s3test.Start(t)
	s := open(t, config(t, server, "down", ""))
	if _, err := s.Put(t.Context(), "a", writes([]byte("x"))); err != nil {
		t.Fatal(err)
	}
	server.Stop()
	if _, err := s.Stat(t.Context(), "a"); !errors.Is(err, blob.ErrUnavailable) || errors.Is(err, blob.ErrRefused) {
		t.Errorf("Stat while it is down: %v", err)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stat(t.Context(), "a"); err != nil {
		t.Errorf("Stat after it came back: %v", err)
	}
}

// What is read without retries stops where the body was cut.
func TestTruncatedReadTellsHowFarItCame(t *testing.T) {
	server := s3test.Start(t)
	proxy := faultproxy.Start(t, server.Address)
	s := open(t, through(proxy, config(t, server, "truncated", "")))
	content := random(400 << 10)
	if _, err := s.Put(t.Context(), "a", writes(content)); err != nil {
		t.Fatal(err)
	}
	o, err := s.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	proxy.Always(faultproxy.Fault{Kind: faultproxy.Truncated})
	got := make([]byte, 200<<10)
	n, err := o.ReadAt(got, 0)
	if n != 100<<10 || !errors.Is(err, blob.ErrUnavailable) || !bytes.Equal(got[:n], content[:n]) {
		t.Errorf("ReadAt = %d, %v", n, err)
	}
}

// Close ends a read that waits.
func TestCloseEndsReads(t *testing.T) {
	server := s3test.Start(t)
	proxy := faultproxy.Start(t, server.Address)
	cfg := through(proxy, config(t, server, "close", ""))
	cfg.Timeout = time.Hour
	s := decorated(open(t, cfg))
	if _, err := s.Put(t.Context(), "a", writes(random(400<<10))); err != nil {
		t.Fatal(err)
	}
	o, err := s.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{})
	proxy.Set(func(*http.Request) faultproxy.Fault {
		close(asked)
		return faultproxy.Fault{Kind: faultproxy.BlackHole}
	})
	failed := make(chan error)
	go func() {
		_, err := o.ReadAt(make([]byte, 10), 0)
		failed <- err
	}()
	<-asked
	o.Close()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("ReadAt: %v", err)
	}
}

// Open costs one request, and reads of the tail none.
func TestRequests(t *testing.T) {
	server := s3test.Start(t)
	proxy := faultproxy.Start(t, server.Address)
	var mu sync.Mutex
	fetched := map[wrap.Op]int64{}
	s := wrap.Meter(open(t, through(proxy, config(t, server, "requests", ""))), func(c wrap.Call) {
		mu.Lock()
		defer mu.Unlock()
		fetched[c.Op] += c.Bytes
	})
	const size, tail = 1 << 20, 128 << 10
	content := random(size)
	for key, n := range map[string]int{"big": size, "small": 1000, "empty": 0} {
		if _, err := s.Put(t.Context(), key, writes(content[:n])); err != nil {
			t.Fatal(err)
		}
	}
	steps := []struct {
		key            string
		off, n         int64
		requests, down int64 // of the open and the read
	}{
		{"small", 0, 1000, 1, 1000},
		{"empty", 0, 0, 1, 0},
		{"big", size - tail, tail, 1, tail},
		{"big", size - 1, 1, 1, tail},
		{"big", 4096, 8192, 2, tail + 8192},
		{"big", size - tail - 100, 300, 2, tail + 100},
		{"big", 0, size, 2, size},
	}
	for _, step := range steps {
		before := proxy.Count()
		clear(fetched)
		o, err := s.Open(t.Context(), step.key)
		if err != nil {
			t.Fatal(err)
		}
		if r, ok := o.(blob.RemoteObject); !ok || !r.Remote() {
			t.Errorf("%s does not say that it is remote", step.key)
		}
		if _, err := o.ReadAt(make([]byte, step.n), step.off); err != nil && err != io.EOF {
			t.Error(err)
		}
		o.Close()
		after := proxy.Count()
		if requests, down := after.Requests-before.Requests, after.Down-before.Down; requests != step.requests || down != step.down {
			t.Errorf("%s, %d bytes at %d: %d requests for %d bytes, want %d for %d", step.key, step.n, step.off, requests, down, step.requests, step.down)
		}
		if got := fetched[wrap.OpOpen] + fetched[wrap.OpRead]; got != step.down {
			t.Errorf("%s, %d bytes at %d: metered %d bytes, want %d", step.key, step.n, step.off, got, step.down)
		}
	}
}
