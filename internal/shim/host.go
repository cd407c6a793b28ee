package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/blob/s3"
	"github.com/hibernacle/hibernacle/internal/blob/wrap"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/pager"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/tier"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vnet"
)

// Config is what a shim is started with. It says nothing about whose machine
// it will hold.
type Config struct {
	VM          string       `json:"vm"`
	Dir         string       `json:"dir"`   // private folder of this machine; holds the socket
	Store       string       `json:"store"` // folder of the snapshot store
	Driver      DriverConfig `json:"driver"`
	Account     *Credential  `json:"account"`             // to change to once the pager is mounted; nil: stay
	FullCapture bool         `json:"full_capture"`        // the kernel does not report dirty pages rightly: save every page
	Resolvers   []string     `json:"resolvers,omitempty"` // DNS servers ("address:port") that answer the guest; none: those of the host
	Remote      *s3.Config   `json:"remote"`              // store of what is not in Store any more, with credentials that need not write; nil: there is none
}

// DriverConfig chooses and sets up the VMM driver.
type DriverConfig struct {
	Binary      string   `json:"binary,omitempty"`
	Accel       string   `json:"accel,omitempty"`
	CPUModel    string   `json:"cpu_model,omitempty"`
	MachineType string   `json:"machine_type,omitempty"`
	WrapCommand []string `json:"wrap_command,omitempty"`
}

// guestDialer is a machine that is reached without a network of ours: the
// fake one.
type guestDialer interface {
	Dial(ctx context.Context, port int) (net.Conn, error)
}

// host is the machine that a shim holds, with all that belongs to it. Orders
// that change it hold the order lock for their whole time.
type host struct {
	cfg     Config
	driver  vmm.Driver
	local   *disk.Store
	remote  *remote // nil: there is none
	repo    *snapshot.Repository
	log     *slog.Logger
	agent   *guestapi.Client
	console *console
	mem     *pager.Server
	limits  limits

	order chan struct{} // holds a token while no order is under way

	// For whoever holds the order lock.
	slot   *pager.Slot
	shape  vmm.Shape
	cold   bool               // prepared to boot
	bound  *snapshot.Snapshot // that the pager reads; nil after a cold boot
	parent *snapshot.Snapshot // that the guest goes on from; nil until a cold boot was parked
	token  string             // present control token of the agent
	advice string             // what is wrong with the snapshot's working set
	plain  bool               // the agent is one of before hooks

	workset workset
	denials *denials

	mu      sync.Mutex
	machine vmm.Machine   // written once, by an order; orders read it without mu
	net     *vnet.Network // likewise
	phase   Phase
	adopted bool
	attempt uint64
	refused uint64                // attempts up to this one are refused
	cancel  func()                // of the capture under way
	report  *CaptureReport        // of the capture sealed last
	hooks   []guestapi.HookResult // that no report had
	exit    *vmm.Exit
	failure error         // of the machine's memory
	changed chan struct{} // closed and replaced at each change
	exited  chan struct{} // closed when the machine has ended and the status shows it
	ended   chan struct{} // closed when the shim shall end: no order begins from then on
	cut     chan struct{} // closed and replaced when the streams into the guest shall end

	streams sync.WaitGroup // into the guest
}

// newHost mounts the pager, gives up the privileges that this took, and opens
// the store.
func newHost(cfg Config, driver vmm.Driver, log *slog.Logger, limits limits, remote *remote) (*host, error) {
	h := &host{
		cfg: cfg, driver: driver, log: log, limits: limits, remote: remote,
		order: make(chan struct{}, 1), console: &console{}, denials: newDenials(), phase: PhaseIdle,
		changed: make(chan struct{}), exited: make(chan struct{}), ended: make(chan struct{}), cut: make(chan struct{}),
	}
	h.order <- struct{}{}
	h.agent = guestapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		return h.dialGuest(ctx, guestapi.Port, true)
	})
	dir := memDir(cfg.Dir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	if cfg.Account != nil { // the mount belongs to the owner of its folder
		if err := os.Chown(dir, int(cfg.Account.UID), int(cfg.Account.GID)); err != nil {
			return nil, err
		}
	}
	var err error
	if h.mem, err = pager.Mount(dir, log); err != nil {
		return nil, err
	}
	if err := h.openStore(); err != nil {
		return nil, errors.Join(err, h.mem.Close())
	}
	return h, nil
}

