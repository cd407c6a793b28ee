// Package servertest runs the server without machines, for tests of what
// stands before the core: a Core keeps sandboxes in memory, and its guests are
// one real agent that runs on this host.
package servertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// Token is the access token of every guest.
const Token = "the-access-token"

// Core is a server.Core in memory. The fields are set before it is used.
type Core struct {
	Fail    func(method string) error // an error that a method is to return; nil: none
	Ports   map[int]string            // where connections to ports of a guest really go
	Runs    []sandbox.HookRun         // of every sandbox
	LogFile string                    // console log of every sandbox
	Headers chan http.Header          // takes those of requests to the agent, as far as there is room
	Steps   []sandbox.Progress        // of a build
	Found   sandbox.Verify            // by a verification

	agent *httptest.Server

	mu          sync.Mutex
	sandboxes   []*sandbox.Sandbox
	templates   map[string]sandbox.Template
	checkpoints map[string][]sandbox.Checkpoint // by id
	wakes       int
	sessions    int
	n           int
}

// NewCore returns a core with the template base whose guests are served by
// agent, until the test ends. Calls to it need Token.
func NewCore(t testing.TB, agent http.Handler) *Core {
	c := &Core{
		Ports: map[int]string{}, Headers: make(chan http.Header, 1),
		templates: map[string]sandbox.Template{"base": template("base")},
	}
	c.agent = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case c.Headers <- r.Header.Clone():
		default:
		}
		if r.Header.Get(guestapi.AccessHeader) != Token {
			http.Error(w, `{"code":401,"message":"the access token is wrong"}`, http.StatusUnauthorized)
			return
		}
		agent.ServeHTTP(w, r)
	}))
	t.Cleanup(c.agent.Close)
	c.Ports[guestapi.Port] = c.agent.Listener.Addr().String()
	return c
}

func template(name string) sandbox.Template {
	return sandbox.Template{
		Name: name, Version: 1, CreatedAt: time.Now(), MemoryMiB: 2048, CPUs: 1,
		BaseDigest: "sha256:00", BaseBytes: 300 << 20, Kernel: "6.1.0",
		Bases: []sandbox.TemplateBase{{MemoryMiB: 2048, CPUs: 1, Snapshot: "base1", StoredBytes: 60 << 20}},
	}
}

func (c *Core) fail(method string) error {
	if c.Fail == nil {
		return nil
	}
	return c.Fail(method)
}

// Wakes returns how many resumes there were.
func (c *Core) Wakes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wakes
}

// Break makes a sandbox a failed one.
func (c *Core) Break(id, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.find(id); s != nil {
		s.State, s.Reason = sandbox.StateFailed, reason
	}
}

// Replicate sets how far the replication of a sandbox is.
func (c *Core) Replicate(id string, r sandbox.Replication) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.find(id); s != nil {
		s.Replication = &r
	}
}

