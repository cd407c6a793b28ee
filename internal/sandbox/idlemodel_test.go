package sandbox_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/shim"
)

// idleModelTime names the environment variable that says how long TestIdleModel
// lets its clients work, in the time of its bubble.
const idleModelTime = "HIB_IDLE_MODEL_TIME"

// client uses one sandbox at random times. A request makes the guest count, so
// that one that was lost or done twice shows.
type client struct {
	h       *host
	id      string
	rnd     *rand.Rand
	timeout time.Duration // of the sandbox
	sent    int
	slept   int // requests that found the sandbox asleep
}

// TestIdleModel has 200 clients use their sandboxes at random for some minutes,
// which sleep and wake all the time: every request is answered, none is lost or
// done twice, and in the end states, records and snapshots agree.
func TestIdleModel(t *testing.T) {
	seed := rand.Uint64()
	if text := os.Getenv(modelSeed); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	long := time.Minute
	if text := os.Getenv(idleModelTime); text != "" {
		var err error
		if long, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%s=%d %s=%v repeats this run", modelSeed, seed, idleModelTime, long)
	for name, options := range variants {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, append(slices.Clone(options), idling)...)
				var clients []*client
				for i := range 200 {
					c := &client{h: h, rnd: rand.New(rand.NewPCG(seed, uint64(i)))}
					c.timeout = time.Duration(1+c.rnd.IntN(20)) * time.Second
					c.id = h.create(changed(func(p *sandbox.Policy) {
						p.IdleTimeout, p.ConnectionCap = c.timeout, time.Minute
						if c.rnd.IntN(4) == 0 {
							p.Idle = sandbox.IdleCPU
						}
					})).ID
					clients = append(clients, c)
				}
				end := time.Now().Add(long)
				var group sync.WaitGroup
				for _, c := range clients {
					group.Go(func() { c.work(end) })
				}
				group.Wait()
				checkIdleModel(h, clients)
			})
		})
	}
}

// work uses the sandbox until end.
func (c *client) work(end time.Time) {
	defer c.h.w.SetBusy(c.id, sandboxtest.Busy{})
	for time.Now().Before(end) {
		time.Sleep(time.Duration(c.rnd.Int64N(int64(3 * c.timeout))))
		if c.h.get(c.id).State == sandbox.StateStandby {
			c.slept++
		}
		switch c.rnd.IntN(8) {
		case 0:
			c.burst(2 + c.rnd.IntN(9))
		case 1:
			c.h.w.Traffic(c.id)
		case 2:
			c.hold()
		case 3:
			c.stream()
		case 4:
			c.busy()
		default:
			c.burst(1)
		}
	}
}

// burst sends n requests at once. Their answers are the next n numbers.
func (c *client) burst(n int) {
	answers := make([]int, n)
	var group sync.WaitGroup
	for i := range answers {
		group.Go(func() {
			answer, err := sandboxtest.Ask(context.Background(), c.h.core, c.id, "count")
			if err != nil {
				c.h.t.Errorf("a request to %s: %v", c.id, err)
			}
			answers[i], _ = strconv.Atoi(answer)
		})
	}
	group.Wait()
	slices.Sort(answers)
	for i, got := range answers {
		if want := c.sent + 1 + i; got != want {
			c.h.t.Errorf("answer %d of %d at once to %s after %d is %d, want %d", i, n, c.id, c.sent, got, want)
		}
	}
	c.sent += n
}

// hold keeps the sandbox awake for a while, if it is.
func (c *client) hold() {
	release, err := c.h.core.Hold(context.Background(), c.id, sandbox.Lease{Kind: sandbox.LeaseExec, Owner: "a client"})
	if err != nil {
		c.h.t.Error(err)
		return
	}
	defer release()
	c.burst(1)
	time.Sleep(time.Duration(c.rnd.Int64N(int64(2 * c.timeout))))
	if s := c.h.get(c.id); s.State != sandbox.StateRunning {
		c.h.t.Errorf("%s is %s under a lease", c.id, s.State)
	}
}

// stream leaves a connection open for a while, which keeps the sandbox awake.
func (c *client) stream() {
	conn, err := c.h.core.Dial(context.Background(), c.id, 80)
	if err != nil {
		c.h.t.Error(err)
		return
	}
	defer conn.Close()
	for range 3 {
		time.Sleep(time.Duration(c.rnd.Int64N(int64(c.timeout))))
		if _, err := fmt.Fprintln(conn, "get"); err != nil {
			c.h.t.Errorf("a connection to %s broke: %v", c.id, err)
			return
		}
		if _, err := conn.Read(make([]byte, 100)); err != nil {
			c.h.t.Errorf("a connection to %s broke: %v", c.id, err)
			return
		}
	}
}

// busy changes what the guest does by itself.
func (c *client) busy() {
	b := sandboxtest.Busy{CPU: c.rnd.Float64() / 5}
	switch c.rnd.IntN(4) {
	case 0:
		b.Awaiting = time.Now()
	case 1:
		b.KeepAwake = []shim.KeepAwake{{PID: 7, Command: "train"}}
	case 2:
		b.AgentErr = "it hangs"
	}
	c.h.w.SetBusy(c.id, b)
}

// checkIdleModel checks that everything sleeps in the end, as the clients know it.
func checkIdleModel(h *host, clients []*client) {
	h.t.Helper()
	time.Sleep(2*20*time.Second + bound) // a process that ended is noticed within a timeout
	synctest.Wait()
	sent, slept := 0, 0
	before := map[string]sandbox.Sandbox{}
	for _, c := range clients {
		s := h.get(c.id)
		before[c.id] = s
		if s.State != sandbox.StateStandby {
			h.t.Fatalf("sandbox %s is %s, want it in standby", c.id, s.State)
		}
		memory, ok := h.w.Memory(s.Snapshot.ID)
		if want := strconv.Itoa(c.sent); c.sent > 0 && (!ok || memory != want) {
			h.t.Errorf("the snapshot of %s holds %q, want %s", c.id, memory, want)
		}
		sent, slept = sent+c.sent, slept+c.slept
	}
	h.t.Logf("%d requests were answered, %d times a sandbox was asleep", sent, slept)
	if slept == 0 {
		h.t.Error("nothing ever slept")
	}
	h.crash() // another daemon, which knows what is recorded
	list := h.list()
	if len(list) != len(clients) {
		h.t.Errorf("%d sandboxes are recorded, want %d", len(list), len(clients))
	}
	for _, s := range list {
		if was := before[s.ID]; was.Snapshot == nil || s.State != was.State || s.Snapshot.ID != was.Snapshot.ID {
			h.t.Errorf("recorded is %s of %s, it was %s", s.State, s.ID, was.State)
		}
	}
}
