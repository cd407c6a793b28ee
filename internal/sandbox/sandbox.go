// Package sandbox is the core: it owns the lifecycle of sandboxes and
// templates and is the only one that changes their records.
//
// A sandbox is a record in the catalog; while it runs, a shim holds its
// machine, and the record holds the shim's handle. The states, the table of
// moves between them (table.go) and the recovery action of each state are
// drawn in docs/lifecycle.md. An operation (create, hibernate, resume,
// delete, a look at a machine that ended) changes one sandbox; the operations
// of one sandbox take turns. Every change of a record goes through change
// (entry.go): one compare-and-swap that the table allows.
//
// The rules that the guarantees rest on:
//
//   - A shim's handle is recorded before the shim may outlive the daemon, and no
//     second machine of a sandbox is given its snapshot before the first is
//     proven dead.
//   - A hibernation is committed by the change that names its snapshot. Until
//     then the guest may go on, after that its machine runs again only if it was
//     parked as exactly that snapshot. Where a sealed guest is to go on, running
//     is recorded first, then it is thawed.
//   - A change whose outcome is unknown leaves the sandbox unsettled. The next
//     operation, or a retry in the background, first reads the record again and
//     does the recovery action of its state, just as after a restart.
package sandbox

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/template"
)

// Config is what a Core is made of. The fields of the first group are needed.
type Config struct {
	Catalog      Catalog
	Launcher     Launcher
	Snapshots    Repository
	Keys         Keys
	Builder      Builder
	TemplatesDir string // templates are kept in TemplatesDir/NAME/vN

	Tier           Tier                     // replicates to a remote store; nil: there is none
	StoreDir       string                   // folder of the store, as people are shown it
	Build          template.Options         // CacheDir and GuestBinary of template builds
	Console        func(name string) string // path of the console log of a sandbox or base machine; nil: none is kept
	HookLog        func(id string) string   // path of the log of a sandbox's hooks; nil: none is kept
	FreeBytes      func() (int64, error)    // free space where snapshots are kept; nil: not watched
	GuestMemory    int64                    // bytes that may be promised to guests that run, 0: any
	Reserve        int64                    // free space that is always kept, default 256 MiB
	HibernateShare int                      // percent of the RAM of the guests that run; so much free space is kept, too, for their hibernations
	CheckEgress    func(Egress) error       // checks egress rules; nil: any will do
	Events         Events                   // called at what happens

	Pool         int                                            // machines that are started before they are needed
	ParkedMemory int64                                          // bytes that parked machines may take up, 0: none is parked
	Pressure     func(ctx context.Context, notify func()) error // calls notify whenever the host is short of memory, until ctx ends; nil: not watched
	LowMemory    func() bool                                    // asked before a machine is parked; nil: there is enough

	NoIdle   bool          // sandboxes hibernate by order alone: for tests
	AwaitCap time.Duration // how long an outbound connection that awaits a reply keeps its sandbox awake, default 5 min

	Log *slog.Logger // nil: silent

	CaptureTimeout time.Duration // until a hibernation is sealed, default 1 min; base snapshots get five times as much
	StartTimeout   time.Duration // of a resume or a boot, default 3 min
	StepTimeout    time.Duration // of one short step: a status, a thaw, a release, a write to the catalog; default 30 s
	RetryDelay     time.Duration // between attempts to settle an unsettled sandbox, default 2 s
	RelapseTime    time.Duration // a guest that loses its memory again within it after going back to its last snapshot fails, default 10 min
	PoolDelay      time.Duration // from the last start to a refill of the pool, default 500 ms
	CollectDelay   time.Duration // from a deletion to the collection of what it left, default 30 s
	Parallel       int           // recoveries at a time when the core starts, and hibernations of idle sandboxes, default 16
}

func (c *Config) setDefaults() {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.HookLog == nil {
		c.HookLog = func(string) string { return "" }
	}
	if c.Console == nil {
		c.Console = func(string) string { return "" }
	}
	for d, v := range map[*time.Duration]time.Duration{
		&c.AwaitCap: 5 * time.Minute, &c.CaptureTimeout: time.Minute, &c.StartTimeout: 3 * time.Minute, &c.StepTimeout: 30 * time.Second,
		&c.RetryDelay: 2 * time.Second, &c.RelapseTime: 10 * time.Minute, &c.PoolDelay: 500 * time.Millisecond, &c.CollectDelay: 30 * time.Second,
	} {
		if *d == 0 {
			*d = v
		}
	}
	if c.Reserve == 0 {
		c.Reserve = 256 << 20
	}
	if c.Parallel == 0 {
		c.Parallel = 16
	}
}

