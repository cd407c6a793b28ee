package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
	"github.com/hibernacle/hibernacle/internal/shim"
)

// modelSeed names the environment variable that repeats a run of TestModel.
const modelSeed = "HIB_MODEL_SEED"

// set is what a memory may hold, where a fault made that uncertain.
type set map[string]bool

func (s set) plus(t set) set {
	out := maps.Clone(s)
	maps.Copy(out, t)
	return out
}

// modelled is what a user knows of a sandbox.
type modelled struct {
	memory set            // of the guest, or of the snapshot where it sleeps
	saved  set            // of the last committed snapshot
	kept   map[string]set // by the name of a checkpoint that was acknowledged
	maybe  map[string]set // likewise, of one that was not
}

func newModelled(memory set) *modelled {
	return &modelled{memory: memory, saved: memory, kept: map[string]set{}, maybe: map[string]set{}}
}

// model is a host with what must be true of it.
type model struct {
	*host
	rnd       *rand.Rand
	sandboxes map[string]*modelled // by id
	count     int
}

// TestModel does random operations, some of them interrupted by a random fault
// at a random step, with restarts in between, and checks every memory against
// what a user may expect.
func TestModel(t *testing.T) {
	seed := rand.Uint64()
	if text := os.Getenv(modelSeed); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%s=%d repeats this run", modelSeed, seed)
	runs, operations := 20, 150
	if testing.Short() {
		runs = 5
	}
	for run := range runs {
		t.Run(fmt.Sprint(run), func(t *testing.T) {
			options := variants[[]string{"plain", "pool and parked"}[run%2]]
			m := &model{host: newHost(t, options...), rnd: rand.New(rand.NewPCG(seed, uint64(run))), sandboxes: map[string]*modelled{}}
			for i := range operations {
				m.operate(i)
				if v := m.w.Violations(); len(v) > 0 {
					t.Fatalf("operation %d: %v", i, v)
				}
			}
			m.check()
			checkAll(m.host)
		})
	}
}

// pick returns a random sandbox, "" if there is none.
func (m *model) pick() string {
	ids := slices.Sorted(maps.Keys(m.sandboxes))
	if len(ids) == 0 {
		return ""
	}
	return ids[m.rnd.IntN(len(ids))]
}

// operate does one operation, every third with a fault.
func (m *model) operate(i int) {
	faultName := ""
	if m.rnd.IntN(3) == 0 {
		names := slices.Sorted(maps.Keys(faults))
		faultName = names[m.rnd.IntN(len(names))]
	}
	fault := faults[faultName]
	at := int64(1 + m.rnd.IntN(20))
	var steps atomic.Int64
	if faultName != "" {
		m.hook.set(func(context.Context, sandboxtest.Step) error {
			if steps.Add(1) != at {
				return nil
			}
			return fault.do(m.host)
		})
	}
	id := m.pick()
	op := m.rnd.IntN(13)
	if id == "" {
		op = 0
	}
	finish := m.begin(op, id, i)
	m.hook.set(nil)
	happened := faultName != "" && steps.Load() >= at
	if happened && fault.guestDies {
		for _, s := range m.sandboxes {
			s.memory = s.memory.plus(s.saved)
		}
	}
	if happened && fault.dies {
		m.crash()
	}
	settled(m.host)
	finish()
	if m.rnd.IntN(10) == 0 {
		m.check()
	}
}

// begin does an operation and returns what is to be checked once the dust has settled.
func (m *model) begin(op int, id string, i int) (finish func()) {
	ctx, s := m.t.Context(), m.sandboxes[id]
	switch op {
	case 0:
		return m.beginCreate(ctx)
	case 1, 2:
		word := fmt.Sprint("w", i)
		if _, err := sandboxtest.Ask(ctx, m.core, id, "set "+word); err == nil {
			s.memory = set{word: true}
		} else {
			s.memory = s.memory.plus(set{word: true})
		}
	case 3, 4:
		if _, err := m.core.Hibernate(ctx, id, sandbox.HibernateOptions{}); err == nil {
			s.saved = s.memory
		} else {
			s.saved = s.saved.plus(s.memory)
		}
		if m.rnd.IntN(2) == 0 { // else what comes next comes right behind the answer
			m.core.Rest(id)
		}
	case 5:
		if _, err := m.core.Resume(ctx, id, sandbox.ResumeOptions{}); err != nil && !errors.Is(err, sandbox.ErrUnavailable) && !errors.Is(err, sandbox.ErrFailed) {
			m.t.Logf("resume: %v", err)
		}
	case 6:
		switch m.rnd.IntN(3) {
		case 0:
			m.w.KillShims(id)
			s.memory = s.memory.plus(s.saved)
			m.core.Dial(ctx, id, 1) // notices
		case 1:
			m.w.FailMemory(id, "the pager's mount has ended", shim.CodeFailed)
			s.memory = s.memory.plus(s.saved)
			m.core.Dial(ctx, id, 1)
		default:
			m.crash()
		}
	case 8, 9:
		name := fmt.Sprint("k", i)
		if _, err := m.core.Checkpoint(ctx, id, name); err == nil {
			s.saved = s.memory
			s.kept[name] = s.memory
		} else {
			s.saved = s.saved.plus(s.memory)
			s.maybe[name] = s.memory.plus(s.saved)
		}
	case 10:
		m.restore(ctx, id, s)
	case 11:
		return m.beginFork(ctx, id, s, i)
	case 12:
		for _, name := range slices.Sorted(maps.Keys(s.kept)) {
			m.core.RemoveCheckpoint(ctx, id, name)
			s.maybe[name] = s.kept[name]
			delete(s.kept, name)
			break
		}
	case 7:
		err := m.core.Delete(ctx, id)
		return func() {
			_, getErr := m.core.Get(m.t.Context(), id)
			switch {
			case errors.Is(getErr, sandbox.ErrNotFound):
				delete(m.sandboxes, id)
			case err == nil:
				m.t.Fatalf("%s was deleted and is there", id)
			}
		}
	}
	return func() {}
}

