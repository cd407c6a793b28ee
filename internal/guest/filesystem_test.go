package guest

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	filesystempb "github.com/hibernacle/hibernacle/api/filesystem"
)

func as(user string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":")) }

func ownerOf(t *testing.T, path string) uint32 {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Uid
}

func (g *guestUnderTest) stat(t *testing.T, path string) (*filesystempb.EntryInfo, error) {
	resp, err := g.files.Stat(testContext(t), connect.NewRequest(&filesystempb.StatRequest{Path: path}))
	if err != nil {
		return nil, err
	}
	return resp.Msg.Entry, nil
}

func TestStatDescribesEntries(t *testing.T) {
	g := newGuest(t, nil)
	writeFile(t, filepath.Join(g.home, "file"), "12345")
	for link, target := range map[string]string{"to-file": "file", "to-dir": "/", "nowhere": "gone"} {
		if err := os.Symlink(target, filepath.Join(g.home, link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		path, name, permissions, target string
		kind                            filesystempb.FileType
		mode                            uint32
	}{
		{"file", "file", "-rw-r--r--", "", filesystempb.FileType_FILE_TYPE_FILE, 0o644},
		{"~/file", "file", "-rw-r--r--", "", filesystempb.FileType_FILE_TYPE_FILE, 0o644},
		{"", "home", "drwxr-xr-x", "", filesystempb.FileType_FILE_TYPE_DIRECTORY, 0o755},
		{"to-file", "to-file", "Lrwxrwxrwx", g.home + "/file", filesystempb.FileType_FILE_TYPE_FILE, 0o644},
		{"to-dir", "to-dir", "Lrwxrwxrwx", "/", filesystempb.FileType_FILE_TYPE_DIRECTORY, 0o755},
		{"nowhere", "nowhere", "Lrwxrwxrwx", "", filesystempb.FileType_FILE_TYPE_SYMLINK, 0o777},
	} {
		e, err := g.stat(t, c.path)
		if err != nil {
			t.Fatal(err)
		}
		if e.Name != c.name || e.Permissions != c.permissions || e.GetSymlinkTarget() != c.target || e.Type != c.kind || e.Mode != c.mode {
			t.Errorf("%s: %v", c.path, e)
		}
	}
	e, err := g.stat(t, "file")
	if err != nil || e.Size != 5 || e.Owner != "root" || e.Group != "root" || e.Path != g.home+"/file" || e.ModifiedTime.AsTime().IsZero() {
		t.Errorf("%v, %v", e, err)
	}
	for path, code := range map[string]connect.Code{
		"missing": connect.CodeNotFound, "file/below": connect.CodeInvalidArgument,
		"a\x00": connect.CodeInvalidArgument, "~other/x": connect.CodeInvalidArgument,
	} {
		_, err := g.stat(t, path)
		wantCode(t, err, code)
	}
}

func TestMakeDir(t *testing.T) {
	g := newGuest(t, nil)
	make := func(path, auth string) error {
		r := connect.NewRequest(&filesystempb.MakeDirRequest{Path: path})
		r.Header().Set("Authorization", auth)
		_, err := g.files.MakeDir(testContext(t), r)
		return err
	}
	if err := make("a/b/c", ""); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"a", "a/b", "a/b/c"} {
		if owner := ownerOf(t, filepath.Join(g.home, dir)); owner != 65534 {
			t.Errorf("%s belongs to %d", dir, owner)
		}
	}
	if err := make(g.home+"/rooted", as("root")); err != nil || ownerOf(t, g.home+"/rooted") != 0 {
		t.Errorf("as root: %v", err)
	}
	writeFile(t, filepath.Join(g.home, "file"), "")
	wantCode(t, make("a/b", ""), connect.CodeAlreadyExists)
	wantCode(t, make("file", ""), connect.CodeInvalidArgument)
	wantCode(t, make("file/x", ""), connect.CodeInvalidArgument)
	wantCode(t, make("x", as("ghost")), connect.CodeUnauthenticated)
}

func TestMoveAndRemove(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	move := func(from, to string) (*connect.Response[filesystempb.MoveResponse], error) {
		return g.files.Move(ctx, connect.NewRequest(&filesystempb.MoveRequest{Source: from, Destination: to}))
	}
	writeFile(t, filepath.Join(g.home, "old"), "content")
	resp, err := move("old", "new/place")
	if err != nil || resp.Msg.Entry.Path != g.home+"/new/place" || readFile(t, resp.Msg.Entry.Path) != "content" {
		t.Fatalf("%v, %v", resp, err)
	}
	if ownerOf(t, filepath.Join(g.home, "new")) != 65534 {
		t.Error("the parent made for it does not belong to the user")
	}
	_, err = move("old", "elsewhere/x")
	wantCode(t, err, connect.CodeNotFound)
	if _, err := os.Stat(filepath.Join(g.home, "elsewhere")); err == nil {
		t.Error("a move that failed left a folder")
	}
	remove := func(path string) error {
		_, err := g.files.Remove(ctx, connect.NewRequest(&filesystempb.RemoveRequest{Path: path}))
		return err
	}
	for range 2 {
		if err := remove("new"); err != nil {
			t.Error(err)
		}
	}
	_, err = g.stat(t, "new")
	wantCode(t, err, connect.CodeNotFound)
	wantCode(t, remove("/"), connect.CodeInvalidArgument)
}

func TestListDir(t *testing.T) {
	g := newGuest(t, nil)
	if err := os.MkdirAll(filepath.Join(g.home, "a/b/c"), 0o755); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(g.home, "a/f"), "")
	if err := os.Symlink("a", filepath.Join(g.home, "link")); err != nil {
		t.Fatal(err)
	}
	list := func(path string, depth uint32) (string, error) {
		resp, err := g.files.ListDir(testContext(t), connect.NewRequest(&filesystempb.ListDirRequest{Path: path, Depth: depth}))
		if err != nil {
			return "", err
		}
		var names []string
		for _, e := range resp.Msg.Entries {
			names = append(names, strings.TrimPrefix(e.Path, g.home+"/"))
		}
		return strings.Join(names, " "), nil
	}
	for _, c := range []struct {
		path  string
		depth uint32
		want  string
	}{
		{"", 0, "a link"}, {"", 1, "a link"}, {"", 2, "a a/b a/f link"}, {"", 9, "a a/b a/b/c a/f link"},
		{"link", 1, "link/b link/f"},
	} {
		if got, err := list(c.path, c.depth); err != nil || got != c.want {
			t.Errorf("%q depth %d: %q, %v", c.path, c.depth, got, err)
		}
	}
	_, err := list("missing", 1)
	wantCode(t, err, connect.CodeNotFound)
	_, err = list("a/f", 1)
	wantCode(t, err, connect.CodeInvalidArgument)
}

