package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

const (
	freezeTimeout   = 2 * time.Second
	maxDeadline     = 10 * time.Minute // of a freeze
	maxControlBytes = 1 << 20          // of a control call's body
	minEntropy      = 32
)

var (
	errWrongToken = errors.New("the control token is missing or wrong")
	errThawed     = errors.New("this attempt was thawed: begin a new one")
)

// controller serves the control calls, one at a time.
type controller struct {
	system   System
	gate     *gate
	log      *slog.Logger
	hooks    *hookRunner
	identify func(*guestapi.Identity)
	abort    interrupter

	mu         sync.Mutex
	token      string // "" until the first init has set it
	last       *initRecord
	frozen     uint64 // attempt that the guest is frozen for, 0: none
	thawed     uint64 // the highest attempt that was thawed; it and those before are refused
	selfThaw   *time.Timer
	generation uint64 // of the last init

	// From the begin of a freeze until the init or the thaw that ends it.
	prepared bool            // pre-hibernate hooks were run
	given    []guestapi.Hook // the sandbox's, from the freeze
	waking   *hookSet        // the image's post-resume hooks, looked for while nobody could change them; nil: not
}

// interrupter ends the hooks that a freeze is running, when the hibernation was
// given up meanwhile: the calls that say so do not get the controller's lock
// before.
type interrupter struct {
	mu      sync.Mutex
	token   string             // of calls that may do so
	attempt uint64             // that is being frozen
	cancel  context.CancelFunc // nil: no hooks are being run
	givenUp uint64             // attempts up to this one get no hooks
}

// begin returns the context of an attempt's hooks. end must be called.
func (i *interrupter) begin(attempt uint64, token string) (ctx context.Context, end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	i.mu.Lock()
	defer i.mu.Unlock()
	i.token, i.attempt, i.cancel = token, attempt, cancel
	if attempt <= i.givenUp {
		cancel()
	}
	return ctx, func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.cancel = nil
		cancel()
	}
}

// giveUp ends the hooks of attempt and of those before it.
func (i *interrupter) giveUp(attempt uint64, token string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.token == "" || !sameToken(token, i.token) {
		return
	}
	i.givenUp = max(i.givenUp, attempt)
	if i.cancel != nil && i.attempt <= attempt {
		i.cancel()
	}
}

// renew begins to count anew, for calls with token.
func (i *interrupter) renew(token string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.token, i.givenUp = token, 0
}

// initRecord remembers the last init, so that one whose answer was lost can be
// repeated, with the token that it was made with.
type initRecord struct {
	token      string
	reason     string
	generation uint64
	id         string
	response   guestapi.InitResponse
}

func newController(s System, g *gate, hooks *hookRunner, log *slog.Logger, identify func(*guestapi.Identity)) *controller {
	return &controller{system: s, gate: g, hooks: hooks, log: log, identify: identify}
}

func (c *controller) register(mux *http.ServeMux) {
	mux.HandleFunc("POST "+guestapi.InitPath, serveControl(c.init))
	mux.HandleFunc("POST "+guestapi.FreezePath, serveControl(c.freeze))
	mux.HandleFunc("POST "+guestapi.ThawPath, serveControl(c.thaw))
	mux.HandleFunc("POST "+guestapi.ClockPath, serveControl(c.clock))
	mux.HandleFunc("POST "+guestapi.HooksPath, serveControl(c.takeHooks))
}

// call is what a control call comes with beside its body.
type call struct {
	token    string
	received time.Time
	flow     Flow // the connection that it came over
}

// serveControl decodes a control call and answers it.
func serveControl[Req, Resp any](serve func(call, Req) (Resp, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		in := call{token: r.Header.Get(guestapi.TokenHeader), received: time.Now(), flow: flowOf(r)}
		var req Req
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxControlBytes)).Decode(&req); err != nil {
			writeError(w, http.StatusBadRequest, fmt.Sprintf("the body of %s is not what it takes: %v", r.URL.Path, err))
			return
		}
		resp, err := serve(in, req)
		switch {
		case errors.Is(err, errWrongToken):
			writeError(w, http.StatusUnauthorized, err.Error())
		case errors.Is(err, errThawed):
			writeError(w, http.StatusConflict, err.Error())
		case errors.Is(err, errBadRequest):
			writeError(w, http.StatusBadRequest, err.Error())
		case err != nil:
			writeError(w, http.StatusInternalServerError, err.Error())
		default:
			writeJSON(w, resp)
		}
	}
}

func flowOf(r *http.Request) Flow {
	var f Flow
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		f.Local, _ = netip.ParseAddrPort(local.String())
	}
	f.Remote, _ = netip.ParseAddrPort(r.RemoteAddr)
	return f
}

