package server

import (
	"fmt"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// The functions of this file translate between the core's nouns and the wire's.
// Maps and lists of an answer are never null.

func fromCreate(r api.CreateRequest) sandbox.CreateOptions {
	o := sandbox.CreateOptions{
		Template: r.Template, Name: r.Name, MemoryMiB: r.MemoryMiB, CPUs: r.CPUs,
		Env: r.Env, Labels: r.Labels, ColdBoot: r.ColdBoot,
	}
	if r.Egress != nil {
		o.Allow, o.Deny = r.Egress.Allow, r.Egress.Deny
	}
	return o
}

// maxStoreDelay bounds the delay that a resume may ask for, in milliseconds.
const maxStoreDelay = 10_000

func fromResume(r api.ResumeRequest) (sandbox.ResumeOptions, error) {
	if r.StoreDelayMS < 0 || r.StoreDelayMS > maxStoreDelay {
		return sandbox.ResumeOptions{}, requestError{fmt.Sprintf("store_delay_ms is %d", r.StoreDelayMS), fmt.Sprintf("take 0 to %d", maxStoreDelay)}
	}
	return sandbox.ResumeOptions{
		NoParked: r.NoParked, NoPool: r.NoPool, NoPrefetch: r.NoPrefetch, StoreDelay: time.Duration(r.StoreDelayMS) * time.Millisecond,
	}, nil
}

func fromBuild(r api.BuildRequest) sandbox.BuildOptions {
	return sandbox.BuildOptions{Name: r.Name, MemoryMiB: r.MemoryMiB, CPUs: r.CPUs}
}

func toSandbox(s sandbox.Sandbox) api.Sandbox {
	out := api.Sandbox{
		ID: s.ID, Name: s.Name, Template: s.Template, State: api.State(s.State), Reason: s.Reason,
		CreatedAt: s.CreatedAt, MemoryMiB: s.MemoryMiB, CPUs: s.CPUs, Labels: orEmpty(s.Labels), Parked: s.Parked,
	}
	if r := s.Replication; r != nil {
		out.Replication = &api.Replication{State: r.State, Error: r.Error}
	}
	if p := s.Snapshot; p != nil {
		out.Snapshot = &api.Snapshot{
			ID: string(p.ID), Parent: string(p.Parent), CreatedAt: p.CreatedAt,
			MemoryBytes: p.MemoryBytes, DirtyBytes: p.DirtyBytes, StoredBytes: p.StoredBytes,
		}
	}
	if h := s.LastHibernate; h != nil {
		out.LastHibernate = &api.HibernateReport{TotalMS: h.TotalMS, PauseMS: h.PauseMS, Phases: orEmpty(h.Phases), Warnings: h.Warnings}
		if w := h.WorkingSet; w != nil {
			report := api.WorkingSetReport(*w)
			out.LastHibernate.WorkingSet = &report
		}
	}
	if r := s.LastResume; r != nil {
		out.LastResume = &api.ResumeReport{
			Tier: r.Tier, TotalMS: r.TotalMS, Phases: orEmpty(r.Phases),
			BytesRead: r.BytesRead, Faults: r.Faults, PrefetchedBytes: r.PrefetchedBytes, Warnings: r.Warnings,
			DemandPages: r.DemandPages, WorkingSetBytes: r.WorkingSetBytes, BytesFetched: r.BytesFetched, Pooled: r.Pooled,
		}
	}
	return out
}

func toTemplate(t sandbox.Template) api.Template {
	out := api.Template{
		Name: t.Name, Version: t.Version, CreatedAt: t.CreatedAt, MemoryMiB: t.MemoryMiB, CPUs: t.CPUs,
		BaseDigest: t.BaseDigest, BaseBytes: t.BaseBytes, Kernel: t.Kernel,
		Bases: make([]api.TemplateBase, 0, len(t.Bases)), SandboxRefs: t.SandboxRefs,
	}
	for _, b := range t.Bases {
		out.Bases = append(out.Bases, api.TemplateBase{MemoryMiB: b.MemoryMiB, CPUs: b.CPUs, Snapshot: string(b.Snapshot), StoredBytes: b.StoredBytes})
	}
	return out
}

func toProgress(p sandbox.Progress) api.Progress {
	return api.Progress{Phase: p.Phase, Message: p.Message, Done: p.Done, Total: p.Total}
}

func toStoreStatus(s sandbox.StoreStatus) api.StoreStatus {
	return api.StoreStatus{
		Packs: s.Packs, PackBytes: s.PackBytes, Manifests: s.Manifests, ManifestBytes: s.ManifestBytes,
		States: s.States, StateBytes: s.StateBytes, BaseImages: s.BaseImages, BaseBytes: s.BaseBytes, FreeBytes: s.FreeBytes,
		Tiers: []api.TierStatus{}, Sandboxes: []api.StoreSandbox{},
	}
}

func toVerify(v sandbox.Verify) api.Verify {
	out := api.Verify{Objects: v.Objects, Bytes: v.Bytes, Faults: v.Faults}
	if out.Faults == nil {
		out.Faults = []string{}
	}
	return out
}

// orEmpty returns m, or an empty map instead of none.
func orEmpty[V any](m map[string]V) map[string]V {
	if m == nil {
		return map[string]V{}
	}
	return m
}
