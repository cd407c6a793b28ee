package sandbox

import (
	"context"
	"errors"
	"net"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/template"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// Catalog keeps the records. *catalog.Catalog is one; see its package for the contract.
type Catalog interface {
	Get(ctx context.Context, kind, key string) (catalog.Record, error)
	Put(ctx context.Context, kind, key string, value []byte, ifRevision uint64) (uint64, error)
	Delete(ctx context.Context, kind, key string, ifRevision uint64) error
	List(ctx context.Context, kind string) ([]catalog.Record, error)
}

// LaunchSpec describes a shim to be started. Whose machine it will hold is
// decided later, when that machine runs.
type LaunchSpec struct {
	VM string // the machine's name, unique for ever: at most 32 of [a-z0-9-]
}

// Launcher starts shims and finds them again.
type Launcher interface {
	// Launch starts a shim and returns when it takes orders. It ends with the
	// daemon until it is adopted. On error nothing is left running.
	Launch(ctx context.Context, spec LaunchSpec) (VM, error)

	// Adopt connects to the shim that h names. The error wraps shim.ErrGone only
	// if that process is proven dead (another boot, pid or start time), and
	// shim.ErrProtocol if it speaks another protocol.
	Adopt(ctx context.Context, h shim.Handle) (VM, error)

	// Kill ends the shim that h names, whatever it speaks and even if it does
	// not answer, with its VMM, and removes what they left. It returns nil only
	// if the process is proven dead; that it was dead before is no error.
	Kill(ctx context.Context, h shim.Handle) error

	// Orphans ends the shims whose machines are not among known and removes
	// what they, and others that died, left. No Launch is under way meanwhile.
	Orphans(ctx context.Context, known []string) error
}

// VM is a shim as the core sees it; *shim.Client is one. An error wraps
// shim.ErrGone only if the shim is proven dead, and a *shim.Error if the shim
// refused the order.
type VM interface {
	Handle() shim.Handle
	Status(ctx context.Context) (shim.Status, error)

	// Adopt makes the shim outlive the daemon. Idempotent.
	Adopt(ctx context.Context) error
	Prepare(ctx context.Context, req shim.PrepareRequest) error
	Boot(ctx context.Context, req shim.BootRequest) (shim.StartReport, error)
	Resume(ctx context.Context, req shim.ResumeRequest) (shim.StartReport, error)
	Capture(ctx context.Context, req shim.CaptureRequest) (shim.CaptureReport, error)
	Thaw(ctx context.Context, req shim.ThawRequest) error

	// Hooks returns the results of hooks that came with no report, each once.
	Hooks(ctx context.Context, req shim.HooksRequest) (shim.HooksReport, error)

	// Activity tells how busy a running guest is; the error wraps shim.ErrUnknown
	// if the shim is too old for that.
	Activity(ctx context.Context, req shim.ActivityRequest) (shim.Activity, error)

	// Park keeps a sealed machine paused. Idempotent. Unpark lets it go on; after
	// an error it can only be ended.
	Park(ctx context.Context, req shim.ParkRequest) (shim.ParkReport, error)
	Unpark(ctx context.Context, req shim.UnparkRequest) (shim.StartReport, error)

	// SetEgress puts an egress policy in force, for open connections too: ErrUnknown
	// of package shim where the shim is too old, its CodeInvalid where it cannot
	// read the policy; then the one before stays in force.
	SetEgress(ctx context.Context, req shim.EgressRequest) error

	// Release ends the shim and its VMM and waits until they are gone. Idempotent.
	Release(ctx context.Context) error
	Dial(ctx context.Context, port int) (net.Conn, error)

	// Watch calls fn with the present status first and then at each change of
	// phase and with what the egress policy denied, until ctx ends, the shim ends (shim.ErrGone) or the connection breaks.
	Watch(ctx context.Context, fn func(shim.Event)) error

	// Close lets go of the connection and leaves the shim as it is.
	Close()
}

// Repository keeps snapshots. FromRepository makes one of a snapshot.Repository.
type Repository interface {
	// Find returns the Ref of a snapshot that is whole; an error that wraps
	// snapshot.ErrMissing or snapshot.ErrCorrupt says that it is not.
	Find(ctx context.Context, id snapshot.ID) (snapshot.Ref, error)
	Metadata(ctx context.Context, ref snapshot.Ref) (snapshot.Metadata, error)
	Delete(ctx context.Context, id snapshot.ID) error
	Collect(ctx context.Context, roots, keep []snapshot.ID) (snapshot.Collected, error)

	// Garbage finds out what Collect would delete.
	Garbage(ctx context.Context, roots, keep []snapshot.ID) (snapshot.Collected, error)
	Status(ctx context.Context) (snapshot.Status, error)
	Verify(ctx context.Context, progress func(done, total int64)) (objects int, bytes int64, faults []error, err error)

	// Footprint measures a snapshot; shared says which packs others use.
	Footprint(ctx context.Context, ref snapshot.Ref, shared func(pack snapshot.ID) bool) (snapshot.Footprint, error)

	Packs(ctx context.Context, ref snapshot.Ref) ([]snapshot.Pack, error)
	Compact(ctx context.Context, in snapshot.CompactInput) (snapshot.Ref, snapshot.Metadata, snapshot.Compacted, error)

	// DropCache makes the host let go of the pages of the snapshot's local
	// objects that it keeps in memory.
	DropCache(ctx context.Context, ref snapshot.Ref) error
}

// Cache is where local objects are cached; a *disk.Store is one.
type Cache interface {
	// DropCache makes the host let go of the pages of an object that it keeps in
	// memory; the error wraps blob.ErrNotExist if there is no such object.
	DropCache(ctx context.Context, key string) error
}

// FromRepository makes a Repository of this package of r, whose local objects
// are cached by cache.
func FromRepository(r *snapshot.Repository, cache Cache) Repository { return repository{r, cache} }

type repository struct {
	*snapshot.Repository
	cache Cache
}

func (r repository) DropCache(ctx context.Context, ref snapshot.Ref) error {
	packs, err := r.Packs(ctx, ref)
	if err != nil {
		return err
	}
	keys := []string{snapshot.KindManifest.Key(ref.ID), snapshot.KindState.Key(ref.ID), snapshot.KindWorkingSet.Key(ref.ID)}
	for _, p := range packs {
		keys = append(keys, p.Key())
	}
	for _, key := range keys {
		// What is not local is not cached either.
		if err := r.cache.DropCache(ctx, key); err != nil && !errors.Is(err, blob.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Metadata reads the metadata of a snapshot, verified against its Ref.
func (r repository) Metadata(ctx context.Context, ref snapshot.Ref) (snapshot.Metadata, error) {
	s, err := r.Open(ctx, ref)
	if err != nil {
		return snapshot.Metadata{}, err
	}
	return s.Metadata(), s.Close()
}

// Keys tells the driver's part of compatibility keys; a vmm.Driver does.
type Keys interface {
	Key(ctx context.Context, shape vmm.Shape) (vmm.Key, error)
}

// Builder makes and reads the artifacts of templates; TemplateBuilder is one.
type Builder interface {
	Build(ctx context.Context, o template.Options, progress func(template.Progress)) (template.Artifacts, error)
	Load(dir string) (template.Artifacts, error)
	Verify(a template.Artifacts) error

	// Check is Verify, but takes files that were not touched since they were
	// verified for good.
	Check(a template.Artifacts) error
}

// TemplateBuilder is the Builder that package template makes up.
type TemplateBuilder struct{ checker template.Checker }

// Build calls template.Build.
func (*TemplateBuilder) Build(ctx context.Context, o template.Options, progress func(template.Progress)) (template.Artifacts, error) {
	return template.Build(ctx, o, progress)
}

// Load calls template.Load.
func (*TemplateBuilder) Load(dir string) (template.Artifacts, error) { return template.Load(dir) }

// Verify calls the artifacts' own Verify.
func (*TemplateBuilder) Verify(a template.Artifacts) error { return a.Verify() }

// Check asks a template.Checker.
func (b *TemplateBuilder) Check(a template.Artifacts) error { return b.checker.Check(a) }