// steps times what a control call does. A step that fails becomes a warning:
// a guest that is not perfect is better than one that cannot be reached.
type steps struct {
	times    map[string]float64
	warnings []string
}

func newSteps() *steps { return &steps{times: map[string]float64{}} }

func (s *steps) do(name string, fn func() error) {
	start := time.Now()
	if err := fn(); err != nil {
		s.warnings = append(s.warnings, fmt.Sprintf("%s: %v", name, err))
	}
	s.times[name] = float64(time.Since(start).Microseconds()) / 1000
}

func (c *controller) init(in call, req guestapi.InitRequest) (guestapi.InitResponse, error) {
	c.abort.giveUp(math.MaxUint64, in.token) // a freeze that was under way when the snapshot was taken
	c.mu.Lock()
	defer c.mu.Unlock()
	if repeated := c.last; repeated != nil && repeated.matches(req) && (sameToken(in.token, repeated.token) || sameToken(in.token, c.token)) {
		return repeated.response, nil
	}
	if c.token != "" && !sameToken(in.token, c.token) {
		return guestapi.InitResponse{}, errWrongToken
	}
	if err := checkInit(req); err != nil {
		return guestapi.InitResponse{}, err
	}
	s := newSteps()
	resp := guestapi.InitResponse{AgentVersion: guestapi.Version, Steps: s.times}
	if req.UnixNano != 0 {
		s.do("clock", func() error { return c.setClock(in, req.UnixNano) })
	}
	if len(req.Entropy) > 0 {
		s.do("entropy", func() error { return c.system.AddEntropy(req.Entropy) })
	}
	if id := req.Identity; id != nil {
		s.do("identity", func() error { return c.system.SetIdentity(id.ID, id.Hostname, id.MachineID) })
		c.identify(id)
	}
	if isCopy(req.Reason) {
		s.do("boot_id", c.system.RenewBootID)
	}
	if resetsSockets(req.Reason) {
		s.do("sockets", func() (err error) {
			resp.SocketsDestroyed, err = c.system.DestroySockets(in.flow)
			return err
		})
	}
	s.do("generation", func() error { return c.system.Publish(req.Generation) })
	s.do("thaw", func() error { return c.release(c.frozen) })
	c.generation = req.Generation
	resp.Hooks = c.wake(s, req)
	resp.Warnings = s.warnings
	if req.Reason != guestapi.ReasonCancelled { // which happens any number of times in one generation
		c.last = recordInit(in, req, resp)
	}
	c.token = c.nextToken(req)
	c.abort.renew(c.token)
	return resp, nil
}

// wake runs the post-resume hooks after an init.
func (c *controller) wake(s *steps, req guestapi.InitRequest) []guestapi.HookResult {
	set := c.postResume(req.Hooks)
	if req.Reason == guestapi.ReasonBoot {
		return nil
	}
	return c.runHooks(context.Background(), s, set, occasion{
		event: guestapi.EventPostResume, reason: req.Reason, snapshot: req.Snapshot, generation: req.Generation,
		slept: time.Duration(min(req.SleptSeconds, 1e9) * float64(time.Second)),
	}, guestapi.MaxHookTimeout)
}

// postResume returns the post-resume hooks and ends what freeze remembered.
func (c *controller) postResume(given []guestapi.Hook) hookSet {
	set := hookSet{}
	if c.waking != nil {
		set = *c.waking
	} else {
		set = c.hooks.scan(guestapi.EventPostResume)
	}
	c.prepared, c.given, c.waking = false, nil, nil
	return set.with(guestapi.EventPostResume, given)
}

// runHooks runs a set as the step "hooks" of a call, which there is only where
// there are hooks.
func (c *controller) runHooks(ctx context.Context, s *steps, set hookSet, o occasion, budget time.Duration) (results []guestapi.HookResult) {
	if len(set.hooks) == 0 {
		s.warnings = append(s.warnings, set.warnings...)
		return nil
	}
	s.do("hooks", func() error {
		var warnings []string
		results, warnings = c.hooks.run(ctx, set, o, budget)
		s.warnings = append(s.warnings, warnings...)
		return nil
	})
	return results
}

// afterCancel runs the post-resume hooks of a hibernation that did not happen,
// if it came to its own hooks.
func (c *controller) afterCancel(s *steps, reason string) []guestapi.HookResult {
	if !c.prepared {
		return nil
	}
	if reason == "" {
		reason = guestapi.ReasonCancelled
	}
	return c.runHooks(context.Background(), s, c.postResume(c.given),
		occasion{event: guestapi.EventPostResume, reason: reason, generation: c.generation}, cancelBudget)
}

