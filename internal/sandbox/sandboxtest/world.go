// Package sandboxtest is a host in memory for tests of the core and of what
// stands on it: shims, snapshots and templates without a VM.
//
// A World is what outlives a daemon: the catalog, the store, and shims that
// were adopted. A Daemon is one life of the daemon in it: the ports that a
// core is given, which stop working, without an effect, when the daemon is
// killed. A guest is one string of memory that a snapshot holds exactly, and a
// line server that reads and sets it (Ask).
//
// Every call that has an effect passes the daemon's Hook before and after the
// effect, where a test can delay it, make it fail, or kill what it likes. The
// world watches for what must never happen (two machines of one sandbox at
// once, a committed guest that runs on, a needed snapshot that is deleted) and
// keeps it in Violations.
package sandboxtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/catalog/catalogtest"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/template"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// ErrKilled is what the ports of a killed daemon return.
var ErrKilled = errors.New("the daemon was killed")

// Step is a call with an effect, just before or just after it.
type Step struct {
	Name  string // put, erase, launch, adopt, prepare, boot, resume, capture, seal, thaw, egress, release, kill, delete, build …
	VM    string // name of the machine, where there is one
	Owner string // sandbox whose machine it is, "" if it is nobody's yet
	After bool
}

// World is a host.
type World struct {
	Dir     string // of templates and console logs
	Catalog catalogtest.Memory
	Truth   sandbox.Catalog // what the core writes to; nil: Catalog
	Base    string          // of base images that are built: the same, the same image
	Old     bool            // shims are of version 1 of their protocol
	Remote  bool            // resumes say that they read from the remote store

	mu          sync.Mutex
	machines    map[string]*machine // alive, by name
	snapshots   map[snapshot.ID]*image
	damaged     map[snapshot.ID]bool // packs
	generations map[string]uint64    // last one that a sandbox ran at
	busy        map[string]Busy
	pid         int
	violations  []string
	bootID      string
	changed     chan struct{} // closed and replaced at each change of a machine
}

// image is a snapshot.
type image struct {
	meta     snapshot.Metadata
	packs    []snapshot.ID // the oldest first
	memory   string
	identity string // of the sandbox that it is of, "base" for a base
}

// NewWorld returns an empty host, whose folder goes with the test.
func NewWorld(t testing.TB) *World {
	return &World{Dir: t.TempDir(), machines: map[string]*machine{}, snapshots: map[snapshot.ID]*image{}, damaged: map[snapshot.ID]bool{},
		generations: map[string]uint64{}, busy: map[string]Busy{}, bootID: "boot-1", pid: 1000, changed: make(chan struct{})}
}

// broadcast wakes whoever waits for a change; mu is held.
func (w *World) broadcast() {
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *World) violate(format string, args ...any) {
	w.violations = append(w.violations, fmt.Sprintf(format, args...))
}

// Violations returns what happened that must not happen.
func (w *World) Violations() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.violations)
}

// owner returns whose machine that is.
func (w *World) owner(vm string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.machines[vm]; m != nil {
		return m.sandbox
	}
	return ""
}

// Machines returns the names of the machines that are alive, sorted.
func (w *World) Machines() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for name := range w.machines {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Waiting returns how many machines are ready for a snapshot and nobody's.
func (w *World) Waiting() int {
	n := 0
	for _, of := range w.WaitingShapes() {
		n += of
	}
	return n
}

// WaitingShapes returns how many of them are of which size in MiB.
func (w *World) WaitingShapes() map[int]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	shapes := map[int]int{}
	for _, m := range w.machines {
		if m.phase == shim.PhasePrepared && m.sandbox == "" {
			shapes[m.shape.MemoryMiB]++
		}
	}
	return shapes
}

// Parked reports whether a parked machine of the sandbox is alive.
func (w *World) Parked(sandbox string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.machines {
		if m.sandbox == sandbox && m.phase == shim.PhaseParked {
			return true
		}
	}
	return false
}

// Runs reports whether a machine of the sandbox is alive and its guest has not ended.
func (w *World) Runs(sandbox string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.machines {
		if m.sandbox == sandbox && m.phase != shim.PhaseStopped {
			return true
		}
	}
	return false
}

// Egress returns the egress policy that is in force at the sandbox's machine.
func (w *World) Egress(sandbox string) shim.EgressRequest {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.machines {
		if m.sandbox == sandbox {
			return m.egress
		}
	}
	return shim.EgressRequest{}
}

