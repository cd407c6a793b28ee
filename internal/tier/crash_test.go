package tier

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/atomicfile"
	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// generations is how often the guest of a node that is killed hibernates.
const generations = 3

// commit is that node's catalog: the guest's last snapshot.
type commit struct {
	Generation int          `json:"generation"`
	Snapshot   snapshot.Ref `json:"snapshot"`
	Base       snapshot.Ref `json:"base"`
	Moved      bool         `json:"moved"`    // the last one was replicated and more
	Imported   bool         `json:"imported"` // by the other node
}

// world are the folders of such a node.
type world struct{ dir string }

func (w world) remote() string  { return filepath.Join(w.dir, "remote") }
func (w world) catalog() string { return filepath.Join(w.dir, "catalog") }

func (w world) load() (c commit, err error) {
	b, err := os.ReadFile(w.catalog())
	if errors.Is(err, fs.ErrNotExist) {
		return commit{}, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	return c, err
}

func (w world) save(c commit) error {
	return atomicfile.Write(w.catalog(), 0o600, func(out io.Writer) error { return json.NewEncoder(out).Encode(c) })
}

// guestAt returns the guest as the commit has it.
func (w world) guestAt(c commit) *guest {
	g := newGuest("s1", Template{Name: "debian", Version: 1, Dir: filepath.Join(w.dir, "debian"), Record: []byte("template record")})
	if c.Base.ID != "" {
		g.rep.Template.Bases = []snapshot.Ref{c.Base}
	}
	for i := 1; i <= c.Generation; i++ {
		g.write(byte(i), i)
	}
	g.rep.Snapshot, g.rep.Record, g.rep.LastUsed = c.Snapshot, fmt.Appendf(nil, "generation %d", c.Generation), time.Unix(int64(c.Generation), 0)
	return g
}

// runNode lets a node live: it goes on from its catalog until its guest has
// hibernated so often as it shall, moved between the tiers, and is imported by a node that
// starts from nothing. It tells each generation on standard output.
func runNode(dir string) error {
	ctx := context.Background()
	w := world{dir}
	if _, err := makeTemplate(filepath.Join(dir, "debian")); err != nil {
		return err
	}
	n, err := openNode(filepath.Join(dir, "a"), w.remote())
	if err != nil {
		return err
	}
	c, err := w.load()
	if err != nil {
		return err
	}
	if c.Imported {
		return nil
	}
	if c.Moved {
		return importAll(ctx, w, c)
	}
	if err := n.startTier("aaaa", 0); err != nil {
		return err
	}
	defer n.tier.Close()
	if c.Base.ID == "" {
		g := w.guestAt(c)
		if err := n.capture(g, 0); err != nil {
			return err
		}
		c.Base, c.Snapshot = g.rep.Snapshot, g.rep.Snapshot
		if err := w.save(c); err != nil {
			return err
		}
	}
	for {
		if err := n.move(ctx, w.guestAt(c)); err != nil {
			return fmt.Errorf("generation %d: %w", c.Generation, err)
		}
		fmt.Println("generation", c.Generation)
		if c.Generation == generations {
			n.tier.Close()
			c.Moved = true
			if err := w.save(c); err != nil {
				return err
			}
			return importAll(ctx, w, c)
		}
		g := w.guestAt(c)
		if err := n.capture(g, byte(c.Generation+1), c.Generation+1); err != nil {
			return err
		}
		c.Generation, c.Snapshot = c.Generation+1, g.rep.Snapshot
		if err := w.save(c); err != nil {
			return err
		}
	}
}

// await waits until cond holds.
func await(what string, cond func() bool) error {
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %v: %s", patience, what)
		}
	}
	return nil
}

// move replicates the guest's snapshot, evicts it, collects, reads it, and
// brings it back.
func (n *node) move(ctx context.Context, g *guest) error {
	n.tier.Replicate(g.rep)
	if err := await("the snapshot is replicated", func() bool { return n.replicated(g) }); err != nil {
		return err
	}
	if _, _, err := n.tier.Evict(ctx, g.rep.Snapshot); err != nil {
		return err
	}
	roots := []snapshot.ID{g.rep.Snapshot.ID, g.rep.Template.Bases[0].ID}
	if _, err := n.tier.Collect(ctx, roots, nil, false); err != nil {
		return err
	}
	if _, err := snapshot.NewRepository(n.disk).Collect(ctx, roots, nil); err != nil {
		return err
	}
	if err := n.resume(g); err != nil {
		return err
	}
	n.tier.Promote(g.rep.Snapshot)
	return await("its packs are local", func() bool {
		n.tier.mu.Lock()
		defer n.tier.mu.Unlock()
		return len(n.tier.promotes) == 0
	})
}

// importAll lets node b take the store over and checks what it gets.
func importAll(ctx context.Context, w world, c commit) error {
	n, err := openNode(filepath.Join(w.dir, "b"), w.remote())
	if err != nil {
		return err
	}
	if err := n.startTier("bbbb", 0); err != nil {
		return err
	}
	defer n.tier.Close()
	r := newReceiver(filepath.Join(n.dir, "templates"))
	if err := n.tier.Import(ctx, true, r.to()); err != nil {
		return err
	}
	if len(r.skipped) != 0 || len(r.sandboxes) != 1 || r.sandboxes["s1"].Snapshot != c.Snapshot {
		return fmt.Errorf("imported %v, skipped %v", r.sandboxes, r.skipped)
	}
	g := w.guestAt(c)
	if err := n.resume(g); err != nil {
		return err
	}
	list, err := listFiles(ctx, r.templates["debian"].Dir)
	if err != nil || len(list.Files) != len(templateFiles) {
		return fmt.Errorf("the template has %d files, %v", len(list.Files), err)
	}
	c.Imported = true
	return w.save(c)
}