// Core runs the sandboxes of one host. Its methods may be called at the same
// time. Where they take an id, a name will do. A context bounds how long the
// caller waits: hibernations, resumes and deletions that have begun go on
// without their caller, a creation is taken back.
type Core struct {
	cfg       Config
	log       *slog.Logger
	mint      mint
	admission admission
	trash     trash
	pool      *pool
	shrinking sync.Mutex // held while parked machines are ended for room
	compactor compactor
	hookLog   sync.Mutex    // held while a log of hooks is written or read
	idleTurns chan struct{} // holds a token for each hibernation of an idle sandbox
	limits    limits
	draining  atomic.Bool
	storeTurn sync.Mutex    // held while snapshots are deleted
	closing   chan struct{} // closed by Close
	started   time.Time     // when the core began to look at its sandboxes

	mu        sync.Mutex
	closed    bool
	entries   map[string]*entry // by id
	names     map[string]string // name → id
	templates map[string]*tmpl
	pins      map[pin]int        // template versions that creations under way use
	boots     map[string]*flight // base snapshots being made
	ops       map[*operation]struct{}

	opsDone  sync.WaitGroup // operations, which may start watchers
	restDone sync.WaitGroup // watchers, retries, the trash
}

// New returns a core whose sandboxes are settled: each record's recovery
// action has been done, and shims that no record names are gone. A sandbox
// whose shim lives but does not answer stays unsettled and is retried in the
// background. New fails where the catalog cannot be read or holds what this
// version does not know.
func New(ctx context.Context, cfg Config) (*Core, error) {
	cfg.setDefaults()
	c := &Core{
		cfg: cfg, log: cfg.Log, closing: make(chan struct{}), started: time.Now(),
		entries: map[string]*entry{}, names: map[string]string{}, templates: map[string]*tmpl{},
		pins: map[pin]int{}, boots: map[string]*flight{}, ops: map[*operation]struct{}{},
	}
	c.mint.init()
	c.admission.claims = map[string]int64{}
	c.trash.kick = make(chan struct{}, 1)
	c.idleTurns = make(chan struct{}, cfg.Parallel)
	c.pool = newPool(cfg.Pool, cfg.PoolDelay, c.log, c.startPooled, c.endPooled)
	c.compactor.init()
	c.limits.init()
	err := c.checkHost(ctx)
	if err == nil {
		err = c.loadTemplates(ctx)
	}
	if err == nil {
		err = c.load(ctx)
	}
	if err == nil {
		err = c.recoverAll(ctx)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	for _, v := range c.versions() {
		c.pruneLater(v.name)
	}
	c.restDone.Go(c.emptyTrash)
	if c.cfg.Pressure != nil {
		c.restDone.Go(func() { c.watchPressure(c.untilClosed()) })
	}
	c.seedPool()
	c.restDone.Go(c.compactAll)
	c.restDone.Go(c.keepLimits)
	return c, nil
}

// untilClosed returns a context that ends with the core.
func (c *Core) untilClosed() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	c.restDone.Go(func() {
		<-c.closing
		cancel(errClosing)
	})
	return ctx
}

// Close ends the core and leaves the guests running and those that are parked
// as they are. Operations under way are
// cancelled: hibernations go back to running, resumes to standby, creations
// are taken back. It returns when nothing of the core runs any more.
func (c *Core) Close() {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	close(c.closing)
	for op := range c.ops {
		op.cancel(errClosing)
	}
	c.mu.Unlock()
	c.opsDone.Wait()
	c.pool.close()
	for _, e := range c.all() {
		e.detach()
		e.mu.Lock()
		e.stopIdle()
		e.mu.Unlock()
	}
	c.restDone.Wait()
}

// Get returns the sandbox.
func (c *Core) Get(_ context.Context, id string) (Sandbox, error) {
	e, err := c.find(id)
	if err != nil {
		return Sandbox{}, err
	}
	return c.view(e), nil
}

