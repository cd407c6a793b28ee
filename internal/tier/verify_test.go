package tier

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// TestVerifyRemote: damage to any object of the remote store is found, with
// the object's name and the tier; a store that is down is no damage.
func TestVerifyRemote(t *testing.T) {
	n := newNode(t, "aaaa", t.TempDir(), 0)
	tpl := newTemplate(t, filepath.Join(n.dir, "debian"))
	g := newGuest("s1", tpl)
	n.hibernate(g, 1, 1)
	n.replicate(g)

	verify := func() (objects int, faults []error) {
		t.Helper()
		var last, total int64
		objects, size, faults, err := n.tier.VerifyRemote(t.Context(), func(d, all int64) {
			if d < last || d > all {
				t.Errorf("progress %d of %d after %d", d, all, last)
			}
			last, total = d, all
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(faults) == 0 && (last != total || last != size) {
			t.Errorf("at the end the progress is %d of %d; %d bytes were read", last, total, size)
		}
		return objects, faults
	}
	all := keys(t, n.store.Store, "")
	objects, faults := verify()
	if objects != len(all)-1 || len(faults) != 0 { // the owner's claim is empty
		t.Fatalf("%d of %d objects, faults %v", objects, len(all), faults)
	}
	for key := range all {
		if strings.HasPrefix(key, ownerPrefix) {
			continue
		}
		path := filepath.Join(n.far, filepath.FromSlash(key))
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		damages := map[string]func() error{
			"changed": func() error {
				b := append([]byte(nil), whole...)
				b[len(b)/2] ^= 1
				return os.WriteFile(path, b, 0o600)
			},
			"cut off": func() error { return os.Truncate(path, int64(len(whole)/2)) },
			"missing": func() error { return os.Remove(path) },
		}
		for name, damage := range damages {
			named := !strings.HasPrefix(key, recordPrefix) && !isListKey(key) && !strings.HasPrefix(key, snapshot.KindWorkingSet.Prefix())
			if name == "missing" && !named {
				continue // nothing names it
			}
			if err := damage(); err != nil {
				t.Fatal(err)
			}
			_, faults := verify()
			found := false
			for _, f := range faults {
				found = found || strings.HasPrefix(f.Error(), "remote tier: ") && strings.Contains(f.Error(), key)
			}
			if !found {
				t.Errorf("%s, %s: the faults are %v", key, name, faults)
			}
			if err := os.WriteFile(path, whole, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, faults := verify(); len(faults) != 0 {
		t.Fatalf("put back, and there are %v", faults)
	}
	n.breaks(down)
	if _, _, faults, err := n.tier.VerifyRemote(t.Context(), nil); !errors.Is(err, blob.ErrUnavailable) || len(faults) != 0 {
		t.Errorf("down: %v, faults %v", err, faults)
	}
}
