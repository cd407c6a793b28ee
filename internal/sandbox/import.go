package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/tier"
)

// Imported says what an import brought.
type Imported struct {
	Sandboxes []string // ids of those that are here now
	Templates []string // names
	Skipped   []string // one line each: what is here already or could not be taken, and why
}

// Import brings the sandboxes that the remote store holds to this host, in
// standby, with the versions of templates that they need. What is here already
// is left alone and reported as skipped, so an import that broke off is
// repeated. takeOver is for a store that belongs to another node, which must
// be gone for good: otherwise that is ErrConflict. progress (which may be nil)
// is told how much is done of how much.
func (c *Core) Import(ctx context.Context, takeOver bool, progress func(done, total int64)) (Imported, error) {
	if c.cfg.Tier == nil {
		return Imported{}, noRemote("there is nothing to import from")
	}
	if progress == nil {
		progress = func(int64, int64) {}
	}
	c.mu.Lock()
	ctx, done, err := c.beginWork(ctx)
	c.mu.Unlock()
	if err != nil {
		return Imported{}, err
	}
	defer done()
	// What is fetched is named by no record at first: nothing is collected meanwhile.
	c.storeTurn.Lock()
	defer c.storeTurn.Unlock()
	im := importing{core: c, templates: map[string]*importedTemplate{}}
	defer im.end()
	err = c.cfg.Tier.Import(ctx, takeOver, tier.Receiver{Dir: im.dir, Template: im.template, Sandbox: im.sandbox, Skipped: im.skipped, Progress: progress})
	im.out.Templates = slices.Sorted(maps.Keys(im.added))
	switch {
	case errors.Is(err, tier.ErrOwned):
		return im.out, &Error{Kind: ErrConflict, Message: "nothing was imported", Cause: err,
			Hint: "hib store import --take-over is for that case: two nodes that write to one store destroy each other's snapshots"}
	case err != nil:
		return im.out, stepError(causeOf(ctx, err), "the import did not come to its end")
	}
	return im.out, nil
}

// noRemote is the error of what only a remote store makes possible.
func noRemote(what string) error {
	return &Error{Kind: ErrInvalid, Message: "this host has no remote store: " + what, Hint: "name one with hib serve --store"}
}

// importing is an import under way. The tier calls its methods one after the
// other.
type importing struct {
	core      *Core
	templates map[string]*importedTemplate // by name
	added     map[string]struct{}          // templates that got a version
	out       Imported
}

// importedTemplate is a template of which versions are needed. It is kept from
// being built and removed until the end of the import.
type importedTemplate struct {
	t       *tmpl
	existed bool
	next    int         // number of a new version that has none of its own
	numbers map[int]int // of a version here, by that where it was built
}

func (im *importing) skipped(sandbox string, err error) {
	im.out.Skipped = append(im.out.Skipped, fmt.Sprintf("sandbox %s: %v", clip(sandbox), err))
}

// dir returns the folder that the files of a template belong to, "" if template
// will refuse it.
func (im *importing) dir(r tier.Template) string {
	name, v, err := decodeTemplateReplica(r)
	if err != nil {
		return ""
	}
	number, err := im.place(name, v)
	if err != nil {
		return ""
	}
	return im.core.templateDir(name, number)
}

// template records a version of a template whose files are here.
func (im *importing) template(ctx context.Context, r tier.Template) error {
	name, v, err := decodeTemplateReplica(r)
	if err != nil {
		return err
	}
	if v.Number, err = im.place(name, v); err != nil {
		return err
	}
	return im.addVersion(ctx, im.templates[name], v)
}

// sandbox records a sandbox of which all that a resume needs is here. Each step
// of an import leaves what a start of the daemon puts in order: a version that
// nobody uses, a name without a sandbox.
func (im *importing) sandbox(ctx context.Context, r tier.Replica) error {
	rec, err := decodeReplica(r)
	if err != nil {
		return err
	}
	c := im.core
	c.mu.Lock()
	_, here := c.entries[rec.ID]
	holder := c.names[rec.Name]
	c.mu.Unlock()
	switch {
	case here:
		return errors.New("it is here already")
	case rec.Name != "" && holder != "":
		return fmt.Errorf("its name %s is that of sandbox %s; hib rm %s, then import again", rec.Name, holder, holder)
	}
	rec.TemplateVersion, rec.LastUsed = im.templates[rec.Template].numbers[rec.TemplateVersion], r.LastUsed
	rec.continueCounts()
	if err := c.adoptRecord(ctx, rec); err != nil {
		return err
	}
	im.out.Sandboxes = append(im.out.Sandboxes, rec.ID)
	return nil
}

// continueCounts makes the attempts and generations go on behind those of
// every snapshot that the record has: the agent in each refuses those before.
func (rec *record) continueCounts() {
	metas := []*snapshot.Metadata{rec.Metadata}
	for i := range rec.Checkpoints {
		metas = append(metas, &rec.Checkpoints[i].Metadata)
	}
	for _, m := range metas {
		if m != nil {
			rec.Attempt, rec.Generation = max(rec.Attempt, m.Attempt), max(rec.Generation, m.Generation)
		}
	}
}

// decodeReplica reads the record of a sandbox, which nobody has checked yet.
func decodeReplica(r tier.Replica) (record, error) {
	rec, err := decodeRecord(r.Record)
	if err != nil {
		return rec, fmt.Errorf("its record: %w", err)
	}
	switch {
	case !idPattern.MatchString(rec.ID), rec.ID != r.Sandbox, rec.Name != "" && !namePattern.MatchString(rec.Name):
		return rec, errors.New("its record has a wrong id or name")
	case rec.State != StateStandby, rec.Handle != nil, rec.Pending != "", rec.Keep != nil, rec.GoOn:
		return rec, errors.New("its record is not that of a sandbox in standby")
	case rec.Snapshot == nil, *rec.Snapshot != r.Snapshot, rec.Metadata == nil:
		return rec, errors.New("its record names another snapshot")
	case rec.Template != r.Template.Name, rec.TemplateVersion != r.Template.Version:
		return rec, errors.New("its record names another template")
	}
	if err := rec.checkCheckpoints(r); err != nil {
		return rec, fmt.Errorf("its record: %w", err)
	}
	return rec, checkShape(rec.Shape)
}

