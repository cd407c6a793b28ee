// Package tier owns where snapshots live: on the local disk, and, compressed,
// in a remote store. It copies committed snapshots to the remote store in the
// background, deletes local packs that are there too when the disk's budget is
// used up, reads packs that are not local from the remote store, and brings back
// what a node that lost its disk had replicated.
//
// An object has the same key in both tiers. Remotely a pack is encoded with
// Zstandard frame by frame, under the same sum, and read in parts; every other
// object is compressed as a whole. Manifests, states and working sets are small
// and stay local for as long as their snapshot is needed; only packs are evicted.
// So what there is of snapshots is known without asking the remote store.
//
// A snapshot is replicated when its record is in the remote store, which is
// written last. A record never changes: an older one of the same sandbox goes
// after the newer one is there, and what no record needs any more goes by
// Collect.
//
// The remote store belongs to one node, whose claim is the object owner/NODE.
// A node that finds another claim there writes and deletes nothing until Import
// takes the store over.
package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Errors that callers act on, returned wrapped.
var (
	ErrOwned         = errors.New("the remote store belongs to another node")
	ErrNotReplicated = errors.New("not in the remote store yet")
)

// State says how far the replication of a snapshot is.
type State string

// The states of a replication.
const (
	Local       State = "local"       // not begun, or waiting for another try
	Replicating State = "replicating" // being uploaded
	Replicated  State = "replicated"  // all that a resume needs is in the remote store
)

// Replica is what a node that lost its disk needs to resume a sandbox.
type Replica struct {
	Sandbox     string         // id
	Snapshot    snapshot.Ref   // the last committed one
	Checkpoints []snapshot.Ref // others that it keeps: replicated with it
	Record      []byte         // the sandbox as its owner knows it, opaque here; may hold secrets
	Template    Template       // that the snapshot is of
	LastUsed    time.Time      // when it was last hibernated or resumed: what was not used for long is evicted first
}

// Template names the files of a template's version.
type Template struct {
	Name    string
	Version int
	Dir     string         // folder of its files on this node, which do not change; "": it has none
	Record  []byte         // the template as its owner knows it, opaque here
	Bases   []snapshot.Ref // its base snapshots: replicated with it, their packs evicted last
}

// Status is how far the replication of one sandbox is.
type Status struct {
	State State
	Err   error // why the last try failed, nil if it did not; it is tried again
	Sent  int64 // bytes that the remote store took for this snapshot since the Tier was opened, once it is Replicated
}

// Config is what a Tier works on.
type Config struct {
	Local  *disk.Store
	Remote blob.Store
	Where  string       // the remote store, as people are shown it: without secrets
	Node   string       // id of this data folder, of [a-z0-9]
	Budget int64        // bytes that local packs may take up, 0: no limit
	Log    *slog.Logger // nil: silent
}

// forgottenPrefix begins the keys of the local objects that note which sandboxes' remote
// records have yet to go.
const forgottenPrefix = "forgotten/"

// whole is the weight of who needs the remote store for himself: uploads and
// evictions rely on what they saw there, with a weight of 1.
const whole = 1 << 20

// Tier keeps snapshots in two tiers. Its methods may be called at the same time.
type Tier struct {
	cfg   Config
	store blob.Store
	local *snapshot.Repository // what is on the local disk

	ctx    context.Context // of what runs in the background
	cancel context.CancelFunc
	wg     sync.WaitGroup
	remote *semaphore.Weighted
	pause  tuning

	wake      chan struct{} // something to do for the worker
	promoting chan struct{} // something to do for the one that fetches

	mu        sync.Mutex
	entries   map[string]*entry
	forgotten map[string]*attempts
	records   map[string]map[string]bool // keys in the remote store by sandbox; nil: not known
	down      attempts                   // of the remote store as a whole
	uploading *upload
	evictDue  bool
	promotes  []promotion
	lists     map[string]fileList       // of templates, by folder
	packs     map[snapshot.Ref][]string // keys of the packs that snapshots name, as the last ranking read them
}

// tuning holds what tests do not wait for.
type tuning struct {
	retry, maxRetry time.Duration // first and longest pause after a failure
	promote         time.Duration // from a resume to the fetching of its packs
}

var usualTuning = tuning{retry: time.Second, maxRetry: 2 * time.Minute, promote: 10 * time.Second}

// entry is a sandbox whose last snapshot is replicated or shall be.
type entry struct {
	replica Replica
	key     string // of its record
	status  Status
	attempts
	sent int64 // bytes for the snapshot, by all tries; of the uploading goroutine
}

// attempts counts failures of what is tried again.
type attempts struct {
	failed int
	next   time.Time
	err    error
}

// fail records a failure and says when the next try is due.
func (a *attempts) fail(err error, p tuning) {
	d := min(p.maxRetry, p.retry<<min(a.failed, 20))
	a.failed++
	a.next = time.Now().Add(d/2 + rand.N(d))
	a.err = err
}

