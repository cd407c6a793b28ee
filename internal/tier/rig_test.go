package tier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// TestMain runs the tests, or as a child of one the node that is killed.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "node" {
		if err := runNode(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// patience bounds every wait for a condition.
const patience = 30 * time.Second

// quick has no pauses worth waiting for.
var quick = tuning{retry: time.Millisecond, maxRetry: 5 * time.Millisecond, promote: time.Millisecond}

const memoryPages = 96

// node is a data folder with its machine and its tier.
type node struct {
	t     testing.TB
	dir   string
	far   string // folder of the remote store
	disk  *disk.Store
	repo  *snapshot.Repository // in both tiers
	tier  *Tier
	store *blobtest.Faulty // the remote one

	mu    sync.Mutex
	fault func(op blobtest.Op, key string) error
	log   []string // of remote operations that change something
}

// newNode returns a node with that id whose remote store is the folder remote.
func newNode(t testing.TB, id, remote string, budget int64) *node {
	t.Helper()
	n, err := openNode(t.TempDir(), remote)
	if err != nil {
		t.Fatal(err)
	}
	n.t = t
	n.start(id, budget)
	t.Cleanup(func() { n.tier.Close() })
	return n
}

// openNode returns the node in the folder dir, not started.
func openNode(dir, remote string) (*node, error) {
	n := &node{dir: dir, far: remote}
	var err error
	if n.disk, err = disk.Open(filepath.Join(dir, "store")); err != nil {
		return nil, err
	}
	far, err := disk.Open(remote)
	n.store = &blobtest.Faulty{Store: far, Fault: n.ask}
	return n, err
}

// start makes the tier, as a start of the daemon does.
func (n *node) start(id string, budget int64) {
	n.t.Helper()
	if err := n.startTier(id, budget); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) startTier(id string, budget int64) (err error) {
	n.tier, err = newTier(context.Background(), Config{
		Local: n.disk, Remote: n.store, Where: "elsewhere", Node: id, Budget: budget,
	}, quick)
	if err == nil {
		n.repo = snapshot.NewRepository(n.tier.Store())
	}
	return err
}

func (n *node) ask(op blobtest.Op, key string) error {
	n.mu.Lock()
	if op == blobtest.OpPublish || op == blobtest.OpDelete {
		n.log = append(n.log, string(op)+" "+key)
	}
	fault := n.fault
	n.mu.Unlock()
	if fault != nil {
		return fault(op, key)
	}
	return nil
}

// breaks makes operations on the remote store fail; nil mends it.
func (n *node) breaks(fault func(op blobtest.Op, key string) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fault = fault
}

// down is the fault of a store that cannot be reached.
func down(blobtest.Op, string) error { return fmt.Errorf("%w: it is down", blob.ErrUnavailable) }

// guest is a sandbox's machine with its memory.
type guest struct {
	id  string
	ram []byte
	rep Replica // of its last snapshot
}

var templateFiles = map[string]string{"base.erofs": "the base image, the base image", "template.json": "{}"}

// newTemplate returns a template with a folder of its own.
func newTemplate(t testing.TB, dir string) Template {
	t.Helper()
	tpl, err := makeTemplate(dir)
	if err != nil {
		t.Fatal(err)
	}
	return tpl
}

func makeTemplate(dir string) (Template, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Template{}, err
	}
	for name, content := range templateFiles {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return Template{}, err
		}
	}
	return Template{Name: "debian", Version: 1, Dir: dir, Record: []byte("template record")}, nil
}

// newGuest returns a guest of the template with that name and content.
func newGuest(id string, tpl Template) *guest {
	g := &guest{id: id, ram: make([]byte, memoryPages*page.Size)}
	for i := range g.ram {
		g.ram[i] = byte(i>>12*7 + i + len(id)*int(id[len(id)-1]))
	}
	g.rep = Replica{Sandbox: id, Template: tpl}
	return g
}

