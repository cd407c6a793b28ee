package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// loadTemplates reads the templates of the catalog, drops what builds and
// boots left that did not come to their end, and removes folders that no
// record names. Versions that nobody uses are pruned once the sandboxes are known.
func (c *Core) loadTemplates(ctx context.Context) error {
	records, err := c.cfg.Catalog.List(ctx, kindTemplate)
	if err != nil {
		return fmt.Errorf("read the templates: %w", err)
	}
	for _, r := range records {
		rec, err := decodeTemplate(r.Value)
		if err != nil {
			return fmt.Errorf("read the record of template %s: %w", r.Key, err)
		}
		t := &tmpl{name: rec.Name, rec: rec, rev: r.Revision}
		if err := c.dropUnfinished(ctx, t); err != nil {
			return err
		}
		c.sweep(rec.Name, t)
		if !t.removed {
			c.templates[rec.Name] = t
		}
	}
	return c.sweepFolders()
}

// dropUnfinished takes a failed build and base snapshots that were being made
// out of a template's record.
func (c *Core) dropUnfinished(ctx context.Context, t *tmpl) error {
	if t.rec.Current == 0 {
		if err := erase(ctx, c.cfg.Catalog, kindTemplate, t.name, t.rev); err != nil {
			return fmt.Errorf("drop the unfinished template %s: %w", t.name, err)
		}
		t.removed = true
		return nil
	}
	next, changed := t.rec, false
	for _, v := range t.rec.Versions {
		if v.Number > t.rec.Current {
			next, changed = next.without(v.Number), true
			continue
		}
		for _, b := range v.Bases {
			if b.Snapshot == nil {
				v, changed = v.withBase(baseRecord{Shape: b.Shape}), true
			}
		}
		next = next.with(v)
	}
	if !changed {
		return nil
	}
	return c.changeTemplate(ctx, t, func(templateRecord) templateRecord { return next })
}

// sweep removes the folders of versions that a template does not have.
func (c *Core) sweep(name string, t *tmpl) {
	dir := filepath.Join(c.cfg.TemplatesDir, name)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // nothing there; a use of it will say so
	}
	for _, entry := range entries {
		number, err := strconv.Atoi(strings.TrimPrefix(entry.Name(), "v"))
		if err == nil && !t.removed {
			if _, ok := t.rec.find(number); ok {
				continue
			}
		}
		c.removeAll(filepath.Join(dir, entry.Name()))
	}
	if t.removed {
		c.removeAll(dir)
	}
}

// sweepFolders removes the folders of templates that have no record.
func (c *Core) sweepFolders() error {
	if c.cfg.TemplatesDir == "" {
		return nil
	}
	entries, err := os.ReadDir(c.cfg.TemplatesDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look through the templates: %w", err)
	}
	for _, entry := range entries {
		if c.templates[entry.Name()] == nil && entry.IsDir() && templatePattern.MatchString(entry.Name()) {
			c.removeAll(filepath.Join(c.cfg.TemplatesDir, entry.Name()))
		}
	}
	return nil
}
