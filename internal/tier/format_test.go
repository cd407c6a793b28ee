package tier

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/snapshot"
)

var update = flag.Bool("update", false, "write the golden files anew")

// file is an object in memory.
func file(b []byte) memory { return memory{strings.NewReader(string(b))} }

func encoded(t testing.TB, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	if _, err := encode(&b, bytes.NewReader(content)); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// golden returns a golden file, which it writes first if it shall.
func golden(t testing.TB, name string, fresh func() []byte) []byte {
	t.Helper()
	at := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(at, fresh(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(at)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

const (
	goldenSnapshot = "01k2m3n4p5q6r7s8t9v0w1x2y3"
	goldenHash     = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
)

func goldenRecord() (string, record) {
	ref := snapshot.Ref{ID: goldenSnapshot, Manifest: goldenHash}
	rep := Replica{
		Sandbox: "s1", Snapshot: ref, Record: []byte(`{"name":"a sandbox"}`),
		Template: Template{Name: "debian", Version: 3, Record: []byte(`{"name":"debian"}`), Bases: []snapshot.Ref{ref}},
	}
	key, err := recordKey(rep)
	if err != nil {
		panic(err)
	}
	r := newRecord(rep)
	r.Node, r.WrittenAt, r.LastUsed, r.Template.List = "0123456789abcdef", time.Unix(2, 0).UTC(), time.Unix(1, 0).UTC(), goldenHash[:hashLen]
	return key, r
}

func TestGoldenRecord(t *testing.T) {
	key, want := goldenRecord()
	if want := "records/s1/" + goldenSnapshot + "/c1bbf6530c1d4b4833a4a06decfb68de"; key != want {
		t.Errorf("its key is %s, want %s", key, want)
	}
	b := golden(t, "record-v1", func() []byte { return encoded(t, mustJSON(t, want)) })
	content, err := decode(file(b), key, maxRecord)
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseRecord(key, content)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("the record is %+v, %v", got, err)
	}
}

// TestGoldenRecordWithCheckpoints is of version 2, which an older release refuses:
// it would let go of what the checkpoints need.
func TestGoldenRecordWithCheckpoints(t *testing.T) {
	_, one := goldenRecord()
	other := snapshot.Ref{ID: "01k2m3n4p5q6r7s8t9v0w1x2y4", Manifest: goldenHash}
	rep := Replica{Sandbox: one.Sandbox, Snapshot: one.Snapshot, Checkpoints: []snapshot.Ref{one.Snapshot, other}, Record: one.Record,
		Template: Template{Name: one.Template.Name, Version: one.Template.Version, Record: one.Template.Record, Bases: one.Template.Bases}}
	key, err := recordKey(rep)
	if err != nil {
		t.Fatal(err)
	}
	want := newRecord(rep)
	if want.Version != 2 || one.Version != 1 {
		t.Errorf("with checkpoints it has version %d, without %d", want.Version, one.Version)
	}
	want.Node, want.WrittenAt, want.LastUsed, want.Template.List = one.Node, one.WrittenAt, one.LastUsed, one.Template.List
	b := golden(t, "record-v2", func() []byte { return encoded(t, mustJSON(t, want)) })
	content, err := decode(file(b), key, maxRecord)
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseRecord(key, content)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("the record is %+v, %v", got, err)
	}
}

func TestGoldenList(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "debian")
	newTemplate(t, dir)
	fresh, err := listFiles(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	b := golden(t, "list-v1", func() []byte { return fresh.encoded })
	got, err := parseList("key", fresh.hash, b)
	if err != nil || !reflect.DeepEqual(got, fresh) {
		t.Errorf("the list is %+v, %v", got, err)
	}
}

func TestEncoding(t *testing.T) {
	for _, size := range []int{0, 1, 100_000} {
		content := bytes.Repeat([]byte{7}, size)
		got, err := decode(file(encoded(t, content)), "k", int64(size))
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("%d bytes come back as %d, %v", size, len(got), err)
		}
	}
	whole := encoded(t, []byte("content"))
	for i := range whole {
		for _, flip := range []byte{1, 0x80} {
			b := bytes.Clone(whole)
			b[i] ^= flip
			got, err := decode(file(b), "some/key", 100)
			if err == nil && string(got) == "content" {
				continue // a bit of the frame that says nothing
			}
			if !errors.Is(err, snapshot.ErrCorrupt) && !errors.Is(err, snapshot.ErrVersion) || !strings.Contains(err.Error(), "some/key") {
				t.Errorf("with byte %d changed: %q, %v", i, got, err)
			}
		}
	}
	for n := range whole {
		if _, err := decode(file(whole[:n]), "k", 100); !errors.Is(err, snapshot.ErrCorrupt) && !errors.Is(err, snapshot.ErrVersion) {
			t.Errorf("cut off at %d: %v", n, err)
		}
	}
	if _, err := decode(file(whole), "k", 6); !errors.Is(err, snapshot.ErrCorrupt) {
		t.Errorf("with more content than is possible: %v", err)
	}
	newer := bytes.Clone(whole)
	binary.LittleEndian.PutUint32(newer[8:], 2)
	if _, err := decode(file(newer), "k", 100); !errors.Is(err, snapshot.ErrVersion) || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("of a newer release: %v", err)
	}
}

