// Package catalogtest holds what tests need of a catalog: an implementation in
// memory, and the suite that every implementation must pass.
package catalogtest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/hibernacle/hibernacle/internal/catalog"
)

// Memory is a catalog in memory. The zero value is empty and ready.
type Memory struct {
	mu      sync.Mutex
	last    uint64
	records map[[2]string]catalog.Record
}

// Get is as in catalog.Catalog.
func (m *Memory) Get(ctx context.Context, kind, key string) (catalog.Record, error) {
	if err := ctx.Err(); err != nil {
		return catalog.Record{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	rec, ok := m.records[[2]string{kind, key}]
	if !ok {
		return rec, fmt.Errorf("read %s %s: %w", kind, key, catalog.ErrNotFound)
	}
	rec.Value = slices.Clone(rec.Value)
	return rec, nil
}

// Put is as in catalog.Catalog.
func (m *Memory) Put(ctx context.Context, kind, key string, value []byte, ifRevision uint64) (uint64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	k := [2]string{kind, key}
	rec, ok := m.records[k]
	switch {
	case !ok && ifRevision != 0:
		return 0, fmt.Errorf("write %s %s: %w", kind, key, catalog.ErrNotFound)
	case rec.Revision != ifRevision:
		return 0, fmt.Errorf("write %s %s: %w", kind, key, catalog.ErrConflict)
	}
	if m.records == nil {
		m.records = map[[2]string]catalog.Record{}
	}
	m.last++
	m.records[k] = catalog.Record{Key: key, Value: slices.Clone(value), Revision: m.last}
	return m.last, nil
}

// Delete is as in catalog.Catalog.
func (m *Memory) Delete(ctx context.Context, kind, key string, ifRevision uint64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	k := [2]string{kind, key}
	rec, ok := m.records[k]
	switch {
	case !ok:
		return fmt.Errorf("delete %s %s: %w", kind, key, catalog.ErrNotFound)
	case rec.Revision != ifRevision:
		return fmt.Errorf("delete %s %s: %w", kind, key, catalog.ErrConflict)
	}
	delete(m.records, k)
	return nil
}

// List is as in catalog.Catalog.
func (m *Memory) List(ctx context.Context, kind string) ([]catalog.Record, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []catalog.Record
	for k, rec := range m.records {
		if k[0] == kind {
			rec.Value = slices.Clone(rec.Value)
			list = append(list, rec)
		}
	}
	slices.SortFunc(list, func(a, b catalog.Record) int { return strings.Compare(a.Key, b.Key) })
	return list, nil
}