func TestWatchDirStreamsChanges(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	s, err := g.files.WatchDir(ctx, connect.NewRequest(&filesystempb.WatchDirRequest{Recursive: true, IncludeEntry: true}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if !s.Receive() || s.Msg().GetStart() == nil {
		t.Fatalf("first %v, %v", s.Msg(), s.Err())
	}
	await := func(name string, kind filesystempb.EventType) *filesystempb.FilesystemEvent {
		t.Helper()
		for s.Receive() {
			if e := s.Msg().GetFilesystem(); e.GetName() == name && e.GetType() == kind {
				return e
			}
		}
		t.Fatalf("no %v of %s: %v", kind, name, s.Err())
		return nil
	}
	// The file may be older than the watch on its folder, and is reported all the same.
	if err := os.MkdirAll(filepath.Join(g.home, "new/deep"), 0o755); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(g.home, "new/deep/f"), "x")
	await("new", filesystempb.EventType_EVENT_TYPE_CREATE)
	await("new/deep", filesystempb.EventType_EVENT_TYPE_CREATE)
	if e := await("new/deep/f", filesystempb.EventType_EVENT_TYPE_CREATE); e.Entry.GetPath() != g.home+"/new/deep/f" {
		t.Errorf("entry %v", e.Entry)
	}
	if err := os.Remove(filepath.Join(g.home, "new/deep/f")); err != nil {
		t.Fatal(err)
	}
	if e := await("new/deep/f", filesystempb.EventType_EVENT_TYPE_REMOVE); e.Entry != nil {
		t.Errorf("entry of what is gone: %v", e.Entry)
	}
}

func TestWatchersCollectChanges(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	created, err := g.files.CreateWatcher(ctx, connect.NewRequest(&filesystempb.CreateWatcherRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	id := created.Msg.WatcherId
	writeFile(t, filepath.Join(g.home, "f"), "x")
	seen := map[filesystempb.EventType]bool{}
	waitFor(t, "the write to be seen", func() bool {
		resp, err := g.files.GetWatcherEvents(ctx, connect.NewRequest(&filesystempb.GetWatcherEventsRequest{WatcherId: id}))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range resp.Msg.Events {
			if e.Name == "f" {
				seen[e.Type] = true
			}
		}
		return seen[filesystempb.EventType_EVENT_TYPE_CREATE] && seen[filesystempb.EventType_EVENT_TYPE_WRITE]
	})
	remove := func() error {
		_, err := g.files.RemoveWatcher(ctx, connect.NewRequest(&filesystempb.RemoveWatcherRequest{WatcherId: id}))
		return err
	}
	if err := remove(); err != nil {
		t.Error(err)
	}
	wantCode(t, remove(), connect.CodeNotFound)
	_, err = g.files.GetWatcherEvents(ctx, connect.NewRequest(&filesystempb.GetWatcherEventsRequest{WatcherId: id}))
	wantCode(t, err, connect.CodeNotFound)
	_, err = g.files.CreateWatcher(ctx, connect.NewRequest(&filesystempb.CreateWatcherRequest{Path: "missing"}))
	wantCode(t, err, connect.CodeNotFound)
}
