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
