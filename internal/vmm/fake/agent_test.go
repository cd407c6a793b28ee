package fake

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/vmmtest"
)

func setup(driver *Driver) vmmtest.Setup {
	return vmmtest.Setup{Driver: driver, Shape: vmm.Shape{MemoryMiB: 8, CPUs: 1}, Timeout: time.Minute}
}

// call makes a call to the agent and decodes its answer into answer (nil: ignored).
func call(t *testing.T, m vmm.Machine, method, path, token string, body, answer any) int {
	t.Helper()
	status, err := tryCall(t.Context(), m, method, path, token, body, answer)
	if err != nil {
		t.Fatal(err)
	}
	return status
}

func tryCall(ctx context.Context, m vmm.Machine, method, path, token string, body, answer any) (int, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return 0, err
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return m.(*Machine).Dial(ctx, guestapi.Port)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, bytes.NewReader(text))
	if err != nil {
		return 0, err
	}
	req.Header.Set(guestapi.TokenHeader, token)
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if answer == nil || resp.StatusCode != http.StatusOK {
		_, err = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode, err
	}
	return resp.StatusCode, json.NewDecoder(resp.Body).Decode(answer)
}

func wantStatus(t *testing.T, got, want int) {
	t.Helper()
	if got != want {
		t.Fatalf("the agent answers %d, want %d", got, want)
	}
}

func firstInit() guestapi.InitRequest {
	return guestapi.InitRequest{
		Reason: guestapi.ReasonBoot, Generation: 1, Entropy: make([]byte, minEntropy),
		Identity: &guestapi.Identity{ID: "one", ControlToken: "secret", Env: map[string]string{"A": "b"}},
	}
}

func TestGuestTravelsInMemory(t *testing.T) {
	s := setup(New())
	rig := s.NewRig(t)
	m := s.Boot(t, rig, "")
	wantStatus(t, call(t, m, "GET", guestapi.HealthPath, "", nil, nil), http.StatusNoContent)
	wantStatus(t, call(t, m, "POST", guestapi.InitPath, "", firstInit(), nil), http.StatusOK)
	wantStatus(t, call(t, m, "POST", "/memory?page=600&value=7", "", nil, nil), http.StatusNoContent)
	var before, after Env
	wantStatus(t, call(t, m, "GET", "/env", "", nil, &before), http.StatusOK)
	img := s.Snapshot(t, rig, m)
	m.Close()

	_, m = s.Resume(t, img)
	if err := m.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	var value int
	wantStatus(t, call(t, m, "GET", "/memory?page=600", "", nil, &value), http.StatusOK)
	if value != 7 {
		t.Errorf("the page holds %d", value)
	}
	resume := guestapi.InitRequest{Reason: guestapi.ReasonResume, Generation: 2, Entropy: make([]byte, minEntropy)}
	wantStatus(t, call(t, m, "POST", guestapi.InitPath, "wrong", resume, nil), http.StatusUnauthorized)
	wantStatus(t, call(t, m, "POST", guestapi.InitPath, "secret", resume, nil), http.StatusOK)
	wantStatus(t, call(t, m, "GET", "/env", "", nil, &after), http.StatusOK)
	if after.Identity.ID != "one" || after.Identity.Env["A"] != "b" || after.Init.Generation != 2 || after.Counter < before.Counter {
		t.Errorf("the guest was %+v and is %+v", before, after)
	}
}

func TestInitIsIdempotent(t *testing.T) {
	s := setup(New())
	m := s.Boot(t, s.NewRig(t), "")
	poor := firstInit()
	poor.Entropy = poor.Entropy[1:]
	wantStatus(t, call(t, m, "POST", guestapi.InitPath, "", poor, nil), http.StatusBadRequest)
	for range 2 { // the answer to the first may have been lost
		wantStatus(t, call(t, m, "POST", guestapi.InitPath, "", firstInit(), nil), http.StatusOK)
	}
	next := firstInit()
	next.Generation = 2
	wantStatus(t, call(t, m, "POST", guestapi.InitPath, "", next, nil), http.StatusUnauthorized)
}

