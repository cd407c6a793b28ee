package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/hibernacle/hibernacle/internal/failpoint"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/template"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// BuildOptions says what template to build.
type BuildOptions struct {
	Name      string // default DefaultTemplate
	MemoryMiB int    // default shape, 0: DefaultShape's
	CPUs      int
}

// Progress is where a build is.
type Progress struct {
	Phase   string // "boot" for the base snapshot, else a phase of the build
	Message string
	Done    int64
	Total   int64 // 0: unknown
}

// baseGeneration is the generation that a machine runs at while its base
// snapshot is taken; a sandbox's begin behind it.
const baseGeneration = 1

// baseCaptureFactor is how much longer than a hibernation a base snapshot may take.
const baseCaptureFactor = 5

// BuildTemplate builds a version of a template, takes the base snapshot of its
// default shape and makes it the current one. Until then, and if it fails, the
// version before stays. The build ends with ctx. progress may be nil.
func (c *Core) BuildTemplate(ctx context.Context, o BuildOptions, progress func(Progress)) (Template, error) {
	if o.Name == "" {
		o.Name = DefaultTemplate
	}
	if progress == nil {
		progress = func(Progress) {}
	}
	shape, err := buildShape(o)
	if err != nil {
		return Template{}, err
	}
	if err := c.checkRoom("template " + o.Name); err != nil {
		return Template{}, err
	}
	c.mu.Lock()
	ctx, done, err := c.beginWork(ctx)
	c.mu.Unlock()
	if err != nil {
		return Template{}, err
	}
	defer done()
	t, number, err := c.beginBuild(o.Name)
	if err != nil {
		return Template{}, err
	}
	err = c.build(ctx, t, number, shape, progress)
	c.endBuild(t)
	if err != nil {
		return Template{}, stepError(causeOf(ctx, err), "template %s was not built", o.Name)
	}
	c.pruneLater(o.Name)
	c.seedPool()
	return c.Template(ctx, o.Name)
}

func buildShape(o BuildOptions) (vmm.Shape, error) {
	if !templatePattern.MatchString(o.Name) {
		return vmm.Shape{}, invalid("the template name %q is not usable: take 1 to 63 of a-z, 0-9, '.', '_' and '-'", clip(o.Name))
	}
	shape := DefaultShape
	if o.MemoryMiB != 0 {
		shape.MemoryMiB = o.MemoryMiB
	}
	if o.CPUs != 0 {
		shape.CPUs = o.CPUs
	}
	return shape, checkShape(shape)
}

// beginWork returns a context for work that ends with ctx or with the core. It
// is called with mu held.
func (c *Core) beginWork(ctx context.Context) (context.Context, func(), error) {
	ctx, cancel := context.WithCancelCause(ctx)
	op := &operation{cancel: cancel}
	if c.closed {
		cancel(errClosing)
		return nil, nil, unavailable(errClosing, "the core")
	}
	c.ops[op] = struct{}{}
	c.opsDone.Add(1)
	return ctx, func() {
		cancel(nil)
		c.mu.Lock()
		delete(c.ops, op)
		c.mu.Unlock()
		c.opsDone.Done()
	}, nil
}

// beginBuild reserves the template's next version.
func (c *Core) beginBuild(name string) (*tmpl, int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.templates[name]
	if t == nil {
		t = &tmpl{name: name, rec: templateRecord{Version: templateRecordVersion, Name: name}}
		c.templates[name] = t
	}
	if t.building {
		return nil, 0, conflict("wait for it to end", "template %s is being built", name)
	}
	if t.removing {
		return nil, 0, conflict("try again", "template %s is being removed", name)
	}
	t.building = true
	number := 1
	for _, v := range t.rec.Versions {
		number = max(number, v.Number+1)
	}
	return t, number, nil
}

func (c *Core) endBuild(t *tmpl) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t.building = false
	if t.rev == 0 {
		delete(c.templates, t.name) // nothing came of it
	}
}

