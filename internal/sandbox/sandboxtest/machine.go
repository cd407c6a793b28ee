package sandboxtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// machine is a shim with its guest. World.mu guards it.
type machine struct {
	w       *World
	daemon  *Daemon // its lifeline, until it is adopted
	handle  shim.Handle
	sandbox string // whose it is, once it was adopted
	dead    chan struct{}
	conns   []net.Conn
	open    map[*conn]struct{} // of those that came by Dial and were not closed
	last    time.Time          // of its traffic
	began   time.Time          // when it last began to run

	phase    shim.Phase
	adopted  bool
	shape    vmm.Shape // once it is prepared
	attempt  uint64
	refused  map[uint64]bool
	captured *shim.CaptureReport
	exit     *vmm.Exit
	failure  string
	code     string // of the failure

	egress     shim.EgressRequest // in force
	denied     []shim.Denied      // not told yet
	memory     string
	identity   string
	generation uint64
	parent     snapshot.ID
	bound      snapshot.ID // that pages are read from
	content    snapshot.ID // of parent
}

// die ends the shim and all that it holds.
func (m *machine) die() {
	if m.gone() {
		return
	}
	close(m.dead)
	delete(m.w.machines, m.handle.VM)
	m.hangUp()
	m.w.broadcast()
}

func (m *machine) gone() bool {
	select {
	case <-m.dead:
		return true
	default:
		return false
	}
}

func (m *machine) hangUp() {
	for _, c := range m.conns {
		c.Close()
	}
	m.conns = nil
	clear(m.open)
}

func (m *machine) enter(p shim.Phase) {
	m.phase = p
	m.w.broadcast()
}

func (m *machine) stop(exit vmm.Exit, failure, code string) {
	m.exit, m.failure, m.code = &exit, failure, code
	m.hangUp()
	m.enter(shim.PhaseStopped)
}

// check returns the error of an order that finds the machine dead, stopped or
// in none of the phases.
func (m *machine) check(order string, phases ...shim.Phase) error {
	switch {
	case m.gone():
		return fmt.Errorf("%s: %w", order, shim.ErrGone)
	case slices.Contains(phases, m.phase):
		return nil
	case m.phase == shim.PhaseStopped:
		return &shim.Error{Code: shim.CodeStopped, Message: order + ": the machine has stopped"}
	}
	return &shim.Error{Code: shim.CodeInvalid, Message: fmt.Sprintf("%s: the shim is %s", order, m.phase)}
}

// run notes that the guest runs, and whether it may: no other machine of its
// sandbox may be there that ever ran.
func (m *machine) run() {
	ran := []shim.Phase{shim.PhaseRunning, shim.PhaseCapturing, shim.PhaseSealed, shim.PhaseParked}
	for _, other := range m.w.machines {
		if other != m && other.sandbox == m.sandbox && m.sandbox != "" && slices.Contains(ran, other.phase) {
			m.w.violate("sandbox %s runs in %s and is %s in %s", m.sandbox, m.handle.VM, other.phase, other.handle.VM)
		}
	}
	if m.phase != shim.PhaseCapturing && m.phase != shim.PhaseSealed { // else it goes on
		m.last, m.began = time.Now(), time.Now()
	}
	m.enter(shim.PhaseRunning)
}

func (w *World) protocol() int {
	if w.Old {
		return 1
	}
	return shim.ProtocolVersion
}

// launcher starts machines for a daemon.
type launcher struct{ d *Daemon }

func (l launcher) Launch(ctx context.Context, spec sandbox.LaunchSpec) (sandbox.VM, error) {
	var m *machine
	err := l.d.step(ctx, "launch", spec.VM, func() error {
		w := l.d.w
		w.pid++
		m = &machine{w: w, daemon: l.d, dead: make(chan struct{}), phase: shim.PhaseIdle, refused: map[uint64]bool{}, open: map[*conn]struct{}{},
			handle: shim.Handle{VM: spec.VM, Socket: "/" + spec.VM, PID: w.pid, StartTime: uint64(w.pid), BootID: w.bootID, Protocol: w.protocol()}}
		if w.machines[spec.VM] != nil {
			w.violate("two machines are named %s", spec.VM)
		}
		w.machines[spec.VM] = m
		return nil
	})
	if err != nil {
		if m != nil { // nothing is left running
			l.d.w.mu.Lock()
			m.die()
			l.d.w.mu.Unlock()
		}
		return nil, err
	}
	return &vm{m: m, d: l.d, closed: make(chan struct{})}, nil
}

