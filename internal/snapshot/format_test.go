package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

const goldenID ID = "0123456789abcdefghjkmnpqrs"

// sample returns a manifest of each kind of run.
func sample() *manifest {
	p := func(id ID, pages int64) packRef {
		return packRef{id: id, summary: pack.Summary{Pages: pages, Sum: sha256.Sum256([]byte(id))}}
	}
	return &manifest{
		metadata: Metadata{
			ID: goldenID, Parent: "0123456789abcdefghjkmnpqr0",
			CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
			Attempt:   4, Generation: 5, MemoryBytes: 10 * page.Size, DirtyBytes: 3 * page.Size,
			Key: map[string]string{"machine": "pc-q35-7.2"}, ControlToken: "token",
		},
		state: stateRef{Size: stateOverhead + 5, SHA256: hashOf([]byte("state"))},
		packs: []packRef{p(goldenID, 2), p("0123456789abcdefghjkmnpqr0", 9)},
		runs: []run{
			{first: 0, count: 3, pack: zeroPack},
			{first: 3, count: 1, pack: 0, packPage: 1},
			{first: 4, count: 2, pack: 1, packPage: 7},
			{first: 6, count: 4, pack: zeroPack},
		},
	}
}

func TestManifestRoundTrip(t *testing.T) {
	m := sample()
	b, err := m.encode(1000)
	if err != nil {
		t.Fatal(err)
	}
	if m.metadata.StoredBytes != int64(1000+len(b)) {
		t.Errorf("stored_bytes is %d, want %d", m.metadata.StoredBytes, 1000+len(b))
	}
	got, err := parseManifest(goldenID, b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, m) {
		t.Errorf("read back %+v, want %+v", got, m)
	}
}

// Each of these is well sealed, but says what no capture would.
func TestManifestRefusesNonsense(t *testing.T) {
	tests := map[string]func(m *manifest){
		"gap at the end":             func(m *manifest) { m.runs[3].count = 3 },
		"runs beyond the memory":     func(m *manifest) { m.runs[3].count = 5 },
		"run beyond any memory":      func(m *manifest) { m.runs[3].count = 1<<32 - 1 },
		"empty run":                  func(m *manifest) { m.runs[1].count = 0; m.runs[3].count = 5 },
		"no runs":                    func(m *manifest) { m.runs = nil },
		"two zero runs for one":      func(m *manifest) { m.runs[1] = run{count: 1, pack: zeroPack} },
		"two runs for one":           func(m *manifest) { m.runs[2] = run{count: 2, pack: 0, packPage: 2}; m.packs[0].summary.Pages = 9 },
		"zero run with a page":       func(m *manifest) { m.runs[0].packPage = 1 },
		"page beyond its pack":       func(m *manifest) { m.runs[1].packPage = 2 },
		"page far beyond its pack":   func(m *manifest) { m.runs[1].packPage = 1<<32 - 1 },
		"pack not in the table":      func(m *manifest) { m.runs[2].pack = 2 },
		"pack not used":              func(m *manifest) { m.packs = append(m.packs, m.packs[1]) },
		"packs out of order":         func(m *manifest) { m.runs[1].pack, m.runs[2].pack = 1, 0; m.runs[2].packPage = 0 },
		"pack with a wrong id":       func(m *manifest) { m.packs[0].id = "../../etc/passwd/../shadow" },
		"pack without pages":         func(m *manifest) { m.packs[0].summary.Pages = 0 },
		"pack with too many pages":   func(m *manifest) { m.packs[0].summary.Pages = pack.MaxPages + 1 },
		"pack with pages below zero": func(m *manifest) { m.packs[0].summary.Pages = -1 },
		"other snapshot":             func(m *manifest) { m.metadata.ID = "0123456789abcdefghjkmnpqr1" },
		"memory not that of runs":    func(m *manifest) { m.metadata.MemoryBytes += 1 },
		"memory negative":            func(m *manifest) { m.metadata.MemoryBytes = -page.Size },
		"state without a hash":       func(m *manifest) { m.state.SHA256 = "" },
		"state of impossible length": func(m *manifest) { m.state.Size = maxState * 2 },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			m := sample()
			change(m)
			b, err := m.encode(0)
			if err != nil {
				t.Fatal(err)
			}
			_, err = parseManifest(goldenID, b)
			if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), manifestKey(goldenID)) {
				t.Errorf("parsed: %v", err)
			}
		})
	}
}

func TestState(t *testing.T) {
	for _, state := range [][]byte{nil, []byte("x"), make([]byte, 100000)} {
		b, err := encodeState(state)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := parseState(goldenID, b); err != nil || !bytes.Equal(got, state) {
			t.Errorf("%d bytes: read back %d, %v", len(state), len(got), err)
		}
		for at := 0; at < len(b); at += 1 + len(b)/50 {
			bad := bytes.Clone(b)
			bad[at] ^= 1
			if _, err := parseState(goldenID, bad); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
				t.Errorf("%d bytes, byte %d flipped: %v", len(state), at, err)
			}
		}
		if _, err := parseState(goldenID, b[:len(b)-1]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%d bytes, cut off: %v", len(state), err)
		}
	}
}

