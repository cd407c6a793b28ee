package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
)

// TestRequestCancelsHibernation: before the commit, and also behind the seal.
func TestRequestCancelsHibernation(t *testing.T) {
	for _, tt := range []struct {
		name  string
		step  string
		after bool
	}{
		{"capturing", "seal", false},
		{"sealed", "seal", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHost(t)
			s := h.create()
			h.ask(s.ID, "set kept")
			machines := h.w.Machines()
			g := newGate()
			h.hook.set(at(tt.step, tt.after, g.wait))
			hibernated := make(chan error)
			go func() {
				_, err := h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
				hibernated <- err
			}()
			<-g.reached
			if got := h.ask(s.ID, "get"); got != "kept" {
				t.Errorf("it has %q", got)
			}
			err := <-hibernated
			isA(t, err, sandbox.ErrConflict)
			if !strings.Contains(err.Error(), "cancelled by a request") {
				t.Errorf("error: %v", err)
			}
			if now := h.w.Machines(); fmt.Sprint(now) != fmt.Sprint(machines) {
				t.Errorf("the machine changed: %v, %v", machines, now)
			}
			wait(t, "the unneeded snapshot is gone", func() bool { return h.w.Snapshots() == 1 })
			h.hibernate(s.ID)
		})
	}
}

// TestRequestAfterCommitResumes waits for the end of the hibernation.
func TestRequestAfterCommitResumes(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set kept")
	g := newGate()
	h.hook.set(at("release", false, g.wait))
	hibernated := make(chan error)
	go func() {
		_, err := h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
		hibernated <- err
	}()
	<-g.reached
	asked := make(chan string)
	go func() {
		answer, err := sandboxtest.Ask(t.Context(), h.core, s.ID, "get")
		asked <- fmt.Sprint(answer, err)
	}()
	close(g.open)
	if err := <-hibernated; err != nil {
		t.Fatal(err)
	}
	if got := <-asked; got != "kept<nil>" {
		t.Fatal(got)
	}
}

// TestConnectionOutlivesCancelledHibernation: a dial that finds the guest going
// to sleep gets a connection that works.
func TestConnectionOutlivesCancelledHibernation(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.ask(s.ID, "set kept")
	conn, err := h.core.Dial(t.Context(), s.ID, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	g := newGate()
	h.hook.set(at("seal", true, g.wait))
	hibernated := make(chan error)
	go func() {
		_, err := h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
		hibernated <- err
	}()
	<-g.reached
	h.ask(s.ID, "get")
	isA(t, <-hibernated, sandbox.ErrConflict)
	if _, err := fmt.Fprintln(conn, "get"); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 5)
	if _, err := conn.Read(answer); err != nil || string(answer) != "kept\n" {
		t.Fatalf("%q, %v", answer, err)
	}
}

// TestDeleteCancels whatever goes on.
func TestDeleteCancels(t *testing.T) {
	for name, tt := range map[string]struct {
		step string
		op   func(h *host, id string) error
	}{
		"hibernation": {"seal", func(h *host, id string) error {
			_, err := h.core.Hibernate(h.t.Context(), id, sandbox.HibernateOptions{})
			return err
		}},
		"hibernation begins": {"capture", func(h *host, id string) error {
			_, err := h.core.Hibernate(h.t.Context(), id, sandbox.HibernateOptions{})
			return err
		}},
		"resume": {"prepare", func(h *host, id string) error {
			_, err := h.core.Resume(h.t.Context(), id, sandbox.ResumeOptions{})
			return err
		}},
		"resume ends": {"resume", func(h *host, id string) error {
			_, err := h.core.Resume(h.t.Context(), id, sandbox.ResumeOptions{})
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			s := h.create()
			if strings.HasPrefix(name, "resume") {
				h.hibernate(s.ID)
			}
			g := newGate()
			h.hook.set(at(tt.step, false, g.wait))
			done := make(chan error)
			go func() { done <- tt.op(h, s.ID) }()
			<-g.reached
			if err := h.core.Delete(t.Context(), s.ID); err != nil {
				t.Fatal(err)
			}
			isA(t, <-done, sandbox.ErrConflict)
			if m := h.w.Machines(); len(m) != 0 {
				t.Fatalf("machines are left: %v", m)
			}
		})
	}
}

func TestTwoResumesAreOne(t *testing.T) {
	h := newHost(t)
	s := h.create()
	h.hibernate(s.ID)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if _, err := h.core.Resume(t.Context(), s.ID, sandbox.ResumeOptions{}); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if _, err := sandboxtest.Ask(t.Context(), h.core, s.ID, "get"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if m := h.w.Machines(); len(m) != 1 {
		t.Fatalf("machines: %v", m)
	}
}

// TestRaces lets hibernations, resumes, requests and at the end deletions of
// one sandbox race, many times. Whatever wins, memory is exact and each answer
// is true.
func TestRaces(t *testing.T) { each(t, races) }

func races(h *host) {
	t := h.t
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	ctx := t.Context()
	for round := range rounds {
		s := h.create()
		want := fmt.Sprint("round-", round)
		h.ask(s.ID, "set "+want)
		var wg sync.WaitGroup
		hibernate := func() {
			if _, err := h.core.Hibernate(ctx, s.ID, sandbox.HibernateOptions{}); err != nil && !errors.Is(err, sandbox.ErrConflict) && !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("round %d: hibernate: %v", round, err)
			}
		}
		resume := func() {
			if _, err := h.core.Resume(ctx, s.ID, sandbox.ResumeOptions{}); err != nil && !errors.Is(err, sandbox.ErrConflict) && !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("round %d: resume: %v", round, err)
			}
		}
		dial := func() {
			conn, err := h.core.Dial(ctx, s.ID, 80)
			if err == nil {
				conn.Close()
			} else if !errors.Is(err, sandbox.ErrConflict) && !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("round %d: dial: %v", round, err)
			}
		}
		for range 2 {
			wg.Go(hibernate)
			wg.Go(dial)
			wg.Go(resume)
		}
		if round%2 == 1 {
			for range 2 {
				wg.Go(func() {
					if err := h.core.Delete(ctx, s.ID); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
						t.Errorf("round %d: delete: %v", round, err)
					}
				})
			}
		}
		wg.Wait()
		if round%2 == 1 {
			if _, err := h.core.Get(ctx, s.ID); !errors.Is(err, sandbox.ErrNotFound) {
				t.Fatalf("round %d: after deletion: %v", round, err)
			}
		} else {
			if got := h.ask(s.ID, "get"); got != want {
				t.Fatalf("round %d: it has %q", round, got)
			}
			if err := h.core.Delete(ctx, s.ID); err != nil {
				t.Fatal(err)
			}
		}
		h.noneLeft()
		if t.Failed() {
			t.FailNow()
		}
	}
}

