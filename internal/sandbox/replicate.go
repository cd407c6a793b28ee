package sandbox

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/tier"
)

// Tier replicates snapshots to a remote store. *tier.Tier is one; see its
// package for the contract.
type Tier interface {
	Replicate(r tier.Replica)
	Forget(sandbox string)
	Promote(ref snapshot.Ref)
	Status(sandbox string, id snapshot.ID) tier.Status
	Usage(ctx context.Context) ([]tier.Usage, error)
	Evict(ctx context.Context, ref snapshot.Ref) (packs int, bytes int64, err error)
	Local(ctx context.Context, ref snapshot.Ref) (bytes int64, err error)
	Collect(ctx context.Context, roots, keep []snapshot.ID, dryRun bool) (tier.Collected, error)
	VerifyRemote(ctx context.Context, progress func(done, total int64)) (objects int, bytes int64, faults []error, err error)
	Import(ctx context.Context, takeOver bool, to tier.Receiver) error
}

// replicable reports whether the record stands for something that its template
// does not give: a sandbox that has never slept has nothing to replicate.
func (rec *record) replicable() bool {
	return rec.Snapshot != nil && !rec.Fresh
}

// replicate hands the snapshot that the sandbox's record names to the remote
// tier. Every change of what another node would need calls it, and so does the
// recovery: what was handed over before costs nothing. The caller has the turn.
func (c *Core) replicate(e *entry) {
	if c.cfg.Tier == nil || !e.rec.replicable() {
		return
	}
	r, err := c.replica(&e.rec)
	if err != nil {
		c.log.Error("a sandbox is not replicated", keySandbox, e.id, keyError, err)
		return
	}
	c.cfg.Tier.Replicate(r)
}

// replica returns what brings the sandbox back elsewhere.
func (c *Core) replica(rec *record) (tier.Replica, error) {
	value, err := json.Marshal(rec.portable())
	if err != nil {
		return tier.Replica{}, fmt.Errorf("encode the record of sandbox %s: %w", rec.ID, err)
	}
	r := tier.Replica{Sandbox: rec.ID, Snapshot: *rec.Snapshot, Record: value, LastUsed: rec.LastUsed}
	if r.LastUsed.IsZero() {
		r.LastUsed = rec.Metadata.CreatedAt // the record is of before it was kept
	}
	c.mu.Lock()
	var v templateVersion
	if t := c.templates[rec.Template]; t != nil {
		v, _ = t.rec.find(rec.TemplateVersion)
	}
	c.mu.Unlock()
	if v.Number == 0 {
		return tier.Replica{}, fmt.Errorf("template %s has no version %d", rec.Template, rec.TemplateVersion)
	}
	r.Template, err = c.templateReplica(rec.Template, v)
	return r, err
}

// templateReplica returns what brings a version of a template back elsewhere.
func (c *Core) templateReplica(name string, v templateVersion) (tier.Template, error) {
	portable := templateRecord{Version: templateRecordVersion, Name: name, Current: v.Number, Versions: []templateVersion{v.finished()}}
	value, err := json.Marshal(portable)
	if err != nil {
		return tier.Template{}, fmt.Errorf("encode the record of template %s: %w", name, err)
	}
	t := tier.Template{Name: name, Version: v.Number, Dir: c.templateDir(name, v.Number), Record: value}
	for _, b := range portable.Versions[0].Bases {
		t.Bases = append(t.Bases, *b.Snapshot)
	}
	return t, nil
}

// portable returns the record without what is only of this host and without
// what changes while the snapshot stays the same: a record that is written to
// the catalog of another host makes a sandbox in standby of the snapshot.
func (rec *record) portable() record {
	return record{
		Version: rec.Version, ID: rec.ID, Name: rec.Name, Template: rec.Template, TemplateVersion: rec.TemplateVersion, Shape: rec.Shape,
		Labels: rec.Labels, Env: rec.Env, Policy: rec.Policy, AccessToken: rec.AccessToken, TrafficToken: rec.TrafficToken, CreatedAt: rec.CreatedAt,
		State: StateStandby, Snapshot: rec.Snapshot, Metadata: rec.Metadata,
	}
}

// finished returns the version without base snapshots that are being made.
func (v templateVersion) finished() templateVersion {
	var bases []baseRecord
	for _, b := range v.Bases {
		if b.Snapshot != nil {
			bases = append(bases, b)
		}
	}
	v.Bases = bases
	return v
}

// view returns the sandbox as others may see it.
func (c *Core) view(e *entry) Sandbox {
	s := e.view()
	if c.cfg.Tier != nil && s.Snapshot != nil {
		st := c.cfg.Tier.Status(s.ID, s.Snapshot.ID)
		s.Replication = &Replication{State: string(st.State), SentBytes: st.Sent}
		if st.Err != nil {
			s.Replication.Error = st.Err.Error()
		}
	}
	return s
}
