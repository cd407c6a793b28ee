package sandbox_test

import (
	"bufio"
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// TestWake: requests at the same time share a resume, each learns of it, and it
// reports who caused it.
func TestWake(t *testing.T) {
	each(t, func(h *host) {
		s := h.create(sandbox.CreateOptions{Name: "anna"})
		if s.LastResume.By != "" || s.TrafficToken == "" {
			t.Errorf("created: woken by %q, token %q", s.LastResume.By, s.TrafficToken)
		}
		if w, err := h.core.Wake(t.Context(), "anna", "exec"); err != nil || w.Resumed || w.Report != nil || w.ID != s.ID || w.String() != "" {
			t.Fatalf("of one that runs: %#v, %v", w, err)
		}
		h.hibernate(s.ID)
		step := "resume"
		if len(h.options) > 0 {
			step = "unpark"
		}
		g := newGate()
		h.hook.set(at(step, false, g.wait))
		go func() {
			<-g.reached
			wait(h.t, "all wait for the resume", func() bool { return h.core.Waiting(s.ID) == 10 })
			close(g.open)
		}()
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				w, err := h.core.Wake(t.Context(), s.ID, "http 8000")
				if err != nil || !w.Resumed || w.Report == nil || w.Report.By != "http 8000" || !strings.HasPrefix(w.String(), "tier="+w.Report.Tier+"; ms=") {
					t.Errorf("%#v, %v", w, err)
				}
			})
		}
		wg.Wait()
		h.hook.set(nil)
		h.hibernate(s.ID)
		if s := h.resume(s.ID); s.LastResume.By != sandbox.ByAPI {
			t.Errorf("resumed by %q", s.LastResume.By)
		}
		h.hibernate(s.ID)
		h.ask(s.ID, "get")
		if by := h.get(s.ID).LastResume.By; by != "port 80" {
			t.Errorf("woken by %q", by)
		}
		_, err := h.core.Wake(t.Context(), "nobody", "exec")
		isA(t, err, sandbox.ErrNotFound)
	})
}

// TestWakeCancelsHibernation: then nothing was resumed.
func TestWakeCancelsHibernation(t *testing.T) {
	h := newHost(t)
	s := h.create()
	g := newGate()
	h.hook.set(at("capture", false, g.wait))
	hibernated := make(chan error, 1)
	go func() {
		_, err := h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
		hibernated <- err
	}()
	<-g.reached
	if w, err := h.core.Wake(t.Context(), s.ID, "exec"); err != nil || w.Resumed {
		t.Errorf("%#v, %v", w, err)
	}
	isA(t, <-hibernated, sandbox.ErrConflict)
}

// TestConnectionTellsOfSleep: a connection says when its guest does not run any
// more, also if that is parked and runs again afterwards.
func TestConnectionTellsOfSleep(t *testing.T) {
	each(t, func(h *host) {
		s := h.create()
		conn, err := h.core.Dial(t.Context(), s.ID, 80)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		asleep := conn.(interface{ Asleep() <-chan struct{} }).Asleep()
		select {
		case <-asleep:
			t.Fatal("it tells so of a guest that runs")
		default:
		}
		h.hibernate(s.ID)
		h.resume(s.ID)
		select {
		case <-asleep:
		default:
			t.Error("it does not tell")
		}
	})
}

// TestWokenEvent: who wakes a sandbox is told, an order to resume it is not that.
func TestWokenEvent(t *testing.T) {
	var mu sync.Mutex
	var woken []string
	h := newHost(t, func(c *sandbox.Config) {
		c.Events.OnEvent = func(ev sandbox.Event) {
			if ev.Type == sandbox.EventWoken {
				mu.Lock()
				defer mu.Unlock()
				woken = append(woken, ev.By)
			}
		}
	})
	s := h.create()
	h.hibernate(s.ID)
	h.resume(s.ID)
	h.hibernate(s.ID)
	if _, err := h.core.Wake(t.Context(), s.ID, "files"); err != nil {
		t.Fatal(err)
	}
	h.core.Close()
	if len(woken) != 1 || woken[0] != "files" {
		t.Errorf("woken by %q", woken)
	}
}

// TestTrafficTokenStays: over restarts of the daemon, and for every sandbox its own.
func TestTrafficTokenStays(t *testing.T) {
	h := newHost(t)
	a, b := h.create(), h.create()
	h.crash()
	if got := h.get(a.ID).TrafficToken; got != a.TrafficToken || got == b.TrafficToken {
		t.Errorf("%q was %q, that of another is %q", got, a.TrafficToken, b.TrafficToken)
	}
	if token, err := h.core.AgentToken(context.Background(), a.ID); err != nil || token == a.TrafficToken {
		t.Errorf("the agent's token is %q, %v", token, err)
	}
}

// TestHibernationHearsAnswersOut: a request that reached the guest before
// somebody asked for a hibernation is answered.
func TestHibernationHearsAnswersOut(t *testing.T) {
	h := newHost(t)
	id := h.create().ID
	h.ask(id, "set kept")
	for range 50 {
		conn, err := h.core.Dial(t.Context(), id, 80)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			_, err := h.core.Hibernate(t.Context(), id, sandbox.HibernateOptions{})
			done <- err
		}()
		runtime.Gosched()
		if _, err := fmt.Fprintln(conn, "get"); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || strings.TrimSpace(line) != "kept" {
			t.Fatalf("the answer is %q, %v", line, err)
		}
		conn.Close()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}
