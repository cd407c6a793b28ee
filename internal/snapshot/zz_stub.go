package snapshot

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
)

var (
	ErrCorrupt = errors.New("corrupt")
	ErrMissing = errors.New("missing")
)

func NewID() ID { return ID(strings.ToLower(rand.Text())) }

type Status struct {
	Packs, Manifests, States                int
	PackBytes, ManifestBytes, StateBytes int64
}
type Collected struct{}
type Repository struct{}
type Snapshot struct{}

func (s *Snapshot) Metadata() Metadata { return Metadata{} }
func (s *Snapshot) Close() error       { return nil }

func (r *Repository) Find(ctx context.Context, id ID) (Ref, error)         { return Ref{}, nil }
func (r *Repository) Open(ctx context.Context, ref Ref) (*Snapshot, error) { return nil, nil }
func (r *Repository) Delete(ctx context.Context, id ID) error              { return nil }
func (r *Repository) Collect(ctx context.Context, roots, keep []ID) (Collected, error) {
	return Collected{}, nil
}
func (r *Repository) Status(ctx context.Context) (Status, error) { return Status{}, nil }
func (r *Repository) Verify(ctx context.Context, progress func(done, total int64)) (int, int64, []error, error) {
	return 0, 0, nil, nil
}
