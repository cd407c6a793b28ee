package guest

import (
	"errors"
	"strings"
	"testing"

	"connectrpc.com/connect"

	processpb "github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// Only processes that were started to keep the sandbox awake, and run, are told of.
func TestKeepAwakeProcesses(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	if _, err := g.control.Awake(ctx, "token"); !errors.Is(err, guestapi.ErrUnauthorized) {
		t.Errorf("before the first init: %v", err)
	}
	g.boot(t)
	if _, err := g.control.Awake(ctx, "guess"); !errors.Is(err, guestapi.ErrUnauthorized) {
		t.Errorf("with a wrong token: %v", err)
	}
	awake := func() []guestapi.KeepAwake {
		t.Helper()
		resp, err := g.control.Awake(ctx, "token")
		if err != nil {
			t.Fatal(err)
		}
		return resp.Processes
	}
	g.start(ctx, t, interactive("read x"))
	g.start(ctx, t, interactive("read x"), guestapi.KeepAwakeHeader, "0")
	if got := awake(); len(got) != 0 {
		t.Errorf("nobody asked for it: %+v", got)
	}
	long := interactive("read x; : " + strings.Repeat("ä", 1000))
	e := g.start(ctx, t, long, guestapi.KeepAwakeHeader, "1")
	got := awake()
	if len(got) != 1 || got[0].PID != e.pid || !strings.HasPrefix(got[0].Command, "/bin/bash -c read x; :") || len(got[0].Command) > guestapi.MaxCommand {
		t.Fatalf("got %+v, want the process %d", got, e.pid)
	}
	if _, err := g.process.CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: byPID(e.pid)})); err != nil {
		t.Fatal(err)
	}
	e.all()
	if got := awake(); len(got) != 0 {
		t.Errorf("it has ended: %+v", got)
	}
}

func TestKeepAwakeProcessesAreBounded(t *testing.T) {
	g := newGuest(t, nil)
	g.boot(t)
	ctx := testContext(t)
	for range guestapi.MaxKeepAwake + 1 {
		g.start(ctx, t, interactive("read x"), guestapi.KeepAwakeHeader, "1")
	}
	resp, err := g.control.Awake(ctx, "token")
	if err != nil || len(resp.Processes) != guestapi.MaxKeepAwake {
		t.Errorf("%d processes, %v; want %d", len(resp.Processes), err, guestapi.MaxKeepAwake)
	}
}
