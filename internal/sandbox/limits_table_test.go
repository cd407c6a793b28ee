package sandbox

import (
	"testing"
	"time"
)

// TestSteps: what is done about limits, and when, as a record's times say.
func TestSteps(t *testing.T) {
	begin := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	after := func(d time.Duration) time.Time { return begin.Add(d) }
	const hour, day = time.Hour, 24 * time.Hour
	deleteAfter := func(d time.Duration) Limit { return Limit{d, ActionDelete} }
	for name, tt := range map[string]struct {
		rec      record
		now      time.Time
		limit    string // "": nothing is to be done
		at       time.Time
		announce bool
	}{
		"no limits": {rec: record{State: StateStandby}},
		"ttl is announced": {rec: record{State: StateRunning, Policy: Policy{TTL: deleteAfter(day)}},
			limit: limitTTL, at: after(23 * hour), announce: true},
		"ttl that was announced": {rec: record{State: StateRunning, Policy: Policy{TTL: deleteAfter(day)}, Told: map[string]told{limitTTL: {after(day), after(23 * hour)}}},
			limit: limitTTL, at: after(day)},
		"ttl that was changed since": {rec: record{State: StateRunning, Policy: Policy{TTL: deleteAfter(2 * day)}, Told: map[string]told{limitTTL: {after(day), after(23 * hour)}}},
			limit: limitTTL, at: after(47 * hour), announce: true},
		"announced late: the daemon was down": {rec: record{State: StateStandby, Policy: Policy{TTL: deleteAfter(day)}, Told: map[string]told{limitTTL: {after(day), after(3 * day)}}},
			now: after(3 * day), limit: limitTTL, at: after(3*day + time.Minute)},
		"short ttl, announced late": {rec: record{State: StateStandby, Policy: Policy{TTL: deleteAfter(10 * time.Second)}, Told: map[string]told{limitTTL: {after(10 * time.Second), after(day)}}},
			now: after(day), limit: limitTTL, at: after(day + time.Second)},
		"a notification": {rec: record{State: StateRunning, Policy: Policy{TTL: Limit{day, ActionNotify}}},
			limit: limitTTL, at: after(day), announce: true},
		"a notification that was given": {rec: record{State: StateRunning, Policy: Policy{TTL: Limit{day, ActionNotify}}, Told: map[string]told{limitTTL: {after(day), after(day)}}},
			now: after(2 * day)},
		"awake, ttl_idle does not count": {rec: record{State: StateRunning, Since: begin, Policy: Policy{TTLIdle: deleteAfter(day)}}},
		"asleep": {rec: record{State: StateStandby, Since: after(hour), Policy: Policy{TTLIdle: deleteAfter(day)}},
			limit: limitTTLIdle, at: after(24 * hour), announce: true},
		"failed": {rec: record{State: StateFailed, Since: begin, Policy: Policy{TTLIdle: deleteAfter(day)}},
			limit: limitTTLIdle, at: after(23 * hour), announce: true},
		"being created": {rec: record{State: StateCreating, Policy: Policy{TTL: deleteAfter(day)}}},
		"expires": {rec: record{State: StateStandby, Policy: Policy{Expires: Expires{after(day), ActionDelete}}},
			limit: limitExpires, at: after(23 * hour), announce: true},
		"timeout": {rec: record{State: StateRunning, Since: begin, Policy: Policy{Timeout: Limit{hour, ActionHibernate}}},
			limit: limitTimeout, at: after(hour)},
		"timeout in standby": {rec: record{State: StateStandby, Since: begin, Policy: Policy{Timeout: Limit{hour, ActionHibernate}}}},
		"timeout, half used before standby": {rec: record{State: StateRunning, Since: after(day), Usage: Usage{Awake: 50 * time.Minute}, TimeoutFrom: 20 * time.Minute, Policy: Policy{Timeout: Limit{hour, ActionDelete}}},
			now: after(day), limit: limitTimeout, at: after(day + 24*time.Minute), announce: true},
		"the first of several": {rec: record{State: StateStandby, Since: begin, Policy: Policy{TTL: deleteAfter(10 * day), TTLIdle: Limit{day, ActionNotify}, Expires: Expires{after(5 * day), ActionDelete}}},
			limit: limitTTLIdle, at: after(day), announce: true},
	} {
		t.Run(name, func(t *testing.T) {
			tt.rec.CreatedAt = begin
			if tt.now.IsZero() {
				tt.now = begin
			}
			s := tt.rec.step(tt.now)
			switch {
			case s == nil && tt.limit == "":
			case s == nil || tt.limit == "":
				t.Fatalf("the step is %+v", s)
			case s.due.Limit != tt.limit || !s.at.Equal(tt.at) || s.announce != tt.announce:
				t.Errorf("the step is %s at %v, announce %v; want %s at %v, %v", s.due.Limit, s.at, s.announce, tt.limit, tt.at, tt.announce)
			}
		})
	}
}

// TestUsageSums: time is summed up by kinds of states, and nothing twice.
func TestUsageSums(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	var rec record
	to := func(s State, passed time.Duration) {
		next := rec
		next.State = s
		now = now.Add(passed)
		next.moved(rec, now)
		rec = next
	}
	to(StateCreating, 0)
	to(StateRunning, time.Second)
	to(StateRunning, time.Second) // a change within the state
	to(StateHibernating, time.Minute)
	to(StateRunning, time.Second) // it was cancelled
	to(StateHibernating, time.Minute)
	to(StateStandby, time.Second)
	to(StateStandby, time.Hour)
	to(StateResuming, time.Hour)
	to(StateRunning, time.Second)
	to(StateFailed, time.Minute)
	to(StateFailed, -time.Hour) // the clock was set back
	want := Usage{Awake: 3*time.Minute + 3*time.Second, Standby: 2 * time.Hour}
	if got := rec.usedAt(now); got != want {
		t.Errorf("the sums are %+v, want %+v", got, want)
	}
}
