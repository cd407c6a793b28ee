package sandbox

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// templateRecordVersion is the version of the layout of template records.
const templateRecordVersion = 1

// templateRecord is what the catalog keeps of a template. Versions other than
// Current are old ones that sandboxes use, or one that is being made.
type templateRecord struct {
	Version  int               `json:"version"` // of this layout
	Name     string            `json:"name"`
	Current  int               `json:"current"` // number of the version that new sandboxes get, 0: none yet
	Versions []templateVersion `json:"versions"`
}

// templateVersion is one build of a template. Its artifacts are in the folder
// vNUMBER of the template's.
type templateVersion struct {
	Number       int          `json:"number"`
	CreatedAt    time.Time    `json:"created_at"`
	Shape        vmm.Shape    `json:"shape"` // default
	BaseDigest   string       `json:"base_digest"`
	KernelDigest string       `json:"kernel_digest"`
	BaseBytes    int64        `json:"base_bytes"`
	Kernel       string       `json:"kernel"` // release
	Bases        []baseRecord `json:"bases"`  // one a shape
}

// baseRecord is the base snapshot of a shape, or the id of one being made.
type baseRecord struct {
	Shape    vmm.Shape          `json:"shape"`
	Pending  snapshot.ID        `json:"pending,omitempty"`
	Snapshot *snapshot.Ref      `json:"snapshot,omitempty"`
	Metadata *snapshot.Metadata `json:"metadata,omitempty"` // without the control token
}

func (r *templateRecord) find(number int) (templateVersion, bool) {
	i := slices.IndexFunc(r.Versions, func(v templateVersion) bool { return v.Number == number })
	if i < 0 || number == 0 {
		return templateVersion{}, false
	}
	return r.Versions[i], true
}

// with returns a copy of the record that has v in place of the version of that number.
func (r templateRecord) with(v templateVersion) templateRecord {
	r = r.without(v.Number)
	r.Versions = append(r.Versions, v)
	return r
}

// without returns a copy of the record that lacks a version.
func (r templateRecord) without(number int) templateRecord {
	var kept []templateVersion
	for _, v := range r.Versions {
		if v.Number != number {
			kept = append(kept, v)
		}
	}
	r.Versions = kept
	return r
}

func (v templateVersion) base(shape vmm.Shape) (baseRecord, bool) {
	i := slices.IndexFunc(v.Bases, func(b baseRecord) bool { return b.Shape == shape })
	if i < 0 {
		return baseRecord{}, false
	}
	return v.Bases[i], true
}

// withBase returns a copy of v that has b in place of the base of its shape; a
// base that is nothing is left out.
func (v templateVersion) withBase(b baseRecord) templateVersion {
	var bases []baseRecord
	for _, old := range v.Bases {
		if old.Shape != b.Shape {
			bases = append(bases, old)
		}
	}
	if b.Snapshot != nil || b.Pending != "" {
		bases = append(bases, b)
	}
	v.Bases = bases
	return v
}

// roots adds the snapshots that the version needs and those that it announces.
func (v templateVersion) roots(needed, announced map[snapshot.ID]struct{}) {
	for _, b := range v.Bases {
		if b.Snapshot != nil {
			needed[b.Snapshot.ID] = struct{}{}
		}
		if b.Pending != "" {
			announced[b.Pending] = struct{}{}
		}
	}
}

// snapshots returns all the snapshots that the version names.
func (v templateVersion) snapshots() []snapshot.ID {
	ids := map[snapshot.ID]struct{}{}
	v.roots(ids, ids)
	return slices.Collect(maps.Keys(ids))
}

// decodeTemplate reads a template record and refuses one that it cannot know.
func decodeTemplate(value []byte) (templateRecord, error) {
	var rec templateRecord
	if err := json.Unmarshal(value, &rec); err != nil {
		return rec, err
	}
	if rec.Version != templateRecordVersion {
		return rec, fmt.Errorf("it has version %d, this daemon reads %d: it was written by a newer one", rec.Version, templateRecordVersion)
	}
	return rec, nil
}