// build makes a version and puts it in the place of the current one.
func (c *Core) build(ctx context.Context, t *tmpl, number int, shape vmm.Shape, progress func(Progress)) error {
	o := c.cfg.Build
	o.Name, o.Out = t.name, c.templateDir(t.name, number)
	c.removeAll(o.Out) // of a build that failed halfway
	if err := os.MkdirAll(filepath.Dir(o.Out), 0o755); err != nil {
		return err
	}
	art, err := c.cfg.Builder.Build(ctx, o, func(p template.Progress) {
		progress(Progress{Phase: string(p.Phase), Message: p.Message, Done: p.Done, Total: p.Total})
	})
	if err != nil {
		c.removeAll(o.Out)
		return err
	}
	v := templateVersion{Number: number, CreatedAt: time.Now().UTC(), Shape: shape,
		BaseDigest: art.BaseDigest, KernelDigest: art.KernelDigest, BaseBytes: art.BaseBytes, Kernel: art.KernelRelease}
	progress(Progress{Phase: "boot", Message: "taking the base snapshot of shape " + shape.String()})
	_, err = c.makeBase(ctx, t, v, shape, func(r templateRecord) templateRecord {
		r.Current = number
		return r
	})
	if err == nil {
		return nil
	}
	t.turn.Lock()
	defer t.turn.Unlock()
	if _, recorded := t.rec.find(number); recorded {
		undo := c.changeTemplate(ctx, t, func(r templateRecord) templateRecord { return r.without(number) })
		if undo != nil {
			c.log.Warn("taking back a build is put off", keyTemplate, t.name, keyError, undo)
			return err
		}
	}
	c.removeAll(o.Out)
	return err
}

// flight is a base snapshot that is being made, for all who wait for it.
type flight struct {
	done chan struct{}
	base baseRecord
	err  error
}

// base returns the base snapshot of a shape, which it makes on first use. Any
// number of callers wait for one boot, which goes on without them.
func (c *Core) base(ctx context.Context, name string, number int, shape vmm.Shape) (baseRecord, error) {
	key := fmt.Sprintf("%s/%d/%s", name, number, shape)
	c.mu.Lock()
	t := c.templates[name]
	if t == nil {
		c.mu.Unlock()
		return baseRecord{}, notFound("template", name)
	}
	v, _ := t.rec.find(number)
	if b, ok := v.base(shape); ok && b.Snapshot != nil {
		c.mu.Unlock()
		return b, nil
	}
	f := c.boots[key]
	if f == nil {
		work, done, err := c.beginWork(context.WithoutCancel(ctx))
		if err != nil {
			c.mu.Unlock()
			return baseRecord{}, err
		}
		f = &flight{done: make(chan struct{})}
		c.boots[key] = f
		go func() {
			defer done()
			c.fly(work, key, f, t, v, shape)
		}()
	}
	c.mu.Unlock()
	select {
	case <-f.done:
		return f.base, f.err
	case <-ctx.Done():
		return baseRecord{}, unavailable(context.Cause(ctx), "waiting for the base snapshot of template %s, shape %s", name, shape)
	}
}

func (c *Core) fly(ctx context.Context, key string, f *flight, t *tmpl, v templateVersion, shape vmm.Shape) {
	defer close(f.done)
	b, err := c.makeBase(ctx, t, v, shape, nil)
	if err != nil {
		f.err = stepError(causeOf(ctx, err), "no base snapshot of template %s, shape %s", t.name, shape)
	}
	f.base = b
	c.mu.Lock()
	delete(c.boots, key)
	c.mu.Unlock()
}

// makeBase boots a version of a template in a shape and keeps its snapshot.
// The snapshot's id is recorded before anything writes to it; finally is what
// else changes in the record together with the snapshot.
func (c *Core) makeBase(ctx context.Context, t *tmpl, v templateVersion, shape vmm.Shape, finally func(templateRecord) templateRecord) (baseRecord, error) {
	id, err := c.mint.take(ctx)
	if err != nil {
		return baseRecord{}, err
	}
	defer c.mint.put(id)
	if err := c.setBase(ctx, t, v, baseRecord{Shape: shape, Pending: id}, nil); err != nil {
		return baseRecord{}, err
	}
	b, err := c.bootBase(ctx, t.name, v.Number, shape, id)
	if err == nil {
		if err = c.setBase(ctx, t, v, b, finally); err == nil {
			return b, nil
		}
	}
	if undo := c.setBase(ctx, t, v, baseRecord{Shape: shape}, nil); undo != nil {
		err = errors.Join(err, undo)
	}
	c.trash.add(id)
	return baseRecord{}, err
}

