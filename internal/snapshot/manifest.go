package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

// manifestVersion is the version of manifests that this release writes and reads.
const manifestVersion = 2

const (
	manifestMagic  = "HIBMANI\n"
	manifestHeader = 32
	packEntrySize  = 72
	runEntrySize   = 12

	maxManifest    = 1 << 30
	maxMetadata    = 1 << 20
	maxMemoryPages = 1<<32 - 2
)

// manifest is a manifest in memory.
type manifest struct {
	metadata Metadata
	state    stateRef
	packs    []packRef
	runs     []run // tile the memory
}

// packRef is a manifest's record of a pack.
type packRef struct {
	id      ID           // of the snapshot whose capture wrote it
	summary pack.Summary // the size, which differs between stores, is not recorded
}

// stateRef is a manifest's record of its state file, the whole file.
type stateRef struct {
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// document is the JSON part of a manifest.
type document struct {
	Metadata
	State stateRef `json:"state"`
}

// encode sets metadata.StoredBytes to written, the bytes of pack and state
// file, plus those of the manifest itself, and returns the manifest file.
func (m *manifest) encode(written int64) ([]byte, error) {
	var doc []byte
	var size int64
	// The number is part of what it counts: repeat until it fits.
	for m.metadata.StoredBytes = 0; m.metadata.StoredBytes == 0 || m.metadata.StoredBytes != written+size; {
		m.metadata.StoredBytes = written + size
		var err error
		if doc, err = json.Marshal(document{m.metadata, m.state}); err != nil {
			return nil, fmt.Errorf("encode metadata: %w", err)
		}
		size = int64(manifestHeader + len(doc) + packEntrySize*len(m.packs) + runEntrySize*len(m.runs) + sha256.Size)
	}
	if len(doc) > maxMetadata || size > maxManifest {
		return nil, fmt.Errorf("encode manifest: %d bytes, %d of them metadata, are too many", size, len(doc))
	}
	le := binary.LittleEndian
	b := make([]byte, 0, size)
	b = append(b, manifestMagic...)
	b = le.AppendUint32(b, manifestVersion)
	b = le.AppendUint32(b, uint32(len(doc)))
	b = le.AppendUint32(b, uint32(len(m.packs)))
	b = le.AppendUint32(b, uint32(len(m.runs)))
	b = le.AppendUint64(b, uint64(pagesOf(m.metadata.MemoryBytes)))
	b = append(b, doc...)
	for _, p := range m.packs {
		b = append(b, p.id...)
		b = append(b, 0, 0, 0, 0, 0, 0)
		b = le.AppendUint64(b, uint64(p.summary.Pages))
		b = append(b, p.summary.Sum[:]...)
	}
	for _, r := range m.runs {
		b = le.AppendUint32(b, r.count)
		b = le.AppendUint32(b, r.pack)
		b = le.AppendUint32(b, r.packPage)
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

// parseManifest decodes and checks the manifest file b of snapshot id. Errors
// name the object and wrap ErrCorrupt or ErrVersion.
func parseManifest(id ID, b []byte) (*manifest, error) {
	key := manifestKey(id)
	if len(b) < manifestHeader+sha256.Size || string(b[:8]) != manifestMagic {
		return nil, corrupt(key, "it is cut off, or no manifest")
	}
	le := binary.LittleEndian
	if v := le.Uint32(b[8:]); v != manifestVersion {
		return nil, unknownVersion(key, v, manifestVersion)
	}
	body, sum := b[:len(b)-sha256.Size], b[len(b)-sha256.Size:]
	if got := sha256.Sum256(body); !bytes.Equal(got[:], sum) {
		return nil, corrupt(key, "it does not fit the hash at its end")
	}
	docLen, packs, runs := int64(le.Uint32(b[12:])), int64(le.Uint32(b[16:])), int64(le.Uint32(b[20:]))
	pages := le.Uint64(b[24:])
	if docLen > maxMetadata || pages == 0 || pages > maxMemoryPages || runs == 0 || uint64(runs) > pages || packs > runs ||
		int64(len(body)) != manifestHeader+docLen+packs*packEntrySize+runs*runEntrySize {
		return nil, corrupt(key, "%d bytes of metadata, %d packs, %d runs and %d pages do not fit its %d bytes", docLen, packs, runs, pages, len(b))
	}
	m := &manifest{}
	body = body[manifestHeader:]
	if err := m.parseDocument(id, body[:docLen], pages); err != nil {
		return nil, err
	}
	body = body[docLen:]
	if err := m.parsePacks(key, body[:packs*packEntrySize]); err != nil {
		return nil, err
	}
	if err := m.parseRuns(key, body[packs*packEntrySize:], uint32(pages)); err != nil {
		return nil, err
	}
	return m, nil
}

func (m *manifest) parseDocument(id ID, b []byte, pages uint64) error {
	key := manifestKey(id)
	var doc document
	if err := json.Unmarshal(b, &doc); err != nil {
		return corrupt(key, "metadata: %v", err)
	}
	m.metadata, m.state = doc.Metadata, doc.State
	if m.metadata.ID != id {
		return corrupt(key, "it is the manifest of %q", m.metadata.ID)
	}
	if m.metadata.MemoryBytes < 0 || uint64(m.metadata.MemoryBytes) != pages*page.Size {
		return corrupt(key, "memory_bytes is %d, the runs hold %d pages", m.metadata.MemoryBytes, pages)
	}
	if sum, err := hex.DecodeString(m.state.SHA256); err != nil || len(sum) != sha256.Size ||
		m.state.Size < stateOverhead || m.state.Size > maxState+stateOverhead {
		return corrupt(key, "its record of the state file is wrong")
	}
	return nil
}

func (m *manifest) parsePacks(key string, b []byte) error {
	m.packs = make([]packRef, 0, len(b)/packEntrySize)
	for ; len(b) > 0; b = b[packEntrySize:] {
		id, err := ParseID(string(b[:idLen]))
		pages := binary.LittleEndian.Uint64(b[32:])
		if err != nil || !bytes.Equal(b[idLen:32], make([]byte, 32-idLen)) || pages == 0 || pages > pack.MaxPages {
			return corrupt(key, "the record of pack %d is wrong", len(m.packs))
		}
		p := packRef{id: id, summary: pack.Summary{Pages: int64(pages)}}
		copy(p.summary.Sum[:], b[40:])
		m.packs = append(m.packs, p)
	}
	return nil
}

// parseRuns also checks that packs are numbered in the order of first use,
// which implies that each is used.
func (m *manifest) parseRuns(key string, b []byte, pages uint32) error {
	m.runs = make([]run, 0, len(b)/runEntrySize)
	var next, used uint32
	for ; len(b) > 0; b = b[runEntrySize:] {
		r := run{
			first:    next,
			count:    binary.LittleEndian.Uint32(b),
			pack:     binary.LittleEndian.Uint32(b[4:]),
			packPage: binary.LittleEndian.Uint32(b[8:]),
		}
		n := len(m.runs)
		if r.count == 0 || r.count > pages-next || n > 0 && joins(m.runs[n-1], r) {
			return corrupt(key, "run %d (page %d, count %d) is wrong", n, next, r.count)
		}
		switch {
		case r.pack == zeroPack:
			if r.packPage != 0 {
				return corrupt(key, "zero run %d (page %d) is wrong", n, next)
			}
		case r.pack > used || int(r.pack) >= len(m.packs):
			return corrupt(key, "run %d (page %d) names pack %d", n, next, r.pack)
		default:
			if int64(r.packPage)+int64(r.count) > m.packs[r.pack].summary.Pages {
				return corrupt(key, "run %d (page %d) goes beyond pack %s", n, next, m.packs[r.pack].id)
			}
			if r.pack == used {
				used++
			}
		}
		m.runs = append(m.runs, r)
		next += r.count
	}
	if next != pages || int(used) != len(m.packs) {
		return corrupt(key, "its runs hold %d of %d pages and use %d of %d packs", next, pages, used, len(m.packs))
	}
	return nil
}
