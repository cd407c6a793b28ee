// Package sandbox is a placeholder of the core until it is there.
package sandbox

import (
	"errors"
	"time"
)

type State string

type Sandbox struct {
	ID            string
	Name          string
	Template      string
	State         State
	Reason        string
	CreatedAt     time.Time
	MemoryMiB     int
	CPUs          int
	Labels        map[string]string
	Snapshot      *Snapshot
	LastHibernate *HibernateReport
	LastResume    *ResumeReport
}

type Snapshot struct {
	ID, Parent                           string
	CreatedAt                            time.Time
	MemoryBytes, DirtyBytes, StoredBytes int64
}

type HibernateReport struct {
	TotalMS, PauseMS float64
	Phases           map[string]float64
	Warnings         []string
}

type ResumeReport struct {
	Tier              string
	TotalMS           float64
	Phases            map[string]float64
	BytesRead, Faults int64
	Warnings          []string
}

type CreateOptions struct {
	Template, Name  string
	MemoryMiB, CPUs int
	Env, Labels     map[string]string
	Allow, Deny     []string
	ColdBoot        bool
}

type Template struct {
	Name            string
	Version         int
	CreatedAt       time.Time
	MemoryMiB, CPUs int
	BaseDigest      string
	BaseBytes       int64
	Kernel          string
	Bases           []TemplateBase
	SandboxRefs     int
}

type TemplateBase struct {
	MemoryMiB, CPUs int
	Snapshot        string
	StoredBytes     int64
}

type BuildOptions struct {
	Name            string
	MemoryMiB, CPUs int
}

type Progress struct {
	Phase, Message string
	Done, Total    int64
}

type StoreStatus struct {
	Packs, Manifests, States, BaseImages                       int
	PackBytes, ManifestBytes, StateBytes, BaseBytes, FreeBytes int64
}

type Verify struct {
	Objects int
	Bytes   int64
	Faults  []string
}

var (
	ErrNotFound    = errors.New("not found")
	ErrConflict    = errors.New("conflict")
	ErrInvalid     = errors.New("invalid")
	ErrFailed      = errors.New("failed")
	ErrNoSpace     = errors.New("no space left on the disk")
	ErrUnavailable = errors.New("unavailable")
)

type Error struct {
	Kind    error
	Message string
	Hint    string
	Cause   error
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.Kind }

func Hint(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Hint
	}
	return ""
}