func (c *controller) takeHooks(in call, _ guestapi.HooksRequest) (guestapi.HooksResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.authorise(in); err != nil {
		return guestapi.HooksResponse{}, err
	}
	return guestapi.HooksResponse{Hooks: c.hooks.take()}, nil
}

// nextToken returns the token of the calls after req. A copy of a sandbox, and
// one that never had a snapshot, counts its attempts from the start.
func (c *controller) nextToken(req guestapi.InitRequest) string {
	if req.Identity == nil {
		return c.token
	}
	c.thawed = 0
	return req.Identity.ControlToken
}

func recordInit(in call, req guestapi.InitRequest, resp guestapi.InitResponse) *initRecord {
	r := &initRecord{token: in.token, reason: req.Reason, generation: req.Generation, response: resp}
	r.response.Hooks = nil // what they printed is not worth the memory
	if req.Identity != nil {
		r.id = req.Identity.ID
	}
	return r
}

func (r *initRecord) matches(req guestapi.InitRequest) bool {
	id := ""
	if req.Identity != nil {
		id = req.Identity.ID
	}
	return r.generation == req.Generation && r.reason == req.Reason && r.id == id
}

// isCopy says if there may be another guest with the same past: ids that are
// made of the boot's must differ. A resume is no boot.
func isCopy(reason string) bool {
	switch reason {
	case guestapi.ReasonCreate, guestapi.ReasonFork, guestapi.ReasonRestore:
		return true
	}
	return false
}

// resetsSockets says if connections from before cannot go on: after a cancelled
// hibernation they can, and at boot there are none.
func resetsSockets(reason string) bool {
	switch reason {
	case guestapi.ReasonResume, guestapi.ReasonCreate, guestapi.ReasonFork, guestapi.ReasonRestore:
		return true
	}
	return false
}

var (
	hostnameForm  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	machineIDForm = regexp.MustCompile(`^[0-9a-f]{32}$`)
	idForm        = regexp.MustCompile(`^[a-z0-9]{1,64}$`)
)

func checkInit(req guestapi.InitRequest) error {
	switch req.Reason {
	case guestapi.ReasonBoot, guestapi.ReasonCreate, guestapi.ReasonResume, guestapi.ReasonFork,
		guestapi.ReasonRestore, guestapi.ReasonCancelled:
	default:
		return fmt.Errorf("%w: unknown reason %q", errBadRequest, req.Reason)
	}
	if n := len(req.Entropy); n < minEntropy && req.Reason != guestapi.ReasonCancelled {
		return fmt.Errorf("%w: %d bytes of entropy, at least %d are needed", errBadRequest, n, minEntropy)
	}
	id := req.Identity
	switch {
	case id == nil && (req.Reason == guestapi.ReasonBoot || req.Reason == guestapi.ReasonCreate || req.Reason == guestapi.ReasonFork):
		return fmt.Errorf("%w: an init for %s needs an identity", errBadRequest, req.Reason)
	case id == nil:
		return nil
	case !idForm.MatchString(id.ID):
		return fmt.Errorf("%w: id %q", errBadRequest, id.ID)
	case !hostnameForm.MatchString(id.Hostname):
		return fmt.Errorf("%w: host name %q", errBadRequest, id.Hostname)
	case !machineIDForm.MatchString(id.MachineID):
		return fmt.Errorf("%w: machine id %q", errBadRequest, id.MachineID)
	case id.ControlToken == "":
		return fmt.Errorf("%w: an identity without a control token", errBadRequest)
	}
	return nil
}

func (c *controller) freeze(in call, req guestapi.FreezeRequest) (guestapi.FreezeResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.authorise(in); err != nil {
		return guestapi.FreezeResponse{}, err
	}
	if req.Attempt == 0 || req.Deadline <= 0 || req.Deadline > maxDeadline {
		return guestapi.FreezeResponse{}, fmt.Errorf("%w: attempt %d with deadline %v", errBadRequest, req.Attempt, req.Deadline)
	}
	if req.Attempt <= c.thawed || req.Attempt < c.frozen || req.Generation != 0 && req.Generation != c.generation {
		return guestapi.FreezeResponse{}, errThawed
	}
	s := newSteps()
	var ran []guestapi.HookResult
	if c.frozen == 0 {
		var ok bool
		if ran, ok = c.prepare(s, req); !ok {
			c.hooks.keep(ran)
			return guestapi.FreezeResponse{}, errThawed
		}
		s.do("freeze", func() error {
			if !c.gate.shut(freezeTimeout) {
				return errors.New("a process is being started and hangs: the others are not stopped")
			}
			return c.system.Freeze(freezeTimeout)
		})
		// Nothing can change them until the thaw, and then there is no time to look.
		waking := c.hooks.scan(guestapi.EventPostResume)
		c.waking = &waking
	}
	c.frozen = req.Attempt
	c.armSelfThaw(req.Attempt, max(req.Deadline-time.Since(in.received), time.Millisecond))
	return guestapi.FreezeResponse{Steps: s.times, Warnings: s.warnings, Hooks: append(c.hooks.take(), ran...)}, nil
}

