package sandbox_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds waiting for what must come.
const patience = time.Minute

// host is a world with a running core and the template "base".
type host struct {
	t      testing.TB
	w      *sandboxtest.World
	remote *sandboxtest.Remote // that its daemons replicate to, may be nil
	d      *sandboxtest.Daemon
	core   *sandbox.Core
	hook   *hook

	options []func(*sandbox.Config) // of every daemon
}

// fast has a core keep machines ready and park others.
func fast(c *sandbox.Config) { c.Pool, c.ParkedMemory = 2, 16*sandboxtest.ParkedBytes }

// variants are the configurations that whatever holds must hold in.
var variants = map[string][]func(*sandbox.Config){"plain": nil, "pool and parked": {fast}}

// filled waits until the pool is full, if there is one.
func (h *host) filled() {
	h.t.Helper()
	if len(h.options) > 0 {
		wait(h.t, "the pool is full", func() bool { return h.w.Waiting() == 2 })
	}
}

// noneLeft checks that there is no machine but those of the pool.
func (h *host) noneLeft() {
	h.t.Helper()
	if len(h.options) > 0 { // the pool fills up
		wait(h.t, "no machine is left but those of the pool", func() bool { return len(h.w.Machines()) == h.w.Waiting() })
	} else if m := h.w.Machines(); len(m) != 0 {
		h.t.Fatalf("machines are left: %v", m)
	}
}

// each runs a test on a host of each variant.
func each(t *testing.T, test func(h *host)) {
	for variant, options := range variants {
		t.Run(variant, func(t *testing.T) { test(newHost(t, options...)) })
	}
}

// ofThePool reports whether a step is taken in the background, to fill or to
// empty the pool.
func ofThePool(s sandboxtest.Step) bool {
	return strings.HasPrefix(s.VM, "pool-") && s.Owner == "" && s.Name != "resume"
}

// hook lets a test change what happens at a step while the core runs. Once set
// returns, what was set before happens no more.
type hook struct {
	mu sync.RWMutex
	fn func(context.Context, sandboxtest.Step) error
}

func (h *hook) set(fn func(context.Context, sandboxtest.Step) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fn = fn
}

func (h *hook) call(ctx context.Context, s sandboxtest.Step) error {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.fn == nil {
		return nil
	}
	return h.fn(ctx, s)
}

func newHost(t testing.TB, options ...func(*sandbox.Config)) *host {
	t.Helper()
	h := newEmptyHost(t, nil, options...)
	h.build()
	return h
}

// newEmptyHost returns a host without a template.
func newEmptyHost(t testing.TB, remote *sandboxtest.Remote, options ...func(*sandbox.Config)) *host {
	t.Helper()
	h := &host{t: t, w: sandboxtest.NewWorld(t), remote: remote, options: options}
	h.boot(options...)
	t.Cleanup(func() {
		h.core.Close()
		h.d.Kill()
		h.w.KillShims("")
		for _, v := range h.w.Violations() {
			t.Error(v)
		}
	})
	return h
}

// build builds the template "base".
func (h *host) build() {
	h.t.Helper()
	if _, err := h.core.BuildTemplate(h.t.Context(), sandbox.BuildOptions{}, nil); err != nil {
		h.t.Fatal(err)
	}
}

// boot starts a daemon.
func (h *host) boot(options ...func(*sandbox.Config)) {
	h.t.Helper()
	h.d, h.hook = h.w.Daemon(), new(hook)
	h.d.Hook = h.hook.call
	cfg := h.d.Config()
	if h.remote != nil {
		cfg.Tier = h.d.Tier(h.remote)
	}
	for _, o := range options {
		o(&cfg)
	}
	core, err := sandbox.New(context.Background(), cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	h.core = core
}

// crash kills the daemon and starts another one; between is what else happens
// meanwhile.
func (h *host) crash(between ...func()) {
	h.t.Helper()
	h.d.Kill()
	h.core.Close()
	for _, f := range between {
		f()
	}
	h.boot(h.options...)
}

func (h *host) create(o ...sandbox.CreateOptions) sandbox.Sandbox {
	h.t.Helper()
	s, err := h.core.Create(h.t.Context(), append(o, sandbox.CreateOptions{})[0])
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

func (h *host) ask(id, line string) string {
	h.t.Helper()
	answer, err := sandboxtest.Ask(h.t.Context(), h.core, id, line)
	if err != nil {
		h.t.Fatalf("ask %s: %v", line, err)
	}
	return answer
}

// hibernate hibernates a sandbox and waits until its machine is parked or ended.
func (h *host) hibernate(id string, o ...sandbox.HibernateOptions) sandbox.Sandbox {
	h.t.Helper()
	if _, err := h.core.Hibernate(h.t.Context(), id, append(o, sandbox.HibernateOptions{})[0]); err != nil {
		h.t.Fatal(err)
	}
	h.core.Rest(id)
	s := h.get(id)
	if s.State != sandbox.StateStandby {
		h.t.Fatalf("after hibernation it is %s", s.State)
	}
	return s
}

func (h *host) resume(id string) sandbox.Sandbox {
	h.t.Helper()
	s, err := h.core.Resume(h.t.Context(), id, sandbox.ResumeOptions{})
	if err != nil {
		h.t.Fatal(err)
	}
	if s.State != sandbox.StateRunning {
		h.t.Fatalf("after resume it is %s", s.State)
	}
	return s
}

func (h *host) get(id string) sandbox.Sandbox {
	h.t.Helper()
	s, err := h.core.Get(h.t.Context(), id)
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

func (h *host) list() []sandbox.Sandbox {
	h.t.Helper()
	list, err := h.core.List(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	return list
}

// wait waits until cond holds.
func wait(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came to: %s", what)
		}
	}
}

func (h *host) waitState(id string, want sandbox.State) sandbox.Sandbox {
	h.t.Helper()
	wait(h.t, string(want), func() bool { return h.get(id).State == want })
	return h.get(id)
}

// at returns a hook that does fn the first time that it comes to the step.
func at(name string, after bool, fn func(context.Context) error) func(context.Context, sandboxtest.Step) error {
	var once sync.Once
	return func(ctx context.Context, s sandboxtest.Step) (err error) {
		if s.Name == name && s.After == after {
			once.Do(func() { err = fn(ctx) })
		}
		return err
	}
}

// gate is a hook that stops the first call that comes to a step until it is opened.
type gate struct {
	reached, open chan struct{}
}

func newGate() *gate { return &gate{make(chan struct{}), make(chan struct{})} }

func (g *gate) wait(ctx context.Context) error {
	close(g.reached)
	select {
	case <-g.open:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var errInjected = errors.New("injected")

func isA(t testing.TB, err, kind error) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Fatalf("got %v, want an error that is %q", err, kind)
	}
}
