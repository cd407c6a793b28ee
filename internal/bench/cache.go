package bench

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// The cache states. With one resume at a time, warm, cold and remote take their
// VMM from the pool; where the daemon keeps none that fits, their rows have
// noPool added to the name. See docs/bench.md for how each is brought about.
const (
	CacheAwake    = "awake"       // no resume at all: the sandbox runs
	CacheParked   = "parked"      // the paused VMM was kept
	CacheWarm     = "warm"        // local packs in the page cache
	CacheFresh    = "warm_nopool" // the same, with a VMM that is started for it
	CacheCold     = "cold"        // local packs, not in the page cache
	CacheLongIdle = "long_idle"   // the same, and neither pool nor parked VMM
	CacheRemote0  = "remote_0ms"  // no local packs
	CacheRemote20 = "remote_20ms" // the same, each request to the store 20 ms later
	CacheRemote50 = "remote_50ms"
)

// Caches are the names of all cache states.
var Caches = []string{CacheAwake, CacheParked, CacheWarm, CacheFresh, CacheCold, CacheLongIdle, CacheRemote0, CacheRemote20, CacheRemote50}

// isRemote tells whether a state has no local packs.
func isRemote(cache string) bool { return strings.HasPrefix(cache, "remote_") }

// judgedCaches are those that bars are about; a quick run has no others.
var judgedCaches = []string{CacheAwake, CacheParked, CacheWarm, CacheCold, CacheRemote20}

// noPool is added to the name of a state whose VMM would come from the pool if
// the daemon had one that fits.
const noPool = "_nopool"

// variant is a cache state, with or without prefetch: what is done before a
// resume, how it is asked for, and what its report must show.
type variant struct {
	cache    string
	prefetch bool
	park     bool             // hibernate keeps the VMM
	evict    api.EvictRequest // after the hibernation; Local waits until the snapshot is replicated
	resume   api.ResumeRequest
	tier     string // of the report
	pool     bool   // the VMM comes from the pool
}

// variants returns the variants of a cache state. Awake has one that is no resume.
func variants(cache string) []variant {
	v := variant{cache: cache, prefetch: true, tier: "local"}
	v.resume.NoParked = true
	switch cache {
	case CacheAwake:
		return []variant{{cache: cache}}
	case CacheParked:
		return []variant{{cache: cache, park: true, tier: "parked"}}
	case CacheWarm:
		v.pool = true
	case CacheFresh:
		v.resume.NoPool = true
	case CacheCold:
		v.pool, v.evict.PageCache = true, true
	case CacheLongIdle:
		v.park, v.resume.NoPool = true, true
		v.evict.Parked, v.evict.PageCache = true, true
	default: // remote
		v.pool, v.tier, v.evict.Local = true, "remote", true
		v.resume.StoreDelayMS = map[string]int{CacheRemote20: 20, CacheRemote50: 50}[cache]
	}
	lazy := v
	lazy.prefetch, lazy.resume.NoPrefetch = false, true
	return []variant{v, lazy}
}

// String names the variant for people.
func (v variant) String() string {
	if v.cache == CacheAwake || v.cache == CacheParked || v.prefetch {
		return v.cache
	}
	return v.cache + " without prefetch"
}

// notPooled is what check finds where the pool was empty.
const notPooled = "the VMM did not come from the pool"

// check returns "" if the report shows that the state was in place, and
// otherwise what was not. pooled tells whether the VMM had to come from the pool.
func (v variant) check(r api.ResumeReport, pooled bool) string {
	switch {
	case r.Tier != v.tier:
		return fmt.Sprintf("the daemon resumed from the tier %q", r.Tier)
	case v.tier == "parked":
		return ""
	case v.tier == "remote" && r.BytesFetched == 0:
		return "nothing was fetched from the remote store"
	case v.tier == "local" && r.BytesFetched != 0:
		return "something was fetched from the remote store"
	case pooled && !r.Pooled:
		return notPooled
	case !pooled && !v.pool && r.Pooled:
		return "the VMM came from the pool"
	case v.prefetch && r.PrefetchedBytes == 0 && r.WorkingSetBytes == 0:
		return "there was no working set to prefetch"
	case !v.prefetch && r.PrefetchedBytes != 0:
		return "the daemon prefetched all the same"
	}
	return ""
}

// notInPlace is the error of a sample whose state was not brought about.
type notInPlace struct {
	reason string
	pool   bool // the VMM did not come from the pool, which other tries may find full
}

func (e notInPlace) Error() string { return e.reason }

// replicationPatience bounds how long an upload is waited for.
const replicationPatience = 5 * time.Minute

// arrange brings a sandbox that is in standby into the state of v.
func (v variant) arrange(ctx context.Context, target Target, sb api.Sandbox) error {
	if v.tier == "parked" && !sb.Parked {
		return notInPlace{reason: "the daemon did not park"}
	}
	if v.evict == (api.EvictRequest{}) {
		return nil
	}
	if v.evict.Local {
		if err := replicated(ctx, target, sb.ID, replicationPatience); err != nil {
			return err
		}
	}
	gone, err := target.Evict(ctx, sb.ID, v.evict)
	switch {
	case err != nil:
		return notInPlace{reason: "eviction: " + err.Error()}
	case v.evict.Local && gone.Packs == 0:
		return notInPlace{reason: "eviction: no local pack was let go of"}
	}
	return nil
}

// replicated waits, but not longer than patience, until a sandbox's snapshot is
// in the remote store. It returns a notInPlace error if it does not get there.
func replicated(ctx context.Context, target Target, id string, patience time.Duration) error {
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var failure error
	done := until(waiting, 20*time.Millisecond, func() bool {
		sb, err := target.Get(waiting, id)
		switch {
		case waiting.Err() != nil:
			return false
		case err != nil:
			failure = err
		case sb.Replication == nil:
			failure = notInPlace{reason: "the daemon has no remote store"}
		default:
			failure = nil
			return sb.Replication.State == "replicated"
		}
		return true
	})
	switch {
	case failure != nil:
		return failure
	case ctx.Err() != nil:
		return ctx.Err()
	case !done:
		return notInPlace{reason: fmt.Sprintf("the snapshot was not replicated within %s", patience)}
	}
	return nil
}

// UntilRunning returns the milliseconds from the resume request until the vCPUs
// ran, by the daemon's report: all of its phases but those in the guest.
func UntilRunning(report api.ResumeReport) float64 {
	var sum float64
	for phase, ms := range report.Phases {
		if !inGuest(phase) {
			sum += ms
		}
	}
	return sum
}
