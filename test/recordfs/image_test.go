package recordfs

import (
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// read returns the files of a folder.
func read(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		out[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestImage(t *testing.T) {
	write := func(file ID, off int64, s string) Op {
		return Op{Kind: Write, File: file, Offset: off, Data: []byte(s)}
	}
	create := Op{Kind: Create, Name: "a", File: 1}
	syncRoot := Op{Kind: SyncDir}
	syncA := Op{Kind: Sync, File: 1}
	type files = map[string]string
	tests := []struct {
		name          string
		ops           []Op
		least, most   files
		contentUnkept files // names kept, content not
	}{
		{"nothing synced", []Op{create, write(1, 0, "x")}, files{}, files{"a": "x"}, files{"a": ""}},
		{"only the content synced", []Op{create, write(1, 0, "x"), syncA}, files{}, files{"a": "x"}, files{"a": "x"}},
		{"only the name synced", []Op{create, write(1, 0, "x"), syncRoot}, files{"a": ""}, files{"a": "x"}, files{"a": ""}},
		{"written again", []Op{create, write(1, 0, "xyz"), syncA, syncRoot, write(1, 1, "Y"), {Kind: Truncate, File: 1, Offset: 2}},
			files{"a": "xyz"}, files{"a": "xY"}, files{"a": "xyz"}},
		{"grown by truncate", []Op{create, syncRoot, write(1, 0, "xyz"), {Kind: Truncate, File: 1, Offset: 1}, {Kind: Truncate, File: 1, Offset: 2}, syncA},
			files{"a": "x\x00"}, files{"a": "x\x00"}, files{"a": "x\x00"}},
		{"renamed", []Op{create, syncRoot, {Kind: Rename, Name: "a", NewName: "b"}}, files{"a": ""}, files{"b": ""}, files{"b": ""}},
		{"linked, first name removed", []Op{create, write(1, 0, "x"), syncA, syncRoot, {Kind: Link, Name: "b", File: 1}, {Kind: Unlink, Name: "a"}},
			files{"a": "x"}, files{"b": "x"}, files{"b": "x"}},
		{"in a new folder", []Op{{Kind: Mkdir, Name: "d", File: 2}, {Kind: Create, Dir: 2, Name: "a", File: 1}, {Kind: SyncDir, Dir: 2}},
			files{}, files{"d/a": ""}, files{"d/a": ""}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			image := NewImage()
			for _, op := range test.ops {
				image.Apply(op)
			}
			for _, v := range []struct {
				loss Loss
				want files
			}{
				{Loss{Content: None, Names: None}, test.least},
				{Loss{Content: All, Names: All}, test.most},
				{Loss{Content: None, Names: All}, test.contentUnkept},
			} {
				dir := t.TempDir()
				if err := image.Build(dir, v.loss); err != nil {
					t.Fatal(err)
				}
				if got := read(t, dir); !reflect.DeepEqual(got, v.want) {
					t.Errorf("%+v: the disk holds %q, want %q", v.loss, got, v.want)
				}
			}
			if err := image.Build(t.TempDir(), Loss{Some, Some, rand.New(rand.NewPCG(1, 1))}); err != nil {
				t.Error(err)
			}
		})
	}
}