// hibernate writes into the given pages and takes a snapshot.
func (n *node) hibernate(g *guest, value byte, pages ...int) {
	n.t.Helper()
	if err := n.capture(g, value, pages...); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) capture(g *guest, value byte, pages ...int) error {
	ctx := context.Background()
	in := snapshot.CaptureInput{
		ID: snapshot.NewID(), MemoryBytes: int64(len(g.ram)), State: []byte("state of " + g.id),
		Metadata: snapshot.Metadata{ControlToken: "secret"}, WorkingSet: snapshot.WorkingSet{{Run: page.Run{First: 1, Count: 2}}},
	}
	if g.rep.Snapshot.ID != "" {
		parent, err := n.repo.Open(ctx, g.rep.Snapshot)
		if err != nil {
			return err
		}
		defer parent.Close()
		in.Parent = parent
	}
	for _, p := range pages {
		g.write(value, p)
		if in.Parent != nil { // the first one saves everything
			in.Dirty = append(in.Dirty, page.Run{First: uint64(p), Count: 1})
		}
	}
	in.RAM = bytes.NewReader(g.ram)
	ref, _, err := n.repo.Capture(ctx, in)
	if err != nil {
		return err
	}
	g.rep.Snapshot, g.rep.LastUsed = ref, time.Now()
	g.rep.Record = []byte("record of " + g.id + " at " + string(ref.ID))
	return nil
}

// write fills a page.
func (g *guest) write(value byte, page4K int) {
	for i := range page.Size {
		g.ram[page4K*page.Size+i] = value + byte(i)
	}
}

// check resumes the guest on a node and compares its memory.
func (n *node) check(g *guest) {
	n.t.Helper()
	if err := n.resume(g); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) resume(g *guest) error {
	s, err := n.repo.Open(context.Background(), g.rep.Snapshot)
	if err != nil {
		return err
	}
	defer s.Close()
	got := make([]byte, len(g.ram))
	if _, err := s.ReadAt(got, 0); err != nil && err != io.EOF {
		return err
	}
	if !bytes.Equal(got, g.ram) {
		return fmt.Errorf("sandbox %s resumes with another memory", g.id)
	}
	return nil
}

// eventually waits until cond holds.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func (n *node) replicated(g *guest) bool {
	return n.tier.Status(g.id, g.rep.Snapshot.ID).State == Replicated
}

// replicate replicates the guest's last snapshot.
func (n *node) replicate(g *guest) {
	n.t.Helper()
	n.tier.Replicate(g.rep)
	eventually(n.t, "the snapshot of "+g.id+" is replicated", func() bool { return n.replicated(g) })
}

// keys returns the keys in a store, with their sizes.
func keys(t testing.TB, s blob.Store, prefix string) map[string]int64 {
	t.Helper()
	out := make(map[string]int64)
	for info, err := range s.List(t.Context(), prefix) {
		if err != nil {
			t.Fatal(err)
		}
		out[info.Key] = info.Size
	}
	return out
}

// receiver is a node's catalog, of what an import brings.
type receiver struct {
	dir       string
	templates map[string]Template
	sandboxes map[string]Replica
	skipped   map[string]error
	progress  [][2]int64
}

func newReceiver(dir string) *receiver {
	return &receiver{dir: dir, templates: map[string]Template{}, sandboxes: map[string]Replica{}, skipped: map[string]error{}}
}

func (r *receiver) to() Receiver {
	return Receiver{
		Dir: func(t Template) string {
			return filepath.Join(r.dir, fmt.Sprintf("%s-%d", t.Name, t.Version))
		},
		Template: func(_ context.Context, t Template) error { r.templates[t.Name] = t; return nil },
		Sandbox: func(_ context.Context, s Replica) error {
			if _, ok := r.templates[s.Template.Name]; !ok {
				return errors.New("its template was not given before")
			}
			r.sandboxes[s.Sandbox] = s
			return nil
		},
		Skipped:  func(sandbox string, err error) { r.skipped[sandbox] = err },
		Progress: func(done, total int64) { r.progress = append(r.progress, [2]int64{done, total}) },
	}
}