// checkCheckpoints checks the checkpoints of a replica's record and leaves out
// those whose snapshots did not come with it.
func (rec *record) checkCheckpoints(r tier.Replica) error {
	if rec.WakeAs != "" && rec.WakeAs != guestapi.ReasonFork && rec.WakeAs != guestapi.ReasonRestore {
		return fmt.Errorf("it is to wake as %q", clip(rec.WakeAs))
	}
	names := map[string]bool{}
	var there []checkpoint
	for _, k := range rec.Checkpoints {
		if !namePattern.MatchString(k.Name) || names[k.Name] || len(names) >= 2*maxCheckpoints || k.WakeAs != "" && k.WakeAs != guestapi.ReasonFork {
			return fmt.Errorf("it has a wrong checkpoint %q", clip(k.Name))
		}
		names[k.Name] = true
		if slices.Contains(r.Checkpoints, k.Snapshot) {
			there = append(there, k)
		}
	}
	rec.Checkpoints = there
	return nil
}

// decodeTemplateReplica reads the record of a template's version, which nobody
// has checked yet.
func decodeTemplateReplica(r tier.Template) (name string, v templateVersion, err error) {
	t, err := decodeTemplate(r.Record)
	if err != nil {
		return "", v, fmt.Errorf("its record: %w", err)
	}
	v, ok := t.find(t.Current)
	if !ok || v.Number < 1 || t.Name != r.Name || v.Number != r.Version || !templatePattern.MatchString(t.Name) {
		return "", v, errors.New("its record is that of another template")
	}
	return t.Name, v, nil
}

// place returns the number that a version of a template has here, or is to
// have: its own, unless another one has that.
func (im *importing) place(name string, v templateVersion) (number int, err error) {
	it := im.templates[name]
	if it == nil {
		t, next, err := im.core.beginBuild(name)
		if err != nil {
			return 0, err
		}
		it = &importedTemplate{t: t, existed: t.rec.Current != 0, next: next, numbers: map[int]int{}}
		im.templates[name] = it
	}
	if number, known := it.numbers[v.Number]; known {
		return number, nil
	}
	for _, have := range it.t.rec.Versions {
		if have.BaseDigest == v.BaseDigest && have.KernelDigest == v.KernelDigest && sameOrigin(have, v) {
			number = have.Number
		}
	}
	if number == 0 {
		number = max(it.next, v.Number)
		it.next = number + 1
	}
	it.numbers[v.Number] = number
	return number, nil
}

// sameOrigin reports whether two versions of the same base image were both
// built, or made of the same snapshot of a sandbox.
func sameOrigin(a, b templateVersion) bool {
	if a.MadeOf == "" && b.MadeOf == "" {
		return true
	}
	return a.MadeOf == b.MadeOf && slices.EqualFunc(a.Bases, b.Bases, func(a, b baseRecord) bool {
		return a.Snapshot != nil && b.Snapshot != nil && *a.Snapshot == *b.Snapshot
	})
}

// addVersion records a version whose files are here, unless it is there.
func (im *importing) addVersion(ctx context.Context, it *importedTemplate, v templateVersion) error {
	c, t := im.core, it.t
	t.turn.Lock()
	defer t.turn.Unlock()
	if _, ok := t.rec.find(v.Number); ok {
		return nil
	}
	if err := c.verifyTemplate(namedVersion{t.name, v}); err != nil {
		return err
	}
	err := c.changeTemplate(ctx, t, func(r templateRecord) templateRecord {
		r = r.with(v)
		if !it.existed {
			r.Current = max(r.Current, v.Number)
		}
		return r
	})
	if err != nil {
		return err
	}
	if im.added == nil {
		im.added = map[string]struct{}{}
	}
	im.added[t.name] = struct{}{}
	return nil
}

// end lets go of the templates, and removes files that no version came to need.
func (im *importing) end() {
	for name, it := range im.templates {
		it.t.turn.Lock()
		for _, number := range it.numbers {
			if _, ok := it.t.rec.find(number); !ok && !it.t.stale {
				im.core.removeAll(im.core.templateDir(name, number))
			}
		}
		it.t.turn.Unlock()
		im.core.endBuild(it.t)
		im.core.pruneLater(name)
	}
}

// adoptRecord makes a sandbox of a record that is in standby and not in the catalog.
func (c *Core) adoptRecord(ctx context.Context, rec record) error {
	e, err := c.announce(rec)
	if err != nil {
		return err
	}
	return c.enroll(ctx, e, func() {})
}

// enroll records a sandbox that was announced and is in standby, or takes it
// back. recorded is called in its turn if it is there.
func (c *Core) enroll(ctx context.Context, e *entry, recorded func()) error {
	op, err := c.begin(ctx, e, opCheck, func(ctx context.Context, _ *operation) error {
		err := c.recordNew(ctx, e)
		switch {
		case err == nil:
			c.replicate(e)
			recorded()
		case !e.unsettled:
			if undo := c.erase(ctx, e); undo != nil {
				c.log.Warn("taking back a record is put off", keySandbox, e.id, keyError, undo)
			}
		}
		return err
	})
	if err != nil {
		c.uninsert(e)
		return err
	}
	return <-op.done
}