// Deny has the sandbox's machine report something that it denied its guest.
func (w *World) Deny(sandbox string, d shim.Denied) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.machines {
		if m.sandbox == sandbox {
			m.denied = append(m.denied, d)
		}
	}
	w.broadcast()
}

// Snapshots returns how many snapshots the store holds.
func (w *World) Snapshots() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.snapshots)
}

// Memory returns what a snapshot holds.
func (w *World) Memory(id snapshot.ID) (string, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.snapshots[id]
	if s == nil {
		return "", false
	}
	return s.memory, true
}

// Packs returns how many packs a snapshot is made of, 0 if it is not there.
func (w *World) Packs(id snapshot.ID) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.snapshots[id]; s != nil {
		return len(s.packs)
	}
	return 0
}

// Lose removes a snapshot from the store, as a fault of the disk.
func (w *World) Lose(id snapshot.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.snapshots, id)
}

// Damage makes a pack one that no compaction can read.
func (w *World) Damage(pack snapshot.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.damaged[pack] = true
}

// KillShims kills the shims of a sandbox, or with "" all of them, and returns
// how many there were.
func (w *World) KillShims(sandbox string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, m := range w.machines {
		if sandbox == "" || m.sandbox == sandbox {
			m.die()
			n++
		}
	}
	return n
}

// Stop lets the guest of a sandbox end.
func (w *World) Stop(sandbox string, exit vmm.Exit) { w.stop(sandbox, exit, "", "") }

// FailMemory lets the VMM of a sandbox, or with "" those of none, die since its
// memory could not be served: why, and the shim's code for that.
func (w *World) FailMemory(sandbox, failure, code string) {
	w.stop(sandbox, vmm.Exit{Reason: vmm.ReasonCrashed}, failure, code)
}

func (w *World) stop(sandbox string, exit vmm.Exit, failure, code string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.machines {
		if m.sandbox == sandbox {
			m.stop(exit, failure, code)
		}
	}
}

// EndPagers lets the pagers of all sandboxes end under their guests.
func (w *World) EndPagers() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.machines {
		if m.sandbox != "" && m.phase != shim.PhaseStopped {
			m.stop(vmm.Exit{Reason: vmm.ReasonCrashed}, "the pager's mount has ended", shim.CodeFailed)
		}
	}
}

// Reboot is a power cut: every machine dies, the catalog and the store stay.
func (w *World) Reboot() {
	w.KillShims("")
	w.mu.Lock()
	defer w.mu.Unlock()
	w.bootID += "+"
}

// truth returns the catalog that tells what is recorded.
func (w *World) truth() sandbox.Catalog {
	if w.Truth != nil {
		return w.Truth
	}
	return &w.Catalog
}

// recorded returns what the catalog says of a sandbox now.
func (w *World) recorded(id string) (state sandbox.State, snap, pending snapshot.ID) {
	rec, err := w.truth().Get(context.Background(), "sandbox", id)
	if err != nil {
		return sandbox.StateGone, "", ""
	}
	var r struct {
		State    sandbox.State
		Snapshot *snapshot.Ref
		Pending  snapshot.ID
	}
	if err := json.Unmarshal(rec.Value, &r); err != nil {
		w.violate("sandbox %s has a record that is no JSON: %v", id, err)
	}
	if r.Snapshot != nil {
		snap = r.Snapshot.ID
	}
	return r.State, snap, r.Pending
}

// Daemon is one life of the daemon.
type Daemon struct {
	// Hook is called at every step, if it is not nil. An error before the
	// effect takes its place; one after it hides it. Set it before the core starts.
	Hook func(ctx context.Context, s Step) error

	w      *World
	once   sync.Once
	killed chan struct{}
}

// Daemon begins a life of the daemon.
func (w *World) Daemon() *Daemon { return &Daemon{w: w, killed: make(chan struct{})} }

// Kill ends the daemon as kill -9 does: its ports have no effect from now on,
// shims that were not adopted end, captures that are not sealed are thawed.
func (d *Daemon) Kill() {
	d.once.Do(func() {
		d.w.mu.Lock()
		defer d.w.mu.Unlock()
		close(d.killed)
		for _, m := range d.w.machines {
			if m.daemon == d && !m.adopted {
				m.die()
			}
		}
	})
}

// alive returns ErrKilled if the daemon is dead; mu is held.
func (d *Daemon) alive() error {
	select {
	case <-d.killed:
		return ErrKilled
	default:
		return nil
	}
}

