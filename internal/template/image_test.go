package template

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
)

// makeTar returns an archive of the entries; a file's content is in its Linkname's place.
func makeTar(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		content := ""
		if h.Typeflag == tar.TypeReg {
			content, h.Linkname = h.Linkname, ""
			h.Size = int64(len(content))
		}
		h.Format = tar.FormatPAX
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func dir(name string) tar.Header {
	return tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}
}

func file(name, content string) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Linkname: content}
}

// toImage turns an archive into an image file.
func toImage(t testing.TB, archive []byte) (string, error) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "base.erofs"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return f.Name(), writeImage(context.Background(), bytes.NewReader(archive), f, t.TempDir())
}

func TestImageKeepsTheTree(t *testing.T) {
	when := time.Date(2024, 5, 6, 7, 8, 9, 123456789, time.UTC)
	sudo := tar.Header{Typeflag: tar.TypeReg, Name: "./bin/sudo", Mode: 0o4755, Uid: 0, Gid: 27, ModTime: when, Linkname: strings.Repeat("sudo", 5000)}
	ping := file("./bin/ping", "ping")
	ping.PAXRecords = map[string]string{
		"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00",
		"SCHILY.xattr.security.selinux":    "label",
	}
	tmp := dir("./tmp/")
	tmp.Mode = 0o1777
	mail := tar.Header{Typeflag: tar.TypeDir, Name: "./mail/", Mode: 0o2775, Uid: 1000, Gid: 70000}
	path, err := toImage(t, makeTar(t, dir("./"), dir("./bin/"), sudo, ping, tmp, mail, dir("./dev/"),
		tar.Header{Typeflag: tar.TypeChar, Name: "./dev/null", Devmajor: 1, Devminor: 3, Mode: 0o666},
		file("./tmp/left", "over"),
		tar.Header{Typeflag: tar.TypeLink, Name: "./bin/sudoedit", Linkname: "./bin/sudo", Mode: 0o4755, Gid: 27, ModTime: when},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "./sbin", Linkname: "bin"},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "./out", Linkname: "../../etc/passwd"},
		file("./empty", ""),
	))
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if info, _ := f.Stat(); info.Size() == 0 || info.Size()%imageAlign != 0 {
		t.Errorf("the image has %d bytes, no multiple of %d", info.Size(), imageAlign)
	}
	root, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}

	for name, want := range map[string]struct {
		mode     fs.FileMode
		uid, gid uint32
	}{
		"bin":          {fs.ModeDir | 0o755, 0, 0},
		"bin/sudo":     {fs.ModeSetuid | 0o755, 0, 27},
		"bin/sudoedit": {fs.ModeSetuid | 0o755, 0, 27},
		"tmp":          {fs.ModeDir | fs.ModeSticky | 0o777, 0, 0},
		"mail":         {fs.ModeDir | fs.ModeSetgid | 0o775, 1000, 70000},
		"empty":        {0o644, 0, 0},
	} {
		info, err := fs.Stat(root, name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		st := info.Sys().(*erofs.Stat)
		if st.Mode != want.mode || st.UID != want.uid || st.GID != want.gid {
			t.Errorf("%s: mode %v owner %d:%d, want %v %d:%d", name, st.Mode, st.UID, st.GID, want.mode, want.uid, want.gid)
		}
	}
	for _, name := range []string{"bin/sudo", "bin/sudoedit"} {
		if b, err := fs.ReadFile(root, name); err != nil || string(b) != sudo.Linkname {
			t.Errorf("%s: content differs (%d bytes, %v)", name, len(b), err)
		}
		if info, err := fs.Stat(root, name); err != nil || !info.ModTime().Equal(when) {
			t.Errorf("%s: time %v, want %v", name, info.ModTime(), when)
		}
	}
	for link, want := range map[string]string{"sbin": "bin", "out": "../../etc/passwd"} {
		if target, err := fs.ReadLink(root, link); err != nil || target != want {
			t.Errorf("%s -> %q (%v), want %q", link, target, err, want)
		}
	}
	info, err := fs.Stat(root, "bin/ping")
	if err != nil {
		t.Fatal(err)
	}
	if x := info.Sys().(*erofs.Stat).Xattrs; len(x) != 1 || x["security.capability"] == "" {
		t.Errorf("bin/ping: attributes %q, want the file capability alone", x)
	}
	for _, gone := range []string{"dev/null", "tmp/left"} {
		if _, err := fs.Stat(root, gone); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is in the image (%v)", gone, err)
		}
	}
	checkImage(t, path)
}

// checkImage runs the checker of erofs-utils, if it is installed.
func checkImage(t *testing.T, path string) {
	t.Helper()
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Log("fsck.erofs is not installed: the image was read by this program only")
		return
	}
	if out, err := exec.Command(fsck, path).CombinedOutput(); err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