// TestEverythingAtOnce lets traffic, hibernation, resume, checkpoint, fork,
// restore and deletion meet at one instant on one sandbox, many times. Each
// answer is true, copies hold what the sandbox held at one time, and nothing is left.
func TestEverythingAtOnce(t *testing.T) { each(t, everythingAtOnce) }

func everythingAtOnce(h *host) {
	t := h.t
	ctx := t.Context()
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	// An answer that is right where others do something else with the sandbox.
	fair := func(round int, what string, err error) {
		if err != nil && !errors.Is(err, sandbox.ErrConflict) && !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("round %d: %s: %v", round, what, err)
		}
	}
	for round := range rounds {
		s := h.create()
		old, now := fmt.Sprint("old-", round), fmt.Sprint("now-", round)
		h.ask(s.ID, "set "+old)
		h.checkpoint(s.ID, "old")
		h.ask(s.ID, "set "+now)
		var mu sync.Mutex
		var copies []string // ids
		start := make(chan struct{})
		var wg sync.WaitGroup
		together := func(what string, do func() error) {
			wg.Go(func() {
				<-start
				fair(round, what, do())
			})
		}
		for range 2 {
			together("traffic", func() error {
				conn, err := h.core.Dial(ctx, s.ID, 80)
				if err == nil {
					conn.Close()
				}
				return err
			})
		}
		together("hibernate", func() error { _, err := h.core.Hibernate(ctx, s.ID, sandbox.HibernateOptions{}); return err })
		together("resume", func() error { _, err := h.core.Resume(ctx, s.ID, sandbox.ResumeOptions{}); return err })
		together("checkpoint", func() error { _, err := h.core.Checkpoint(ctx, s.ID, ""); return err })
		together("restore", func() error { _, _, err := h.core.Restore(ctx, s.ID, "old"); return err })
		for _, from := range []string{"", "old"} {
			together("fork", func() error {
				forks, err := h.core.Fork(ctx, s.ID, sandbox.ForkOptions{Count: 2, Checkpoint: from})
				mu.Lock()
				defer mu.Unlock()
				for _, f := range forks {
					copies = append(copies, f.ID)
				}
				return err
			})
		}
		deleted := round%2 == 1
		if deleted {
			together("delete", func() error { return h.core.Delete(ctx, s.ID) })
		}
		close(start)
		wg.Wait()
		if !deleted {
			if got := h.ask(s.ID, "get"); got != old { // the restore came to its end
				t.Errorf("round %d: it has %q", round, got)
			}
			copies = append(copies, s.ID)
		}
		for _, id := range copies {
			if got := h.ask(id, "get"); got != old && got != now {
				t.Errorf("round %d: a copy has %q", round, got)
			}
			if err := h.core.Delete(ctx, id); err != nil {
				t.Error(err)
			}
		}
		if list := h.list(); len(list) != 0 {
			t.Errorf("round %d: %d sandboxes are left", round, len(list))
		}
		h.noneLeft()
		if t.Failed() {
			t.FailNow()
		}
	}
}

// TestManyAtOnce races over many sandboxes with collections in between.
func TestManyAtOnce(t *testing.T) { each(t, manyAtOnce) }

func manyAtOnce(h *host) {
	t := h.t
	ctx := t.Context()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			s, err := h.core.Create(ctx, sandbox.CreateOptions{Name: fmt.Sprint("s-", i)})
			if err != nil {
				t.Error(err)
				return
			}
			for cycle := range 10 {
				want := fmt.Sprint(i, "-", cycle)
				if _, err := sandboxtest.Ask(ctx, h.core, s.ID, "set "+want); err != nil {
					t.Error(err)
				}
				if _, err := h.core.Hibernate(ctx, s.ID, sandbox.HibernateOptions{}); err != nil {
					t.Error(err)
				}
				if got, err := sandboxtest.Ask(ctx, h.core, s.ID, "get"); err != nil || got != want {
					t.Errorf("%d: %q, %v", i, got, err)
				}
			}
		})
	}
	stop, stopped := context.WithCancel(ctx)
	var collector sync.WaitGroup
	collector.Go(func() {
		for stop.Err() == nil {
			if _, err := h.core.Collect(ctx, sandbox.CollectOptions{}); err != nil && !errors.Is(err, sandbox.ErrUnavailable) {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	stopped()
	collector.Wait()
}