// Create makes a sandbox that runs.
func (c *Core) Create(_ context.Context, o sandbox.CreateOptions) (sandbox.Sandbox, error) {
	if err := c.fail("Create"); err != nil {
		return sandbox.Sandbox{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if o.Template == "" {
		o.Template = sandbox.DefaultTemplate
	}
	if _, ok := c.templates[o.Template]; !ok {
		return sandbox.Sandbox{}, notFound("template", o.Template)
	}
	if o.Name != "" && c.find(o.Name) != nil {
		return sandbox.Sandbox{}, &sandbox.Error{Kind: sandbox.ErrConflict, Message: "the name " + o.Name + " is taken", Hint: "choose another"}
	}
	policy := sandbox.DefaultPolicy()
	if o.Policy != nil {
		policy = *o.Policy
	}
	c.n++
	s := &sandbox.Sandbox{
		ID: fmt.Sprintf("sandbox%d", c.n), Name: o.Name, Template: o.Template, State: sandbox.StateRunning, TrafficToken: fmt.Sprintf("token-sandbox%d", c.n),
		CreatedAt: time.Now(), MemoryMiB: 2048, CPUs: 1, Labels: o.Labels, Env: o.Env, Policy: policy,
		Usage:      sandbox.Usage{Awake: 61250 * time.Millisecond, Standby: 2 * time.Hour, CPU: 1500 * time.Millisecond, StoredBytes: 4096},
		LastResume: &sandbox.ResumeReport{Tier: "local", TotalMS: 30, Phases: map[string]float64{"state": 2}},
	}
	if o.MemoryMiB != 0 {
		s.MemoryMiB = o.MemoryMiB
	}
	c.sandboxes = append(c.sandboxes, s)
	return *s, nil
}

// find returns the sandbox of an id or a name. c.mu is held.
func (c *Core) find(id string) *sandbox.Sandbox {
	for _, s := range c.sandboxes {
		if s.ID == id || s.Name == id && id != "" {
			return s
		}
	}
	return nil
}

func notFound(what, name string) error {
	return &sandbox.Error{Kind: sandbox.ErrNotFound, Message: what + " " + name + " not found", Hint: "look at the list"}
}

// with calls fn with a sandbox.
func (c *Core) with(method, id string, fn func(s *sandbox.Sandbox) error) (sandbox.Sandbox, error) {
	if err := c.fail(method); err != nil {
		return sandbox.Sandbox{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.find(id)
	if s == nil {
		return sandbox.Sandbox{}, notFound("sandbox", id)
	}
	if err := fn(s); err != nil {
		return sandbox.Sandbox{}, err
	}
	return *s, nil
}

// Get returns a sandbox.
func (c *Core) Get(_ context.Context, id string) (sandbox.Sandbox, error) {
	return c.with("Get", id, func(*sandbox.Sandbox) error { return nil })
}

// Inspect returns a sandbox, which is made to keep a process awake if it runs.
func (c *Core) Inspect(ctx context.Context, id string) (sandbox.Sandbox, error) {
	s, err := c.Get(ctx, id)
	if err == nil && s.State == sandbox.StateRunning {
		s.Activity = &sandbox.Activity{Open: 1, Idle: time.Second, KeepAwake: []guestapi.KeepAwake{{PID: 7, Command: "train"}}}
	}
	return s, err
}

// Hold adds a lease to a sandbox's, until its release.
func (c *Core) Hold(_ context.Context, id string, l sandbox.Lease) (release func(), err error) {
	l.Since = time.Now()
	_, err = c.with("Hold", id, func(s *sandbox.Sandbox) error { s.Leases = append(slices.Clone(s.Leases), l); return nil })
	if err != nil {
		return nil, err
	}
	return func() { c.dropLease(id, func(o sandbox.Lease) bool { return o == l }) }, nil
}

func (c *Core) dropLease(id string, drop func(sandbox.Lease) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.find(id); s != nil {
		s.Leases = slices.DeleteFunc(slices.Clone(s.Leases), drop)
	}
}

// SetHold adds a lease of the kind LeaseHold.
func (c *Core) SetHold(ctx context.Context, id string, until time.Time, reason string) (sandbox.Sandbox, error) {
	if _, err := c.Hold(ctx, id, sandbox.Lease{Kind: sandbox.LeaseHold, Owner: reason, Until: until}); err != nil {
		return sandbox.Sandbox{}, err
	}
	return c.Get(ctx, id)
}

// ReleaseHold takes it away.
func (c *Core) ReleaseHold(ctx context.Context, id string) (sandbox.Sandbox, error) {
	c.dropLease(id, func(l sandbox.Lease) bool { return l.Kind == sandbox.LeaseHold })
	return c.Get(ctx, id)
}

// Session counts the interactive sessions, of all sandboxes.
func (c *Core) Session(id, kind string) (end func(), err error) {
	_, err = c.with("Session", id, func(*sandbox.Sandbox) error { c.sessions++; return nil })
	if err != nil {
		return nil, err
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.sessions--
	}, nil
}

// Sessions returns how many there are.
func (c *Core) Sessions() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sessions
}

// Update changes a sandbox's settings, unchecked.
func (c *Core) Update(_ context.Context, id string, mutate func(*sandbox.Settings) error) (sandbox.Sandbox, error) {
	return c.with("Update", id, func(s *sandbox.Sandbox) error {
		now := sandbox.Settings{Policy: s.Policy, Labels: s.Labels}
		if err := mutate(&now); err != nil {
			return err
		}
		s.Policy, s.Labels = now.Policy, now.Labels
		return nil
	})
}

// List returns all sandboxes.
func (c *Core) List(context.Context) ([]sandbox.Sandbox, error) {
	if err := c.fail("List"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []sandbox.Sandbox
	for _, s := range c.sandboxes {
		all = append(all, *s)
	}
	return all, nil
}

// Evict says that it let go of one pack.
func (c *Core) Evict(_ context.Context, id string, o sandbox.EvictOptions) (sandbox.Evicted, error) {
	if _, err := c.Get(context.Background(), id); err != nil || !o.Local {
		return sandbox.Evicted{}, err
	}
	return sandbox.Evicted{Packs: 1, Bytes: 4096}, nil
}

// Hibernate brings a sandbox to standby.
func (c *Core) Hibernate(_ context.Context, id string, _ sandbox.HibernateOptions) (sandbox.Sandbox, error) {
	return c.with("Hibernate", id, func(s *sandbox.Sandbox) error {
		if s.State == sandbox.StateFailed {
			return failed(s)
		}
		s.State = sandbox.StateStandby
		s.Snapshot = &sandbox.Snapshot{ID: "snap1", Parent: "base1", CreatedAt: time.Now(), MemoryBytes: 2 << 30, DirtyBytes: 4 << 20, StoredBytes: 1 << 20}
		s.LastHibernate = &sandbox.HibernateReport{Trigger: sandbox.TriggerCall, TotalMS: 120, PauseMS: 40, Phases: map[string]float64{"freeze": 10, "write": 30}}
		return nil
	})
}

func failed(s *sandbox.Sandbox) error {
	return &sandbox.Error{Kind: sandbox.ErrFailed, Message: "sandbox " + s.ID + " has failed: " + s.Reason, Hint: "hib resume " + s.ID + " brings it back from its last snapshot"}
}

// Resume wakes a sandbox.
func (c *Core) Resume(_ context.Context, id string, _ sandbox.ResumeOptions) (sandbox.Sandbox, error) {
	return c.with("Resume", id, c.wake)
}

func (c *Core) wake(s *sandbox.Sandbox) error {
	if s.State != sandbox.StateRunning {
		c.wakes++
		s.State, s.Reason = sandbox.StateRunning, ""
	}
	return nil
}

// Delete deletes a sandbox.
func (c *Core) Delete(_ context.Context, id string) error {
	_, err := c.with("Delete", id, func(s *sandbox.Sandbox) error {
		c.sandboxes = slices.DeleteFunc(c.sandboxes, func(o *sandbox.Sandbox) bool { return o == s })
		return nil
	})
	return err
}

// Wake wakes a sandbox.
func (c *Core) Wake(_ context.Context, id, by string) (woken sandbox.Woken, err error) {
	_, err = c.with("Wake", id, func(s *sandbox.Sandbox) error {
		woken.ID = s.ID
		switch s.State {
		case sandbox.StateFailed:
			return failed(s)
		case sandbox.StateRunning:
			return nil
		}
		s.LastResume = &sandbox.ResumeReport{Tier: "local", TotalMS: 30, Phases: map[string]float64{"state": 2}, By: by}
		woken.Resumed, woken.Report = true, s.LastResume
		return c.wake(s)
	})
	return woken, err
}

// Dial connects to where Ports leads.
func (c *Core) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	_, err := c.with("Dial", id, func(s *sandbox.Sandbox) error {
		if s.State == sandbox.StateFailed {
			return failed(s)
		}
		return c.wake(s)
	})
	if err != nil {
		return nil, err
	}
	addr, ok := c.Ports[port]
	if !ok {
		return nil, &sandbox.Error{Kind: sandbox.ErrUnavailable, Message: fmt.Sprintf("connect to port %d of sandbox %s", port, id), Cause: errors.New("connection refused")}
	}
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}

// AgentToken returns Token.
func (c *Core) AgentToken(_ context.Context, id string) (string, error) {
	_, err := c.with("AgentToken", id, func(*sandbox.Sandbox) error { return nil })
	return Token, err
}

// Logs opens LogFile.
func (c *Core) Logs(_ context.Context, id string) (io.ReadCloser, error) {
	if _, err := c.with("Logs", id, func(*sandbox.Sandbox) error { return nil }); err != nil {
		return nil, err
	}
	if c.LogFile == "" {
		return io.NopCloser(strings.NewReader("")), nil
	}
	return os.Open(c.LogFile)
}

// HookRuns returns Runs.
func (c *Core) HookRuns(_ context.Context, id string) ([]sandbox.HookRun, error) {
	_, err := c.with("HookRuns", id, func(*sandbox.Sandbox) error { return nil })
	return c.Runs, err
}

// Templates returns all templates.
func (c *Core) Templates(context.Context) ([]sandbox.Template, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []sandbox.Template
	for _, t := range c.templates {
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b sandbox.Template) int { return strings.Compare(a.Name, b.Name) })
	return all, c.fail("Templates")
}

// Template returns one template.
func (c *Core) Template(_ context.Context, name string) (sandbox.Template, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, ok := c.templates[name]
	if !ok {
		return t, notFound("template", name)
	}
	return t, nil
}

// BuildTemplate tells Steps and then fails, or has built the template.
func (c *Core) BuildTemplate(_ context.Context, o sandbox.BuildOptions, progress func(sandbox.Progress)) (sandbox.Template, error) {
	for _, p := range c.Steps {
		progress(p)
	}
	if err := c.fail("BuildTemplate"); err != nil {
		return sandbox.Template{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.templates[o.Name] = template(o.Name)
	return c.templates[o.Name], nil
}

// RemoveTemplate removes a template.
func (c *Core) RemoveTemplate(_ context.Context, name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.templates[name]; !ok {
		return notFound("template", name)
	}
	delete(c.templates, name)
	return nil
}

// StoreStatus returns made-up figures.
func (c *Core) StoreStatus(context.Context) (sandbox.StoreStatus, error) {
	st := sandbox.StoreStatus{Packs: 2, PackBytes: 3 << 20, Manifests: 2, ManifestBytes: 4000, States: 2, StateBytes: 160000, BaseImages: 1, BaseBytes: 300 << 20, FreeBytes: 9 << 30,
		Tiers: []sandbox.TierStatus{
			{Tier: "local", Where: "/data/store", Objects: 6, Bytes: 4 << 20, Budget: 1 << 30},
			{Tier: "remote", Where: "s3://bucket/prefix", Objects: 5, Bytes: 1 << 20, Pending: 1, Error: "connection refused"},
		}}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.sandboxes {
		st.Sandboxes = append(st.Sandboxes, sandbox.StoreSandbox{ID: s.ID, Name: s.Name, Packs: 3, LiveBytes: 2 << 20, StoredBytes: 3 << 20, LocalBytes: 1 << 20, Replication: "replicated"})
	}
	return st, c.fail("StoreStatus")
}

// Collect says that it deleted one object from each tier, or would.
func (c *Core) Collect(_ context.Context, o sandbox.CollectOptions) (sandbox.Collected, error) {
	out := sandbox.Collected{DryRun: o.DryRun, Tiers: []sandbox.CollectedTier{
		{Tier: "local", Objects: 1, Bytes: 4096, InUse: 1}, {Tier: "remote", Error: "connection refused"}}}
	if o.DryRun {
		out.Objects = []string{"packs/one"}
	}
	return out, c.fail("Collect")
}

// Import tells progress once and says that it brought one sandbox, and skipped
// another one unless the store was taken over.
func (c *Core) Import(_ context.Context, takeOver bool, progress func(done, total int64)) (sandbox.Imported, error) {
	if err := c.fail("Import"); err != nil {
		return sandbox.Imported{}, err
	}
	progress(50, 100)
	out := sandbox.Imported{Sandboxes: []string{"imported1"}, Templates: []string{"base"}}
	if !takeOver {
		out.Skipped = []string{"sandbox imported2: it is here already"}
	}
	return out, nil
}

// Drain hibernates all sandboxes but those that are named "awake".
func (c *Core) Drain(_ context.Context, progress func(done, total int64)) (sandbox.Drained, error) {
	if err := c.fail("Drain"); err != nil {
		return sandbox.Drained{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out := sandbox.Drained{Failed: map[string]string{}}
	for _, s := range c.sandboxes {
		switch {
		case s.State != sandbox.StateRunning:
		case s.Name == "awake":
			out.Failed[s.ID] = "sandbox " + s.ID + " did not hibernate and runs on: it hangs"
		default:
			s.State = sandbox.StateStandby
			out.Hibernated = append(out.Hibernated, s.ID)
		}
	}
	progress(int64(len(out.Hibernated)), int64(len(c.sandboxes)))
	return out, nil
}

// Undrain does nothing.
func (c *Core) Undrain() {}

// Host returns made-up figures.
func (c *Core) Host(context.Context) (sandbox.Host, error) {
	return sandbox.Host{CPUs: 2, MemoryLimit: 10 << 30, MemoryPromised: 3 << 30, Guests: 2, FreeBytes: 9 << 30, DiskReserve: 1 << 30, Parked: 1, ParkedBytes: 512 << 20}, c.fail("Host")
}

// StoreVerify tells progress twice and returns Found, with one fault more of the
// remote tier.
func (c *Core) StoreVerify(_ context.Context, o sandbox.VerifyOptions, progress func(done, total int64)) (sandbox.Verify, error) {
	if err := c.fail("StoreVerify"); err != nil {
		return sandbox.Verify{}, err
	}
	progress(50, 100)
	progress(100, 100)
	found := c.Found
	if o.Remote {
		found.Faults = append(slices.Clone(found.Faults), "remote tier: packs/x: corrupt")
	}
	return found, nil
}