func (l launcher) find(h shim.Handle) *machine {
	if m := l.d.w.machines[h.VM]; m != nil && m.handle == h {
		return m
	}
	return nil
}

func (l launcher) Adopt(ctx context.Context, h shim.Handle) (sandbox.VM, error) {
	var m *machine
	err := l.d.step(ctx, "connect", h.VM, func() error {
		if m = l.find(h); m == nil {
			return shim.ErrGone
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &vm{m: m, d: l.d, closed: make(chan struct{})}, nil
}

func (l launcher) Kill(ctx context.Context, h shim.Handle) error {
	return l.d.step(ctx, "kill", h.VM, func() error {
		if m := l.find(h); m != nil {
			m.die()
		}
		return nil
	})
}

func (l launcher) Orphans(ctx context.Context, known []string) error {
	return l.d.step(ctx, "orphans", "", func() error {
		for name, m := range l.d.w.machines {
			if !slices.Contains(known, name) {
				m.die()
			}
		}
		return nil
	})
}

// vm is a connection of a daemon to a machine.
type vm struct {
	m      *machine
	d      *Daemon
	closed chan struct{}
}

func (v *vm) order(ctx context.Context, name string, effect func() error) error {
	return v.d.step(ctx, name, v.m.handle.VM, effect)
}

func (v *vm) Handle() shim.Handle { return v.m.handle }

func (v *vm) Close() {
	v.m.w.mu.Lock()
	defer v.m.w.mu.Unlock()
	select {
	case <-v.closed:
	default:
		close(v.closed)
	}
}

func (v *vm) Status(ctx context.Context) (st shim.Status, err error) {
	err = v.order(ctx, "status", func() error {
		if v.m.gone() {
			return shim.ErrGone
		}
		st = v.m.status()
		return nil
	})
	return st, err
}

func (m *machine) status() shim.Status {
	st := shim.Status{Protocol: shim.ProtocolVersion, VM: m.handle.VM, Phase: m.phase, Adopted: m.adopted, Attempt: m.attempt, Exit: m.exit, Failure: m.failure, Code: m.code}
	if m.phase == shim.PhaseSealed {
		st.Captured = m.captured
	}
	return st
}

func (v *vm) Adopt(ctx context.Context) error {
	return v.order(ctx, "adopt", func() error {
		if v.m.gone() {
			return shim.ErrGone
		}
		v.m.adopt()
		return nil
	})
}

func (v *vm) Prepare(ctx context.Context, req shim.PrepareRequest) error {
	return v.order(ctx, "prepare", func() error {
		if err := v.m.check("prepare", shim.PhaseIdle); err != nil {
			return err
		}
		v.m.shape = req.Shape
		v.m.enter(shim.PhasePrepared)
		return nil
	})
}

// adopt makes the machine outlive its daemon. It must be in the catalog by
// then, which tells whose it is.
func (m *machine) adopt() {
	m.adopted = true
	list, err := m.w.truth().List(context.Background(), "sandbox")
	for _, rec := range list {
		if strings.Contains(string(rec.Value), `"vm":"`+m.handle.VM+`"`) {
			m.sandbox = rec.Key
			return
		}
	}
	m.w.violate("machine %s was adopted without being in the catalog (%v)", m.handle.VM, err)
}

func (v *vm) Boot(ctx context.Context, req shim.BootRequest) (rep shim.StartReport, err error) {
	err = v.order(ctx, "boot", func() error {
		if err := v.m.check("boot", shim.PhasePrepared); err != nil {
			return err
		}
		v.m.memory, v.m.identity, v.m.generation = "booted", req.Init.Identity.ID, req.Init.Generation
		v.m.attach(req.Attach)
		rep.Phases = map[string]float64{"boot": 1}
		v.m.run()
		return nil
	})
	return rep, err
}

func (v *vm) Resume(ctx context.Context, req shim.ResumeRequest) (rep shim.StartReport, err error) {
	err = v.order(ctx, "resume", func() error {
		if err := v.m.check("resume", shim.PhasePrepared); err != nil {
			return err
		}
		if req.Adopt {
			v.m.adopt()
		}
		rep.Phases = map[string]float64{"bind": 1, "state": 1, "unpause": 1, "guest_init": 1}
		rep.Remote = v.m.w.Remote
		rep.Hooks = runHooks(req.Init.Hooks, guestapi.EventPostResume, req.Init.Reason)
		v.m.attach(req.Attach)
		return v.m.resume(req)
	})
	return rep, err
}

func (m *machine) resume(req shim.ResumeRequest) error {
	img := m.w.snapshots[req.Snapshot.ID]
	if img == nil {
		return &shim.Error{Code: shim.CodeCorrupt, Message: "snapshot " + string(req.Snapshot.ID) + " is missing"}
	}
	if diff := req.Key.Diff(img.meta.Key); diff != "" {
		return &shim.Error{Code: shim.CodeMismatch, Message: diff}
	}
	m.w.wake(m.sandbox, req.Init.Reason)
	m.memory, m.identity, m.parent, m.bound, m.content = img.memory, img.identity, req.Snapshot.ID, req.Snapshot.ID, img.meta.Content()
	if id := req.Init.Identity; id != nil {
		m.identity = id.ID
	} else {
		m.attempt = img.meta.Attempt // the guest knows which attempts it was frozen for
	}
	if m.identity != m.sandbox {
		m.w.violate("sandbox %s woke up as %s", m.sandbox, m.identity)
	}
	m.wake(req.Init.Generation)
	return nil
}

// wake lets the guest run at a new generation.
func (m *machine) wake(generation uint64) {
	if last := m.w.generations[m.sandbox]; generation <= last {
		m.w.violate("sandbox %s runs at generation %d after %d", m.sandbox, generation, last)
	}
	m.generation = generation
	m.w.generations[m.sandbox] = generation
	m.run()
}

func (v *vm) Capture(ctx context.Context, req shim.CaptureRequest) (shim.CaptureReport, error) {
	m := v.m
	err := v.order(ctx, "capture", func() error {
		if m.refused[req.Attempt] {
			return &shim.Error{Code: shim.CodeRefused, Message: "the attempt was thawed"}
		}
		if err := m.check("capture", shim.PhaseRunning); err != nil {
			return err
		}
		if req.Attempt <= m.attempt {
			m.w.violate("attempt %d of %s after %d", req.Attempt, m.handle.VM, m.attempt)
		}
		m.attempt = req.Attempt
		m.enter(shim.PhaseCapturing)
		return nil
	})
	if err == nil {
		err = v.order(ctx, "seal", func() error { return m.seal(req) })
	}
	if err != nil {
		m.w.mu.Lock()
		m.unfreeze(req.Attempt) // the order was cancelled, by an error or by the daemon's death
		m.w.mu.Unlock()
		return shim.CaptureReport{}, err
	}
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	if m.captured == nil {
		return shim.CaptureReport{}, &shim.Error{Code: shim.CodeRefused, Message: "the attempt was thawed"}
	}
	return *m.captured, nil
}

// unfreeze lets a guest go on whose capture was cancelled before its seal.
func (m *machine) unfreeze(attempt uint64) {
	if !m.gone() && m.phase == shim.PhaseCapturing && m.attempt == attempt {
		m.refused[attempt] = true
		m.run()
	}
}

func (m *machine) seal(req shim.CaptureRequest) error {
	if err := m.check("capture", shim.PhaseCapturing); err != nil {
		return err
	}
	if req.Full != (m.parent == "") {
		m.w.violate("machine %s: full is %v with parent %q", m.handle.VM, req.Full, m.parent)
	}
	parent, packs := m.parent, []snapshot.ID(nil)
	if req.Parent != nil {
		parent = req.Parent.ID
		img := m.w.snapshots[parent]
		if img == nil || img.meta.Content() != m.content {
			m.w.violate("machine %s, resumed from %s, is captured as a child of %s", m.handle.VM, m.parent, parent)
			return &shim.Error{Code: shim.CodeInvalid, Message: "capture: another parent"}
		}
		packs = img.packs
	}
	meta := snapshot.Metadata{ID: req.ID, Parent: parent, CreatedAt: time.Now(), Attempt: req.Attempt, Generation: req.Generation,
		MemoryBytes: 1 << 30, DirtyBytes: 8192, StoredBytes: packBytes, Key: req.Key, ControlToken: "secret"}
	m.w.snapshots[req.ID] = &image{meta: meta, memory: m.memory, identity: m.identity, packs: append(slices.Clone(packs), req.ID)}
	m.captured = &shim.CaptureReport{Snapshot: snapshot.Ref{ID: req.ID, Manifest: "manifest of " + string(req.ID)}, Metadata: meta,
		Phases: map[string]float64{"freeze": 1, "pause": 1, "state": 1, "scan": 1, "write": 1}, PauseMS: 2,
		Hooks: runHooks(req.Hooks, guestapi.EventPreHibernate, guestapi.ReasonHibernate)}
	m.enter(shim.PhaseSealed)
	return nil
}

// Hooks returns none: this guest has run those that it was given.
func (v *vm) Hooks(context.Context, shim.HooksRequest) (shim.HooksReport, error) {
	return shim.HooksReport{}, nil
}

// runHooks pretends that hooks of an event ran.
func runHooks(hooks []guestapi.Hook, event, reason string) (runs []guestapi.HookResult) {
	for _, h := range hooks {
		if h.Event == event {
			runs = append(runs, guestapi.HookResult{Name: h.Name, Event: event, Reason: reason, Output: h.Name + " ran\n", StartedAt: time.Now()})
		}
	}
	return runs
}

func (v *vm) Thaw(ctx context.Context, req shim.ThawRequest) error {
	m := v.m
	return v.order(ctx, "thaw", func() error {
		if err := m.check("thaw", shim.PhaseRunning, shim.PhaseCapturing, shim.PhaseSealed); err != nil {
			return err
		}
		m.refused[req.Attempt] = true
		if m.phase == shim.PhaseRunning || m.attempt != req.Attempt {
			return nil
		}
		if m.phase == shim.PhaseSealed && m.sandbox != "" {
			id := m.captured.Snapshot.ID
			state, snap, pending := m.w.recorded(m.sandbox)
			switch {
			case req.Committed && (snap != id || state != sandbox.StateRunning):
				m.w.violate("sandbox %s (%s) goes on from snapshot %s as if that were committed, its record names %s", m.sandbox, state, id, snap)
			case !req.Committed && (snap == id || pending == id):
				m.w.violate("sandbox %s runs on from snapshot %s, which its record (%s) names", m.sandbox, id, state)
			}
			if req.Committed {
				m.parent, m.content = id, id
			}
		}
		m.captured = nil
		m.run()
		return nil
	})
}

// holds reports whether a snapshot is the one that was captured as that, or
// what a compaction made of it.
func (w *World) holds(id, captured snapshot.ID) bool {
	img := w.snapshots[id]
	return img != nil && img.meta.Content() == captured
}

// ParkedBytes is what a parked machine takes up.
const ParkedBytes = 1 << 20

func (v *vm) Park(ctx context.Context, req shim.ParkRequest) (rep shim.ParkReport, err error) {
	m := v.m
	err = v.order(ctx, "park", func() error {
		if err := m.check("park", shim.PhaseSealed, shim.PhaseParked); err != nil {
			return err
		}
		if m.attempt != req.Attempt {
			return &shim.Error{Code: shim.CodeInvalid, Message: "another attempt is sealed"}
		}
		if state, snap, _ := m.w.recorded(m.sandbox); state != sandbox.StateStandby || !m.w.holds(snap, m.captured.Snapshot.ID) {
			m.w.violate("sandbox %s (%s) is parked as %s, its record names %s", m.sandbox, state, m.captured.Snapshot.ID, snap)
		}
		m.hangUp()
		m.enter(shim.PhaseParked)
		rep.MemoryBytes = ParkedBytes
		return nil
	})
	return rep, err
}

func (v *vm) Unpark(ctx context.Context, req shim.UnparkRequest) (rep shim.StartReport, err error) {
	m := v.m
	err = v.order(ctx, "unpark", func() error {
		if err := m.check("unpark", shim.PhaseParked); err != nil {
			return err
		}
		if m.attempt != req.Attempt {
			return &shim.Error{Code: shim.CodeInvalid, Message: "another attempt is parked"}
		}
		if state, snap, _ := m.w.recorded(m.sandbox); state != sandbox.StateResuming || snap != req.Snapshot.ID {
			m.w.violate("sandbox %s (%s) is unparked as %s, its record names %s", m.sandbox, state, req.Snapshot.ID, snap)
		}
		img := m.w.snapshots[req.Snapshot.ID]
		if img == nil {
			m.stop(vmm.Exit{Reason: vmm.ReasonClosed}, "", "")
			return &shim.Error{Code: shim.CodeCorrupt, Message: "snapshot " + string(req.Snapshot.ID) + " is missing"}
		}
		if img.memory != m.memory {
			m.w.violate("sandbox %s goes on with %q, its snapshot holds %q", m.sandbox, m.memory, img.memory)
		}
		m.refused[req.Attempt] = true
		m.attach(req.Attach)
		m.parent, m.content, m.captured = req.Snapshot.ID, img.meta.Content(), nil
		rep.Phases = map[string]float64{"unpause": 1, "guest_init": 1}
		m.wake(req.Init.Generation)
		return nil
	})
	return rep, err
}

func (m *machine) attach(a shim.Attach) {
	m.egress = shim.EgressRequest{Profile: a.Profile, Allow: a.Allow, Deny: a.Deny}
}

func (v *vm) SetEgress(ctx context.Context, req shim.EgressRequest) error {
	return v.order(ctx, "egress", func() error {
		if err := v.m.check("egress", shim.PhaseRunning, shim.PhaseCapturing, shim.PhaseSealed, shim.PhaseParked); err != nil {
			return err
		}
		if v.m.handle.Protocol < 2 {
			return shim.ErrUnknown
		}
		v.m.egress = req
		return nil
	})
}

func (v *vm) Release(ctx context.Context) error {
	return v.order(ctx, "release", func() error {
		v.m.die()
		return nil
	})
}

func (v *vm) Watch(ctx context.Context, fn func(shim.Event)) error {
	var last shim.Phase
	for {
		v.m.w.mu.Lock()
		changed, st, gone, denied := v.m.w.changed, v.m.status(), v.m.gone(), v.m.denied
		v.m.denied = nil
		v.m.w.mu.Unlock()
		for _, d := range denied {
			fn(shim.Event{Status: st, Denied: &d})
		}
		if gone {
			return shim.ErrGone
		}
		if st.Phase != last {
			last = st.Phase
			fn(shim.Event{Status: st})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-v.closed:
			return errors.New("the connection was closed")
		case <-v.d.killed:
			return ErrKilled
		}
	}
}

// Dial connects to the guest, which answers on every port but 1, once it runs.
func (v *vm) Dial(ctx context.Context, port int) (net.Conn, error) {
	for {
		v.m.w.mu.Lock()
		changed, err := v.m.w.changed, v.d.alive()
		if err == nil {
			err = v.m.check("dial", shim.PhaseRunning, shim.PhaseCapturing, shim.PhaseSealed)
		}
		if err == nil && port == 1 {
			err = errors.New("connection refused")
		}
		if err != nil {
			v.m.w.mu.Unlock()
			return nil, err
		}
		if v.m.phase == shim.PhaseRunning {
			host, guest := net.Pipe()
			v.m.conns = append(v.m.conns, host, guest)
			c := &conn{Conn: host, m: v.m, last: time.Now()}
			v.m.open[c], v.m.last = struct{}{}, c.last
			go v.m.serve(guest)
			v.m.w.mu.Unlock()
			return c, nil
		}
		v.m.w.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-v.d.killed:
			return nil, ErrKilled
		}
	}
}

// serve answers the lines "get", "set WORD" and "count", which makes the memory
// the next number, with the memory.
func (m *machine) serve(conn net.Conn) {
	defer conn.Close()
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		answer, ok := m.answer(lines.Text())
		if !ok {
			return
		}
		if _, err := fmt.Fprintln(conn, answer); err != nil {
			return
		}
	}
}

// answer waits until the guest runs and lets it answer; false if it ended.
func (m *machine) answer(line string) (string, bool) {
	for {
		m.w.mu.Lock()
		if m.gone() || m.phase == shim.PhaseStopped {
			m.w.mu.Unlock()
			return "", false
		}
		if m.phase == shim.PhaseRunning {
			if word, ok := strings.CutPrefix(line, "set "); ok {
				m.memory = word
			} else if line == "count" {
				n, _ := strconv.Atoi(m.memory) // at first it is no number
				m.memory = strconv.Itoa(n + 1)
			}
			memory := m.memory
			m.w.mu.Unlock()
			return memory, true
		}
		changed := m.w.changed
		m.w.mu.Unlock()
		<-changed
	}
}

// Ask connects to a sandbox, sends one line and returns the answer, which is
// the guest's memory: "get", "set WORD" or "count".
func Ask(ctx context.Context, c *sandbox.Core, id, line string) (string, error) {
	conn, err := c.Dial(ctx, id, 80)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if _, err := fmt.Fprintln(conn, line); err != nil {
		return "", err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSuffix(answer, "\n"), err
}