func TestFreeze(t *testing.T) {
	s := setup(New())
	m := s.Boot(t, s.NewRig(t), "")
	wantStatus(t, call(t, m, "POST", guestapi.InitPath, "", firstInit(), nil), http.StatusOK)
	freeze := func(attempt uint64, deadline time.Duration) int {
		return call(t, m, "POST", guestapi.FreezePath, "secret", guestapi.FreezeRequest{Attempt: attempt, Deadline: deadline}, nil)
	}
	env := func() (e Env) {
		call(t, m, "GET", "/env", "", nil, &e)
		return e
	}
	wantStatus(t, freeze(1, time.Hour), http.StatusOK)
	before := env()
	if after := env(); !before.Frozen || after.Counter != before.Counter {
		t.Errorf("a frozen guest goes from %+v to %+v", before, after)
	}
	wantStatus(t, call(t, m, "POST", guestapi.ThawPath, "secret", guestapi.ThawRequest{Attempt: 1}, nil), http.StatusOK)
	if env().Frozen {
		t.Error("the guest is frozen after a thaw")
	}
	wantStatus(t, freeze(1, time.Hour), http.StatusConflict)
	wantStatus(t, freeze(2, time.Nanosecond), http.StatusOK)
	for env().Frozen { // until it thaws by itself
	}
	wantStatus(t, freeze(2, time.Hour), http.StatusConflict)
	wantStatus(t, freeze(3, time.Hour), http.StatusOK)
}

func TestFreezeHangs(t *testing.T) {
	driver := New()
	driver.SetFaults(Faults{Freeze: func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}})
	s := setup(driver)
	m := s.Boot(t, s.NewRig(t), "")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := tryCall(ctx, m, "POST", guestapi.FreezePath, "", guestapi.FreezeRequest{Attempt: 1}, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the freeze returns %v", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := tryCall(t.Context(), m, "POST", guestapi.FreezePath, "", guestapi.FreezeRequest{Attempt: 1}, nil)
		done <- err
	}()
	m.Close()
	if err := <-done; err == nil {
		t.Error("the freeze of a machine that ended succeeds")
	}
}

func TestFaults(t *testing.T) {
	driver := New()
	s := setup(driver)
	rig := s.NewRig(t)
	m := s.Boot(t, rig, "")
	img := s.Snapshot(t, rig, m)
	fails := errors.New("it fails")
	fail := func(context.Context) error { return fails }

	driver.SetFaults(Faults{SaveState: fail})
	if err := m.SaveState(t.Context(), io.Discard); !errors.Is(err, fails) {
		t.Errorf("SaveState returns %v", err)
	}
	driver.SetFaults(Faults{Start: fail})
	if _, err := driver.Start(t.Context(), rig.Spec); !errors.Is(err, fails) {
		t.Errorf("Start returns %v", err)
	}
	driver.SetFaults(Faults{LoadState: fail})
	other := s.Start(t, s.NewRig(t))
	if err := other.LoadState(t.Context(), bytes.NewReader(img.State)); !errors.Is(err, fails) {
		t.Errorf("LoadState returns %v", err)
	}
}

// TestForeignMemory runs a state with memory that is not its own.
func TestForeignMemory(t *testing.T) {
	driver := New()
	s := setup(driver)
	rig := s.NewRig(t)
	m := s.Boot(t, rig, "")
	first := s.Snapshot(t, rig, m)
	if err := m.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := s.Snapshot(t, rig, m)
	for name, ram := range map[string][]byte{"older": first.RAM, "none": make([]byte, len(first.RAM))} {
		mixed := second
		mixed.RAM = ram
		_, m := s.Resume(t, mixed)
		if err := m.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-m.Exited()
		if exit := m.Exit(); exit.Reason != vmm.ReasonPanic {
			t.Errorf("memory %s: the machine ended with %+v", name, exit)
		}
	}
}

func TestDial(t *testing.T) {
	s := setup(New())
	rig := s.NewRig(t)
	rig.Spec.Boot = &vmm.Boot{}
	m := s.Start(t, rig).(*Machine)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := m.Dial(ctx, guestapi.Port); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a dial to a machine that does not run returns %v", err)
	}
	if err := m.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Dial(t.Context(), 1); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a dial to a port that nobody serves returns %v", err)
	}
	conn, err := m.Dial(t.Context(), UserPort)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.Contains(string(answer), "hello from") {
		t.Errorf("the guest answers %q, %v", answer, err)
	}
	kept, err := m.Dial(t.Context(), UserPort)
	if err != nil {
		t.Fatal(err)
	}
	m.Crash(vmm.ReasonCrashed)
	if n, err := kept.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes come from a machine that crashed", n)
	}
	if _, err := m.Dial(t.Context(), UserPort); !errors.Is(err, vmm.ErrExited) {
		t.Errorf("a dial to a machine that crashed returns %v", err)
	}
}

func TestEndFromWithin(t *testing.T) {
	s := setup(New())
	m := s.Boot(t, s.NewRig(t), "")
	tryCall(t.Context(), m, "POST", "/end?reason=shutdown", "", nil, nil) // the connection may break first
	<-m.Exited()
	if exit := m.Exit(); exit.Reason != vmm.ReasonShutdown {
		t.Errorf("the machine ended with %+v", exit)
	}
}
