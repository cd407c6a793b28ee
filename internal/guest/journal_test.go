package guest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func text(s string) chunk { return chunk{streamStdout, []byte(s)} }

// drain reads what a follower can have at once, or to the end.
func drain(t *testing.T, f *follower) string {
	t.Helper()
	var b strings.Builder
	for {
		c, ok, err := f.read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return b.String()
		}
		b.Write(c.data)
	}
}

func TestJournalKeepsTheLastOutput(t *testing.T) {
	j := newJournal(3 * (chunkOverhead + 1))
	for _, s := range strings.Split("abcdef", "") {
		j.write(text(s))
	}
	fresh, replay := j.follow(false), j.follow(true)
	j.close()
	j.write(text("x")) // has no effect
	if got := drain(t, fresh) + "|" + drain(t, replay); got != "|def" {
		t.Errorf("got %q", got)
	}
	if j.bytes() > j.limit {
		t.Errorf("%d bytes are kept, the limit is %d", j.bytes(), j.limit)
	}
}

func TestJournalTakesAChunkBeyondItsLimit(t *testing.T) {
	j := newJournal(10)
	f := j.follow(false)
	j.write(text(strings.Repeat("x", 100)))
	j.close()
	if got := drain(t, f); len(got) != 100 {
		t.Errorf("got %d bytes", len(got))
	}
}

func TestWriterWaitsForFollowersUntilTheyLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(2 * (chunkOverhead + 1))
		slow, fast := j.follow(false), j.follow(false)
		written := 0
		go func() {
			for _, s := range strings.Split("abcdef", "") {
				j.write(text(s))
				written++
			}
			j.close()
		}()
		synctest.Wait()
		if written != 2 {
			t.Fatalf("%d chunks were written past followers that read nothing", written)
		}
		if c, _, _ := slow.read(t.Context()); string(c.data) != "a" {
			t.Fatalf("read %q", c.data)
		}
		synctest.Wait()
		if written != 2 {
			t.Fatalf("%d chunks were written past the other follower", written)
		}
		go fast.read(t.Context())
		synctest.Wait()
		if written != 3 {
			t.Fatalf("%d chunks were written, want 3", written)
		}
		slow.leave()
		if got := drain(t, fast); got != "bcdef" {
			t.Errorf("got %q", got)
		}
	})
}

func TestFollowerStopsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, _, err := newJournal(10).follow(true).read(ctx)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}