// New returns a Tier and begins to work. Whether the remote store answers makes
// no difference. ctx bounds New only.
func New(ctx context.Context, cfg Config) (*Tier, error) { return newTier(ctx, cfg, usualTuning) }

func newTier(ctx context.Context, cfg Config, pause tuning) (*Tier, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := blob.CheckKey(ownerPrefix + cfg.Node); err != nil {
		return nil, fmt.Errorf("remote store: the node's id: %w", err)
	}
	t := &Tier{
		cfg: cfg, store: ReadStore(cfg.Local, cfg.Remote), local: snapshot.NewRepository(cfg.Local),
		remote: semaphore.NewWeighted(whole), pause: pause,
		wake: make(chan struct{}, 1), promoting: make(chan struct{}, 1),
		entries: make(map[string]*entry), forgotten: make(map[string]*attempts), lists: make(map[string]fileList),
	}
	for info, err := range cfg.Local.List(ctx, forgottenPrefix) {
		if err != nil {
			return nil, fmt.Errorf("look for deleted sandboxes: %w", err)
		}
		t.forgotten[strings.TrimPrefix(info.Key, forgottenPrefix)] = &attempts{}
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.wg.Go(t.work)
	t.wg.Go(t.fetchPromoted)
	t.kick()
	return t, nil
}

// Close ends what runs in the background. What was being uploaded goes on when
// the sandbox is given to Replicate again.
func (t *Tier) Close() {
	t.cancel()
	t.wg.Wait()
}

// Store returns the store of snapshots in both tiers: see ReadStore.
func (t *Tier) Store() blob.Store { return t.store }

func (t *Tier) kick() {
	select {
	case t.wake <- struct{}{}:
	default: // it is due to look already
	}
}

// Replicate makes sure that the remote store gets r, in the background, and
// returns at once. Of a sandbox the snapshot given last is the one that counts.
// It is to be called for every sandbox in standby at the start, and after
// every commit.
func (t *Tier) Replicate(r Replica) {
	key, err := recordKey(r)
	if err != nil {
		// Not to be replicated by any number of tries: shown until another one comes.
		key, err = "", fmt.Errorf("sandbox %s cannot be replicated: %w", r.Sandbox, err)
	}
	t.mu.Lock()
	e, known := t.entries[r.Sandbox]
	if known && e.key == key && err == nil {
		e.replica.LastUsed = r.LastUsed
		t.evictDue = t.cfg.Budget > 0
		t.mu.Unlock()
		t.kick()
		return
	}
	e = &entry{replica: r, key: key, status: Status{State: Local, Err: err}}
	t.entries[r.Sandbox] = e
	_, forgotten := t.forgotten[r.Sandbox]
	delete(t.forgotten, r.Sandbox)
	if u := t.uploading; u != nil && u.entry.replica.Sandbox == r.Sandbox && !u.superseded {
		u.superseded = true
		t.wg.Go(func() { t.supersede(u, r) })
	}
	t.evictDue = t.cfg.Budget > 0
	t.mu.Unlock()
	if forgotten {
		t.unmark(r.Sandbox)
	}
	t.kick()
}

// supersede ends the upload u of an older snapshot of r's sandbox, unless the
// object that is being sent is one that r needs as well: then it ends behind that.
func (t *Tier) supersede(u *upload, r Replica) {
	packs, err := t.local.Packs(t.ctx, r.Snapshot)
	if err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, p := range packs {
			if p.Key() == u.object {
				return
			}
		}
	}
	u.cancel()
}

// Forget makes the remote record of a sandbox go that was deleted, in the
// background and, if the remote store cannot be reached, later, also after a
// restart. It is to be called before the last trace of the sandbox on this node goes.
func (t *Tier) Forget(sandbox string) {
	_, err := t.cfg.Local.Put(t.ctx, forgottenPrefix+sandbox, func(io.Writer) error { return nil })
	if err != nil && !errors.Is(err, blob.ErrExist) {
		t.cfg.Log.Error("a deleted sandbox may stay in the remote store", "sandbox", sandbox, "error", err)
	}
	t.mu.Lock()
	delete(t.entries, sandbox)
	t.forgotten[sandbox] = &attempts{}
	if u := t.uploading; u != nil && u.entry.replica.Sandbox == sandbox {
		u.superseded = true
		u.cancel()
	}
	t.mu.Unlock()
	t.kick()
}

// unmark removes the note that a sandbox is to be forgotten.
func (t *Tier) unmark(sandbox string) {
	if err := t.cfg.Local.Delete(t.ctx, forgottenPrefix+sandbox); err != nil {
		t.cfg.Log.Error("the note about a deleted sandbox cannot be removed", "sandbox", sandbox, "error", err)
	}
}

// Status says how far the replication of a sandbox's snapshot id is.
func (t *Tier) Status(sandbox string, id snapshot.ID) Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.entries[sandbox]
	if !ok || e.replica.Snapshot.ID != id {
		return Status{State: Local}
	}
	s := e.status
	if s.State == Local && s.Err == nil {
		s.Err = t.down.err
	}
	return s
}

