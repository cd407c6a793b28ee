package wrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/blob/disk"
)

func TestConformance(t *testing.T) {
	for name, around := range map[string]func(blob.Store) blob.Store{
		"retry": func(s blob.Store) blob.Store { return Retry(s, Policy{}) },
		"limit": func(s blob.Store) blob.Store { return Limit(s, 2, 2) },
		"meter": func(s blob.Store) blob.Store { return Meter(s, func(Call) {}) },
		"delay": func(s blob.Store) blob.Store { return Delay(s, time.Microsecond) },
		"all": func(s blob.Store) blob.Store {
			return Retry(Limit(Meter(Delay(s, time.Microsecond), func(Call) {}), 4, 4), Policy{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			blobtest.Suite{Quick: name != "all", Open: func(t *testing.T, name string) blob.Store {
				s, err := disk.Open(filepath.Join(root, name))
				if err != nil {
					t.Fatal(err)
				}
				return around(s)
			}}.Run(t)
		})
	}
}

// memory is a store of one object with the key "a".
type memory struct {
	content string // "" is none
	tail    int64  // of the object
	fail    func(op Op, n int) error

	mu    sync.Mutex
	calls map[Op]int
}

// call counts an operation and asks fail what becomes of it.
func (m *memory) call(op Op) error {
	m.mu.Lock()
	if m.calls == nil {
		m.calls = map[Op]int{}
	}
	m.calls[op]++
	n := m.calls[op]
	m.mu.Unlock()
	if m.fail == nil {
		return nil
	}
	return m.fail(op, n)
}

func (m *memory) Put(_ context.Context, key string, write func(io.Writer) error) (blob.Info, error) {
	var b strings.Builder
	if err := write(&b); err != nil {
		return blob.Info{}, err
	}
	if m.content != "" {
		return blob.Info{}, blob.ErrExist
	}
	m.content = b.String() // an error that comes now is that of a lost answer
	return blob.Info{Key: key, Size: int64(b.Len())}, m.call(OpPut)
}

func (m *memory) Open(context.Context, string) (blob.Object, error) {
	return &memoryObject{m}, m.call(OpOpen)
}

func (m *memory) Stat(_ context.Context, key string) (blob.Info, error) {
	return blob.Info{Key: key, Size: int64(len(m.content))}, m.call(OpStat)
}

// List yields a to e; an error comes after c.
func (m *memory) List(context.Context, string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		err := m.call(OpList)
		for _, key := range []string{"a", "b", "c", "d", "e"} {
			if key == "d" && err != nil {
				yield(blob.Info{}, err)
				return
			}
			if !yield(blob.Info{Key: key}, nil) {
				return
			}
		}
	}
}

func (m *memory) Delete(context.Context, string) error { return m.call(OpDelete) }

type memoryObject struct{ m *memory }

func (o *memoryObject) Size() int64  { return int64(len(o.m.content)) }
func (o *memoryObject) Remote() bool { return true }
func (o *memoryObject) Tail() int64  { return o.m.tail }
func (o *memoryObject) Close() error { return nil }

// ReadAt reads half when it fails.
func (o *memoryObject) ReadAt(p []byte, off int64) (int, error) {
	if err := o.m.call(OpRead); err != nil {
		n, _ := strings.NewReader(o.m.content).ReadAt(p[:len(p)/2], off)
		return n, err
	}
	return strings.NewReader(o.m.content).ReadAt(p, off)
}

func failFirst(n int, err error) func(Op, int) error {
	return func(_ Op, call int) error {
		if call <= n {
			return fmt.Errorf("by order: %w", err)
		}
		return nil
	}
}