// start begins to run the node as a process, with a failpoint or "".
func (w world) start(t *testing.T, point string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "node", w.dir)
	cmd.Env = append(os.Environ(), failpoint.Env+"=")
	if point != "" {
		cmd.Env = append(os.Environ(), failpoint.Env+"="+point+"=kill")
	}
	cmd.Stderr = t.Output()
	return cmd
}

// finish lets the node go on until it is done.
func (w world) finish(t *testing.T) {
	t.Helper()
	if out, err := w.start(t, "").Output(); err != nil {
		t.Fatalf("the node that goes on fails: %v\n%s", err, out)
	}
	c, err := w.load()
	if err != nil || c.Generation != generations || !c.Imported {
		t.Fatalf("at the end the catalog says %+v, %v", c, err)
	}
	w.onlyWhatIsNeeded(t, c)
}

// check holds what must be true after a kill at any instant: the committed snapshot can be
// resumed, and what the remote store records can be imported.
func (w world) check(t *testing.T) {
	t.Helper()
	c, err := w.load()
	if err != nil {
		t.Fatal(err)
	}
	n, err := openNode(filepath.Join(w.dir, "a"), w.remote())
	if err != nil {
		t.Fatal(err)
	}
	n.t, n.repo = t, snapshot.NewRepository(ReadStore(n.disk, n.store))
	if c.Snapshot.ID != "" {
		n.check(w.guestAt(c))
	}
	records := keys(t, n.store, recordPrefix)
	if len(records) == 0 {
		return
	}
	// Another node, on a copy of the remote store: the one here goes on.
	copied := filepath.Join(t.TempDir(), "remote")
	if err := os.CopyFS(copied, os.DirFS(w.remote())); err != nil {
		t.Fatal(err)
	}
	other := newNode(t, "cccc", copied, 0)
	defer other.tier.Close()
	r := newReceiver(filepath.Join(other.dir, "templates"))
	if err := other.tier.Import(t.Context(), true, r.to()); err != nil || len(r.skipped) != 0 {
		t.Fatalf("import: %v, skipped %v", err, r.skipped)
	}
	got := r.sandboxes["s1"]
	var generation int
	if _, err := fmt.Sscanf(string(got.Record), "generation %d", &generation); err != nil {
		t.Fatalf("the record is %q", got.Record)
	}
	if generation != c.Generation && generation != c.Generation-1 {
		t.Errorf("generation %d was imported, %d is committed", generation, c.Generation)
	}
	c.Generation, c.Snapshot = generation, got.Snapshot
	other.check(w.guestAt(c))
}

// onlyWhatIsNeeded checks that a collection leaves nothing of older generations.
func (w world) onlyWhatIsNeeded(t *testing.T, c commit) {
	t.Helper()
	n, err := openNode(filepath.Join(w.dir, "b"), w.remote())
	if err != nil {
		t.Fatal(err)
	}
	n.t = t
	n.start("bbbb", 0)
	defer n.tier.Close()
	n.replicate(w.guestAt(c))
	roots := []snapshot.ID{c.Snapshot.ID, c.Base.ID}
	if _, err := n.tier.Collect(t.Context(), roots, nil, false); err != nil {
		t.Fatal(err)
	}
	for key := range keys(t, n.store, "") {
		id, _ := snapshot.KindManifest.Parse(key)
		if id != "" && id != c.Snapshot.ID && id != c.Base.ID {
			t.Errorf("%s is left", key)
		}
	}
	if got := len(keys(t, n.store, recordPrefix)); got != 1 {
		t.Errorf("%d records are left", got)
	}
	n.check(w.guestAt(c))
}

// TestKilledAtEachStep kills a node at each of its failpoints, looks at what is
// there, and lets it go on.
func TestKilledAtEachStep(t *testing.T) {
	for _, point := range []string{
		fpTemplateFile, fpTemplate, fpPack, fpState, fpManifest, fpRecord, fpReplaced,
		fpProven, fpEvicted, fpCollect, fpPromoted, fpTakenOver, fpTemplateThere, fpObjects,
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := world{t.TempDir()}
			out, err := w.start(t, point).Output()
			if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.String() != "signal: killed" {
				t.Fatalf("the node was not killed but ended with %v\n%s", err, out)
			}
			w.check(t)
			w.finish(t)
		})
	}
}

// TestKilledAtAnyInstant kills a node again and again, at random.
func TestKilledAtAnyInstant(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 3 {
		w := world{t.TempDir()}
		kills := 0
		for ; kills < 8; kills++ {
			cmd := w.start(t, "")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			// Counted from what it has done, or the start of a process would be all that is hit.
			lines := bufio.NewScanner(out)
			if rnd.IntN(3) > 0 {
				lines.Scan()
			}
			time.Sleep(time.Duration(rnd.Int64N(int64(60 * time.Millisecond))))
			_ = cmd.Process.Kill()
			rest, _ := io.ReadAll(out)
			if err := cmd.Wait(); err == nil {
				break // it was done before
			} else if !strings.Contains(err.Error(), "killed") {
				t.Fatalf("the node ended with %v\n%s", err, rest)
			}
			w.check(t)
		}
		w.finish(t)
		t.Logf("killed %d times", kills)
	}
}
