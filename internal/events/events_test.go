package events

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

var update = flag.Bool("update", false, "write the golden file anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, dir string, o Options) *Journal {
	t.Helper()
	j, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(j.Close)
	return j
}

func number(n int) Event {
	return Event{Type: "t", Sandbox: "s", Data: json.RawMessage(fmt.Sprintf(`{"n":%d}`, n))}
}

// take returns the next n events of a subscription.
func take(t testing.TB, s *Subscription, n int) []Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var got []Event
	for range n {
		e, err := s.Next(ctx)
		if err != nil {
			t.Fatalf("after %d of %d events: %v", len(got), n, err)
		}
		got = append(got, e)
	}
	return got
}

// wantRun checks that events are those of the numbers from first on, with
// ids that grow.
func wantRun(t testing.TB, got []Event, first int) {
	t.Helper()
	for i, e := range got {
		if want := fmt.Sprintf(`{"n":%d}`, first+i); string(e.Data) != want || i > 0 && e.ID <= got[i-1].ID {
			t.Fatalf("event %d is %d %s, want %s", i, e.ID, e.Data, want)
		}
	}
}

func TestReplayThenLive(t *testing.T) {
	j := open(t, t.TempDir(), Options{})
	for n := range 10 {
		j.Append(number(n))
	}
	s := j.Subscribe(0, Filter{})
	defer s.Close()
	wantRun(t, take(t, s, 10), 0)
	if _, err := s.Ready(); err != io.EOF {
		t.Fatalf("Ready behind the last event: %v", err)
	}
	go j.Append(number(10))
	got := take(t, s, 1)
	wantRun(t, got, 10)

	later := j.Subscribe(got[0].ID-3, Filter{})
	defer later.Close()
	wantRun(t, take(t, later, 3), 8)
}

func TestFilter(t *testing.T) {
	j := open(t, t.TempDir(), Options{})
	for _, e := range []Event{
		{Type: "a", Sandbox: "1"}, {Type: "b", Sandbox: "1"}, {Type: "a", Sandbox: "2", Name: "two"}, {Type: "c"},
	} {
		j.Append(e)
	}
	all := j.Subscribe(0, Filter{})
	defer all.Close()
	take(t, all, 4)
	for _, c := range []struct {
		f    Filter
		want string
	}{
		{Filter{}, "a1 b1 a2 c"},
		{Filter{Sandbox: "1"}, "a1 b1"},
		{Filter{Sandbox: "two"}, "a2"},
		{Filter{Types: []string{"b", "c"}}, "b1 c"},
		{Filter{Sandbox: "2", Types: []string{"b"}}, ""},
	} {
		s := j.Subscribe(0, c.f)
		var got []string
		for e, err := s.Ready(); err == nil; e, err = s.Ready() {
			got = append(got, e.Type+e.Sandbox)
		}
		if strings.Join(got, " ") != c.want || s.After() != 4 {
			t.Errorf("%+v: %v up to %d, want %s up to 4", c.f, got, s.After(), c.want)
		}
		s.Close()
	}
}

func TestIDsSurviveRestarts(t *testing.T) {
	dir := t.TempDir()
	n := 0
	for range 4 {
		j := open(t, dir, Options{})
		for range 25 {
			j.Append(number(n))
			n++
		}
		j.Close()
	}
	j := open(t, dir, Options{})
	s := j.Subscribe(0, Filter{})
	defer s.Close()
	got := take(t, s, n)
	wantRun(t, got, 0)
	if last := got[len(got)-1].ID; last != uint64(n) || j.Last() != last {
		t.Errorf("after orderly restarts the last of %d events has id %d", n, last)
	}
}

