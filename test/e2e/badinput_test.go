package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestDamagedObjects: whatever is wrong with what a sandbox resumes from is
// told with the object's name; nothing else suffers; with the object back, the
// sandbox is back.
func TestDamagedObjects(t *testing.T) {
	d := hibtest.StartBare(t) // a parked machine reads nothing of what is damaged
	witness := d.Create("--memory", "512")
	d.Shell(witness, "echo well > note")

	damage := map[string]func(path string) error{
		"missing":   os.Remove,
		"truncated": func(path string) error { return cutHalf(path) },
		"corrupt":   func(path string) error { return flipBits(path) },
		"empty":     func(path string) error { return os.WriteFile(path, nil, 0o600) },
	}
	base, err := filepath.Glob(filepath.Join(d.Data, "templates", "base", "*", "base.erofs"))
	if err != nil || len(base) != 1 {
		t.Fatalf("base image: %v, %v", base, err)
	}
	inStore := func(kind string) func(id string) string {
		return func(id string) string { return filepath.Join(d.Data, "store", kind, d.Inspect(id).Snapshot.ID) }
	}
	objects := map[string]func(id string) string{
		"pack": inStore("packs"), "state": inStore("states"), "manifest": inStore("manifests"),
		"base image": func(string) string { return base[0] },
	}
	for object, find := range objects {
		// Each has a sandbox of its own: one that hibernates often is compacted, and
		// then resumes from other objects than those that were found.
		id := d.Create("--memory", "512")
		srv := d.StartServer(id, 30, 8000)
		for kind, harm := range damage {
			t.Run(object+" "+kind, func(t *testing.T) {
				d.Hib("hibernate", id)
				path := find(id)
				restore := setAside(t, path)
				if err := harm(path); err != nil {
					t.Fatal(err)
				}
				_, stderr, code := d.Try("resume", id)
				if code == 0 && object == "pack" && kind == "corrupt" {
					// A page that nobody touched yet: the first touch tells.
					srv.TryGet("/sum")
				} else if code == 0 {
					t.Fatal("the resume succeeded")
				}
				sb := d.WaitState(id, api.StateFailed)
				t.Logf("exit %d: %sreason: %s", code, stderr, sb.Reason)
				if name := filepath.Base(path); !strings.Contains(sb.Reason, name) {
					t.Errorf("the reason %q does not name %s", sb.Reason, name)
				}
				if got := d.Shell(witness, "cat note"); got != "well" {
					t.Errorf("the other sandbox says %q", got)
				}
				if out, _, code := d.Try("store", "verify"); code == 0 {
					t.Errorf("store verify finds nothing wrong: %s", out)
				}
				restore()
				d.Hib("resume", id)
				if got := srv.Get("/sum").Sum; got != srv.WantSum() {
					t.Errorf("checksum after the repair is %d, want %d", got, srv.WantSum())
				}
			})
		}
		d.Hib("rm", id)
	}
}

// setAside keeps a copy of the file path, whose links elsewhere stay as they
// are, and returns what puts it back.
func setAside(t *testing.T, path string) func() {
	t.Helper()
	kept := path + ".kept"
	if err := os.Rename(path, kept); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(kept)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(kept)
	if err != nil {
		t.Fatal(err)
	}
	own := info.Sys().(*syscall.Stat_t)
	if err := os.Chown(path, int(own.Uid), int(own.Gid)); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Rename(kept, path); err != nil {
			t.Fatal(err)
		}
	}
}

func cutHalf(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return os.Truncate(path, info.Size()/2)
}

// flipBits changes a bit in every 4 KiB of the file.
func flipBits(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for i := 100; i < len(b); i += 4096 {
		b[i] ^= 4
	}
	return os.WriteFile(path, b, 0o600)
}

