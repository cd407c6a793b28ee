package guest

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	processpb "github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

func identity() *guestapi.Identity {
	return &guestapi.Identity{ID: "abc", Hostname: "abc", MachineID: strings.Repeat("0f", 16), ControlToken: "token"}
}

func bootRequest() guestapi.InitRequest {
	return guestapi.InitRequest{Reason: guestapi.ReasonBoot, UnixNano: 1, Entropy: make([]byte, 32), Generation: 1, Identity: identity()}
}

func resumeRequest(generation uint64) guestapi.InitRequest {
	return guestapi.InitRequest{Reason: guestapi.ReasonResume, UnixNano: time.Now().UnixNano(), Entropy: bytes.Repeat([]byte{7}, 32), Generation: generation}
}

// boot makes the first init.
func (g *guestUnderTest) boot(t *testing.T) {
	t.Helper()
	if _, err := g.control.Init(testContext(t), "", bootRequest()); err != nil {
		t.Fatal(err)
	}
	g.system.calls = nil
}

func TestInitActsInItsOrder(t *testing.T) {
	for _, c := range []struct {
		reason   string
		identity *guestapi.Identity
		want     string
	}{
		{guestapi.ReasonCreate, identity(), "clock entropy identity boot_id sockets publish thaw"},
		{guestapi.ReasonFork, identity(), "clock entropy identity boot_id sockets publish thaw"},
		{guestapi.ReasonResume, nil, "clock entropy sockets publish thaw"},
		{guestapi.ReasonRestore, nil, "clock entropy boot_id sockets publish thaw"},
		{guestapi.ReasonCancelled, nil, "clock entropy publish thaw"},
	} {
		t.Run(c.reason, func(t *testing.T) {
			g := newGuest(t, nil)
			g.boot(t)
			req := resumeRequest(2)
			req.Reason, req.Identity = c.reason, c.identity
			resp, err := g.control.Init(testContext(t), "token", req)
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(g.system.calls, " "); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			if len(resp.Steps) != len(g.system.calls) || resp.AgentVersion != guestapi.Version {
				t.Errorf("answer %+v", resp)
			}
			if g.system.generation != 2 || !bytes.Equal(g.system.entropy, req.Entropy) {
				t.Errorf("generation %d, entropy %x", g.system.generation, g.system.entropy)
			}
			if late := g.system.clock.Sub(time.Unix(0, req.UnixNano)); late < 0 || late > patience {
				t.Errorf("the clock was set %v from the host's", late)
			}
		})
	}
}

func TestInitSparesTheConnectionThatCarriesIt(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	resp, err := g.control.Init(testContext(t), "token", resumeRequest(2))
	if err != nil || resp.SocketsDestroyed != 3 {
		t.Fatalf("%+v, %v", resp, err)
	}
	if k := g.system.kept; !k.Local.IsValid() || !k.Remote.IsValid() || k.Local == k.Remote {
		t.Errorf("kept %+v", k)
	}
}

func TestInitIsDoneOncePerGeneration(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	fork := resumeRequest(2)
	fork.Reason, fork.Identity = guestapi.ReasonFork, identity()
	fork.Identity.ControlToken = "new"
	if _, err := g.control.Init(testContext(t), "token", fork); err != nil {
		t.Fatal(err)
	}
	done := slices.Clone(g.system.calls)
	// Its answer may have been lost: the caller repeats it with the token it knew.
	for _, token := range []string{"token", "new"} {
		if _, err := g.control.Init(testContext(t), token, fork); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(done, g.system.calls) {
		t.Errorf("a repeated init acted again: %v", g.system.calls)
	}
	if _, err := g.control.Init(testContext(t), "token", resumeRequest(3)); !errors.Is(err, guestapi.ErrUnauthorized) {
		t.Errorf("the old token with another generation: %v", err)
	}
	if _, err := g.control.Init(testContext(t), "new", resumeRequest(3)); err != nil {
		t.Error(err)
	}
}

func TestInitWarnsOfWhatFailed(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	g.system.fail["sockets"] = errors.New("no such module")
	resp, err := g.control.Init(testContext(t), "token", resumeRequest(2))
	if err != nil || len(resp.Warnings) != 1 || resp.Warnings[0] != "sockets: no such module" {
		t.Errorf("%+v, %v", resp, err)
	}
	if !slices.Contains(g.system.calls, "thaw") {
		t.Errorf("the guest was left frozen: %v", g.system.calls)
	}
}

func TestInitRefusesBadRequests(t *testing.T) {
	for name, spoil := range map[string]func(*guestapi.InitRequest){
		"reason":     func(r *guestapi.InitRequest) { r.Reason = "?" },
		"entropy":    func(r *guestapi.InitRequest) { r.Entropy = make([]byte, 31) },
		"identity":   func(r *guestapi.InitRequest) { r.Identity = nil },
		"id":         func(r *guestapi.InitRequest) { r.Identity.ID = "../x" },
		"host name":  func(r *guestapi.InitRequest) { r.Identity.Hostname = "a b" },
		"machine id": func(r *guestapi.InitRequest) { r.Identity.MachineID = "x" },
		"token":      func(r *guestapi.InitRequest) { r.Identity.ControlToken = "" },
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, nil)
			req := bootRequest()
			spoil(&req)
			if _, err := g.control.Init(testContext(t), "", req); err == nil || !strings.Contains(err.Error(), "400") {
				t.Errorf("got %v", err)
			}
			if len(g.system.calls) > 0 {
				t.Errorf("it acted: %v", g.system.calls)
			}
		})
	}
}