// List returns all sandboxes, the oldest first.
func (c *Core) List(context.Context) ([]Sandbox, error) {
	var list []Sandbox
	for _, e := range c.all() {
		list = append(list, c.view(e))
	}
	slices.SortFunc(list, func(a, b Sandbox) int {
		if n := a.CreatedAt.Compare(b.CreatedAt); n != 0 {
			return n
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list, nil
}

// AgentToken returns the access token of the sandbox's agent.
func (c *Core) AgentToken(_ context.Context, id string) (string, error) {
	e, err := c.find(id)
	if err != nil {
		return "", err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.rec.AccessToken, nil
}

// Logs opens what the guest printed on its console, over all its resumes. It
// wakes nothing. The caller closes the reader.
func (c *Core) Logs(_ context.Context, id string) (io.ReadCloser, error) {
	e, err := c.find(id)
	if err != nil {
		return nil, err
	}
	path := c.cfg.Console(e.id)
	f, err := os.Open(path)
	switch {
	case path == "" || os.IsNotExist(err):
		return io.NopCloser(strings.NewReader("")), nil
	case err != nil:
		return nil, unavailable(err, "open the console log of sandbox %s", e.id)
	}
	return f, nil
}

// Dial connects to a TCP port of the guest. A sandbox in standby is woken, a
// hibernation that is not committed is cancelled, a failed one is not touched
// (ErrFailed). ErrRefused says that nothing answers there. The connection ends
// when the sandbox hibernates. It has CloseWrite, and Asleep, which returns a
// channel that is closed once the guest does not run any more: what was
// connected then has at most some bytes left to read.
func (c *Core) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, invalid("%d is no TCP port", port)
	}
	e, err := c.find(id)
	if err != nil {
		return nil, err
	}
	e.dial(+1)
	defer e.dial(-1)
	by := "port " + strconv.Itoa(port)
	vm, err := c.awake(ctx, e, by)
	for err == nil {
		slept := e.sleep()
		conn, dialErr := c.dialGuest(ctx, vm, port)
		// The machine may have gone to sleep or ended under the dial: only a
		// connection to the one that is awake now is worth something.
		var now VM
		now, err = c.awake(ctx, e, by)
		if err == nil && now == vm && dialErr != nil && !errors.Is(dialErr, shim.ErrRefused) {
			c.look(ctx, e, vm)
			now, err = c.awake(ctx, e, by)
		}
		if err == nil && now == vm && !isClosed(slept) {
			if dialErr != nil {
				return nil, dialFailed(dialErr, e.id, port)
			}
			return guestConn{conn, slept, e.unanswered()}, nil
		}
		if conn != nil {
			conn.Close()
		}
		vm = now
	}
	return nil, err
}

var errMute = errors.New("the guest does not answer: is its network down, or does it hang?")

// dialGuest connects to a port of a guest that runs, which has the time of a
// step to answer.
func (c *Core) dialGuest(ctx context.Context, vm VM, port int) (net.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.StepTimeout, errMute)
	defer cancel()
	conn, err := vm.Dial(ctx, port)
	if err != nil && context.Cause(ctx) == errMute {
		err = errMute
	}
	return conn, err
}

// awake returns the machine of a sandbox that runs, and wakes it for that on
// behalf of by.
func (c *Core) awake(ctx context.Context, e *entry, by string) (VM, error) {
	for {
		if vm := e.ready(); vm != nil {
			return vm, nil
		}
		if err := c.drained(); err != nil {
			return nil, err
		}
		e.interrupt(errRequest)
		if err := c.run(ctx, e, opStart, func(ctx context.Context, _ *operation) error { return c.wake(ctx, e, ResumeOptions{By: by}) }); err != nil {
			return nil, refusedWake(err)
		}
	}
}

// find returns the entry of an id or a name.
func (c *Core) find(idOrName string) (*entry, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.entries[idOrName]; e != nil {
		return e, nil
	}
	if e := c.entries[c.names[idOrName]]; e != nil {
		return e, nil
	}
	return nil, notFound("sandbox", idOrName)
}

// all returns the entries, in no order.
func (c *Core) all() []*entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]*entry, 0, len(c.entries))
	for _, e := range c.entries {
		list = append(list, e)
	}
	return list
}

// short returns a context for steps that must be done whatever became of ctx.
func (c *Core) short(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), c.cfg.StepTimeout)
}
