package sandbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// DefaultTemplate is the template of a sandbox that names none.
const DefaultTemplate = "base"

// Bounds of what a user may ask for.
const (
	minMemoryMiB = 128
	maxMemoryMiB = 1 << 20
	maxCPUs      = 64
	maxText      = 64 << 10 // of all labels or all of the environment, in bytes
	maxRules     = 256
)

// CreateOptions says what sandbox to create. The zero value asks for one of
// DefaultTemplate in its default shape.
type CreateOptions struct {
	Template  string
	Name      string // an RFC 1123 label, unique; "" for none
	MemoryMiB int    // 0: the template's
	CPUs      int    // 0: the template's
	Env       map[string]string
	Labels    map[string]string
	Policy    *Policy // nil: DefaultPolicy
	ColdBoot  bool    // boot instead of resuming the base snapshot: for measuring and for finding faults
}

var (
	idPattern   = regexp.MustCompile(`^[a-z0-9]{20}$`)
	namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// newID returns an id that no sandbox ever had: 100 random bits.
func newID() string { return strings.ToLower(rand.Text()[:20]) }

// Create makes a sandbox by resuming the base snapshot of its template and
// shape under a new identity, and returns when it runs. A shape that the
// template has no base snapshot of is booted first. If ctx ends before, the
// creation is taken back.
func (c *Core) Create(ctx context.Context, o CreateOptions) (Sandbox, error) {
	if o.Template == "" {
		o.Template = DefaultTemplate
	}
	if err := c.drained(); err != nil {
		return Sandbox{}, err
	}
	policy := DefaultPolicy()
	if o.Policy != nil {
		policy = *o.Policy
	}
	if err := c.checkOptions(o, &policy); err != nil {
		return Sandbox{}, err
	}
	v, unpin, err := c.pinTemplate(o.Template)
	if err != nil {
		return Sandbox{}, err
	}
	defer unpin()
	shape := v.Shape
	if o.MemoryMiB != 0 {
		shape.MemoryMiB = o.MemoryMiB
	}
	if o.CPUs != 0 {
		shape.CPUs = o.CPUs
	}
	rec := record{
		Version: recordVersion, ID: newID(), Name: o.Name, Template: o.Template, TemplateVersion: v.Number, Shape: shape,
		Labels: o.Labels, Env: o.Env, Policy: policy,
		AccessToken: newToken(), TrafficToken: newToken(), CreatedAt: time.Now().UTC(), State: StateCreating,
	}
	if !o.ColdBoot {
		b, err := c.base(ctx, o.Template, v.Number, shape)
		if err != nil {
			return Sandbox{}, err
		}
		rec.commit(*b.Snapshot, *b.Metadata)
		rec.Fresh = true
	}
	rec.Generation = nextGeneration(&rec)
	return c.create(ctx, rec, o.ColdBoot)
}

// create makes the sandbox of a record that is not in the catalog yet.
func (c *Core) create(ctx context.Context, rec record, boot bool) (Sandbox, error) {
	e := newEntry(rec, 0)
	e.turn <- struct{}{} // nobody else touches it before it is there
	if err := c.insert(e); err != nil {
		return Sandbox{}, err
	}
	op, err := c.begin(ctx, e, opStart, func(ctx context.Context, _ *operation) error {
		err := c.establish(ctx, e, boot)
		if err == nil {
			c.emit(e, Event{Type: EventCreated, Resume: e.rec.LastResume})
		}
		return err
	})
	if err != nil {
		c.uninsert(e)
		return Sandbox{}, err
	}
	// Nobody but the caller learns of the sandbox: without it, it goes.
	stop := context.AfterFunc(ctx, func() { op.cancel(context.Cause(ctx)) })
	defer stop()
	if err := <-op.done; err != nil {
		return Sandbox{}, err
	}
	return c.view(e), nil
}

// establish records a sandbox and starts it, or takes it back.
func (c *Core) establish(ctx context.Context, e *entry, boot bool) error {
	defer c.pool.hold()()
	begun, from := time.Now(), originFresh
	if boot {
		from = originBoot
	}
	err := c.admit(ctx, e.id, "a new sandbox", e.rec.Shape)
	if err == nil && !boot {
		if _, ok := c.takePooled(e); ok {
			from = originPool
		}
	}
	if err == nil {
		err = c.recordNew(ctx, e)
	}
	if err == nil {
		points := startPoints{fpCreateRecorded, fpCreateLaunched, fpCreateHandle, fpCreatePrepared, fpCreateRunning}
		err = c.start(ctx, e, startRequest{from: from, points: points, at: begun})
	}
	if err == nil {
		return nil
	}
	err = causeOf(ctx, err)
	if e.unsettled {
		return err // whoever settles it takes it back, or finds that it runs
	}
	if why := c.memoryFailure(ctx, e); why != "" {
		err = fmt.Errorf("%s (%w)", why, err)
	}
	if undo := c.remove(ctx, e, "it was not created"); undo != nil {
		c.log.Warn("taking back a creation is put off", keySandbox, e.id, keyError, undo)
	}
	return stepError(err, "sandbox %s was not created", e.id)
}

// recordNew writes the first records of a sandbox: its name, then itself with
// the machine that is attached.
func (c *Core) recordNew(ctx context.Context, e *entry) error {
	if name := e.rec.Name; name != "" {
		short, cancel := c.short(ctx)
		defer cancel()
		_, err := swap(short, c.cfg.Catalog, kindName, name, []byte(e.id), 0)
		if errors.Is(err, catalog.ErrConflict) {
			return nameTaken(name)
		}
		if err != nil {
			return stepError(err, "record the name %s", name)
		}
	}
	return c.change(ctx, e, func(r *record) {
		if e.vm != nil {
			r.bind(e.vm.Handle())
		}
	})
}

func nameTaken(name string) error {
	return conflict("choose another name, or hib rm "+name, "there is a sandbox named %s already", name)
}

// insert makes a new entry known under its id and name.
func (c *Core) insert(e *entry) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if name := e.rec.Name; name != "" {
		if _, taken := c.names[name]; taken {
			return nameTaken(name)
		}
		c.names[name] = e.id
	}
	c.entries[e.id] = e
	return nil
}