func TestRecordsThatAreRefused(t *testing.T) {
	key, good := goldenRecord()
	for name, change := range map[string]func(r *record){
		"newer":         func(r *record) { r.Version = 3 },
		"checkpoint":    func(r *record) { r.Checkpoints = []snapshot.Ref{{ID: "../x", Manifest: goldenHash}} },
		"sandbox":       func(r *record) { r.Sandbox = "s2" },
		"snapshot":      func(r *record) { r.Snapshot.ID = snapshot.NewID() },
		"manifest":      func(r *record) { r.Snapshot.Manifest = "x" },
		"base":          func(r *record) { r.Template.Bases = []snapshot.Ref{{ID: "../x", Manifest: goldenHash}} },
		"template name": func(r *record) { r.Template.Name = "../../etc" },
		"version":       func(r *record) { r.Template.Version = 0 },
		"list":          func(r *record) { r.Template.List = "../../../../../../x" },
	} {
		r := good
		change(&r)
		if _, err := parseRecord(key, mustJSON(t, r)); !errors.Is(err, snapshot.ErrCorrupt) && !errors.Is(err, snapshot.ErrVersion) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, bad := range []string{"", "{", "[]", `{"version":1}`} {
		if _, err := parseRecord(key, []byte(bad)); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestListsThatAreRefused(t *testing.T) {
	for _, bad := range []string{
		`{`, `{"version":2}`,
		fmt.Sprintf(`{"version":1,"files":[{"name":"../x","size":1,"sha256":%q}]}`, goldenHash),
		fmt.Sprintf(`{"version":1,"files":[{"name":"a/b","size":1,"sha256":%q}]}`, goldenHash),
		fmt.Sprintf(`{"version":1,"files":[{"name":"a","size":-1,"sha256":%q}]}`, goldenHash),
		fmt.Sprintf(`{"version":1,"files":[{"name":"a","size":1,"sha256":%q},{"name":"a","size":1,"sha256":%q}]}`, goldenHash, goldenHash),
		`{"version":1,"files":[{"name":"a","size":1,"sha256":"x"}]}`,
	} {
		if _, err := parseList("k", listHash([]byte(bad)), []byte(bad)); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
	if _, err := parseList("k", goldenHash[:hashLen], []byte(`{"version":1}`)); !errors.Is(err, snapshot.ErrCorrupt) {
		t.Errorf("with another hash: %v", err)
	}
}

// What a record, a list or an encoded object holds came over a network.
func FuzzDecode(f *testing.F) {
	f.Add(encoded(f, []byte("content")))
	f.Add([]byte(encodedMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 1 << 16
		got, err := decode(file(b), "k", limit)
		if err == nil && len(got) > limit {
			t.Errorf("%d bytes were decoded", len(got))
		}
	})
}

func FuzzRecord(f *testing.F) {
	key, good := goldenRecord()
	f.Add(mustJSON(f, good))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseRecord(key, b)
		if err != nil {
			return
		}
		for _, k := range []string{r.Template.key(), r.Template.fileKey("f")} {
			if path.Clean("/"+k) != "/"+k {
				t.Errorf("a key is %s", k)
			}
		}
	})
}

func FuzzList(f *testing.F) {
	f.Add(mustJSON(f, fileList{Version: 1, Files: []fileItem{{Name: "a", Size: 1, SHA256: goldenHash}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := parseList("k", listHash(b), b)
		if err != nil {
			return
		}
		for _, item := range l.Files {
			if filepath.Join("/dir", item.Name) != "/dir/"+item.Name || item.Size < 0 {
				t.Errorf("a file is %+v", item)
			}
		}
	})
}

func mustJSON(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