// restore rolls a sandbox back to a checkpoint of its, if it has one.
func (m *model) restore(ctx context.Context, id string, s *modelled) {
	names := slices.Sorted(maps.Keys(s.kept))
	if len(names) == 0 {
		return
	}
	kept := s.kept[names[0]]
	if _, _, err := m.core.Restore(ctx, id, names[0]); err == nil {
		s.memory, s.saved = kept, kept
	} else {
		s.saved = s.saved.plus(s.memory).plus(kept)
		s.memory = s.memory.plus(kept)
	}
}

// beginFork makes a copy of a sandbox, or of a checkpoint of its.
func (m *model) beginFork(ctx context.Context, id string, s *modelled, i int) (finish func()) {
	name, o, memory := fmt.Sprint("f", i), sandbox.ForkOptions{Standby: m.rnd.IntN(2) == 0}, s.memory
	o.Name = name
	if kept := slices.Sorted(maps.Keys(s.kept)); len(kept) > 0 && m.rnd.IntN(2) == 0 {
		o.Checkpoint = kept[0]
		memory = s.kept[kept[0]]
	}
	_, err := m.core.Fork(ctx, id, o)
	switch {
	case o.Checkpoint != "":
	case err == nil:
		s.saved = s.memory
	default:
		s.saved = s.saved.plus(s.memory)
	}
	return func() {
		got, getErr := m.core.Get(m.t.Context(), name)
		switch {
		case getErr == nil && (err == nil || errors.Is(err, sandboxtest.ErrKilled) || o.Standby):
			if err != nil {
				memory = memory.plus(s.saved)
			}
			m.sandboxes[got.ID] = newModelled(memory)
		case err != nil && getErr == nil:
			m.t.Fatalf("%s was not made (%v) and is %s", name, err, got.State)
		case err == nil && getErr != nil:
			m.t.Fatalf("%s was made and is lost: %v", name, getErr)
		}
	}
}

// beginCreate creates a sandbox. One that was refused must not be there; where
// the daemon died before it could answer, both are right.
func (m *model) beginCreate(ctx context.Context) (finish func()) {
	m.count++
	name := fmt.Sprint("n", m.count)
	s, err := m.core.Create(ctx, sandbox.CreateOptions{Name: name, ColdBoot: m.rnd.IntN(8) == 0})
	if err == nil {
		fresh := set{"booted": true}
		m.sandboxes[s.ID] = newModelled(fresh)
	}
	return func() {
		got, getErr := m.core.Get(m.t.Context(), name)
		switch {
		case errors.Is(err, sandboxtest.ErrKilled) && getErr == nil:
			fresh := set{"booted": true}
			m.sandboxes[got.ID] = newModelled(fresh)
		case err != nil && getErr == nil:
			m.t.Fatalf("%s was not created (%v) and is %s", name, err, got.State)
		case err == nil && getErr != nil:
			m.t.Fatalf("%s was created and is lost: %v", name, getErr)
		}
	}
}

// checkKept looks at what the checkpoints of a sandbox hold.
func (m *model) checkKept(id string, s *modelled) {
	m.t.Helper()
	list, err := m.core.Checkpoints(m.t.Context(), id)
	if err != nil {
		m.t.Fatal(err)
	}
	there := map[string]bool{}
	for _, k := range list {
		there[k.Name] = true
		memory, ok := m.w.Memory(k.Snapshot.ID)
		if !ok {
			m.t.Fatalf("%s: what checkpoint %s holds is lost", id, k.Name)
		}
		if want, known := s.kept[k.Name]; known && !want[memory] {
			m.t.Fatalf("%s: checkpoint %s holds %q, not one of %v", id, k.Name, memory, want)
		} else if known {
			s.kept[k.Name] = set{memory: true}
		}
		if want, known := s.maybe[k.Name]; known && !want[memory] {
			m.t.Fatalf("%s: checkpoint %s holds %q, not one of %v", id, k.Name, memory, want)
		}
	}
	for name := range s.kept {
		if !there[name] {
			m.t.Fatalf("%s: checkpoint %s is lost", id, name)
		}
	}
}

// check reads every memory.
func (m *model) check() {
	m.t.Helper()
	for id, s := range m.sandboxes {
		if now := m.get(id); now.State == sandbox.StateFailed {
			if now.Snapshot == nil { // booted cold and lost before its first hibernation
				if err := m.core.Delete(m.t.Context(), id); err != nil {
					m.t.Fatal(err)
				}
				delete(m.sandboxes, id)
				continue
			}
			m.resume(id)
		}
		got, err := sandboxtest.Ask(m.t.Context(), m.core, id, "get")
		if errors.Is(err, sandbox.ErrFailed) { // nobody had noticed yet
			m.resume(id)
			got = m.ask(id, "get")
		} else if err != nil {
			m.t.Fatal(err)
		}
		if !s.memory[got] {
			m.t.Fatalf("%s has %q, not one of %v", id, got, s.memory)
		}
		s.memory = set{got: true}
		m.checkKept(id, s)
	}
}