// uninsert takes insert back.
func (c *Core) uninsert(e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.entries, e.id)
	if c.names[e.rec.Name] == e.id {
		delete(c.names, e.rec.Name)
	}
}

// checkOptions checks what a user asks for and completes the policy.
func (c *Core) checkOptions(o CreateOptions, policy *Policy) error {
	if o.Name != "" && (!namePattern.MatchString(o.Name) || idPattern.MatchString(o.Name)) {
		return invalid("the name %q is not usable: take 1 to 63 of a-z, 0-9 and '-', not '-' at an end, and not 20 letters and digits as in an id", clip(o.Name))
	}
	if err := checkShape(vmm.Shape{MemoryMiB: o.MemoryMiB, CPUs: o.CPUs}); err != nil {
		return err
	}
	for name := range o.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			return invalid("%q is no name of an environment variable", clip(name))
		}
	}
	for what, m := range map[string]map[string]string{"environment": o.Env, "labels": o.Labels} {
		if err := checkText(what, m); err != nil {
			return err
		}
	}
	if err := checkExpiry(Policy{}, *policy); err != nil {
		return err
	}
	return c.checkPolicy(policy)
}

// checkText bounds names and values that a user gives.
func checkText(what string, m map[string]string) error {
	size := 0
	for k, v := range m {
		size += len(k) + len(v)
		if k == "" || strings.ContainsRune(v, 0) {
			return invalid("the %s have an empty name or a zero byte", what)
		}
	}
	if size > maxText {
		return invalid("the %s are %d bytes long, more than %d", what, size, maxText)
	}
	return nil
}

// checkShape checks a shape in which 0 stands for a default.
func checkShape(s vmm.Shape) error {
	if s.MemoryMiB != 0 && (s.MemoryMiB < minMemoryMiB || s.MemoryMiB > maxMemoryMiB || s.MemoryMiB%2 != 0) {
		return invalid("%d MiB of memory: take an even number from %d to %d", s.MemoryMiB, minMemoryMiB, maxMemoryMiB)
	}
	if s.CPUs < 0 || s.CPUs > maxCPUs {
		return invalid("%d CPUs: take 1 to %d", s.CPUs, maxCPUs)
	}
	return nil
}

// clip bounds what an error repeats of its input.
func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "…"
	}
	return s
}
