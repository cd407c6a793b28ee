package sandbox

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/hibernacle/hibernacle/internal/vmm"
)

// CreateTemplateFrom makes a version of a template whose base snapshot is a
// sandbox's: what it is now, or with a name one of its checkpoints. Sandboxes of
// it begin there under identities of their own. It has the base image of the
// sandbox's template and one machine shape, the sandbox's: what that did is in
// no other. A sandbox that runs stands still as for a checkpoint and goes on.
func (c *Core) CreateTemplateFrom(ctx context.Context, id, checkpoint, name string) (Template, error) {
	if !templatePattern.MatchString(name) {
		return Template{}, invalidTemplateName(name)
	}
	e, err := c.find(id)
	if err != nil {
		return Template{}, err
	}
	t, number, err := c.beginBuild(name)
	if err != nil {
		return Template{}, err
	}
	// The turn is kept until a template names the snapshot, so nobody deletes it.
	err = c.run(context.WithoutCancel(ctx), e, opCheckpoint, func(ctx context.Context, op *operation) error {
		from, err := c.source(ctx, e, op, checkpoint)
		if err != nil {
			return err
		}
		return c.addTemplateOf(ctx, e, t, number, from)
	})
	c.endBuild(t)
	if err != nil {
		return Template{}, err
	}
	c.pruneLater(name)
	return c.Template(ctx, name)
}

// addTemplateOf copies the artifacts of the sandbox's template and records the
// version that is made of them and of the checkpoint.
func (c *Core) addTemplateOf(ctx context.Context, e *entry, t *tmpl, number int, from checkpoint) error {
	c.mu.Lock()
	var v templateVersion
	if of := c.templates[e.rec.Template]; of != nil {
		v, _ = of.rec.find(e.rec.TemplateVersion)
	}
	c.mu.Unlock()
	art, err := c.artifacts(e.rec.Template, e.rec.TemplateVersion)
	if err != nil {
		return stepError(err, "template %s was not made", t.name)
	}
	out := c.templateDir(t.name, number)
	c.removeAll(out) // of one that failed halfway
	err = os.MkdirAll(filepath.Dir(out), 0o755)
	if err == nil {
		_, err = c.cfg.Builder.Copy(ctx, art, t.name, out)
	}
	if err != nil {
		c.removeAll(out)
		return stepError(err, "template %s was not made", t.name)
	}
	meta := from.Metadata
	made := templateVersion{Number: number, CreatedAt: time.Now().UTC(), Shape: e.rec.Shape, MadeOf: e.id,
		BaseDigest: v.BaseDigest, KernelDigest: v.KernelDigest, BaseBytes: v.BaseBytes, Kernel: v.Kernel,
		Bases: []baseRecord{{Shape: e.rec.Shape, Snapshot: &from.Snapshot, Metadata: &meta}}}
	t.turn.Lock()
	defer t.turn.Unlock()
	err = c.changeTemplate(ctx, t, func(r templateRecord) templateRecord {
		r = r.with(made)
		r.Current = number
		return r
	})
	if err != nil && !t.stale {
		c.removeAll(out)
	}
	return err
}

// madeOfOne is the error of a shape that a template made of a sandbox has not.
func madeOfOne(name string, v templateVersion, asked vmm.Shape) error {
	return &Error{Kind: ErrInvalid, Message: "template " + name + " was made of a sandbox of shape " + v.Shape.String() + " and has no other: " + asked.String() + " is not possible",
		Hint: "leave the shape out, or take a template that was built"}
}
