package tier

import (
	"errors"
	"fmt"
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

// A node loses its disk, and another one goes on from what was replicated.
func TestAnotherNodeResumesWhatWasReplicated(t *testing.T) {
	remote := t.TempDir()
	a := newNode(t, "aaaa", remote, 0)
	tpl := newTemplate(t, filepath.Join(a.dir, "debian"))
	base := newGuest("base", tpl)
	a.hibernate(base, 0)
	tpl.Bases = []snapshot.Ref{base.rep.Snapshot}
	guests := []*guest{newGuest("s1", tpl), newGuest("s2", tpl)}
	for i, g := range guests {
		copy(g.ram, base.ram)
		g.rep.Snapshot = base.rep.Snapshot
		a.hibernate(g, byte(i), 3, 4+i)
		a.replicate(g)
		a.hibernate(g, byte(10+i), 5)
		a.replicate(g)
	}
	a.tier.Close()

	b := newNode(t, "bbbb", remote, 0)
	r := newReceiver(filepath.Join(b.dir, "templates"))
	if err := b.tier.Import(t.Context(), false, r.to()); !errors.Is(err, ErrOwned) || !strings.Contains(err.Error(), "aaaa") {
		t.Fatalf("Import of another's store: %v", err)
	}
	for range 2 { // it may be repeated
		if err := b.tier.Import(t.Context(), true, r.to()); err != nil {
			t.Fatal(err)
		}
		if len(r.sandboxes) != 2 || len(r.skipped) != 0 {
			t.Fatalf("imported %v, skipped %v", r.sandboxes, r.skipped)
		}
		if last := r.progress[len(r.progress)-1]; last[0] != last[1] || last[1] == 0 {
			t.Errorf("progress ended with %v", last)
		}
	}
	for _, g := range guests {
		got := r.sandboxes[g.id]
		if got.Snapshot != g.rep.Snapshot || string(got.Record) != string(g.rep.Record) || !got.LastUsed.Equal(g.rep.LastUsed) {
			t.Errorf("sandbox %s is %+v", g.id, got)
		}
		b.check(g)
	}
	b.check(base)
	if packs := keys(t, b.disk, "packs/"); len(packs) != 0 {
		t.Errorf("packs were fetched: %v", packs)
	}
	got := r.templates["debian"]
	if string(got.Record) != "template record" || !slices.Equal(got.Bases, tpl.Bases) {
		t.Errorf("template is %+v", got)
	}
	for name, want := range templateFiles {
		if b, err := os.ReadFile(filepath.Join(got.Dir, name)); string(b) != want {
			t.Errorf("%s is %q, %v", name, b, err)
		}
	}
	// The new node goes on, the old one is shut out.
	g := guests[0]
	b.hibernate(g, 77, 9)
	g.rep.Template.Dir = got.Dir
	b.replicate(g)
	a.start("aaaa", 0)
	old := newGuest("s3", tpl)
	a.hibernate(old, 1, 1)
	a.mu.Lock()
	a.log = nil
	a.mu.Unlock()
	a.tier.Replicate(old.rep)
	eventually(t, "the old node is refused", func() bool {
		return errors.Is(a.tier.Status(old.id, old.rep.Snapshot.ID).Err, ErrOwned)
	})
	if _, err := a.tier.Collect(t.Context(), nil, nil, false); !errors.Is(err, ErrOwned) {
		t.Errorf("Collect: %v", err)
	}
	if _, _, err := a.tier.Evict(t.Context(), base.rep.Snapshot); !errors.Is(err, ErrOwned) {
		t.Errorf("Evict: %v", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.log) != 0 {
		t.Errorf("the old node did %v", a.log)
	}
}

func TestTheRecordComesLastAndTheOldOneGoes(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	g := newGuest("s1", tpl)
	n.hibernate(g, 1, 1)
	n.replicate(g)
	first, _ := recordKey(g.rep)
	if last := n.log[len(n.log)-1]; last != "publish "+first {
		t.Errorf("the last operation was %s", last)
	}
	n.hibernate(g, 2, 2)
	n.replicate(g)
	second, _ := recordKey(g.rep)
	if got := n.log[len(n.log)-2:]; !slices.Equal(got, []string{"publish " + second, "delete " + first}) {
		t.Errorf("the last operations were %v", got)
	}
	// A start finds that there is nothing to do.
	n.tier.Close()
	n.start("aaaa", 0)
	n.log = nil
	n.replicate(g)
	if len(n.log) != 0 {
		t.Errorf("a second time: %v", n.log)
	}
	// Another record of the same snapshot takes the place of the first.
	g.rep.Record = []byte("renamed")
	n.replicate(g)
	third, _ := recordKey(g.rep)
	if !slices.Equal(n.log, []string{"publish " + third, "delete " + second}) {
		t.Errorf("another record of the same snapshot: %v", n.log)
	}
}

func TestNothingIsSentTwiceAfterABrokenUpload(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	g := newGuest("s1", tpl)
	n.hibernate(g, 1, 1)
	sent := make(map[string]int)
	n.breaks(func(op blobtest.Op, key string) error {
		if op != blobtest.OpPublish {
			return nil
		}
		sent[key]++
		if sent[key] == 1 {
			return fmt.Errorf("%w: broken off", blob.ErrUnavailable)
		}
		return nil
	})
	n.replicate(g)
	for key, times := range sent {
		if times != 2 {
			t.Errorf("%s was sent %d times", key, times)
		}
	}
	if len(sent) < 7 {
		t.Errorf("only %v were sent", sent)
	}
	// What it says that the store took, over all tries, is what the store has of the snapshot.
	var size int64
	for key, bytes := range keys(t, n.store, "") {
		if _, _, record := parseRecordKey(key); !record && strings.Contains(key, string(g.rep.Snapshot.ID)) {
			size += bytes
		}
	}
	if st := n.tier.Status(g.id, g.rep.Snapshot.ID); st.Sent != size || size == 0 {
		t.Errorf("%d bytes were sent of the %d that are there", st.Sent, size)
	}
}

// The store is down for a whole hibernation and after it; nothing waits for it.
func TestReplicationCatchesUp(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	var guests []*guest
	n.breaks(down)
	for i := range 5 {
		g := newGuest(fmt.Sprint("s", i), tpl)
		n.hibernate(g, 1, 1)
		n.tier.Replicate(g.rep)
		guests = append(guests, g)
	}
	gone := newGuest("gone", tpl)
	n.hibernate(gone, 1, 2)
	n.tier.Replicate(gone.rep)
	n.tier.Forget(gone.id)
	for _, g := range guests {
		eventually(t, "the status says why it waits", func() bool {
			s := n.tier.Status(g.id, g.rep.Snapshot.ID)
			return s.State == Local && errors.Is(s.Err, blob.ErrUnavailable)
		})
		n.check(g)
	}
	usage, err := n.tier.Usage(t.Context())
	if err != nil || usage[1].Pending != 5 || !errors.Is(usage[1].Err, blob.ErrUnavailable) || usage[0].Objects == 0 {
		t.Errorf("Usage = %+v, %v", usage, err)
	}
	// The daemon starts meanwhile.
	n.tier.Close()
	n.start("aaaa", 0)
	for _, g := range guests {
		n.tier.Replicate(g.rep)
	}
	n.breaks(nil)
	for _, g := range guests {
		eventually(t, "the snapshot of "+g.id+" is replicated", func() bool { return n.replicated(g) })
	}
	if records := keys(t, n.store.Store, recordPrefix); len(records) != len(guests) {
		t.Errorf("records: %v", records)
	}
}

// A deleted sandbox's record goes, also when the store is down at the deletion
// and the daemon starts before it is back.
func TestForgetOutlivesARestart(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	g, other := newGuest("s1", tpl), newGuest("s2", tpl)
	for _, g := range []*guest{g, other} {
		n.hibernate(g, 1, 1)
		n.replicate(g)
	}
	n.breaks(down)
	n.tier.Forget(g.id)
	n.tier.Close()
	n.start("aaaa", 0)
	n.breaks(nil)
	key, _ := recordKey(other.rep)
	eventually(t, "the record goes", func() bool {
		left := keys(t, n.store.Store, recordPrefix)
		_, there := left[key]
		return len(left) == 1 && there
	})
	eventually(t, "the note goes", func() bool { return len(keys(t, n.disk, forgottenPrefix)) == 0 })
}

func TestANewerSnapshotEndsAnUploadThatIsNotNeeded(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	for _, needed := range []bool{true, false} {
		t.Run(fmt.Sprint("needed=", needed), func(t *testing.T) {
			g := newGuest(fmt.Sprint("s", needed), tpl)
			n.hibernate(g, 1, 1)
			old := g.rep.Snapshot
			reached, goOn := make(chan struct{}), make(chan struct{})
			n.breaks(func(op blobtest.Op, key string) error {
				if op == blobtest.OpPublish && key == snapshot.KindPack.Key(old.ID) {
					close(reached)
					<-goOn
				}
				return nil
			})
			n.tier.Replicate(g.rep)
			<-reached
			n.breaks(nil)
			if !needed {
				g.rep.Snapshot = snapshot.Ref{} // the next one has no page of it
			}
			n.hibernate(g, 2, 2)
			n.tier.Replicate(g.rep)
			u := func() *upload {
				n.tier.mu.Lock()
				defer n.tier.mu.Unlock()
				return n.tier.uploading
			}()
			eventually(t, "the upload is told", func() bool {
				n.tier.mu.Lock()
				defer n.tier.mu.Unlock()
				return u.superseded
			})
			close(goOn)
			eventually(t, "the newer one is replicated", func() bool { return n.replicated(g) })
			if _, err := n.store.Store.Stat(t.Context(), snapshot.KindManifest.Key(old.ID)); !errors.Is(err, blob.ErrNotExist) {
				t.Errorf("the older one's manifest: %v", err)
			}
			if _, err := n.store.Store.Stat(t.Context(), snapshot.KindPack.Key(old.ID)); needed && err != nil {
				t.Errorf("the pack that both name: %v", err)
			}
		})
	}
}

func TestEvictOnlyWhatIsProven(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	g := newGuest("s1", tpl)
	n.hibernate(g, 1, 1)
	if _, _, err := n.tier.Evict(t.Context(), g.rep.Snapshot); !errors.Is(err, ErrNotReplicated) {
		t.Errorf("before its replication: %v", err)
	}
	n.replicate(g)
	local, err := n.tier.Local(t.Context(), g.rep.Snapshot)
	if err != nil || local == 0 {
		t.Fatalf("Local = %d, %v", local, err)
	}
	held, err := n.repo.Open(t.Context(), g.rep.Snapshot)
	if err != nil {
		t.Fatal(err)
	}
	if packs, _, err := n.tier.Evict(t.Context(), g.rep.Snapshot); packs != 0 || err != nil {
		t.Errorf("while it is open: %d, %v", packs, err)
	}
	held.Close()
	n.breaks(down)
	if _, _, err := n.tier.Evict(t.Context(), g.rep.Snapshot); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("while the store is down: %v", err)
	}
	n.breaks(nil)
	if packs, bytes, err := n.tier.Evict(t.Context(), g.rep.Snapshot); packs != 1 || bytes != local || err != nil {
		t.Errorf("Evict = %d, %d, %v", packs, bytes, err)
	}
	if local, err := n.tier.Local(t.Context(), g.rep.Snapshot); local != 0 || err != nil {
		t.Errorf("then Local = %d, %v", local, err)
	}
	n.check(g)

	// Its child is made of what is remote, and replicated without it.
	n.hibernate(g, 9, 7)
	n.replicate(g)
	n.check(g)

	n.tier.Promote(g.rep.Snapshot)
	eventually(t, "its packs are local again", func() bool {
		packs, err := n.tier.local.Packs(t.Context(), g.rep.Snapshot)
		if err != nil {
			t.Fatal(err)
		}
		return len(keys(t, n.disk, "packs/")) == len(packs)
	})
	n.breaks(down)
	n.check(g)
}

func TestWhatCannotBeReadIsTold(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	g := newGuest("s1", tpl)
	n.hibernate(g, 1, 1)
	n.replicate(g)
	if _, _, err := n.tier.Evict(t.Context(), g.rep.Snapshot); err != nil {
		t.Fatal(err)
	}
	pack := snapshot.KindPack.Key(g.rep.Snapshot.ID)
	told := func(err error, kind error, but error) {
		t.Helper()
		if !errors.Is(err, kind) || errors.Is(err, but) || !strings.Contains(err.Error(), pack) || !strings.Contains(err.Error(), "remote store") {
			t.Errorf("the error is: %v", err)
		}
	}
	n.breaks(down)
	told(n.resume(g), blob.ErrUnavailable, snapshot.ErrMissing)
	n.breaks(func(op blobtest.Op, key string) error {
		if op == blobtest.OpRead {
			return down(op, key)
		}
		return nil
	})
	told(n.resume(g), blob.ErrUnavailable, snapshot.ErrCorrupt)
	n.breaks(nil)

	// One byte of a frame.
	path := filepath.Join(n.far, pack)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	bad := slices.Clone(whole)
	bad[5000] ^= 1
	if err := os.WriteFile(path, bad, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.resume(g); !errors.Is(err, snapshot.ErrCorrupt) || !strings.Contains(err.Error(), pack) {
		t.Errorf("the error is: %v", err)
	}
	n.tier.Promote(g.rep.Snapshot)
	eventually(t, "the promotion has ended", func() bool {
		n.tier.mu.Lock()
		defer n.tier.mu.Unlock()
		return len(n.tier.promotes) == 0
	})
	if got := keys(t, n.disk, "packs/"); len(got) != 0 {
		t.Errorf("a corrupt pack was made local: %v", got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	told(n.resume(g), snapshot.ErrMissing, blob.ErrUnavailable)
}

// The snapshots used last stay local, as many as fit, and a template's base longest.
func TestTheBudgetOfTheLocalDisk(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	base := newGuest("base", tpl)
	n.hibernate(base, 0)
	size := keys(t, n.disk, "packs/")[snapshot.KindPack.Key(base.rep.Snapshot.ID)]
	tpl.Bases = []snapshot.Ref{base.rep.Snapshot}
	n.tier.Close()
	n.start("aaaa", 3*size+size/2) // the base and two more
	var guests []*guest
	start := time.Now()
	for i := range 5 {
		g := newGuest(fmt.Sprint("s", i), tpl)
		n.hibernate(g, byte(i), 1)
		g.rep.LastUsed = start.Add(time.Duration(i) * time.Second)
		if i == 0 {
			g.rep.LastUsed = start.Add(time.Hour)
		}
		n.replicate(g)
		guests = append(guests, g)
	}
	is := func(g *guest) bool {
		local, err := n.tier.Local(t.Context(), g.rep.Snapshot)
		if err != nil {
			t.Fatal(err)
		}
		return local > 0
	}
	eventually(t, "the budget is kept", func() bool {
		return is(base) && is(guests[0]) && !is(guests[1]) && !is(guests[2]) && !is(guests[3]) && is(guests[4])
	})
	for _, g := range guests {
		n.check(g)
	}
	// What is used now takes the place of what was not used for longest.
	n.tier.Promote(guests[1].rep.Snapshot)
	eventually(t, "another one is promoted", func() bool { return is(guests[1]) && !is(guests[4]) && is(base) && is(guests[0]) })
}

func TestCollectRemote(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	other := newTemplate(t, filepath.Join(n.dir, "other"))
	other.Name = "other"
	a, b, c := newGuest("s1", tpl), newGuest("s2", other), newGuest("s3", tpl)
	for _, g := range []*guest{a, b, c} {
		n.hibernate(g, 1, 1)
		n.replicate(g)
	}
	old := a.rep.Snapshot
	n.hibernate(a, 2, 2)
	n.replicate(a)
	n.tier.Forget(b.id)
	n.tier.Forget(c.id)
	eventually(t, "the records go", func() bool { return len(keys(t, n.store.Store, recordPrefix)) == 1 })

	before := keys(t, n.store.Store, "")
	roots := []snapshot.ID{c.rep.Snapshot.ID} // that one runs
	dry, err := n.tier.Collect(t.Context(), roots, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	if after := keys(t, n.store.Store, ""); len(after) != len(before) {
		t.Errorf("a dry run left %d of %d objects", len(after), len(before))
	}
	done, err := n.tier.Collect(t.Context(), roots, nil, false)
	if err != nil || done.Objects != dry.Objects || done.Bytes != dry.Bytes || done.Objects != len(dry.Keys) {
		t.Errorf("Collect = %+v, %v; the dry run said %+v", done, err, dry)
	}
	after := keys(t, n.store.Store, "")
	for key := range before {
		gone := slices.Contains(dry.Keys, key)
		want := strings.HasSuffix(key, string(b.rep.Snapshot.ID)) || strings.HasPrefix(key, templatePrefix+"other/") ||
			strings.HasSuffix(key, string(old.ID)) && !strings.HasPrefix(key, "packs/")
		if _, there := after[key]; there == gone || gone != want {
			t.Errorf("%s: announced %v, there %v, wanted gone %v", key, gone, there, want)
		}
	}
	if _, _, err := n.tier.Evict(t.Context(), a.rep.Snapshot); err != nil {
		t.Fatal(err)
	}
	n.check(a)

	// Without the manifest of a root nobody knows what is needed.
	if _, err := n.tier.Collect(t.Context(), []snapshot.ID{snapshot.NewID()}, nil, false); !errors.Is(err, snapshot.ErrMissing) {
		t.Errorf("with an unknown root: %v", err)
	}
	if got := keys(t, n.store.Store, ""); len(got) != len(after) {
		t.Errorf("it deleted: %v", got)
	}
}

// A collection that breaks off leaves no manifest without what it names, and no
// list without its files: an upload would believe them.
func TestCollectBreaksOffAnywhere(t *testing.T) {
	for limit := range 12 {
		n := newNode(t, "aaaa", t.TempDir(), 0)
		g := newGuest("s1", newTemplate(t, filepath.Join(n.dir, "debian")))
		n.hibernate(g, 1, 1)
		n.replicate(g)
		n.tier.Forget(g.id)
		eventually(t, "the record goes", func() bool { return len(keys(t, n.store, recordPrefix)) == 0 })
		n.tier.Close()
		n.start("aaaa", 0)
		deleted := 0
		n.breaks(func(op blobtest.Op, key string) error {
			if op != blobtest.OpDelete {
				return nil
			}
			if deleted++; deleted > limit {
				return down(op, key)
			}
			return nil
		})
		_, err := n.tier.Collect(t.Context(), nil, nil, false)
		n.breaks(nil)
		if err != nil && !errors.Is(err, blob.ErrUnavailable) {
			t.Fatal(err)
		}
		n.replicate(g)
		n.tier.Close()
		other := newNode(t, "bbbb", n.far, 0)
		r := newReceiver(filepath.Join(other.dir, "templates"))
		if err := other.tier.Import(t.Context(), true, r.to()); err != nil || len(r.skipped) > 0 || len(r.sandboxes) != 1 {
			t.Fatalf("after %d deletions: %v, skipped %v", limit, err, r.skipped)
		}
		other.check(g)
	}
}

// A node without a catalog knows no roots: the records in the store are enough.
func TestAnEmptyNodeCollectsNothingThatIsRecorded(t *testing.T) {
	remote := t.TempDir()
	n := newNode(t, "aaaa", remote, 0)
	g := newGuest("s1", newTemplate(t, filepath.Join(n.dir, "debian")))
	n.hibernate(g, 1, 1)
	n.replicate(g)
	before := keys(t, n.store.Store, "")
	n.tier.Close()
	for id, want := range map[string]error{"bbbb": ErrOwned, "aaaa": nil} {
		fresh := newNode(t, id, remote, 0)
		if _, err := fresh.tier.Collect(t.Context(), nil, nil, false); !errors.Is(err, want) {
			t.Errorf("Collect by %s: %v", id, err)
		}
		if after := keys(t, n.store.Store, ""); len(after) != len(before) {
			t.Errorf("%s left %v of %v", id, after, before)
		}
	}
}

func TestTwoNodesThatClaimAnEmptyStore(t *testing.T) {
	remote := t.TempDir()
	a, b := newNode(t, "aaaa", remote, 0), newNode(t, "bbbb", remote, 0)
	owned := make(chan bool)
	for _, n := range []*node{a, b} {
		go func() {
			err := n.tier.own(t.Context())
			if err != nil && !errors.Is(err, ErrOwned) {
				t.Errorf("own: %v", err)
			}
			owned <- err == nil
		}()
	}
	if first, second := <-owned, <-owned; first && second {
		t.Error("both own it")
	}
}
