package shim

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"
)

func (g *guest) activity(req ActivityRequest) Activity {
	g.t.Helper()
	a, err := g.client.Activity(context.Background(), req)
	if err != nil {
		g.t.Fatal(err)
	}
	return a
}

func TestActivity(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.prepare(true)
	prepared := time.Now()
	if _, err := r.client.Boot(context.Background(), bootRequest()); err != nil {
		t.Fatal(err)
	}
	a := r.activity(ActivityRequest{InboundCap: time.Minute, AwaitCap: time.Minute})
	if a.Open != 0 || a.Awaiting != 0 || !a.Asked || len(a.KeepAwake) != 0 || a.AgentErr != "" {
		t.Errorf("a guest that nobody uses: %+v", a)
	}
	if longest := time.Since(prepared); a.Idle <= 0 || a.Idle > longest {
		t.Errorf("idle for %v, the guest cannot run for longer than %v", a.Idle, longest)
	}

	if err := r.ask(context.Background(), http.MethodPost, "/keep-awake?command=train", nil); err != nil {
		t.Fatal(err)
	}
	a = r.activity(ActivityRequest{})
	if len(a.KeepAwake) != 1 || a.KeepAwake[0].Command != "train" {
		t.Errorf("with a process that keeps it awake: %+v", a)
	}
	if a = r.activity(ActivityRequest{IdleAfter: time.Hour}); a.Asked || len(a.KeepAwake) != 0 {
		t.Errorf("the guest was asked though the network is not idle: %+v", a)
	}
}

// Streams into the guest count until they are closed, or silent for the cap.
func TestActivityOfStreams(t *testing.T) {
	d := newDriver()
	d.ports = map[int]func(net.Conn){7: func(c net.Conn) { io.Copy(c, c) }}
	r := newRig(t, rigOptions{driver: d})
	r.boot()
	caps := ActivityRequest{InboundCap: time.Hour, AwaitCap: time.Hour, IdleAfter: time.Hour}
	conn, err := r.client.Dial(context.Background(), 7)
	if err != nil {
		t.Fatal(err)
	}
	before := r.activity(caps)
	if before.Open != 1 || before.Held <= 0 || before.Held > time.Hour {
		t.Errorf("with a stream: %+v", before)
	}
	if _, err := conn.Write([]byte("abc")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if a := r.activity(caps); a.Bytes != before.Bytes+6 {
		t.Errorf("after 3 bytes each way: %+v, before %+v", a, before)
	}
	if a := r.activity(ActivityRequest{IdleAfter: time.Hour}); a.Open != 0 {
		t.Errorf("beyond the cap: %+v", a)
	}
	conn.Close()
	eventually(t, "the stream is closed", func() bool { return r.activity(caps).Open == 0 })
}

// A guest that does not answer does not hold itself awake.
func TestActivityOfAHungGuest(t *testing.T) {
	r := newRig(t, rigOptions{limits: limits{awake: 10 * time.Millisecond}})
	r.boot()
	if err := r.driver.machine().Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	a := r.activity(ActivityRequest{})
	if !a.Asked || a.AgentErr == "" || len(a.KeepAwake) != 0 {
		t.Errorf("%+v", a)
	}
}

// Orders that were added later are not given to a shim of before.
func TestActivityOfAnOldShim(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	old := r.client.Handle()
	old.Protocol = 1
	c, err := Adopt(context.Background(), old)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Activity(context.Background(), ActivityRequest{}); !errors.Is(err, ErrUnknown) {
		t.Errorf("%v, want ErrUnknown", err)
	}
	if err := r.client.added(context.Background(), "dance", struct{}{}, &struct{}{}); !errors.Is(err, ErrUnknown) {
		t.Errorf("%v, want ErrUnknown", err)
	}
}

func TestCPUTime(t *testing.T) {
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "processor time passes", func() bool {
		for begun := time.Now(); time.Since(begun) < time.Millisecond; {
		}
		now, err := cpuTime(os.Getpid())
		return err == nil && now > before
	})
	if _, err := cpuTime(1 << 30); err == nil {
		t.Error("a process that is not there took time")
	}
}