func TestImageIsReproducible(t *testing.T) {
	archive := makeTar(t, dir("./"), dir("./a"), file("./a/x", "x"), file("./a/y", strings.Repeat("y", 9999)))
	var images [][]byte
	for range 2 {
		path, err := toImage(t, archive)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		images = append(images, b)
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("one archive made two images")
	}
}

func TestImageRefusesHostileArchives(t *testing.T) {
	huge := file("big", "x")
	truncated := makeTar(t, dir("./"), file("./f", strings.Repeat("x", 4096)))
	for name, c := range map[string]struct {
		archive []byte
		want    string
	}{
		"empty":                    {makeTar(t), "empty"},
		"no archive":               {[]byte(strings.Repeat("nonsense", 200)), "header"},
		"truncated":                {truncated[:2000], "EOF"},
		"dot-dot":                  {makeTar(t, dir("./"), file("./../../etc/passwd", "x")), `".."`},
		"dot-dot in the middle":    {makeTar(t, dir("./"), dir("./a"), file("a/../../x", "x")), `".."`},
		"absolute":                 {makeTar(t, file("/etc/passwd", "x")), "absolute"},
		"long part":                {makeTar(t, file(strings.Repeat("n", 256), "x")), "255"},
		"long name":                {makeTar(t, file(strings.Repeat("n/", 2100)+"f", "x")), "too long"},
		"no parent":                {makeTar(t, file("a/b", "x")), "no folder"},
		"below a symbolic link":    {makeTar(t, tar.Header{Typeflag: tar.TypeSymlink, Name: "etc", Linkname: "/etc"}, file("etc/passwd", "x")), "no folder"},
		"below a file":             {makeTar(t, file("etc", "x"), file("etc/passwd", "x")), "no folder"},
		"twice":                    {makeTar(t, huge, huge), "second time"},
		"a folder becomes a link":  {makeTar(t, dir("a"), tar.Header{Typeflag: tar.TypeSymlink, Name: "a", Linkname: "/"}), "second time"},
		"device":                   {makeTar(t, tar.Header{Typeflag: tar.TypeBlock, Name: "sda", Devmajor: 8}), "not accepted"},
		"device in a /dev below":   {makeTar(t, dir("a"), dir("a/dev"), tar.Header{Typeflag: tar.TypeChar, Name: "a/dev/mem"}), "not accepted"},
		"pipe":                     {makeTar(t, tar.Header{Typeflag: tar.TypeFifo, Name: "p"}), "not accepted"},
		"hard link to nothing":     {makeTar(t, tar.Header{Typeflag: tar.TypeLink, Name: "a", Linkname: "b"}), "no file"},
		"hard link to itself":      {makeTar(t, tar.Header{Typeflag: tar.TypeLink, Name: "a", Linkname: "a"}), "no file"},
		"hard link to a folder":    {makeTar(t, dir("d"), tar.Header{Typeflag: tar.TypeLink, Name: "a", Linkname: "d"}), "no file"},
		"hard link out of it":      {makeTar(t, tar.Header{Typeflag: tar.TypeLink, Name: "a", Linkname: "../../etc/shadow"}), `".."`},
		"symbolic link to nothing": {makeTar(t, tar.Header{Typeflag: tar.TypeSymlink, Name: "a"}), "target"},
		"owner":                    {makeTar(t, tar.Header{Typeflag: tar.TypeReg, Name: "a", Uid: 1 << 40}), "owner"},
		"attributes": {makeTar(t, tar.Header{Typeflag: tar.TypeReg, Name: "a",
			PAXRecords: map[string]string{"SCHILY.xattr.user.x": strings.Repeat("x", maxXattrs)}}), "attributes"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := toImage(t, c.archive)
			if !errors.Is(err, errArchive) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one about %s", err, c.want)
			}
		})
	}
}

func TestImageStopsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f, err := os.Create(filepath.Join(t.TempDir(), "base.erofs"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	archive := makeTar(t, dir("./"), file("./f", "x"))
	if err := writeImage(ctx, bytes.NewReader(archive), f, t.TempDir()); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
}

func FuzzImage(f *testing.F) {
	f.Add(makeTar(f, dir("./"), file("./a", "content"), tar.Header{Typeflag: tar.TypeLink, Name: "./b", Linkname: "./a"}))
	f.Add(makeTar(f, tar.Header{Typeflag: tar.TypeSymlink, Name: "etc", Linkname: "/etc"}, file("etc/passwd", "x")))
	f.Fuzz(func(t *testing.T, archive []byte) {
		path, err := toImage(t, archive)
		if err != nil {
			return
		}
		image, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer image.Close()
		root, err := erofs.Open(image)
		if err != nil {
			t.Fatalf("the image cannot be opened: %v", err)
		}
		if err := fs.WalkDir(root, ".", func(_ string, _ fs.DirEntry, err error) error { return err }); err != nil {
			t.Fatalf("the image cannot be walked: %v", err)
		}
	})
}