// The golden files were written by the first release with this format version;
// they must be readable for ever.
func TestGolden(t *testing.T) {
	m := sample()
	b, err := m.encode(1000)
	if err != nil {
		t.Fatal(err)
	}
	state, err := encodeState([]byte("registers and devices"))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]byte{"v2.manifest": b, "v1.state": state} {
		path := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(path, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		golden, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		switch name {
		case "v2.manifest":
			got, err := parseManifest(goldenID, golden)
			if err != nil || !reflect.DeepEqual(got, m) {
				t.Errorf("%s reads as %+v, %v", name, got, err)
			}
		case "v1.state":
			got, err := parseState(goldenID, golden)
			if err != nil || string(got) != "registers and devices" {
				t.Errorf("%s reads as %q, %v", name, got, err)
			}
		}
	}
}

// seal puts the right hash at the end, so that mutations get beyond it.
func seal(b []byte) []byte {
	if len(b) < sha256.Size {
		return b
	}
	body := bytes.Clone(b[:len(b)-sha256.Size])
	sum := sha256.Sum256(body)
	return append(body, sum[:]...)
}

func FuzzParseManifest(f *testing.F) {
	b, err := sample().encode(1000)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseManifest(goldenID, seal(b))
		if err != nil {
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
				t.Errorf("parsed: %v", err)
			}
			return
		}
		var next uint32
		for i, r := range m.runs {
			if r.first != next || r.count == 0 || r.pack != zeroPack && int64(r.packPage)+int64(r.count) > m.packs[r.pack].summary.Pages {
				t.Fatalf("run %d is %+v", i, r)
			}
			next = r.end()
		}
		if int64(next)*page.Size != m.metadata.MemoryBytes {
			t.Fatalf("the runs end at %d of %d bytes", next, m.metadata.MemoryBytes)
		}
	})
}

func FuzzParseState(f *testing.F) {
	b, err := encodeState([]byte("registers"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := parseState(goldenID, seal(b)); err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
			t.Errorf("parsed: %v", err)
		}
	})
}

func TestIDs(t *testing.T) {
	last := ID("")
	seen := map[ID]bool{}
	for range 1000 {
		id := NewID()
		if got, err := ParseID(string(id)); err != nil || got != id || seen[id] {
			t.Fatalf("id %q: %v", id, err)
		}
		if last != "" && id[:8] < last[:8] {
			t.Errorf("%q sorts before the older %q", id, last)
		}
		seen[id], last = true, id
	}
	for _, s := range []string{"", "short", strings.Repeat("a", 27), strings.Repeat("A", 26), "../" + strings.Repeat("a", 23)} {
		if _, err := ParseID(s); err == nil {
			t.Errorf("%q passed for an id", s)
		}
	}
}

// The overlay of runs must be what an overlay page by page is.
func TestOverlay(t *testing.T) {
	const pages = 40
	type where struct{ pack, page uint32 }
	expand := func(runs []run) (out [pages]where) {
		for _, r := range runs {
			for i := range r.count {
				w := where{r.pack, r.packPage + i}
				if r.pack == zeroPack {
					w.page = 0
				}
				out[r.first+i] = w
			}
		}
		return out
	}
	collapse := func(t *rapid.T, tile bool) (runs []run) {
		for n := uint32(0); n < pages; {
			count := min(rapid.Uint32Range(1, 9).Draw(t, "count"), pages-n)
			if tile || rapid.Bool().Draw(t, "there") {
				r := run{first: n, count: count, pack: rapid.SampledFrom([]uint32{0, 1, zeroPack}).Draw(t, "pack")}
				if r.pack != zeroPack {
					r.packPage = rapid.Uint32Range(0, 20).Draw(t, "packPage")
				}
				runs = appendRun(runs, r)
			}
			n += count
		}
		return runs
	}
	rapid.Check(t, func(t *rapid.T) {
		base, over := collapse(t, true), collapse(t, false)
		want := expand(base)
		for _, r := range over {
			one := expand([]run{r})
			copy(want[r.first:r.end()], one[r.first:r.end()])
		}
		baseBefore, overBefore := expand(base), expand(over)
		got := overlay(base, over)
		if expand(got) != want {
			t.Fatalf("overlay of %v by %v is %v", base, over, got)
		}
		if expand(base) != baseBefore || expand(over) != overBefore {
			t.Fatal("the arguments were changed")
		}
		for i := 1; i < len(got); i++ {
			if got[i].first != got[i-1].end() || joins(got[i-1], got[i]) {
				t.Fatalf("run %d of %v", i, got)
			}
		}
	})
}

func TestFormatsAreLittleEndianAsSpecified(t *testing.T) {
	b, err := sample().encode(0)
	if err != nil {
		t.Fatal(err)
	}
	doc := binary.LittleEndian.Uint32(b[12:])
	runs := b[32+int(doc)+2*72:]
	if string(b[:8]) != "HIBMANI\n" || b[8] != 2 || b[16] != 2 || b[20] != 4 || b[24] != 10 ||
		!bytes.Equal(runs[:12], []byte{3, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0}) ||
		!bytes.Equal(runs[12:24], []byte{1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0}) {
		t.Error("the file is not laid out as docs/formats/manifest.md says")
	}
}
