package cli

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// archive makes a tar stream of entries; a file's content is its name.
func archive(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if h.Typeflag == 0 {
			h.Typeflag, h.Size = tar.TypeReg, int64(len(h.Name))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := w.Write([]byte(h.Name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// unpack reads a stream into a folder that has a neighbour called outside.
func unpack(t testing.TB, stream []byte) (inside, outside string, err error) {
	t.Helper()
	dir := t.TempDir()
	inside, outside = filepath.Join(dir, "inside"), filepath.Join(dir, "outside")
	for _, d := range []string{inside, outside} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(inside)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	return inside, outside, readTree(bytes.NewReader(stream), root)
}

func TestHostileStreams(t *testing.T) {
	for name, c := range map[string]struct {
		entries []tar.Header
		ok      bool
	}{
		"plain":                {[]tar.Header{{Name: "a/b"}, {Name: "./c"}}, true},
		"up":                   {[]tar.Header{{Name: "../outside/x"}}, false},
		"up in the middle":     {[]tar.Header{{Name: "a/../../outside/x"}}, false},
		"absolute":             {[]tar.Header{{Name: "/tmp/outside/x"}}, false},
		"through a link":       {[]tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../outside"}, {Name: "l/x"}}, false},
		"through an abs. link": {[]tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/"}, {Name: "l/x"}}, false},
		"over a link":          {[]tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../outside/x"}, {Name: "l"}}, true},
		"hard link out":        {[]tar.Header{{Name: "h", Typeflag: tar.TypeLink, Linkname: "../outside/x"}}, false},
		"device":               {[]tar.Header{{Name: "d", Typeflag: tar.TypeBlock}}, true},
		"folder over a file":   {[]tar.Header{{Name: "a"}, {Name: "a", Typeflag: tar.TypeDir}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			_, outside, err := unpack(t, archive(t, c.entries...))
			if (err == nil) != c.ok {
				t.Errorf("error %v", err)
			}
			if left, _ := os.ReadDir(outside); len(left) > 0 {
				t.Errorf("%s was written outside", left[0].Name())
			}
		})
	}
}

func TestSpecialBitsAreDropped(t *testing.T) {
	inside, _, err := unpack(t, archive(t, tar.Header{Name: "su", Mode: 0o4755}))
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(inside, "su"))
	if err != nil || info.Mode()&(os.ModeSetuid|os.ModeSetgid|os.ModeSticky) != 0 || info.Mode().Perm()&0o100 == 0 {
		t.Errorf("%v %v", info.Mode(), err)
	}
}

func FuzzReadTree(f *testing.F) {
	f.Add(archive(f, tar.Header{Name: "a/b"}, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../outside"}, tar.Header{Name: "l/x"}))
	f.Add(archive(f, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "../outside/x"}))
	f.Fuzz(func(t *testing.T, stream []byte) {
		if len(stream) > 1<<16 {
			return
		}
		_, outside, _ := unpack(t, stream)
		if left, _ := os.ReadDir(outside); len(left) > 0 {
			t.Errorf("%s was written outside", left[0].Name())
		}
	})
}

func TestSplitRemote(t *testing.T) {
	for in, want := range map[string][2]string{
		"id:/path": {"id", "/path"}, "id:": {"id", "."}, "id:a:b": {"id", "a:b"},
		"/path": {}, "./a:b": {}, "a/b:c": {}, "-": {}, ":x": {}, "plain": {},
	} {
		id, p, ok := splitRemote(in)
		if id != want[0] || p != want[1] || ok != (want[0] != "") {
			t.Errorf("%q: %q %q %v", in, id, p, ok)
		}
	}
}
