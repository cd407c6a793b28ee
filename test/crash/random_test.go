package crash

import (
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// seedEnv names the environment variable that repeats a run of TestKillAtAnyInstant.
const seedEnv = "HIB_CRASH_SEED"

// TestKillAtAnyInstant kills the daemon again and again while it does random
// things with a sandbox and its remote store. Each time the guest is where it was or
// where it was last hibernated, which is the same to it, and at the end the store and
// its replica are whole.
func TestKillAtAnyInstant(t *testing.T) {
	const length = 40 * time.Second
	seed := rand.Uint64()
	if text := os.Getenv(seedEnv); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%s=%d repeats the order of this run", seedEnv, seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	remote := hibtest.StartRemote(t)
	d := hibtest.StartWith(t, append(remote.Flags("node"), "--pool", "1", "--parked-memory", "1G"))
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 5, 8000)
	last := srv.Get("/sum")
	d.Hib("hibernate", id)
	operations := [][]string{
		{"hibernate", id}, {"hibernate", id}, {"resume", id}, {"resume", id}, {"exec", id, "--", "true"},
		{"store", "evict", "--local", "--parked", id}, {"store", "gc"},
	}
	rounds := 0
	for end := time.Now().Add(length); time.Now().Before(end); rounds++ {
		var order [][]string
		for range 50 {
			order = append(order, operations[rnd.IntN(len(operations))])
		}
		dead := make(chan struct{})
		var work sync.WaitGroup
		work.Go(func() {
			for _, args := range order {
				select {
				case <-dead:
					return
				default:
					d.Try(args...) // may be refused, and is in the end
				}
			}
		})
		time.Sleep(time.Duration(rnd.Int64N(int64(1500 * time.Millisecond))))
		d.Kill()
		close(dead)
		work.Wait()
		d.Run()
		sb := d.Inspect(id)
		if sb.State != api.StateRunning && sb.State != api.StateStandby {
			t.Fatalf("round %d: it is %s: %s", rounds, sb.State, sb.Reason)
		}
		now := srv.Get("/sum")
		if now.PID != last.PID || now.Counter < last.Counter || now.Sum != srv.WantSum() {
			t.Fatalf("round %d: the server says %+v, before %+v; its sum should be %d", rounds, now, last, srv.WantSum())
		}
		last = now
	}
	t.Logf("killed %d times", rounds)
	d.Hib("hibernate", id)
	hibtest.Eventually(t, "it is replicated", func() bool { return d.Inspect(id).Replication.State == "replicated" })
	d.Hib("store", "gc")
	d.Hib("store", "verify", "--remote")
	hibtest.Eventually(t, "nothing of it is left here", func() bool { // a compaction may bring another snapshot
		_, _, code := d.Try("store", "evict", "--local", "--parked", id)
		return code == 0
	})
	if now := srv.Get("/sum"); now.PID != last.PID || now.Sum != srv.WantSum() {
		t.Errorf("from afar the server says %+v, before %+v", now, last)
	}
}
