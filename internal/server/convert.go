package server

import (
	"fmt"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// The functions of this file translate between the core's nouns and the wire's.
// Maps and lists of an answer are never null.

func fromCreate(r api.CreateRequest) (sandbox.CreateOptions, error) {
	policy := sandbox.DefaultPolicy()
	err := patchPolicy(&policy, r.Policy)
	return sandbox.CreateOptions{
		Template: r.Template, Name: r.Name, MemoryMiB: r.MemoryMiB, CPUs: r.CPUs,
		Env: r.Env, Labels: r.Labels, ColdBoot: r.ColdBoot, Policy: &policy,
	}, err
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

func (srv *Server) toSandbox(s sandbox.Sandbox) api.Sandbox {
	out := api.Sandbox{
		ID: s.ID, Name: s.Name, Template: s.Template, State: api.State(s.State), Reason: s.Reason,
		CreatedAt: s.CreatedAt, MemoryMiB: s.MemoryMiB, CPUs: s.CPUs, Labels: orEmpty(s.Labels), Parked: s.Parked, ForkedFrom: s.ForkedFrom, Checkpoints: s.Checkpoints,
		Policy: toPolicy(s.Policy), TrafficToken: s.TrafficToken, PortURL: strings.ReplaceAll(srv.portURL, "{id}", s.ID),
		Usage: api.Usage{AwakeS: s.Usage.Awake.Seconds(), StandbyS: s.Usage.Standby.Seconds(), CPUS: s.Usage.CPU.Seconds(), StoredBytes: s.Usage.StoredBytes},
	}
	out.Leases = make([]api.Lease, 0, len(s.Leases))
	for _, l := range s.Leases {
		out.Leases = append(out.Leases, toLease(l))
	}
	if a := s.Activity; a != nil {
		out.Activity = toActivity(*a)
	}
	if r := s.Replication; r != nil {
		out.Replication = &api.Replication{State: r.State, Error: r.Error, SentBytes: r.SentBytes}
	}
	if n := s.Next; n != nil {
		out.Next = &api.Next{Limit: n.Limit, Action: string(n.Action), At: n.At}
	}
	if s.Snapshot != nil {
		snap := toSnapshot(*s.Snapshot)
		out.Snapshot = &snap
	}
	if s.LastHibernate != nil {
		out.LastHibernate = toHibernateReport(*s.LastHibernate)
	}
	if r := s.LastResume; r != nil {
		out.LastResume = &api.ResumeReport{
			Tier: r.Tier, TotalMS: r.TotalMS, Phases: orEmpty(r.Phases),
			BytesRead: r.BytesRead, Faults: r.Faults, PrefetchedBytes: r.PrefetchedBytes, Warnings: r.Warnings,
			DemandPages: r.DemandPages, WorkingSetBytes: r.WorkingSetBytes, BytesFetched: r.BytesFetched, Pooled: r.Pooled, By: r.By,
		}
	}
	return out
}

func toSnapshot(p sandbox.Snapshot) api.Snapshot {
	return api.Snapshot{
		ID: string(p.ID), Parent: string(p.Parent), CreatedAt: p.CreatedAt,
		MemoryBytes: p.MemoryBytes, DirtyBytes: p.DirtyBytes, StoredBytes: p.StoredBytes,
	}
}

func toHibernateReport(h sandbox.HibernateReport) *api.HibernateReport {
	out := &api.HibernateReport{Trigger: string(h.Trigger), TotalMS: h.TotalMS, PauseMS: h.PauseMS, Phases: orEmpty(h.Phases), Warnings: h.Warnings}
	if w := h.WorkingSet; w != nil {
		report := api.WorkingSetReport(*w)
		out.WorkingSet = &report
	}
	return out
}

func toLease(l sandbox.Lease) api.Lease {
	out := api.Lease{Kind: l.Kind, Owner: l.Owner, Since: l.Since}
	if !l.Until.IsZero() {
		out.Until = &l.Until
	}
	return out
}

func toActivity(a sandbox.Activity) *api.Activity {
	out := &api.Activity{
		Open: a.Open, Awaiting: a.Awaiting, IdleMS: float64(a.Idle.Microseconds()) / 1000,
		KeepAwake: make([]api.KeepAwake, 0, len(a.KeepAwake)), AgentError: a.AgentErr,
	}
	for _, p := range a.KeepAwake {
		out.KeepAwake = append(out.KeepAwake, api.KeepAwake(p))
	}
	return out
}

func toTemplate(t sandbox.Template) api.Template {
	out := api.Template{
		Name: t.Name, Version: t.Version, CreatedAt: t.CreatedAt, MemoryMiB: t.MemoryMiB, CPUs: t.CPUs,
		BaseDigest: t.BaseDigest, BaseBytes: t.BaseBytes, Kernel: t.Kernel,
		Bases: make([]api.TemplateBase, 0, len(t.Bases)), SandboxRefs: t.SandboxRefs, MadeOf: t.MadeOf,
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
	out := api.StoreStatus{
		Packs: s.Packs, PackBytes: s.PackBytes, Manifests: s.Manifests, ManifestBytes: s.ManifestBytes,
		States: s.States, StateBytes: s.StateBytes, BaseImages: s.BaseImages, BaseBytes: s.BaseBytes, FreeBytes: s.FreeBytes,
		Tiers: make([]api.TierStatus, 0, len(s.Tiers)), Sandboxes: make([]api.StoreSandbox, 0, len(s.Sandboxes)),
	}
	for _, t := range s.Tiers {
		out.Tiers = append(out.Tiers, api.TierStatus(t))
	}
	for _, sb := range s.Sandboxes {
		out.Sandboxes = append(out.Sandboxes, api.StoreSandbox(sb))
	}
	return out
}

func toCollected(c sandbox.Collected) api.Collected {
	out := api.Collected{DryRun: c.DryRun, Objects: c.Objects, Tiers: make([]api.CollectedTier, 0, len(c.Tiers))}
	for _, t := range c.Tiers {
		out.Tiers = append(out.Tiers, api.CollectedTier(t))
	}
	return out
}

func toImported(i sandbox.Imported) api.Imported {
	return api.Imported{Sandboxes: orNone(i.Sandboxes), Templates: orNone(i.Templates), Skipped: orNone(i.Skipped)}
}

func toVerify(v sandbox.Verify) api.Verify {
	return api.Verify{Objects: v.Objects, Bytes: v.Bytes, Faults: orNone(v.Faults)}
}

// orNone returns list, or one without elements instead of null.
func orNone(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

// orEmpty returns m, or an empty map instead of none.
func orEmpty[V any](m map[string]V) map[string]V {
	if m == nil {
		return map[string]V{}
	}
	return m
}