// TestCrash opens copies of a journal that ends at every byte of its file: what
// was whole is there, and no id that somebody may have seen comes again.
func TestCrash(t *testing.T) {
	from := t.TempDir()
	j := open(t, from, Options{})
	for n := range 5 {
		j.Append(number(n))
	}
	s := j.Subscribe(0, Filter{})
	take(t, s, 5)
	s.Close()
	name := segmentName(1)
	whole, err := os.ReadFile(filepath.Join(from, name)) // as a crash leaves it: the journal is open
	if err != nil {
		t.Fatal(err)
	}
	seen := bytes.Index(whole, []byte(`{"id":1,`)) // from here on ids may have been seen
	for cut := range len(whole) + 1 {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, name), whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j := open(t, dir, Options{})
		j.Append(number(99))
		s := j.Subscribe(0, Filter{})
		lines := max(0, bytes.Count(whole[:cut], []byte("\n"))-2)
		got := take(t, s, lines+1)
		wantRun(t, got[:lines], 0)
		if last := got[lines]; string(last.Data) != `{"n":99}` || cut >= seen && last.ID <= 5 {
			t.Errorf("cut at %d: the new event is %d %s", cut, last.ID, last.Data)
		}
		s.Close()
		j.Close()
		again := open(t, dir, Options{})
		s = again.Subscribe(0, Filter{})
		if after := take(t, s, lines+1); after[lines].ID != got[lines].ID {
			t.Errorf("cut at %d: event %d became %d", cut, got[lines].ID, after[lines].ID)
		}
		s.Close()
		again.Close()
	}
}

