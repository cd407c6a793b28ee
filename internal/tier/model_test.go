package tier

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// model is the reference that a node is held against: what every sandbox must
// resume with, whatever happened to its packs.
type model struct {
	t      *testing.T
	rnd    *rand.Rand
	n      *node
	tpl    Template
	base   *guest
	guests map[string]*guest
	made   int
	isDown bool
	budget int64
}

// TestModel does things at random to a node and its sandboxes, with a remote
// store that fails at random, and compares with the reference.
func TestModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for round := range uint64(4) {
		m := newModel(t, rand.New(rand.NewPCG(seed, round)))
		for range 120 {
			m.step()
			if t.Failed() {
				return
			}
		}
		m.settle()
	}
}

func newModel(t *testing.T, rnd *rand.Rand) *model {
	m := &model{t: t, rnd: rnd, guests: make(map[string]*guest)}
	m.n = newNode(t, "aaaa", t.TempDir(), 0)
	m.tpl = newTemplate(t, filepath.Join(m.n.dir, "debian"))
	m.base = newGuest("base", m.tpl)
	m.n.hibernate(m.base, 0)
	m.tpl.Bases = []snapshot.Ref{m.base.rep.Snapshot}
	if rnd.IntN(2) == 0 {
		m.budget = 3 * keys(t, m.n.disk, "packs/")[snapshot.KindPack.Key(m.base.rep.Snapshot.ID)]
	}
	m.restart()
	return m
}

// flaky is the fault of a store of which one operation in so many fails.
func (m *model) flaky(in int) {
	seed := m.rnd.Uint64()
	m.n.breaks(func(op blobtest.Op, key string) error {
		// Many goroutines ask: each answer is drawn from what is asked and the time.
		if rand.New(rand.NewPCG(seed, uint64(time.Now().UnixNano()))).IntN(in) == 0 {
			return fmt.Errorf("%w: it failed at random", blob.ErrUnavailable)
		}
		return nil
	})
}

func (m *model) step() {
	if m.t.Failed() {
		return
	}
	g := m.pick()
	switch op := m.rnd.IntN(20); {
	case op < 3 || g == nil:
		m.create()
	case op < 8:
		m.hibernate(g)
	case op < 10:
		m.evict(g)
	case op < 11:
		m.n.tier.Promote(g.rep.Snapshot)
	case op < 12:
		m.n.tier.Forget(g.id)
		delete(m.guests, g.id)
	case op < 14:
		m.collect()
	case op < 15:
		m.n.tier.Close() // as if killed: what it was doing ends anywhere
		m.restart()
	case op < 16:
		m.isDown = !m.isDown
		m.n.breaks(down)
		if !m.isDown {
			m.flaky(20)
		}
	case op < 17:
		m.imported()
	default:
		m.resume(g)
	}
}

// pick returns a sandbox at random, nil if there is none.
func (m *model) pick() *guest {
	ids := slices.Sorted(maps.Keys(m.guests))
	if len(ids) == 0 {
		return nil
	}
	return m.guests[ids[m.rnd.IntN(len(ids))]]
}

func (m *model) create() {
	if len(m.guests) > 4 {
		return
	}
	m.made++
	g := newGuest(fmt.Sprint("s", m.made), m.tpl)
	copy(g.ram, m.base.ram)
	g.rep.Snapshot = m.base.rep.Snapshot
	m.guests[g.id] = g
	m.hibernate(g)
}

// hibernate never waits for the remote store, nor fails because of it: what a
// parent's remote pack holds counts as changed where it cannot be read. Opening
// the parent's packs needs it, as a resume does.
func (m *model) hibernate(g *guest) {
	before := slices.Clone(g.ram)
	err := m.n.capture(g, byte(m.rnd.Int()), m.rnd.IntN(memoryPages), m.rnd.IntN(memoryPages))
	if errors.Is(err, blob.ErrUnavailable) {
		g.ram = before
		if g.rep.Snapshot == m.base.rep.Snapshot { // it was never made
			delete(m.guests, g.id)
		}
		return
	} else if err != nil {
		m.t.Fatal(err)
	}
	m.n.tier.Replicate(g.rep)
}

func (m *model) resume(g *guest) {
	if err := m.n.resume(g); err != nil && !errors.Is(err, blob.ErrUnavailable) {
		m.t.Error(err)
	}
}

