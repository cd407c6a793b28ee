package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/template"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// DefaultShape is the shape of a template that is built without one.
var DefaultShape = vmm.Shape{MemoryMiB: 2048, CPUs: 1}

// templatePattern is what the name of a template looks like; it names a folder.
var templatePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$`)

// Template is a template as others see it: its current version.
type Template struct {
	Name        string
	Version     int
	CreatedAt   time.Time
	MemoryMiB   int // default shape
	CPUs        int
	BaseDigest  string
	BaseBytes   int64
	Kernel      string // release
	Bases       []TemplateBase
	SandboxRefs int // sandboxes of any version
}

// TemplateBase is a base snapshot of a template.
type TemplateBase struct {
	MemoryMiB   int
	CPUs        int
	Snapshot    snapshot.ID
	StoredBytes int64
}

// tmpl is a template in memory. The record is replaced, never written into;
// Core.mu guards rec, rev, building and removing, and turn serialises those who change them.
type tmpl struct {
	name     string
	turn     sync.Mutex
	rec      templateRecord
	rev      uint64
	building bool
	removing bool
	removed  bool // it has no record any more; read and written with turn held
	stale    bool // rec may not be what the catalog has; read and written with turn held
}

// pin names a version of a template.
type pin struct {
	template string
	version  int
}

// namedVersion is a version with the name of its template.
type namedVersion struct {
	name string
	templateVersion
}

// Templates returns all templates, sorted by name.
func (c *Core) Templates(context.Context) ([]Template, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []Template
	for _, t := range c.templates {
		if t.rec.Current != 0 {
			list = append(list, c.viewTemplate(t))
		}
	}
	slices.SortFunc(list, func(a, b Template) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// Template returns the template of that name.
func (c *Core) Template(_ context.Context, name string) (Template, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.templates[name]
	if t == nil || t.rec.Current == 0 {
		return Template{}, notFound("template", name)
	}
	return c.viewTemplate(t), nil
}

// viewTemplate is called with mu held.
func (c *Core) viewTemplate(t *tmpl) Template {
	v, _ := t.rec.find(t.rec.Current)
	out := Template{Name: t.name, Version: v.Number, CreatedAt: v.CreatedAt, MemoryMiB: v.Shape.MemoryMiB, CPUs: v.Shape.CPUs,
		BaseDigest: v.BaseDigest, BaseBytes: v.BaseBytes, Kernel: v.Kernel}
	for _, b := range v.Bases {
		if b.Snapshot == nil {
			continue
		}
		out.Bases = append(out.Bases, TemplateBase{MemoryMiB: b.Shape.MemoryMiB, CPUs: b.Shape.CPUs, Snapshot: b.Snapshot.ID, StoredBytes: b.Metadata.StoredBytes})
	}
	for _, n := range c.users(t.name) {
		out.SandboxRefs += n
	}
	return out
}

// users counts by version the sandboxes of a template and the creations under
// way. It is called with mu held.
func (c *Core) users(name string) map[int]int {
	counts := map[int]int{}
	for _, e := range c.entries {
		e.mu.Lock()
		if e.rec.Template == name {
			counts[e.rec.TemplateVersion]++
		}
		e.mu.Unlock()
	}
	for p, n := range c.pins {
		if p.template == name {
			counts[p.version] += n
		}
	}
	return counts
}

// pinTemplate returns the current version of a template and keeps it from
// being removed until unpin is called.
func (c *Core) pinTemplate(name string) (v templateVersion, unpin func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.templates[name]
	if t == nil || t.rec.Current == 0 || t.removing {
		return templateVersion{}, nil, notFound("template", clip(name))
	}
	v, _ = t.rec.find(t.rec.Current)
	p := pin{name, v.Number}
	c.pins[p]++
	return v, func() {
		c.mu.Lock()
		if c.pins[p]--; c.pins[p] == 0 {
			delete(c.pins, p)
		}
		c.mu.Unlock()
		c.pruneLater(name)
	}, nil
}

// versions returns every version of every template.
func (c *Core) versions() []namedVersion {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []namedVersion
	for name, t := range c.templates {
		for _, v := range t.rec.Versions {
			list = append(list, namedVersion{name, v})
		}
	}
	return list
}

func (c *Core) templateDir(name string, version int) string {
	return filepath.Join(c.cfg.TemplatesDir, name, "v"+strconv.Itoa(version))
}

// artifacts reads the artifacts of a template's version.
func (c *Core) artifacts(name string, version int) (template.Artifacts, error) {
	art, err := c.cfg.Builder.Load(c.templateDir(name, version))
	if err != nil {
		return art, fmt.Errorf("template %s version %d: %w", name, version, err)
	}
	return art, nil
}

// changeTemplate records what mutate makes of a template's record; the caller
// holds t.turn. After an error whose outcome is unknown the next change reads
// the record again; until then memory names what the catalog may name.
func (c *Core) changeTemplate(ctx context.Context, t *tmpl, mutate func(templateRecord) templateRecord) error {
	if t.removed {
		return notFound("template", t.name)
	}
	ctx, cancel := c.short(ctx)
	defer cancel()
	if err := c.refreshTemplate(ctx, t); err != nil {
		return err
	}
	next := mutate(t.rec)
	value, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("encode the record of template %s: %w", t.name, err)
	}
	rev, err := swap(ctx, c.cfg.Catalog, kindTemplate, t.name, value, t.rev)
	if err != nil {
		t.stale = !isUnwritten(err)
		return stepError(err, "record template %s", t.name)
	}
	c.mu.Lock()
	t.rec, t.rev = next, rev
	c.mu.Unlock()
	return nil
}

// refreshTemplate reads the record of a stale template again.
func (c *Core) refreshTemplate(ctx context.Context, t *tmpl) error {
	if !t.stale {
		return nil
	}
	rec, rev := templateRecord{Version: templateRecordVersion, Name: t.name}, uint64(0)
	r, err := c.cfg.Catalog.Get(ctx, kindTemplate, t.name)
	if err == nil {
		rev = r.Revision
		rec, err = decodeTemplate(r.Value)
	}
	if err != nil && !isNotFound(err) {
		return unavailable(err, "read the record of template %s", t.name)
	}
	c.mu.Lock()
	t.rec, t.rev = rec, rev
	c.mu.Unlock()
	t.stale = false
	return nil
}

// RemoveTemplate removes a template that no sandbox uses; ErrConflict counts
// those that do.
func (c *Core) RemoveTemplate(ctx context.Context, name string) error {
	c.mu.Lock()
	t := c.templates[name]
	c.mu.Unlock()
	if t == nil {
		return notFound("template", clip(name))
	}
	t.turn.Lock()
	defer t.turn.Unlock()
	ctx, cancel := c.short(ctx)
	defer cancel()
	if err := c.refreshTemplate(ctx, t); err != nil {
		return err
	}
	if err := c.beginRemoval(t); err != nil {
		return err
	}
	if err := erase(ctx, c.cfg.Catalog, kindTemplate, name, t.rev); err != nil {
		t.stale = true
		c.mu.Lock()
		t.removing = false
		c.mu.Unlock()
		return stepError(err, "remove template %s", name)
	}
	t.removed = true
	c.pool.drop(func(k poolKey) bool { return k.template == name })
	c.removeAll(filepath.Join(c.cfg.TemplatesDir, name))
	// Until here its snapshots were needed and its name was taken.
	c.mu.Lock()
	delete(c.templates, name)
	c.mu.Unlock()
	for _, v := range t.rec.Versions {
		c.trash.add(v.snapshots()...)
	}
	return nil
}

// beginRemoval checks that nobody uses the template and keeps it so.
func (c *Core) beginRemoval(t *tmpl) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, users := range c.users(t.name) {
		n += users
	}
	switch {
	case t.removed:
		return notFound("template", t.name)
	case t.building:
		return conflict("wait for the build to end", "template %s is being built", t.name)
	case n > 0:
		return conflict("delete them first", "template %s is used by %d sandboxes", t.name, n)
	}
	t.removing = true
	return nil
}

// pruneLater removes, in the background, versions of a template that are
// neither current nor used.
func (c *Core) pruneLater(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.templates[name]
	if t == nil || c.closed || len(t.rec.Versions) < 2 {
		return
	}
	c.opsDone.Add(1)
	go func() {
		defer c.opsDone.Done()
		if err := c.prune(context.Background(), t); err != nil {
			c.log.Warn("old versions of a template are left", keyTemplate, name, keyError, err)
		}
	}()
}

// prune removes the versions of a template that are neither current nor used
// nor being built.
func (c *Core) prune(ctx context.Context, t *tmpl) error {
	t.turn.Lock()
	defer t.turn.Unlock()
	c.mu.Lock()
	users := c.users(t.name)
	skip := t.building || t.removed
	var old []templateVersion
	for _, v := range t.rec.Versions {
		if v.Number != t.rec.Current && users[v.Number] == 0 {
			old = append(old, v)
		}
	}
	c.mu.Unlock()
	if skip {
		return nil // its end prunes
	}
	for _, v := range old {
		err := c.changeTemplate(ctx, t, func(r templateRecord) templateRecord { return r.without(v.Number) })
		if err != nil {
			return err
		}
		c.trash.add(v.snapshots()...)
		c.pool.drop(func(k poolKey) bool { return k.template == t.name && k.version == v.Number })
		c.removeAll(c.templateDir(t.name, v.Number))
	}
	return nil
}
