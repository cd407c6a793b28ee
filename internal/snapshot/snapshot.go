// Package snapshot owns snapshots: their manifests, their capture and their
// lineage. This file fixes the nouns that others record and pass on.
package snapshot

import "time"

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
	CreatedAt    time.Time         `json:"created_at"`
	Attempt      uint64            `json:"attempt"`
	Generation   uint64            `json:"generation"`
	MemoryBytes  int64             `json:"memory_bytes"`
	DirtyBytes   int64             `json:"dirty_bytes"`
	StoredBytes  int64             `json:"stored_bytes"`
	Key          map[string]string `json:"key"`
	ControlToken string            `json:"control_token"`
}