// setBase records b as a base of v, which is added to the template if it is new.
func (c *Core) setBase(ctx context.Context, t *tmpl, v templateVersion, b baseRecord, finally func(templateRecord) templateRecord) error {
	t.turn.Lock()
	defer t.turn.Unlock()
	return c.changeTemplate(ctx, t, func(r templateRecord) templateRecord {
		if now, ok := r.find(v.Number); ok {
			v = now
		}
		r = r.with(v.withBase(b))
		if finally != nil {
			r = finally(r)
		}
		return r
	})
}

// bootBase boots a machine, takes its snapshot under id and ends it. The shim
// is never adopted: it must not outlive the daemon.
func (c *Core) bootBase(ctx context.Context, name string, version int, shape vmm.Shape, id snapshot.ID) (baseRecord, error) {
	if err := failpoint.Hit(ctx, fpBaseRecorded); err != nil {
		return baseRecord{}, err
	}
	art, err := c.artifacts(name, version)
	if err != nil {
		return baseRecord{}, err
	}
	key, err := c.key(ctx, shape, art)
	if err != nil {
		return baseRecord{}, err
	}
	machine := machineName("base")
	if err := c.admit(ctx, machine, fmt.Sprintf("the base machine of template %s, shape %s", name, shape), shape); err != nil {
		return baseRecord{}, err
	}
	defer c.admission.release(machine)
	vm, err := c.cfg.Launcher.Launch(ctx, LaunchSpec{VM: machine})
	if err != nil {
		return baseRecord{}, fmt.Errorf("start a machine: %w", err)
	}
	report, err := c.captureBase(ctx, vm, shim.Attach{Console: c.cfg.Console("base-" + name)}, shape, art, key, id)
	short, cancel := c.short(ctx)
	defer cancel()
	if endErr := c.endMachine(short, vm); endErr != nil && err == nil {
		err = fmt.Errorf("end the machine of a base snapshot: %w", endErr)
	}
	vm.Close()
	if err != nil {
		return baseRecord{}, err
	}
	meta := report.Metadata
	meta.ControlToken = ""
	return baseRecord{Shape: shape, Snapshot: &report.Snapshot, Metadata: &meta}, nil
}

func (c *Core) captureBase(ctx context.Context, vm VM, attach shim.Attach, shape vmm.Shape, art template.Artifacts, key vmm.Key, id snapshot.ID) (shim.CaptureReport, error) {
	deadline := baseCaptureFactor * c.cfg.CaptureTimeout
	ctx, cancel := context.WithTimeout(ctx, c.cfg.StartTimeout+deadline+captureGrace)
	defer cancel()
	if err := vm.Prepare(ctx, prepareRequest(shape, art, true)); err != nil {
		return shim.CaptureReport{}, fmt.Errorf("prepare a machine: %w", err)
	}
	ident, err := identity(&record{ID: "base", AccessToken: newToken()})
	if err != nil {
		return shim.CaptureReport{}, err
	}
	init := guestapi.InitRequest{Reason: guestapi.ReasonBoot, Generation: baseGeneration, Identity: ident}
	if _, err := vm.Boot(ctx, shim.BootRequest{Attach: attach, Init: init}); err != nil {
		return shim.CaptureReport{}, fmt.Errorf("boot: %w", err)
	}
	if err := failpoint.Hit(ctx, fpBaseBooted); err != nil {
		return shim.CaptureReport{}, err
	}
	report, err := vm.Capture(ctx, shim.CaptureRequest{Attempt: 1, ID: id, Deadline: deadline, Generation: baseGeneration, Key: key, Full: true})
	if err != nil {
		return report, fmt.Errorf("take the base snapshot: %w", err)
	}
	return report, failpoint.Hit(ctx, fpBaseSealed)
}
