// Package crash tests that an acknowledged hibernation survives whatever
// happens to the host.
package crash

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/test/recordfs"
)

// actEnv holds, in a child process, the act it plays and the folder.
const actEnv = "HIB_TEST_POWERLOSS"

func TestMain(m *testing.M) {
	if act, dir, ok := strings.Cut(os.Getenv(actEnv), " "); ok {
		if err := acts[act](context.Background(), dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// acts are what the child process does to the recorded folder.
var acts = map[string]func(ctx context.Context, dir string) error{
	"setup":     setup,
	"hibernate": hibernate,
	"collect":   collect,
}

const memoryPages = 64

// memory is the machine's RAM in a generation, and what changed in it since
// the one before: pages that are new, go on changing, become zero, stay.
func memory(generation uint64) (ram []byte, dirty []page.Run) {
	ram = make([]byte, memoryPages*page.Size)
	for n := range uint64(memoryPages) {
		v := byte(n)
		switch n % 4 {
		case 1:
			v = byte(n + generation)
		case 2:
			v = byte((n + generation) % 3)
		case 3:
			v = 0
		}
		if n%4 == 1 || n%4 == 2 {
			dirty = page.Append(dirty, n)
		}
		copy(ram[n*page.Size:(n+1)*page.Size], bytes.Repeat([]byte{v}, page.Size))
	}
	return ram, dirty
}

func repository(dir string) (*snapshot.Repository, *disk.Store, error) {
	store, err := disk.Open(filepath.Join(dir, "store"))
	if err != nil {
		return nil, nil, err
	}
	return snapshot.NewRepository(store), store, nil
}

// capture takes the snapshot of a generation.
func capture(ctx context.Context, r *snapshot.Repository, parent *snapshot.Snapshot, generation uint64) (snapshot.Ref, error) {
	ram, dirty := memory(generation)
	in := snapshot.CaptureInput{
		ID: snapshot.NewID(), Parent: parent, MemoryBytes: int64(len(ram)), RAM: bytes.NewReader(ram),
		State:    fmt.Appendf(nil, "state of generation %d", generation),
		Metadata: snapshot.Metadata{Generation: generation},
	}
	if parent != nil {
		in.Dirty = dirty
	}
	ref, _, err := r.Capture(ctx, in)
	return ref, err
}

// The record of one sandbox, which names its snapshot.
const (
	kind   = "sandbox"
	record = "one"
)

// withCatalog opens the catalog for fn.
func withCatalog(dir string, fn func(*catalog.Catalog) error) error {
	c, err := catalog.Open(filepath.Join(dir, "catalog.db"))
	if err != nil {
		return err
	}
	return errors.Join(fn(c), c.Close())
}

// named returns the snapshot that the record names, and the record's revision.
func named(ctx context.Context, c *catalog.Catalog) (ref snapshot.Ref, revision uint64, err error) {
	r, err := c.Get(ctx, kind, record)
	if err != nil {
		return ref, 0, err
	}
	return ref, r.Revision, json.Unmarshal(r.Value, &ref)
}

// swap is the commit point: it names a new snapshot if the record was not
// changed since revision.
func swap(ctx context.Context, c *catalog.Catalog, revision uint64, to snapshot.Ref) error {
	v, err := json.Marshal(to)
	if err != nil {
		return err
	}
	_, err = c.Put(ctx, kind, record, v, revision)
	return err
}

func setup(ctx context.Context, dir string) error {
	r, _, err := repository(dir)
	if err != nil {
		return err
	}
	ref, err := capture(ctx, r, nil, 1)
	if err != nil {
		return err
	}
	return withCatalog(dir, func(c *catalog.Catalog) error { return swap(ctx, c, 0, ref) })
}

func hibernate(ctx context.Context, dir string) error {
	r, _, err := repository(dir)
	if err != nil {
		return err
	}
	return withCatalog(dir, func(c *catalog.Catalog) error {
		old, revision, err := named(ctx, c)
		if err != nil {
			return err
		}
		parent, err := r.Open(ctx, old)
		if err != nil {
			return err
		}
		defer parent.Close()
		ref, err := capture(ctx, r, parent, parent.Metadata().Generation+1)
		if err != nil {
			return err
		}
		return swap(ctx, c, revision, ref)
	})
}

func collect(ctx context.Context, dir string) error {
	r, store, err := repository(dir)
	if err != nil {
		return err
	}
	return withCatalog(dir, func(c *catalog.Catalog) error {
		ref, _, err := named(ctx, c)
		if err != nil {
			return err
		}
		_, err = r.Collect(ctx, []snapshot.ID{ref.ID}, nil)
		return errors.Join(err, store.Clean(ctx))
	})
}

// phase is one act in the recording.
type phase struct {
	act    string
	before uint64 // generation that the catalog names
	after  uint64
	end    int // number of operations when it had ended
}

// TestPowerLoss records hibernations and collections, and cuts the power behind
// every single operation of them.
func TestPowerLoss(t *testing.T) {
	ops, phases := perform(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	losses := map[string]recordfs.Loss{
		"all unsynced is lost": {Content: recordfs.None, Names: recordfs.None},
		"names are kept":       {Content: recordfs.None, Names: recordfs.All},
		"content is kept":      {Content: recordfs.All, Names: recordfs.None},
		"all is kept":          {Content: recordfs.All, Names: recordfs.All},
		"some is kept":         {Content: recordfs.Some, Names: recordfs.Some, Rand: rand.New(rand.NewPCG(seed, 1))},
		"some other is kept":   {Content: recordfs.Some, Names: recordfs.Some, Rand: rand.New(rand.NewPCG(seed, 2))},
	}
	disks := scratch(t)
	image := recordfs.NewImage()
	p, states := 0, 0
	for i := 0; i <= len(ops); i++ {
		for p < len(phases)-1 && i > phases[p].end {
			p++
		}
		if p > 0 || i == phases[0].end {
			allowed := []uint64{phases[p].before, phases[p].after}
			if i == phases[p].end {
				allowed = allowed[1:] // acknowledged
			}
			for name, loss := range losses {
				states++
				if err := check(t.Context(), filepath.Join(disks, "disk"), image, loss, allowed); err != nil {
					t.Errorf("power lost in %q, %s, behind operation %d of %d (%v): %v", phases[p].act, name, i, len(ops), ops[i-1], err)
				}
			}
			if t.Failed() {
				for j := max(0, i-30); j < min(len(ops), i+3); j++ {
					t.Logf("%d: %v", j+1, ops[j])
				}
				t.FailNow()
			}
		}
		if i < len(ops) {
			image.Apply(ops[i])
		}
	}
	t.Logf("%d operations, %d states of the disk", len(ops), states)
}

// perform records the acts.
func perform(t *testing.T) ([]recordfs.Op, []phase) {
	t.Helper()
	mountpoint := t.TempDir()
	fs, err := recordfs.Mount(t.TempDir(), mountpoint)
	if err != nil {
		t.Skipf("no file systems in user space here: %v", err)
	}
	defer func() {
		if err := fs.Unmount(); err != nil {
			t.Error(err)
		}
	}()
	var phases []phase
	generation := uint64(0)
	for _, act := range []string{"setup", "hibernate", "hibernate", "collect", "hibernate", "collect"} {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), actEnv+"="+act+" "+mountpoint)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", act, err, out)
		}
		ph := phase{act: act, before: generation, end: len(fs.Ops())}
		if act != "collect" {
			generation++
		}
		ph.after = generation
		phases = append(phases, ph)
	}
	return fs.Ops(), phases
}

// scratch returns a folder for the rebuilt disks, in memory where there is one: nothing
// need survive in it.
func scratch(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "hib-powerloss-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// check builds a disk and looks at it as a daemon that starts again.
func check(ctx context.Context, dir string, image *recordfs.Image, loss recordfs.Loss, allowed []uint64) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := image.Build(dir, loss); err != nil {
		return err
	}
	r, store, err := repository(dir)
	if err != nil {
		return err
	}
	if _, _, faults, err := r.Verify(ctx, nil); err != nil || len(faults) > 0 {
		return fmt.Errorf("verify: %w", errors.Join(append(faults, err)...))
	}
	return withCatalog(dir, func(c *catalog.Catalog) error {
		ref, _, err := named(ctx, c)
		if err != nil {
			return err
		}
		if err := whole(ctx, r, ref, allowed); err != nil {
			return err
		}
		// What the crash left is cleaned up, and nothing is lost by that.
		if err := store.Clean(ctx); err != nil {
			return err
		}
		if _, err := r.Collect(ctx, []snapshot.ID{ref.ID}, nil); err != nil {
			return err
		}
		if st, err := r.Status(ctx); err != nil || st.Manifests.Objects != 1 || st.States.Objects != 1 {
			return fmt.Errorf("after the clean-up the store holds %+v: %w", st, err)
		}
		return whole(ctx, r, ref, allowed)
	})
}

// whole checks that a snapshot is one of the allowed generations, bit by bit.
func whole(ctx context.Context, r *snapshot.Repository, ref snapshot.Ref, allowed []uint64) error {
	s, err := r.Open(ctx, ref)
	if err != nil {
		return err
	}
	defer s.Close()
	generation := s.Metadata().Generation
	if generation != allowed[0] && generation != allowed[len(allowed)-1] {
		return fmt.Errorf("the record names generation %d, allowed is %v", generation, allowed)
	}
	want, _ := memory(generation)
	got := make([]byte, len(want))
	if _, err := s.ReadAt(got, 0); err != nil {
		return err
	}
	state, err := s.State(ctx)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, want) || string(state) != fmt.Sprintf("state of generation %d", generation) {
		return fmt.Errorf("the memory or state of generation %d is not what it was", generation)
	}
	return nil
}