func TestRetryTriesAgainWhatMayHelp(t *testing.T) {
	for name, c := range map[string]struct {
		fail  func(Op, int) error
		calls int
		want  error
	}{
		"succeeds":       {nil, 1, nil},
		"fails once":     {failFirst(1, blob.ErrUnavailable), 2, nil},
		"fails 4 times":  {failFirst(4, blob.ErrUnavailable), 5, nil},
		"fails for good": {failFirst(9, blob.ErrUnavailable), 5, blob.ErrUnavailable},
		"is refused":     {failFirst(9, blob.ErrRefused), 1, blob.ErrRefused},
		"is missing":     {failFirst(9, blob.ErrNotExist), 1, blob.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &memory{content: "content", fail: c.fail}
				s := Retry(m, Policy{})
				_, statErr := s.Stat(t.Context(), "a")
				_, openErr := s.Open(t.Context(), "a")
				var listErr error
				for _, listErr = range s.List(t.Context(), "") {
				}
				errs := map[Op]error{OpStat: statErr, OpOpen: openErr, OpList: listErr, OpDelete: s.Delete(t.Context(), "a")}
				for op, err := range errs {
					if m.calls[op] != c.calls || !errors.Is(err, c.want) {
						t.Errorf("%s: %d calls, %v", op, m.calls[op], err)
					}
				}
			})
		})
	}
}

func TestRetryWaitsLongerEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var at []time.Time
		m := &memory{fail: func(Op, int) error {
			at = append(at, time.Now())
			return blob.ErrUnavailable
		}}
		Retry(m, Policy{Attempts: 9, Backoff: time.Second}).Stat(t.Context(), "a")
		if len(at) != 9 {
			t.Fatalf("%d attempts", len(at))
		}
		for i := range len(at) - 1 {
			longest := min(time.Second<<i, 32*time.Second)
			if d := at[i+1].Sub(at[i]); d > longest || d < longest/2 {
				t.Errorf("wait %d: %v, want %v to %v", i+1, d, longest/2, longest)
			}
		}
	})
}

func TestRetryEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		m := &memory{fail: failFirst(1<<30, blob.ErrUnavailable)}
		began := time.Now()
		_, err := Retry(m, Policy{Attempts: 1 << 20, Backoff: time.Millisecond}).Stat(ctx, "a")
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, blob.ErrUnavailable) || time.Since(began) != time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	})
}

func TestRetryReadsOnWhereItStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{content: "0123456789abcdef"}
		o, err := Retry(m, Policy{}).Open(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		m.fail = failFirst(3, blob.ErrUnavailable)
		got := make([]byte, 16)
		if n, err := o.ReadAt(got, 0); n != 16 || err != nil && err != io.EOF || string(got) != m.content {
			t.Errorf("ReadAt = %d, %v: %s", n, err, got)
		}
	})
}

func TestRetryListsEachKeyOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []string
		for info, err := range Retry(&memory{fail: failFirst(2, blob.ErrUnavailable)}, Policy{}).List(t.Context(), "") {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, info.Key)
		}
		if want := []string{"a", "b", "c", "d", "e"}; !slices.Equal(got, want) {
			t.Errorf("listed %v, want %v", got, want)
		}
	})
}

// The first answer of each Put is lost. What is there then is taken for the
// object if it has its bytes.
func TestRetryOfPutKnowsItsOwnObject(t *testing.T) {
	for name, c := range map[string]struct {
		writes []string // by the calls of write
		want   error
	}{
		"the same":        {[]string{"content", "content", "content"}, nil},
		"empty":           {[]string{"", "", ""}, nil},
		"another content": {[]string{"content", "content", "contemn"}, blob.ErrExist},
		"shorter":         {[]string{"content", "content", "cont"}, blob.ErrExist},
		"longer":          {[]string{"content", "content", "contents"}, blob.ErrExist},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &memory{fail: failFirst(1, blob.ErrUnavailable)}
				calls := 0
				info, err := Retry(m, Policy{}).Put(t.Context(), "a", func(w io.Writer) error {
					calls++
					_, err := io.WriteString(w, c.writes[calls-1])
					return err
				})
				if !errors.Is(err, c.want) || c.want == nil && info.Size != int64(len(c.writes[0])) {
					t.Errorf("Put = %+v, %v", info, err)
				}
			})
		})
	}
}