func TestSlowSubscriberHoldsUpNobody(t *testing.T) {
	const events = 10_000
	dir := t.TempDir()
	j := open(t, dir, Options{SegmentBytes: 64 << 10, Segments: 3, Queue: events})
	j.Append(number(0))
	slow := j.Subscribe(0, Filter{})
	defer slow.Close()
	at := take(t, slow, 1)[0].ID // from here on it hangs

	var readers sync.WaitGroup
	ids := make([][]uint64, 4)
	for i := range ids {
		s := j.Subscribe(at, Filter{})
		readers.Go(func() {
			defer s.Close()
			for s.After() < events {
				e, err := s.Next(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				if e.Type != TypeGap {
					ids[i] = append(ids[i], e.ID)
				}
			}
		})
	}
	for n := 1; n < events; n++ {
		j.Append(number(n))
	}
	readers.Wait()
	for i, got := range ids {
		if !slices.IsSorted(got) || len(slices.Compact(got)) != len(got) || got[len(got)-1] != events {
			t.Errorf("reader %d: %d events, not in order up to %d", i, len(got), events)
		}
	}
	e := take(t, slow, 1)[0]
	var g Gap
	if err := json.Unmarshal(e.Data, &g); e.Type != TypeGap || err != nil || g.First != e.ID+1 || g.First <= at {
		t.Fatalf("the slow one got %+v %s, want a gap", e, e.Data)
	}
	if next := take(t, slow, 1)[0]; next.ID != g.First {
		t.Errorf("behind the gap comes %d, not %d", next.ID, g.First)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(files) > 3 {
		t.Errorf("%d segments are kept: %v", len(files), files)
	}
}

func TestUnknownIDIsAGap(t *testing.T) {
	j := open(t, t.TempDir(), Options{})
	j.Append(number(0))
	s := j.Subscribe(12345, Filter{Sandbox: "none"})
	defer s.Close()
	if e := take(t, s, 1)[0]; e.Type != TypeGap || !strings.Contains(string(e.Data), "12345") {
		t.Errorf("got %+v", e)
	}
}

func TestQueueIsBounded(t *testing.T) {
	j := open(t, t.TempDir(), Options{Queue: 4})
	s := j.Subscribe(0, Filter{})
	defer s.Close()
	j.mu.Lock() // the writer can't take the queue
	j.queue = slices.Repeat([]Event{number(0)}, 4)
	j.mu.Unlock()
	j.Append(number(1))
	j.Append(number(1))
	j.wake <- struct{}{}
	e := take(t, s, 1)[0]
	if e.Type != TypeGap || !strings.Contains(string(e.Data), `"lost":2`) {
		t.Fatalf("got %+v %s, want a gap of 2", e, e.Data)
	}
	take(t, s, 4)
}

func TestWriteFailureIsAGap(t *testing.T) {
	j := open(t, t.TempDir(), Options{})
	s := j.Subscribe(0, Filter{})
	defer s.Close()
	j.Append(number(0))
	take(t, s, 1)
	j.file.Close() // the writer waits for its queue
	j.Append(number(1))
	for {
		j.mu.Lock()
		lost := j.lost
		j.mu.Unlock()
		if lost == 1 {
			break
		}
	}
	j.Append(number(2))
	got := take(t, s, 2)
	if got[0].Type != TypeGap || !strings.Contains(string(got[0].Data), `"lost":1`) || string(got[1].Data) != `{"n":2}` {
		t.Errorf("got %s %s", got[0].Data, got[1].Data)
	}
}

func TestCloseEndsSubscriptions(t *testing.T) {
	j := open(t, t.TempDir(), Options{})
	s := j.Subscribe(0, Filter{})
	defer s.Close()
	for n := range 3 {
		j.Append(number(n))
	}
	go j.Close()
	wantRun(t, take(t, s, 3), 0)
	if _, err := s.Next(t.Context()); err != io.EOF {
		t.Errorf("Next of a closed journal: %v", err)
	}
	j.Append(number(3)) // is nobody's loss
}

func TestNextEndsWithItsContext(t *testing.T) {
	j := open(t, t.TempDir(), Options{})
	s := j.Subscribe(0, Filter{})
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestLongDataIsLeftOut(t *testing.T) {
	j := open(t, t.TempDir(), Options{})
	s := j.Subscribe(0, Filter{})
	defer s.Close()
	j.Append(Event{Type: "t", Data: json.RawMessage(`"` + strings.Repeat("x", maxLine) + `"`)})
	j.Append(Event{Type: strings.Repeat("x", maxLine)})
	j.Append(Event{Type: "t", Data: json.RawMessage(`{`)})
	j.Append(number(1))
	got := take(t, s, 2)
	if string(got[0].Data) != `{"truncated":true}` || string(got[1].Data) != `{"n":1}` {
		t.Errorf("got %s and %s", got[0].Data, got[1].Data)
	}
}

// TestGolden holds the format against a file that was written by the first
// version of it.
func TestGolden(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	text := head(0)
	text = append(text, reservation(1000)...)
	for _, e := range []Event{
		{ID: 1, Time: at, Type: "created", Sandbox: "0123456789abcdefghjk", Name: "demo", Data: json.RawMessage(`{"template":"base"}`)},
		{ID: 2, Time: at, Type: "deleted", Sandbox: "0123456789abcdefghjk"},
		gap(5, at, Gap{Lost: 3, Reason: "more happened at once than could be written"}),
	} {
		var err error
		if text, err = encode(text, e); err != nil {
			t.Fatal(err)
		}
	}
	text = append(text, reservation(5)...)
	path := filepath.Join("testdata", "v1.events")
	if *update {
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, want) {
		t.Errorf("written:\n%s\nthe golden file:\n%s", text, want)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, segmentName(1)), want, 0o600); err != nil {
		t.Fatal(err)
	}
	j := open(t, dir, Options{})
	s := j.Subscribe(0, Filter{})
	defer s.Close()
	if got := take(t, s, 3); got[0].Name != "demo" || got[2].ID != 5 || j.Last() != 5 {
		t.Errorf("read %+v, last %d", got, j.Last())
	}
}

func TestNewerVersionIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, segmentName(1)), []byte(`{"format":"hib-events","version":2}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Options{}); !errors.Is(err, ErrFormat) {
		t.Errorf("got %v, want ErrFormat", err)
	}
}

// FuzzSegment reads anything as a segment: what comes out is in order, and a
// journal opens on it.
func FuzzSegment(f *testing.F) {
	golden, err := os.ReadFile(filepath.Join("testdata", "v1.events"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(golden)
	f.Add(golden[:len(golden)-7])
	f.Add([]byte("\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		sc := newScanner(bytes.NewReader(b), 1)
		var last uint64
		for {
			e, err := sc.next()
			if err != nil {
				break
			}
			if e.ID <= last || e.Type == "" {
				t.Fatalf("event %d of type %q follows %d", e.ID, e.Type, last)
			}
			last = e.ID
		}
		if sc.good > int64(len(b)) || sc.good > 0 && b[sc.good-1] != '\n' {
			t.Fatalf("%d of %d bytes are whole lines", sc.good, len(b))
		}
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, segmentName(1)), b, 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := Open(dir, Options{})
		if errors.Is(err, ErrFormat) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		j.Append(Event{Type: "new"})
		s := j.Subscribe(0, Filter{Types: []string{"new"}})
		defer s.Close()
		for {
			e, err := s.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if e.Type == "new" && e.ID > last {
				return
			}
		}
	})
}