func TestControlCallsNeedTheToken(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	freeze := guestapi.FreezeRequest{Attempt: 1, Deadline: time.Minute}
	check := func(token string) {
		t.Helper()
		_, err := g.control.Freeze(ctx, token, freeze)
		if !errors.Is(err, guestapi.ErrUnauthorized) {
			t.Errorf("freeze with %q: %v", token, err)
		}
		if _, err := g.control.Thaw(ctx, token, guestapi.ThawRequest{Attempt: 1}); !errors.Is(err, guestapi.ErrUnauthorized) {
			t.Errorf("thaw with %q: %v", token, err)
		}
	}
	check("") // there is no token yet: nothing but an init is taken
	g.boot(t)
	check("")
	check("guess")
	if _, err := g.control.Init(ctx, "guess", resumeRequest(2)); !errors.Is(err, guestapi.ErrUnauthorized) {
		t.Errorf("init: %v", err)
	}
	if len(g.system.calls) > 0 {
		t.Errorf("it acted: %v", g.system.calls)
	}
}

func TestFreezeAndThaw(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	ctx := testContext(t)
	freeze := func(attempt uint64) error {
		_, err := g.control.Freeze(ctx, "token", guestapi.FreezeRequest{Attempt: attempt, Deadline: time.Minute})
		return err
	}
	thaw := func(attempt uint64) {
		t.Helper()
		if _, err := g.control.Thaw(ctx, "token", guestapi.ThawRequest{Attempt: attempt}); err != nil {
			t.Fatal(err)
		}
	}
	want := func(err, target error, frozen bool) {
		t.Helper()
		if !errors.Is(err, target) {
			t.Errorf("got %v, want %v", err, target)
		}
		if g.system.isFrozen() != frozen {
			t.Errorf("frozen: %v", !frozen)
		}
	}
	want(freeze(2), nil, true)
	want(freeze(2), nil, true) // idempotent
	want(freeze(1), guestapi.ErrRefused, true)
	thaw(1) // an earlier attempt's: it does not touch this one
	want(nil, nil, true)
	thaw(2)
	want(freeze(2), guestapi.ErrRefused, false)
	thaw(5) // never frozen, and now it never will be
	want(freeze(5), guestapi.ErrRefused, false)
	want(freeze(6), nil, true)
	if _, err := g.control.Init(ctx, "token", resumeRequest(2)); err != nil {
		t.Fatal(err)
	}
	want(freeze(6), guestapi.ErrRefused, false)
	want(freeze(7), nil, true)
	fork := resumeRequest(3)
	fork.Reason, fork.Identity = guestapi.ReasonFork, identity()
	if _, err := g.control.Init(ctx, "token", fork); err != nil {
		t.Fatal(err)
	}
	want(freeze(1), nil, true) // a copy counts for itself
}

func TestFreezeRefusesBadRequests(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	for _, r := range []guestapi.FreezeRequest{{Deadline: time.Minute}, {Attempt: 1}, {Attempt: 1, Deadline: time.Hour}} {
		if _, err := g.control.Freeze(testContext(t), "token", r); err == nil || !strings.Contains(err.Error(), "400") {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

func TestGuestThawsItselfAtTheDeadline(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	g.system.fail["freeze"] = ErrFreezeTimeout
	resp, err := g.control.Freeze(testContext(t), "token", guestapi.FreezeRequest{Attempt: 1, Deadline: 50 * time.Millisecond})
	if err != nil || len(resp.Warnings) != 1 {
		t.Fatalf("%+v, %v", resp, err)
	}
	waitFor(t, "the thaw", func() bool { return !g.system.isFrozen() })
	_, err = g.control.Freeze(testContext(t), "token", guestapi.FreezeRequest{Attempt: 1, Deadline: time.Minute})
	if !errors.Is(err, guestapi.ErrRefused) {
		t.Errorf("got %v", err)
	}
}

func TestStartWaitsWhileFrozen(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	ctx := testContext(t)
	if _, err := g.control.Freeze(ctx, "token", guestapi.FreezeRequest{Attempt: 1, Deadline: time.Minute}); err != nil {
		t.Fatal(err)
	}
	started := make(chan error, 1)
	go func() {
		s, err := g.process.Start(ctx, connect.NewRequest(bash("true")))
		if err == nil {
			for s.Receive() {
			}
			err = errors.Join(s.Err(), s.Close())
		}
		started <- err
	}()
	select {
	case err := <-started:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	list, err := g.process.List(ctx, connect.NewRequest(&processpb.ListRequest{}))
	if err != nil || len(list.Msg.Processes) != 0 {
		t.Fatalf("%v, %v", list, err)
	}
	if _, err := g.control.Thaw(ctx, "token", guestapi.ThawRequest{Attempt: 1}); err != nil {
		t.Fatal(err)
	}
	if err := <-started; err != nil {
		t.Error(err)
	}
}

func TestAccessToken(t *testing.T) {
	g := newGuest(t, nil)
	req := bootRequest()
	req.Identity.AccessToken = "secret"
	if _, err := g.control.Init(testContext(t), "", req); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path, token string
		want        int
	}{
		{"/health", "", http.StatusNoContent},
		{"/metrics", "", http.StatusUnauthorized},
		{"/metrics", "guess", http.StatusUnauthorized},
		{"/metrics", "secret", http.StatusOK},
		{"/envs", "", http.StatusUnauthorized},
		{"/files?path=/etc/hostname", "", http.StatusUnauthorized},
		{"/nothing", "secret", http.StatusNotFound},
	} {
		r, err := http.NewRequest(http.MethodGet, guestapi.BaseURL+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set(guestapi.AccessHeader, c.token)
		resp, err := g.http.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%s with %q: %d, want %d", c.path, c.token, resp.StatusCode, c.want)
		}
	}
	_, err := g.process.List(testContext(t), connect.NewRequest(&processpb.ListRequest{}))
	wantCode(t, err, connect.CodeUnauthenticated)
}
