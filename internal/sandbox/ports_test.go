package sandbox_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// cache notes which objects it is to drop.
type cache []string

func (c *cache) DropCache(_ context.Context, key string) error {
	*c = append(*c, key)
	if strings.HasPrefix(key, "worksets/") {
		return fmt.Errorf("%w: %s", blob.ErrNotExist, key)
	}
	return nil
}

// TestDropCacheOfASnapshot reaches every object of it, packs of its ancestors
// among them, and does not mind what is not there.
func TestDropCacheOfASnapshot(t *testing.T) {
	store, err := disk.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	repo := snapshot.NewRepository(store)
	ram := bytes.Repeat([]byte{1}, 8*page.Size)
	in := snapshot.CaptureInput{ID: snapshot.NewID(), MemoryBytes: int64(len(ram)), State: []byte("state"), RAM: bytes.NewReader(ram)}
	base, _, err := repo.Capture(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	if in.Parent, err = repo.Open(t.Context(), base); err != nil {
		t.Fatal(err)
	}
	defer in.Parent.Close()
	ram[0] = 2
	in.ID, in.Dirty = snapshot.NewID(), []page.Run{{First: 0, Count: 1}}
	child, _, err := repo.Capture(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}

	var dropped cache
	if err := sandbox.FromRepository(repo, &dropped).DropCache(t.Context(), child); err != nil {
		t.Fatal(err)
	}
	want := cache{snapshot.KindPack.Key(base.ID)}
	for _, kind := range []snapshot.Kind{snapshot.KindManifest, snapshot.KindState, snapshot.KindWorkingSet, snapshot.KindPack} {
		want = append(want, kind.Key(child.ID))
	}
	slices.Sort(want)
	slices.Sort(dropped)
	if !slices.Equal(dropped, want) {
		t.Errorf("%v, want %v", dropped, want)
	}
}
