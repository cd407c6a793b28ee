package tier

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// TestOutage: a remote store that is down for a whole hibernation, and for long
// after, gets the snapshot within minutes once it is back; by then nobody has
// asked it all the time.
func TestOutage(t *testing.T) {
	for name, outage := range map[string]time.Duration{"ten minutes": 10 * time.Minute, "a week": 7 * 24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, err := openNode(t.TempDir(), t.TempDir())
				if err != nil {
					t.Fatal(err)
				}
				n.t = t
				tier, err := newTier(t.Context(), Config{Local: n.disk, Remote: n.store, Where: "remote", Node: "aaaa"}, usualTuning)
				if err != nil {
					t.Fatal(err)
				}
				n.tier, n.repo = tier, snapshot.NewRepository(tier.Store())
				defer tier.Close()
				n.breaks(down)
				g := newGuest("s1", newTemplate(t, filepath.Join(n.dir, "debian")))
				n.hibernate(g, 1, 1)
				tier.Replicate(g.rep)
				time.Sleep(outage)
				synctest.Wait()
				if s := tier.Status(g.id, g.rep.Snapshot.ID); s.State != Local || s.Err == nil {
					t.Fatalf("during the outage it is %+v", s)
				}
				tier.mu.Lock()
				tries := tier.down.failed
				tier.mu.Unlock()
				if most := int(outage/time.Minute) + 20; tries > most {
					t.Errorf("it was tried %d times, at most %d are wanted", tries, most)
				}
				n.breaks(nil)
				time.Sleep(2 * usualTuning.maxRetry)
				synctest.Wait()
				if s := tier.Status(g.id, g.rep.Snapshot.ID); s.State != Replicated {
					t.Fatalf("after the outage it is %+v", s)
				}
				n.check(g)
			})
		})
	}
}