func (m *model) evict(g *guest) {
	_, _, err := m.n.tier.Evict(m.t.Context(), g.rep.Snapshot)
	if err != nil && !errors.Is(err, blob.ErrUnavailable) && !errors.Is(err, ErrNotReplicated) {
		m.t.Error(err)
	}
}

func (m *model) roots() []snapshot.ID {
	roots := []snapshot.ID{m.base.rep.Snapshot.ID}
	for _, g := range m.guests {
		roots = append(roots, g.rep.Snapshot.ID)
	}
	return roots
}

// collect collects both tiers.
func (m *model) collect() {
	if _, err := m.n.tier.Collect(m.t.Context(), m.roots(), nil, m.rnd.IntN(4) == 0); err != nil && !errors.Is(err, blob.ErrUnavailable) {
		m.t.Error(err)
	}
	if _, err := snapshot.NewRepository(m.n.disk).Collect(m.t.Context(), m.roots(), nil); err != nil {
		m.t.Error(err)
	}
}

// restart starts the tier and gives it all sandboxes, as a start of the daemon.
func (m *model) restart() {
	m.n.tier.Close()
	m.n.start("aaaa", m.budget)
	for _, g := range m.guests {
		m.n.tier.Replicate(g.rep)
	}
}

// imported looks at what another node would get at this moment, from a copy of
// the remote store: of each sandbox some snapshot that it had, whole.
func (m *model) imported() {
	copied := filepath.Join(m.t.TempDir(), "remote")
	m.n.tier.Close() // else it would change under the copy
	err := os.CopyFS(copied, os.DirFS(m.n.far))
	m.restart()
	if err != nil {
		m.t.Fatal(err)
	}
	other := newNode(m.t, "bbbb", copied, 0)
	defer other.tier.Close()
	r := newReceiver(filepath.Join(other.dir, "templates"))
	if err := other.tier.Import(m.t.Context(), true, r.to()); err != nil || len(r.skipped) > 0 {
		m.t.Fatalf("import: %v, skipped %v", err, r.skipped)
	}
	for id, rep := range r.sandboxes {
		if want := "record of " + id + " at " + string(rep.Snapshot.ID); string(rep.Record) != want {
			m.t.Errorf("sandbox %s has %q", id, rep.Record)
		}
		g, ok := m.guests[id]
		if !ok || g.rep.Snapshot != rep.Snapshot {
			continue // forgotten, or an older one: Import has opened it
		}
		other.check(g)
	}
}

// settle lets the store work again and everything be done, and then finds
// exactly what is needed.
func (m *model) settle() {
	m.isDown = false
	m.n.breaks(nil)
	for _, g := range m.guests {
		eventually(m.t, "the snapshot of "+g.id+" is replicated", func() bool { return m.n.replicated(g) })
	}
	eventually(m.t, "what was deleted is forgotten", func() bool { return len(keys(m.t, m.n.disk, forgottenPrefix)) == 0 })
	for _, g := range m.guests {
		m.n.check(g)
		if _, _, err := m.n.tier.Evict(m.t.Context(), g.rep.Snapshot); err != nil {
			m.t.Error(err)
		}
		m.n.check(g)
	}
	m.collect() // perhaps a dry run
	if _, err := m.n.tier.Collect(m.t.Context(), m.roots(), nil, false); err != nil {
		m.t.Fatal(err)
	}
	want := map[string]bool{}
	add := func(ref snapshot.Ref) {
		packs, err := m.n.tier.local.Packs(m.t.Context(), ref)
		if err != nil {
			m.t.Fatal(err)
		}
		for _, p := range packs {
			want[p.Key()] = true
		}
		for _, k := range smallKinds {
			want[k.Key(ref.ID)] = true
		}
	}
	for _, g := range m.guests {
		key, _ := recordKey(g.rep)
		want[key] = true
		add(g.rep.Snapshot)
		add(m.base.rep.Snapshot)
	}
	got := keys(m.t, m.n.store, "")
	for key := range got {
		if !want[key] && !strings.HasPrefix(key, templatePrefix) && !strings.HasPrefix(key, ownerPrefix) &&
			!strings.HasSuffix(key, string(m.base.rep.Snapshot.ID)) {
			m.t.Errorf("%s is not needed", key)
		}
		delete(want, key)
	}
	if len(want) > 0 {
		m.t.Errorf("these are missing: %v", slices.Sorted(maps.Keys(want)))
	}
	m.imported()
	m.n.tier.Close()
}