// step does effect, with the hook around it. effect runs with the world locked.
func (d *Daemon) step(ctx context.Context, name, vm string, effect func() error) error {
	if err := d.hook(ctx, Step{Name: name, VM: vm}); err != nil {
		return err
	}
	d.w.mu.Lock()
	err := d.alive()
	if err == nil {
		err = effect()
	}
	d.w.mu.Unlock()
	if err != nil {
		return err
	}
	return d.hook(ctx, Step{Name: name, VM: vm, After: true})
}

func (d *Daemon) hook(ctx context.Context, s Step) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.Owner = d.w.owner(s.VM)
	if d.Hook != nil {
		if err := d.Hook(ctx, s); err != nil {
			return err
		}
	}
	d.w.mu.Lock()
	defer d.w.mu.Unlock()
	return d.alive()
}

// Config returns the configuration of a core in this life, with short delays.
func (d *Daemon) Config() sandbox.Config {
	return sandbox.Config{
		Catalog: catalogPort{d}, Launcher: launcher{d}, Snapshots: repository{d}, Keys: keys{d}, Builder: builder{d},
		TemplatesDir: filepath.Join(d.w.Dir, "templates"),
		Console:      func(name string) string { return filepath.Join(d.w.Dir, name+".log") },
		HookLog:      func(id string) string { return filepath.Join(d.w.Dir, id+".hooks") },
		NoIdle:       true, // tests that want it say so
		StepTimeout:  10 * time.Second, RetryDelay: time.Millisecond, PoolDelay: time.Millisecond, CollectDelay: 5 * time.Millisecond,
	}
}

// catalogPort is the world's catalog as the daemon reaches it.
type catalogPort struct{ d *Daemon }

func (c catalogPort) Get(ctx context.Context, kind, key string) (rec catalog.Record, err error) {
	c.d.w.mu.Lock()
	err = c.d.alive()
	c.d.w.mu.Unlock()
	if err != nil {
		return rec, err
	}
	return c.d.w.Catalog.Get(ctx, kind, key)
}

func (c catalogPort) List(ctx context.Context, kind string) ([]catalog.Record, error) {
	return c.d.w.Catalog.List(ctx, kind)
}

func (c catalogPort) Put(ctx context.Context, kind, key string, value []byte, rev uint64) (out uint64, err error) {
	err = c.d.step(ctx, "put", "", func() (err error) {
		out, err = c.d.w.Catalog.Put(ctx, kind, key, value, rev)
		return err
	})
	if err != nil {
		return 0, err
	}
	return out, nil
}

func (c catalogPort) Delete(ctx context.Context, kind, key string, rev uint64) error {
	return c.d.step(ctx, "erase", "", func() error { return c.d.w.Catalog.Delete(ctx, kind, key, rev) })
}

// keys is a driver's part of the compatibility keys.
type keys struct{ d *Daemon }

func (keys) Key(_ context.Context, shape vmm.Shape) (vmm.Key, error) {
	return vmm.Key{"driver": "fake", "shape": shape.String()}, nil
}

// builder makes templates that are one small file.
type builder struct{ d *Daemon }

func (b builder) Build(ctx context.Context, o template.Options, progress func(template.Progress)) (a template.Artifacts, err error) {
	err = b.d.step(ctx, "build", "", func() error {
		if err := os.MkdirAll(o.Out, 0o755); err != nil {
			return err
		}
		value, err := json.Marshal(template.Artifacts{BaseDigest: "sha256:base" + b.d.w.Base, KernelDigest: "sha256:kernel", BaseBytes: 2 << 20, KernelRelease: "6.1.0-fake"})
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(o.Out, "template.json"), value, 0o644)
	})
	if err != nil {
		return a, err
	}
	progress(template.Progress{Phase: "image", Message: "made", Done: 1, Total: 1})
	return b.Load(o.Out)
}

func (b builder) Load(dir string) (a template.Artifacts, err error) {
	value, err := os.ReadFile(filepath.Join(dir, "template.json"))
	if err != nil {
		return a, err
	}
	if err := json.Unmarshal(value, &a); err != nil {
		return a, err
	}
	a.Dir, a.BaseImage = dir, filepath.Join(dir, "base.erofs")
	return a, nil
}

func (b builder) Verify(a template.Artifacts) error {
	_, err := b.Load(a.Dir)
	return err
}

func (b builder) Check(a template.Artifacts) error { return b.Verify(a) }