func (h *host) openStore() error {
	if h.cfg.Account != nil {
		if err := h.cfg.Account.become(); err != nil {
			return err
		}
	}
	var err error
	if h.local, err = disk.Open(h.cfg.Store); err != nil {
		return fmt.Errorf("open the store: %w", err)
	}
	if h.cfg.Remote != nil && h.remote == nil {
		if h.remote, err = openRemote(*h.cfg.Remote); err != nil {
			return fmt.Errorf("open the remote store: %w", err)
		}
	}
	h.repo = h.repository(0)
	return nil
}

// repository returns the snapshots of both tiers; each request to the remote
// store waits for delay first.
func (h *host) repository(delay time.Duration) *snapshot.Repository {
	switch {
	case h.remote == nil:
		return snapshot.NewRepository(h.local)
	case delay > 0:
		return snapshot.NewRepository(tier.ReadStore(h.local, wrap.Delay(h.remote, delay)))
	}
	return snapshot.NewRepository(tier.ReadStore(h.local, h.remote))
}

// begin waits until no other order is under way and checks the phase.
func (h *host) begin(ctx context.Context, allowed ...Phase) (end func(), err error) {
	select {
	case <-h.order:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-h.ended:
		return nil, errEnding
	}
	end = func() { h.order <- struct{}{} }
	if err := ctx.Err(); err != nil { // the turn came with the end of the wait
		end()
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.check(allowed); err != nil {
		end()
		return nil, err
	}
	return end, nil
}

// errEnding answers orders that come after a release.
var errEnding = errorf(CodeStopped, "the shim is ending")

// check tells why an order does not fit. h.mu is held.
func (h *host) check(allowed []Phase) error {
	switch {
	case h.hasEnded():
		return errEnding
	case slices.Contains(allowed, h.phase):
		return nil
	case h.phase == PhaseStopped:
		return h.whyStopped()
	}
	return errorf(CodeInvalid, "the machine is %s; this order needs it to be one of %v", h.phase, allowed)
}

// whyStopped says how the machine ended, once the status shows it. h.mu is held.
func (h *host) whyStopped() *Error {
	switch {
	case h.failure != nil:
		return errorf(CodeStopped, "the machine has ended: its memory could not be served: %v", h.failure)
	case h.exit.Detail != "":
		return errorf(CodeStopped, "the machine has ended: %s: %s", h.exit.Reason, h.exit.Detail)
	}
	return errorf(CodeStopped, "the machine has ended: %s", h.exit.Reason)
}

// update changes what a status shows and tells those who watch.
func (h *host) update(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change()
	close(h.changed)
	h.changed = make(chan struct{})
}

// enter moves to phase p, unless the machine has stopped meanwhile: that is
// an error.
func (h *host) enter(p Phase) (err error) {
	h.update(func() {
		if h.phase == PhaseStopped {
			err = h.whyStopped()
			return
		}
		h.phase = p
	})
	return err
}

// status returns the present status and a channel that is closed at the next change.
func (h *host) status() (Status, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := Status{
		Protocol: ProtocolVersion, VM: h.cfg.VM, Phase: h.phase, Adopted: h.adopted,
		Attempt: h.attempt, Exit: h.exit,
	}
	if h.phase == PhaseSealed {
		s.Captured = h.report
	}
	if h.failure != nil {
		s.Failure, s.Code = h.failure.Error(), classify(h.failure).Code
	}
	if h.machine != nil && h.phase != PhaseStopped {
		s.VMMPID = h.machine.PID()
	}
	return s, h.changed
}

// watch notices by itself that the machine ended or that its memory failed.
func (h *host) watch(machine vmm.Machine, network *vnet.Network, slot *pager.Slot) {
	defer close(h.exited)
	select {
	case <-machine.Exited():
	case <-slot.Failed():
		// The VMM gets SIGBUS at that page, at the latest now.
		_ = machine.Close()
		<-machine.Exited()
	}
	exit, failure := machine.Exit(), slot.Err()
	if failure == nil && exit.Reason == vmm.ReasonCrashed {
		failure = h.mem.Check()
	}
	if tail := h.console.tail(); tail != "" && exit.Reason != vmm.ReasonClosed {
		exit.Detail += "; console: " + lastLines(tail, 400)
	}
	h.update(func() {
		h.phase, h.exit, h.failure = PhaseStopped, &exit, failure
	})
	_ = network.Close() // streams into the guest end with it
}

// hasExited tells whether the machine has ended, before the status may show it.
func (h *host) hasExited() bool {
	select {
	case <-h.machine.Exited():
		return true
	default:
		return false
	}
}

// exitError says why an order failed whose machine ended meanwhile: where that
// is due to a damaged object, or to a remote store that did not answer, the
// code says so.
func (h *host) exitError() error {
	<-h.exited
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.whyStopped()
	if h.failure != nil {
		switch code := classify(h.failure).Code; code {
		case CodeCorrupt, CodeUnavailable:
			e.Code = code
		}
	}
	return e
}

func lastLines(s string, max int) string {
	if len(s) > max {
		s = s[len(s)-max:]
	}
	return s
}

// dialGuest opens a byte stream to a port of the guest. Control streams are
// not counted as activity.
func (h *host) dialGuest(ctx context.Context, port uint16, control bool) (net.Conn, error) {
	h.mu.Lock()
	machine, network := h.machine, h.net
	var err error
	switch {
	case machine == nil:
		err = errorf(CodeInvalid, "there is no machine yet")
	case h.phase == PhaseStopped:
		err = h.whyStopped()
	case h.phase == PhaseParked:
		err = errorf(CodeInvalid, "the machine is parked")
	}
	h.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if d, ok := machine.(guestDialer); ok {
		conn, err := d.Dial(ctx, int(port))
		if err != nil || control {
			return conn, err
		}
		return network.Count(conn)
	}
	if control {
		return network.DialControl(ctx, port)
	}
	return network.Dial(ctx, port)
}

// close releases everything. The order lock need not be held: a release comes
// through whatever else is under way. cancelOrders ends the contexts of orders.
func (h *host) close(cancelOrders func()) error {
	h.end()
	h.endMachine()
	cancelOrders()
	h.workset.stop()
	err := h.mem.Close() // reads that hang end too
	<-h.order            // for good
	h.endMachine()       // that a prepare had under way
	h.agent.Close()
	h.workset.close()
	h.adoptParent(nil)
	if h.bound != nil {
		_ = h.bound.Close()
	}
	_ = h.console.Close()
	return err
}

// endMachine kills the machine, if there is one, and its network.
func (h *host) endMachine() {
	h.mu.Lock()
	machine := h.machine
	h.mu.Unlock()
	if machine != nil {
		_ = machine.Close()
		<-h.exited
	}
}

// prepare starts the VMM.
func (h *host) prepare(ctx context.Context, req PrepareRequest) error {
	end, err := h.begin(ctx, PhaseIdle)
	if err != nil {
		return err
	}
	defer end()
	size := req.Shape.MemoryBytes()
	if size <= 0 || req.Shape.CPUs <= 0 {
		return errorf(CodeInvalid, "a machine of %d MiB and %d CPUs makes no sense", req.Shape.MemoryMiB, req.Shape.CPUs)
	}
	if _, err := os.Stat(req.BaseImage); err != nil {
		return errorf(CodeCorrupt, "base image: %v", err)
	}
	slot, err := h.mem.NewSlot("ram", size)
	if err != nil {
		return err
	}
	if req.Boot != nil {
		if err := slot.Bind(pager.Zero); err != nil {
			return err
		}
	}
	network, err := vnet.New(vnet.Config{
		Policy: vnet.Policy{Profile: vnet.ProfileNone}, // until attach
		Log:    h.log, OnDenied: h.denials.add, Resolvers: h.cfg.Resolvers,
	})
	if err != nil {
		return err
	}
	socket := filepath.Join(h.cfg.Dir, "net")
	if err := network.Listen(socket); err != nil {
		_ = network.Close()
		return err
	}
	machine, err := h.driver.Start(ctx, vmm.Spec{
		Shape: req.Shape, Dir: h.cfg.Dir, MemoryPath: slot.Path(), BaseImage: req.BaseImage,
		NetSocket: socket, MAC: vnet.GuestMAC, Console: h.console, Boot: req.Boot,
	})
	if err != nil {
		_ = network.Close()
		return fmt.Errorf("start the virtual machine: %w", err)
	}
	h.slot, h.shape, h.cold = slot, req.Shape, req.Boot != nil
	h.update(func() { h.machine, h.net, h.phase = machine, network, PhasePrepared })
	go h.watch(machine, network, slot)
	return nil
}