func TestRetryCallsWriteOnceIfItMust(t *testing.T) {
	m := &memory{fail: failFirst(1, blob.ErrUnavailable)}
	calls := 0
	_, err := Retry(m, Policy{PutOnce: true}).Put(t.Context(), "a", func(io.Writer) error {
		calls++
		return nil
	})
	if calls != 1 || !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func TestRetryLeavesTheWritersErrorAlone(t *testing.T) {
	mine := errors.New("mine")
	calls := 0
	_, err := Retry(&memory{}, Policy{}).Put(t.Context(), "a", func(io.Writer) error {
		calls++
		return mine
	})
	if calls != 1 || !errors.Is(err, mine) {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func TestLimitBoundsReadsAndWritesApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads, writes, most atomic.Int64
		m := &memory{content: "content", fail: func(op Op, _ int) error {
			n := &reads
			if op == OpDelete {
				n = &writes
			}
			now := n.Add(1)
			if op != OpDelete {
				most.Store(max(most.Load(), now))
			} else if now > 1 {
				t.Errorf("%d writes at a time", now)
			}
			time.Sleep(time.Second)
			n.Add(-1)
			return nil
		}}
		s := Limit(m, 3, 1)
		began := time.Now()
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() { s.Stat(t.Context(), "a") })
		}
		for range 2 {
			wg.Go(func() { s.Delete(t.Context(), "a") })
		}
		wg.Wait()
		if took := time.Since(began); took != 2*time.Second || most.Load() != 3 {
			t.Errorf("took %v with %d reads at a time at most", took, most.Load())
		}
	})
}

// A read that waits for its turn ends when its object is closed.
func TestCloseEndsWaiting(t *testing.T) {
	for name, around := range map[string]func(blob.Store) blob.Store{
		"limit": func(s blob.Store) blob.Store { return Limit(s, 1, 1) },
		"delay": func(s blob.Store) blob.Store { return Delay(s, time.Hour) },
		"retry": func(s blob.Store) blob.Store { return Retry(s, Policy{Backoff: time.Hour}) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := around(&memory{content: "content", fail: func(op Op, _ int) error {
					switch op {
					case OpRead:
						return blob.ErrUnavailable
					case OpStat:
						time.Sleep(2 * time.Hour)
					}
					return nil
				}})
				o, err := s.Open(t.Context(), "a")
				if err != nil {
					t.Fatal(err)
				}
				go s.Stat(t.Context(), "a") // takes the only place of Limit
				synctest.Wait()
				failed := make(chan error)
				go func() {
					_, err := o.ReadAt(make([]byte, 1), 0)
					failed <- err
				}()
				synctest.Wait()
				o.Close()
				if err := <-failed; !errors.Is(err, context.Canceled) {
					t.Errorf("ReadAt: %v", err)
				}
				time.Sleep(4 * time.Hour) // lets Stat end
			})
		})
	}
}

func TestMeterAndDelayCountRequestsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls []Call
		s := Delay(Meter(&memory{content: "0123456789", tail: 4}, func(c Call) { calls = append(calls, c) }), time.Second)
		began := time.Now()
		o, err := s.Open(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		for _, read := range [][2]int{{6, 4}, {8, 5}, {20, 1}, {0, 6}, {5, 3}} { // offset, length; the first three are of the tail
			if _, err := o.ReadAt(make([]byte, read[1]), int64(read[0])); err != nil && err != io.EOF {
				t.Error(err)
			}
		}
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("took %v", took)
		}
		want := []Call{{Op: OpOpen, Key: "a", Bytes: 4}, {Op: OpRead, Key: "a", Bytes: 6}, {Op: OpRead, Key: "a", Bytes: 1}}
		if !slices.Equal(calls, want) {
			t.Errorf("calls %+v", calls)
		}
	})
}
