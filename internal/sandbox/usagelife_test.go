package sandbox_test

import (
	"testing"
)

func TestUsage(t *testing.T) {
	each(t, func(h *host) {
		s := h.create()
		if u := s.Usage; u.Standby != 0 || u.StoredBytes != 0 {
			t.Errorf("new: %+v", u)
		}
		h.ask(s.ID, "set x")
		first := h.hibernate(s.ID)
		wait(t, "time in standby passes", func() bool { return h.get(s.ID).Usage.Standby > 0 })
		asleep := h.get(s.ID).Usage
		if asleep.StoredBytes == 0 || asleep.Awake < first.Usage.Awake {
			t.Errorf("asleep: %+v, just before %+v", asleep, first.Usage)
		}
		h.crash()
		again := h.get(s.ID).Usage
		if again.Awake != asleep.Awake || again.Standby < asleep.Standby || again.CPU != asleep.CPU || again.StoredBytes == 0 {
			t.Errorf("after a crash: %+v, before %+v", again, asleep)
		}
		h.resume(s.ID)
		wait(t, "waking time passes", func() bool { return h.get(s.ID).Usage.Awake > again.Awake })
		if now := h.get(s.ID).Usage; now.Standby < again.Standby {
			t.Errorf("awake: %+v, before %+v", now, again)
		}
	})
}

// TestUsageIsMeasured compares the bytes with what the store says.
func TestUsageIsMeasured(t *testing.T) {
	h := newHost(t)
	s := h.create()
	for range 3 {
		h.ask(s.ID, "set x")
		h.hibernate(s.ID)
	}
	wait(t, "the usage is what the store says", func() bool {
		st, err := h.core.StoreStatus(t.Context())
		return err == nil && len(st.Sandboxes) == 1 && st.Sandboxes[0].StoredBytes == h.get(s.ID).Usage.StoredBytes
	})
	if tiers, err := h.core.Tiers(t.Context()); err != nil || len(tiers) != 1 || tiers[0].Objects == 0 {
		t.Errorf("%+v %v", tiers, err)
	}
}

// TestCheckpointsAreBilled: what a checkpoint holds counts as long as it is there,
// and what two snapshots share counts once.
func TestCheckpointsAreBilled(t *testing.T) {
	h := newHost(t)
	s := h.create()
	stored := func() int64 { return h.get(s.ID).Usage.StoredBytes }
	h.ask(s.ID, "set x")
	first := h.checkpoint(s.ID, "first")
	wait(t, "the checkpoint of one that runs counts", func() bool { return stored() >= first.Snapshot.StoredBytes && stored() > 0 })
	h.ask(s.ID, "set y")
	h.hibernate(s.ID)
	own := h.get(s.ID).Snapshot.StoredBytes
	packs := own + first.Snapshot.StoredBytes
	wait(t, "both count, and a record of each", func() bool { return stored() == packs+2 })
	h.checkpoint(s.ID, "same")
	if err := h.core.RemoveCheckpoint(t.Context(), s.ID, "first"); err != nil {
		t.Fatal(err)
	}
	// Its pack stays, since the later snapshot builds upon it.
	wait(t, "what only it needed does not count any more", func() bool { return stored() == packs+1 })
	h.crash()
	if got := stored(); got == 0 {
		t.Error("nothing is known after a crash")
	}
}
