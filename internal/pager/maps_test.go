package pager

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/hibernacle/hibernacle/internal/page"
)

func TestMapping(t *testing.T) {
	for kind, path := range testFiles(t, testSize) {
		t.Run(kind, func(t *testing.T) {
			c := startChild(t, "toucher")
			if _, _, err := Mapping(c.pid(), path); !errors.Is(err, ErrNotMapped) {
				t.Errorf("before mapping: %v, want ErrNotMapped", err)
			}
			want := c.must(command{Op: "map", Path: path, Len: testSize}).Addr
			c.must(command{Op: "protect", Off: testSize / 4, Len: page.Size}) // three parts
			link := filepath.Join(t.TempDir(), "link")
			if err := os.Symlink(path, link); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{path, link} {
				addr, length, err := Mapping(c.pid(), name)
				if err != nil || uint64(addr) != want || length != testSize {
					t.Errorf("Mapping(%s) = %#x, %d, %v; want %#x, %d", name, addr, length, err, want, testSize)
				}
			}
			c.must(command{Op: "unmap", Off: testSize / 2, Len: page.Size})
			if _, _, err := Mapping(c.pid(), path); !errors.Is(err, ErrNotMapped) {
				t.Errorf("with a gap: %v, want ErrNotMapped", err)
			}
			c.kill()
			if _, _, err := Mapping(c.pid(), path); !errors.Is(err, ErrNoProcess) {
				t.Errorf("of a dead process: %v, want ErrNoProcess", err)
			}
		})
	}
}

func TestMappingFromWithinTheFile(t *testing.T) {
	path := testFiles(t, testSize)["flat file"]
	c := startChild(t, "toucher")
	c.must(command{Op: "map", Path: path, Off: page.Size, Len: page.Size})
	if _, _, err := Mapping(c.pid(), path); !errors.Is(err, ErrNotMapped) {
		t.Errorf("got %v, want ErrNotMapped", err)
	}
}

func TestJoin(t *testing.T) {
	part := func(start, end, offset uint64) mapping {
		return mapping{start: start, end: end, offset: offset, private: true}
	}
	tests := []struct {
		name   string
		parts  []mapping
		length int64 // 0: an error
	}{
		{"none", nil, 0},
		{"one", []mapping{part(0x1000, 0x3000, 0)}, 0x2000},
		{"side by side", []mapping{part(0x1000, 0x3000, 0), part(0x3000, 0x4000, 0x2000)}, 0x3000},
		{"gap", []mapping{part(0x1000, 0x3000, 0), part(0x4000, 0x5000, 0x3000)}, 0},
		{"side by side, not in the file", []mapping{part(0x1000, 0x3000, 0), part(0x3000, 0x4000, 0x9000)}, 0},
		{"twice", []mapping{part(0x1000, 0x3000, 0), part(0x3000, 0x5000, 0)}, 0},
		{"shared", []mapping{{start: 0x1000, end: 0x2000}}, 0},
		{"from within", []mapping{part(0x1000, 0x3000, 0x1000)}, 0},
	}
	for _, tt := range tests {
		_, length, err := join(tt.parts)
		if length != tt.length || (err == nil) != (tt.length > 0) {
			t.Errorf("%s: length %#x, error %v; want %#x", tt.name, length, err, tt.length)
		}
	}
}

func TestParseMapping(t *testing.T) {
	tests := []struct {
		line string
		want mapping
		bad  bool
	}{
		{line: "7f10-7f20 rw-p 00001000 08:02 1234                       /tmp/a b", want: mapping{start: 0x7f10, end: 0x7f20, offset: 0x1000, private: true, dev: 0x802, inode: 1234, path: "/tmp/a b"}},
		{line: "7f10-7f20 r--s 00000000 00:2a 9 /tmp/x (deleted)", want: mapping{start: 0x7f10, end: 0x7f20, dev: 0x2a, inode: 9, path: "/tmp/x"}},
		{line: `7f10-7f20 r--p 00000000 00:2a 9 /tmp/\012x`, want: mapping{start: 0x7f10, end: 0x7f20, private: true, dev: 0x2a, inode: 9, path: "/tmp/\nx"}},
		{line: "7f10-7f20 rw-p 00000000 00:00 0 ", want: mapping{start: 0x7f10, end: 0x7f20, private: true}},
		{line: "7f20-7f10 rw-p 00000000 00:00 0", bad: true},
		{line: "7f20 rw-p 00000000 00:00 0", bad: true},
		{line: "", bad: true},
	}
	for _, tt := range tests {
		got, err := parseMapping(tt.line)
		if (err != nil) != tt.bad || !tt.bad && got != tt.want {
			t.Errorf("parseMapping(%q) = %+v, %v", tt.line, got, err)
		}
	}
}

func FuzzParseMaps(f *testing.F) {
	f.Add("7f10-7f20 rw-p 00001000 08:02 1234   /tmp/a b\n")
	f.Add("7f10-7f20 r--p 00000000 00:2a 9 /tmp/\\012x\\")
	f.Fuzz(func(t *testing.T, text string) {
		maps, err := parseMaps(text)
		if err != nil {
			return
		}
		for _, m := range maps {
			if m.end <= m.start {
				t.Errorf("%+v of %q is empty", m, text)
			}
		}
	})
}
