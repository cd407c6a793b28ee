package sandbox_test

import (
	"context"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
)

// answered is a sandbox whose hibernation is acknowledged, and whose machine is
// held at the step that parks or ends it until open is called.
type answered struct {
	*host
	id   string
	open func()
}

// leavings are the steps by which a machine leaves behind a commit.
var leavings = map[string][]func(*sandbox.Config){"release": nil, "park": {fast}}

// eachAnswered runs a test on a sandbox with the memory "kept" that has just been
// hibernated, by every way that its machine leaves.
func eachAnswered(t *testing.T, test func(t *testing.T, a answered)) {
	for step, options := range leavings {
		t.Run(step, func(t *testing.T) {
			h := newHost(t, options...)
			s := h.create()
			h.ask(s.ID, "set kept")
			g := newGate()
			h.hook.set(at(step, false, g.wait))
			s, err := h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
			if err != nil || s.State != sandbox.StateStandby {
				t.Fatalf("it is %s, %v", s.State, err)
			}
			<-g.reached
			test(t, answered{host: h, id: s.ID, open: func() { close(g.open) }})
		})
	}
}

// TestAnswerComesWithTheCommit: the snapshot is durable, the report complete up to
// there, and the machine leaves behind it. The event tells all.
func TestAnswerComesWithTheCommit(t *testing.T) {
	for step, options := range leavings {
		t.Run(step, func(t *testing.T) {
			told := make(chan sandbox.HibernateReport, 1)
			h := newHost(t, append(options, func(c *sandbox.Config) {
				c.Events.OnEvent = func(e sandbox.Event) {
					if e.Type == sandbox.EventHibernated {
						told <- *e.Hibernate
					}
				}
			})...)
			s := h.create()
			h.ask(s.ID, "set kept")
			g := newGate()
			h.hook.set(at(step, false, g.wait))
			s, err := h.core.Hibernate(t.Context(), s.ID, sandbox.HibernateOptions{})
			if err != nil || s.State != sandbox.StateStandby || s.Parked {
				t.Fatalf("the answer is %+v, %v; machines %v", s, err, h.w.Machines())
			}
			if memory, ok := h.w.Memory(s.Snapshot.ID); !ok || memory != "kept" {
				t.Errorf("the snapshot has %q", memory)
			}
			report := s.LastHibernate
			if _, ok := report.Phases["commit"]; !ok || report.TotalMS < report.Phases["commit"] || report.TotalMS == 0 {
				t.Errorf("the report has no time until the commit: %+v", report)
			}
			if _, ok := report.Phases[step]; ok {
				t.Errorf("the report tells of what is to come: %v", report.Phases)
			}
			select {
			case r := <-told:
				t.Errorf("the event came before the machine left: %+v", r)
			default:
			}
			close(g.open)
			final := <-told
			if _, ok := final.Phases[step]; !ok || final.TotalMS != report.TotalMS {
				t.Errorf("the event tells %+v, the answer was %+v", final, report)
			}
			h.core.Rest(s.ID)
			if now := h.get(s.ID); now.LastHibernate.Phases[step] != final.Phases[step] || now.Parked != (step == "park") {
				t.Errorf("afterwards it is %+v", now)
			}
			h.crash()
			if now := h.get(s.ID).LastHibernate; now.TotalMS != final.TotalMS || now.Phases[step] != final.Phases[step] {
				t.Errorf("the next daemon knows %+v, want %+v", now, final)
			}
		})
	}
}

// TestKilledBehindTheAnswer: what was acknowledged is there, and the machine is
// seen to by the next daemon.
func TestKilledBehindTheAnswer(t *testing.T) {
	for name, between := range map[string]func(h *host){
		"shim lives": func(*host) {},
		"shim dead":  func(h *host) { h.w.KillShims("") },
		"power cut":  func(h *host) { h.w.Reboot() },
	} {
		t.Run(name, func(t *testing.T) {
			eachAnswered(t, func(t *testing.T, a answered) {
				a.d.Kill()
				a.open()
				a.crash(func() { between(a.host) })
				s := a.get(a.id)
				if s.State != sandbox.StateStandby {
					t.Fatalf("it is %s: %s", s.State, s.Reason)
				}
				if parks := len(a.options) > 0 && name == "shim lives"; s.Parked != parks || a.w.Parked(a.id) != parks {
					t.Errorf("parked: %v; machines %v", s.Parked, a.w.Machines())
				}
				if got := a.ask(a.id, "get"); got != "kept" {
					t.Errorf("it has %q", got)
				}
			})
		})
	}
}

// TestOrdersBehindTheAnswer wait until the machine has left, and do what they
// always do.
func TestOrdersBehindTheAnswer(t *testing.T) {
	for name, order := range map[string]func(ctx context.Context, h *host, id string) error{
		"resume": func(ctx context.Context, h *host, id string) error {
			_, err := h.core.Resume(ctx, id, sandbox.ResumeOptions{})
			return err
		},
		"request": func(ctx context.Context, h *host, id string) error {
			_, err := sandboxtest.Ask(ctx, h.core, id, "get")
			return err
		},
		"hibernate": func(ctx context.Context, h *host, id string) error {
			_, err := h.core.Hibernate(ctx, id, sandbox.HibernateOptions{})
			return err
		},
		"evict": func(ctx context.Context, h *host, id string) error {
			_, err := h.core.Evict(ctx, id, sandbox.EvictOptions{Parked: true})
			return err
		},
		"delete": func(ctx context.Context, h *host, id string) error { return h.core.Delete(ctx, id) },
		"close":  func(_ context.Context, h *host, _ string) error { h.core.Close(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			eachAnswered(t, func(t *testing.T, a answered) {
				done := make(chan error)
				go func() { done <- order(t.Context(), a.host, a.id) }()
				a.open()
				if err := <-done; err != nil {
					t.Fatal(err)
				}
				switch name {
				case "delete":
					_, err := a.core.Get(t.Context(), a.id)
					isA(t, err, sandbox.ErrNotFound)
					a.noneLeft()
					return
				case "close":
					if parks := len(a.options) > 0; a.w.Parked(a.id) != parks {
						t.Errorf("machines: %v", a.w.Machines())
					}
					a.boot(a.options...)
				case "hibernate":
					if s := a.get(a.id); s.State != sandbox.StateStandby {
						t.Errorf("it is %s", s.State)
					}
				}
				if got := a.ask(a.id, "get"); got != "kept" {
					t.Errorf("it has %q", got)
				}
			})
		})
	}
}

// TestMemoryOfOneThatLeaves is not refused to who knows that it hibernated, nor
// promised to anybody before its machine has ended.
func TestMemoryOfOneThatLeaves(t *testing.T) {
	h := newHost(t, roomForTwo)
	a := h.create()
	h.create()
	g := newGate()
	h.hook.set(at("release", false, g.wait))
	if _, err := h.core.Hibernate(t.Context(), a.ID, sandbox.HibernateOptions{}); err != nil {
		t.Fatal(err)
	}
	<-g.reached
	if n := h.guests(); n != 2 {
		t.Errorf("memory is promised to %d guests while two machines are alive", n)
	}
	created := make(chan error)
	go func() {
		_, err := h.core.Create(t.Context(), sandbox.CreateOptions{})
		created <- err
	}()
	close(g.open)
	if err := <-created; err != nil {
		t.Fatal(err)
	}
	_, err := h.core.Create(t.Context(), sandbox.CreateOptions{})
	isA(t, err, sandbox.ErrUnavailable)
}
