// Package snapshot owns snapshots: their manifests, their capture, their
// lineage and the collection of what is not needed any more.
//
// A snapshot is an immutable generation of a machine. In the store it is a
// manifest (manifests/ID), a state file (states/ID: vCPU registers and devices)
// and pages in packs (packs/ID: the pages that the capture of snapshot ID
// wrote). The manifest maps the machine's memory image to pages of packs, its
// own and those of its ancestors, so no other manifest is needed to read it.
// docs/formats specifies the files.
//
// A snapshot exists when its manifest does; it is written last. A Ref names a
// snapshot together with the hash of its manifest, and everything else is
// verified from there.
package snapshot

import (
	"errors"
	"fmt"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/pack"
)

// Errors that callers act on. They are returned wrapped, with the key of the
// object in the message.
var (
	ErrCorrupt = errors.New("damaged object")
	ErrMissing = errors.New("missing object")
	ErrVersion = errors.New("unknown version of the object")
)

// ID names a snapshot: 26 characters of [a-z0-9].
type ID string

// Ref is what a catalog record holds of a snapshot.
type Ref struct {
	ID       ID     `json:"id"`
	Manifest string `json:"manifest"` // hexadecimal SHA-256 of the manifest file
}

// Metadata describes a snapshot; it is part of its manifest.
type Metadata struct {
	ID           ID                `json:"id"`
	Parent       ID                `json:"parent,omitempty"`
	Origin       ID                `json:"origin,omitempty"` // the snapshot whose capture took what this one, made by a compaction, holds
	CreatedAt    time.Time         `json:"created_at"`
	Attempt      uint64            `json:"attempt"`
	Generation   uint64            `json:"generation"`
	MemoryBytes  int64             `json:"memory_bytes"`
	DirtyBytes   int64             `json:"dirty_bytes"`  // that the capture looked at
	StoredBytes  int64             `json:"stored_bytes"` // that the capture wrote: pack, state file and manifest
	Key          map[string]string `json:"key"`
	ControlToken string            `json:"control_token"`
}

// Content names what the snapshot holds: state and memory image. Snapshots with
// the same Content hold the same.
func (m Metadata) Content() ID {
	if m.Origin != "" {
		return m.Origin
	}
	return m.ID
}

const (
	packPrefix     = "packs/"
	statePrefix    = "states/"
	manifestPrefix = "manifests/"
)

func packKey(id ID) string     { return packPrefix + string(id) }
func stateKey(id ID) string    { return statePrefix + string(id) }
func manifestKey(id ID) string { return manifestPrefix + string(id) }

// objectError names the object in err and says what kind of error it is.
func objectError(key string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, blob.ErrNotExist):
		return fmt.Errorf("%w %s: %w", ErrMissing, key, err)
	case errors.Is(err, pack.ErrCorrupt):
		return fmt.Errorf("%w %s: %w", ErrCorrupt, key, err)
	case errors.Is(err, pack.ErrVersion):
		return fmt.Errorf("%w %s: %w", ErrVersion, key, err)
	}
	return fmt.Errorf("%s: %w", key, err)
}

// corrupt returns an error about the object key that wraps ErrCorrupt.
func corrupt(key, format string, args ...any) error {
	return fmt.Errorf("%w %s: %s", ErrCorrupt, key, fmt.Sprintf(format, args...))
}

// unknownVersion returns the error about an object of a version that is not known.
func unknownVersion(key string, version, known uint32) error {
	return fmt.Errorf("%w %s: version %d, this release reads version %d", ErrVersion, key, version, known)
}