// TestFullDisk: a hibernation that finds no room cancels and says so, and
// the sandbox goes on. So does one whose packs are to come back from the remote
// store, and an import is repeated when there is room.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	dir := hibtest.SmallDisk(t, "3g")
	remote := hibtest.StartRemote(t)
	d := hibtest.StartIn(t, dir, remote.Flags("node"))
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 100, 8000)
	hog := filepath.Join(dir, "hog")
	hibtest.FillDisk(t, hog, 20<<20)
	_, stderr, code := d.Try("hibernate", id)
	t.Logf("exit %d: %s", code, stderr)
	if code == 0 || !strings.Contains(stderr, "space") {
		t.Fatalf("hibernate on a full disk: exit %d, %q", code, stderr)
	}
	if sb := d.Inspect(id); sb.State != api.StateRunning {
		t.Fatalf("the sandbox is %s (%s), want running", sb.State, sb.Reason)
	}
	if got := srv.Get("/sum").Sum; got != srv.WantSum() {
		t.Errorf("checksum is %d, want %d", got, srv.WantSum())
	}
	if err := os.Remove(hog); err != nil {
		t.Fatal(err)
	}
	d.Hib("hibernate", id)
	if got := srv.Get("/sum").Sum; got != srv.WantSum() {
		t.Errorf("checksum after the hibernation is %d, want %d", got, srv.WantSum())
	}
	asleep := func() {
		d.Hib("hibernate", id)
		hibtest.Eventually(t, "it is replicated", func() bool { return d.Inspect(id).Replication.State == "replicated" })
	}
	asleep()
	d.Hib("store", "evict", "--local", id)
	d.Hib("resume", id)
	hibtest.FillDisk(t, hog, 1<<20)
	hibtest.Eventually(t, "it stays remote", func() bool { return strings.Contains(d.Log(), "a snapshot stays remote") })
	if got := srv.Get("/sum").Sum; got != srv.WantSum() {
		t.Errorf("checksum from the remote store is %d, want %d", got, srv.WantSum())
	}
	if err := os.Remove(hog); err != nil {
		t.Fatal(err)
	}
	asleep()

	d.Stop()
	if err := os.RemoveAll(d.Data); err != nil {
		t.Fatal(err)
	}
	d.Run()
	hibtest.FillDisk(t, hog, 8<<20)
	_, stderr, code = d.Try("store", "import", "--take-over")
	t.Logf("exit %d: %s", code, stderr)
	if code == 0 || !strings.Contains(stderr, "space") {
		t.Fatalf("import to a full disk: exit %d, %q", code, stderr)
	}
	if err := os.Remove(hog); err != nil {
		t.Fatal(err)
	}
	d.Hib("store", "import", "--take-over")
	if got := srv.Get("/sum").Sum; got != srv.WantSum() {
		t.Errorf("checksum after the import is %d, want %d", got, srv.WantSum())
	}
}

// TestBadRequests: what is no valid request gets a status, a code, a message
// and a hint.
func TestBadRequests(t *testing.T) {
	d := hibtest.Start(t)
	for _, tt := range []struct {
		name, method, path, key, body string
		status                        int
		code                          string
	}{
		{"unknown sandbox", "GET", "/v1/sandboxes/nosuch", d.Key, "", 404, api.CodeNotFound},
		{"hibernate unknown", "POST", "/v1/sandboxes/nosuch/hibernate", d.Key, "", 404, api.CodeNotFound},
		{"delete unknown", "DELETE", "/v1/sandboxes/nosuch", d.Key, "", 404, api.CodeNotFound},
		{"unknown template", "POST", "/v1/sandboxes", d.Key, `{"template":"nosuch"}`, 404, api.CodeNotFound},
		{"malformed", "POST", "/v1/sandboxes", d.Key, `{"template":`, 400, api.CodeInvalid},
		{"unknown field", "POST", "/v1/sandboxes", d.Key, `{"tempalte":"base"}`, 400, api.CodeInvalid},
		{"nonsense shape", "POST", "/v1/sandboxes", d.Key, `{"memory_mib":-5}`, 400, api.CodeInvalid},
		{"huge shape", "POST", "/v1/sandboxes", d.Key, `{"memory_mib":1000000000}`, 400, api.CodeInvalid},
		{"oversized", "POST", "/v1/sandboxes", d.Key, `{"name":"` + strings.Repeat("x", 8<<20) + `"}`, 413, api.CodeTooLarge},
		{"no key", "GET", "/v1/sandboxes", "", "", 401, api.CodeUnauthorized},
		{"wrong key", "GET", "/v1/sandboxes", "e2b_0123", "", 401, api.CodeUnauthorized},
		{"unknown route", "GET", "/v1/nosuch", d.Key, "", 404, api.CodeNotFound},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req, err := http.NewRequest(tt.method, d.URL+tt.path, bytes.NewReader([]byte(tt.body)))
			if err != nil {
				t.Fatal(err)
			}
			if tt.key != "" {
				req.Header.Set("X-API-Key", tt.key)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			var e api.Error
			if err := json.Unmarshal(body, &e); err != nil {
				t.Fatalf("the body is no error object: %q", body)
			}
			if resp.StatusCode != tt.status || e.Code != tt.code || e.Message == "" || e.Hint == "" {
				t.Errorf("%d %+v, want %d %s with message and hint", resp.StatusCode, e, tt.status, tt.code)
			}
		})
	}
}