// Usage is what one tier holds.
type Usage struct {
	Tier    string // "local" or "remote"
	Where   string // "" for the local one
	Objects int
	Bytes   int64 // of all objects; Budget is about packs only
	Budget  int64 // bytes, 0: none
	Pending int   // snapshots that wait for their upload
	Err     error // why the tier could not be looked at; the figures are then not whole
}

// usagePatience bounds how long Usage waits for the remote store.
const usagePatience = 10 * time.Second

// Usage counts what is in the local and in the remote tier, in this order. That
// the remote store cannot be reached is in its Usage, and no error.
func (t *Tier) Usage(ctx context.Context) ([]Usage, error) {
	local, remote := Usage{Tier: "local", Budget: t.cfg.Budget}, Usage{Tier: "remote", Where: t.cfg.Where}
	local.count(ctx, t.cfg.Local)
	far, cancel := context.WithTimeout(ctx, usagePatience)
	defer cancel()
	remote.count(far, t.cfg.Remote)
	t.mu.Lock()
	for _, e := range t.entries {
		if e.status.State != Replicated {
			remote.Pending++
		}
	}
	if remote.Err == nil {
		remote.Err = t.down.err
	}
	t.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return []Usage{local, remote}, local.Err
}

// count counts the objects in the store.
func (u *Usage) count(ctx context.Context, store blob.Store) {
	for info, err := range store.List(ctx, "") {
		if err != nil {
			u.Err = err
			return
		}
		u.Objects++
		u.Bytes += info.Size
	}
}

// work does, one after the other, what is due. It sleeps until it is told of
// something, or until another try is due.
func (t *Tier) work() {
	for t.ctx.Err() == nil {
		task, next := t.due()
		if task != nil {
			task()
			continue
		}
		var timer <-chan time.Time
		if !next.IsZero() {
			timer = time.After(time.Until(next))
		}
		select {
		case <-t.wake:
		case <-timer:
		case <-t.ctx.Done():
		}
	}
}

// due returns what is to be done now, or when the next try is due; the zero
// time if there is none.
func (t *Tier) due() (task func(), next time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	ready := func(a *attempts) bool {
		at := a.next
		if t.down.next.After(at) {
			at = t.down.next
		}
		if at.After(now) {
			if next.IsZero() || at.Before(next) {
				next = at
			}
			return false
		}
		return true
	}
	if t.evictDue && ready(&attempts{}) {
		t.evictDue = false
		return t.keepBudget, time.Time{}
	}
	for sandbox, a := range t.forgotten {
		if ready(a) {
			return func() { t.forget(sandbox, a) }, time.Time{}
		}
	}
	for _, e := range t.entries {
		if e.status.State == Local && e.key != "" && ready(&e.attempts) {
			return func() { t.replicate(e) }, time.Time{}
		}
	}
	return nil, next
}

// failed records that a try failed, and whether that is due to the store as a whole.
func (t *Tier) failed(a *attempts, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case unusable(err):
		if t.down.err == nil {
			t.cfg.Log.Warn("the remote store cannot be used, snapshots wait for it", "store", t.cfg.Where, "error", err)
		}
		t.down.fail(err, t.pause)
	default:
		if a.err == nil {
			t.cfg.Log.Warn("a replication failed, it is tried again", "error", err)
		}
		a.fail(err, t.pause)
	}
}

// unusable tells whether err is about the remote store as a whole.
func unusable(err error) bool { return errors.Is(err, blob.ErrUnavailable) || errors.Is(err, ErrOwned) }

// answered records that the remote store did what it was asked.
func (t *Tier) answered() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.down.err != nil {
		t.cfg.Log.Info("the remote store can be used again", "store", t.cfg.Where)
	}
	t.down = attempts{}
}

// forget deletes the remote records of a sandbox.
func (t *Tier) forget(sandbox string, a *attempts) {
	err := t.shared(t.ctx, func() error {
		if err := t.knowRecords(t.ctx); err != nil {
			return err
		}
		return t.deleteRecords(t.ctx, sandbox, "")
	})
	if t.ctx.Err() != nil {
		return
	}
	if err != nil {
		t.failed(a, err)
		return
	}
	t.answered()
	t.mu.Lock()
	still := t.forgotten[sandbox] == a
	if still {
		delete(t.forgotten, sandbox)
	}
	t.mu.Unlock()
	if still {
		t.unmark(sandbox)
	}
}

// shared does what relies on the remote store as it is: nothing is collected meanwhile.
func (t *Tier) shared(ctx context.Context, f func() error) error {
	if err := t.remote.Acquire(ctx, 1); err != nil {
		return err
	}
	defer t.remote.Release(1)
	return f()
}

// alone does what takes things away in the remote store.
func (t *Tier) alone(ctx context.Context, f func() error) error {
	if err := t.remote.Acquire(ctx, whole); err != nil {
		return err
	}
	defer t.remote.Release(whole)
	return f()
}
