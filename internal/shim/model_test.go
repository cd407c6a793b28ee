package shim

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/fake"
)

// seedEnv sets the seed of TestRandomOrders.
const seedEnv = "HIB_TEST_SEED"

func seed(t *testing.T) uint64 {
	t.Helper()
	n := rand.Uint64()
	if text := os.Getenv(seedEnv); text != "" {
		var err error
		if n, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%s=%d throws the same dice", seedEnv, n)
	return n
}

// world is one shim with several callers that give orders at random.
type world struct {
	*rig
	attempts atomic.Uint64 // given so far
	rounds   atomic.Int64  // left

	mu      sync.Mutex
	failed  []snapshot.ID // of captures that the shim answered with an error
	sealed  []snapshot.ID // of captures that it reported as sealed
	refused uint64        // attempts up to this one were thawed
}

// TestRandomOrders: several callers capture, cancel, thaw, ask and dial at
// random, with faults. Whatever happens, a sealed guest does not run before it
// is thawed, its counter never goes back, an attempt that was given up stays so,
// and the store holds the snapshots that were reported and no others.
func TestRandomOrders(t *testing.T) {
	n := seed(t)
	w := &world{rig: newRig(t, rigOptions{driver: streamDriver(nil)})}
	w.boot()
	w.rounds.Store(300)
	w.driver.at(func(_ *machine, step string) error {
		if step == stepRun && w.status().Phase == PhaseSealed {
			t.Error("the machine is run while it is sealed")
		}
		return nil
	})
	w.driver.SetFaults(w.faults(rand.New(rand.NewPCG(n, 0))))

	var callers, watchers sync.WaitGroup
	done := make(chan struct{})
	watchers.Go(func() { w.watchSeal(done) })
	watchers.Go(func() { w.watchCounter(done) })
	for i := range uint64(4) {
		callers.Go(func() { w.orders(rand.New(rand.NewPCG(n, i+1))) })
	}
	callers.Wait()
	close(done)
	watchers.Wait()

	w.driver.SetFaults(noFaults)
	w.thaw(w.attempts.Load())
	w.goesOn()
	w.checkStore()
	if w.attempts.Load() == 0 || len(w.sealed) == 0 || len(w.failed) == 0 {
		t.Errorf("of %d attempts %d were sealed and %d failed: that tests little", w.attempts.Load(), len(w.sealed), len(w.failed))
	}
	t.Logf("of %d attempts %d were sealed and %d failed", w.attempts.Load(), len(w.sealed), len(w.failed))

	// The machine may end at any time as well.
	w.rounds.Store(40)
	for i := range uint64(4) {
		callers.Go(func() { w.orders(rand.New(rand.NewPCG(n, i+10))) })
	}
	eventually(t, "half of the orders are given", func() bool { return w.rounds.Load() < 20 })
	w.driver.machine().Crash(vmm.ReasonCrashed)
	callers.Wait()
	if s := w.waitPhase(PhaseStopped); s.Exit == nil || s.Exit.Reason != vmm.ReasonCrashed {
		t.Errorf("the status is %+v", s)
	}
	wantCode(t, w.client.Thaw(context.Background(), ThawRequest{Attempt: 1}), CodeStopped)
	_, err := w.client.Capture(context.Background(), captureRequest(w.attempts.Add(1)))
	wantCode(t, err, CodeStopped)
}

// faults make the agent and the machine fail or dawdle at times.
func (w *world) faults(rng *rand.Rand) fake.Faults {
	var mu sync.Mutex
	fault := func(ctx context.Context) error {
		mu.Lock()
		dice := rng.IntN(10)
		mu.Unlock()
		switch {
		case dice == 0:
			return errors.New("a fault at random")
		case dice < 4:
			return sleep(ctx, time.Duration(dice)*time.Millisecond)
		}
		return nil
	}
	return fake.Faults{Freeze: fault, SaveState: fault}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *world) orders(rng *rand.Rand) {
	for w.rounds.Add(-1) >= 0 {
		ctx, cancel := context.WithCancel(context.Background())
		if rng.IntN(3) == 0 { // the caller loses patience
			ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(20_000))*time.Microsecond)
		}
		switch rng.IntN(6) {
		case 0, 1, 2:
			w.captureOnce(ctx, rng)
		case 3, 4:
			w.thawOnce(ctx, rng)
		case 5:
			w.dialOnce(ctx)
		}
		cancel()
	}
}

func (w *world) captureOnce(ctx context.Context, rng *rand.Rand) {
	req := captureRequest(w.attempts.Add(1))
	if rng.IntN(4) == 0 {
		req.Deadline = time.Duration(1+rng.IntN(10_000)) * time.Microsecond
	}
	w.mu.Lock()
	refused := w.refused
	w.mu.Unlock()
	report, err := w.client.Capture(ctx, req)
	var answered *Error
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case err == nil && report.Snapshot.ID != req.ID:
		w.t.Errorf("attempt %d made %s, want %s", req.Attempt, report.Snapshot.ID, req.ID)
	case err == nil && req.Attempt <= refused:
		w.t.Errorf("attempt %d was sealed, though it had been given up", req.Attempt)
	case err == nil:
		w.sealed = append(w.sealed, req.ID)
	case errors.As(err, &answered):
		w.failed = append(w.failed, req.ID)
	}
}

func (w *world) thawOnce(ctx context.Context, rng *rand.Rand) {
	attempt := w.attempts.Load() + 1
	attempt -= min(attempt, uint64(rng.IntN(4)))
	if err := w.client.Thaw(ctx, ThawRequest{Attempt: attempt, Committed: rng.IntN(2) == 0}); err == nil {
		w.mu.Lock()
		w.refused = max(w.refused, attempt)
		w.mu.Unlock()
	}
}

func (w *world) dialOnce(ctx context.Context) {
	if c, err := w.client.Dial(ctx, portSum); err == nil {
		c.Write([]byte("x"))
		c.Close()
	}
}

// watchSeal: a machine that is sealed for one attempt now and later was so in
// between, as no attempt is sealed again once it was thawed.
func (w *world) watchSeal(done chan struct{}) {
	for {
		before := w.status()
		runs := w.driver.machine().runs.Load()
		after := w.status()
		if before.Phase == PhaseSealed && after.Phase == PhaseSealed && before.Attempt == after.Attempt && runs {
			w.t.Errorf("the guest runs though attempt %d is sealed", before.Attempt)
		}
		select {
		case <-done:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

func (w *world) watchCounter(done chan struct{}) {
	last := uint64(0)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		var now uint64
		err := w.ask(ctx, http.MethodGet, "/counter", &now)
		cancel()
		if err == nil && now < last {
			w.t.Errorf("the guest's counter went back from %d to %d", last, now)
		}
		last = max(last, now)
		select {
		case <-done:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

func (w *world) checkStore() {
	w.t.Helper()
	manifests := objects(w.t, w.cfg.Store, "manifests/")
	for _, id := range w.sealed {
		if !slices.Contains(manifests, "manifests/"+string(id)) {
			w.t.Errorf("snapshot %s was reported and is not there", id)
		}
	}
	for _, id := range w.failed {
		if slices.Contains(manifests, "manifests/"+string(id)) {
			w.t.Errorf("snapshot %s was left by a capture that failed", id)
		}
	}
	if _, _, faults, err := w.repo().Verify(context.Background(), nil); err != nil || len(faults) > 0 {
		w.t.Errorf("the store: %v, %v", faults, err)
	}
}