// prepare runs the pre-hibernate hooks, for at most half of the time that the
// hibernation may take. False: it was given up meanwhile.
func (c *controller) prepare(s *steps, req guestapi.FreezeRequest) (ran []guestapi.HookResult, ok bool) {
	set := c.hooks.scan(guestapi.EventPreHibernate).with(guestapi.EventPreHibernate, req.Hooks)
	c.prepared, c.given, c.waking = true, req.Hooks, nil
	if len(set.hooks) == 0 {
		s.warnings = append(s.warnings, set.warnings...)
		return nil, true
	}
	reason := req.Reason
	if reason == "" {
		reason = guestapi.ReasonHibernate
	}
	ctx, end := c.abort.begin(req.Attempt, c.token)
	defer end()
	ran = c.runHooks(ctx, s, set, occasion{
		event: guestapi.EventPreHibernate, reason: reason, snapshot: req.Snapshot, generation: c.generation,
	}, min(guestapi.MaxHookTimeout, req.Deadline/2))
	return ran, ctx.Err() == nil
}

// armSelfThaw thaws the guest at the deadline if nobody did anything about the
// attempt. The time is the guest's monotonic one, which stands still in a
// paused machine.
func (c *controller) armSelfThaw(attempt uint64, deadline time.Duration) {
	c.stopSelfThaw()
	c.selfThaw = time.AfterFunc(deadline, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.frozen != attempt {
			return
		}
		if err := c.release(attempt); err != nil {
			c.log.Error("thaw after the deadline", "attempt", attempt, "err", err)
			return
		}
		c.hooks.keep(c.afterCancel(newSteps(), ""))
		c.log.Warn("thawed by itself: the hibernation was not finished in time", "attempt", attempt)
	})
}

func (c *controller) stopSelfThaw() {
	if c.selfThaw != nil {
		c.selfThaw.Stop()
		c.selfThaw = nil
	}
}

func (c *controller) thaw(in call, req guestapi.ThawRequest) (guestapi.ThawResponse, error) {
	c.abort.giveUp(req.Attempt, in.token)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.authorise(in); err != nil {
		return guestapi.ThawResponse{}, err
	}
	if req.Attempt == 0 {
		return guestapi.ThawResponse{}, fmt.Errorf("%w: attempt 0", errBadRequest)
	}
	if req.UnixNano != 0 {
		if err := c.setClock(in, req.UnixNano); err != nil {
			c.log.Error("set the clock", "err", err) // no reason to stay frozen
		}
	}
	if err := c.release(req.Attempt); err != nil {
		return guestapi.ThawResponse{}, err
	}
	s := newSteps()
	var ran []guestapi.HookResult
	if c.frozen == 0 {
		ran = c.afterCancel(s, req.Reason)
	}
	return guestapi.ThawResponse{Warnings: s.warnings, Hooks: append(c.hooks.take(), ran...)}, nil
}

func (c *controller) clock(in call, req guestapi.ClockRequest) (struct{}, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.authorise(in); err != nil {
		return struct{}{}, err
	}
	if req.UnixNano <= 0 {
		return struct{}{}, fmt.Errorf("%w: no time", errBadRequest)
	}
	return struct{}{}, c.setClock(in, req.UnixNano)
}

// setClock sets the wall clock to the host's, which showed unixNano when the
// call was sent.
func (c *controller) setClock(in call, unixNano int64) error {
	return c.system.SetClock(time.Unix(0, unixNano).Add(time.Since(in.received)))
}

// release ends a freeze of the attempt or an earlier one and refuses them from
// now on.
func (c *controller) release(attempt uint64) error {
	c.thawed = max(c.thawed, attempt)
	if c.frozen > attempt {
		return nil
	}
	c.frozen = 0
	c.stopSelfThaw()
	if err := c.system.Thaw(); err != nil {
		return err // and the gate stays shut: see gate
	}
	c.gate.open()
	return nil
}

// authorise checks the token. A guest that had no init yet takes no other call.
func (c *controller) authorise(in call) error {
	if c.token == "" || !sameToken(in.token, c.token) {
		return errWrongToken
	}
	return nil
}

// check is authorise for calls that leave the controller alone.
func (c *controller) check(in call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.authorise(in)
}

// randomName returns a name that nobody can guess, also not in a copy of this guest.
func randomName() string {
	var b [12]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
