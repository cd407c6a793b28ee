package doctor

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/shim"
)

// find returns the check of a name.
func find(t *testing.T, checks []Check, name string) Check {
	t.Helper()
	for _, c := range checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %q", name)
	return Check{}
}

func TestEveryCheckSaysWhatItFound(t *testing.T) {
	checks := Run(t.Context(), Host{Data: filepath.Join(t.TempDir(), "data"), Program: "/bin/true"})
	names := map[string]bool{}
	for _, c := range checks {
		if names[c.Name] {
			t.Errorf("two checks are called %q", c.Name)
		}
		names[c.Name] = true
		if c.Detail == "" {
			t.Errorf("%s says nothing", c.Name)
		}
		if (c.Status == OK) != (c.Fix == "") {
			t.Errorf("%s: status %s, fix %q", c.Name, c.Status, c.Fix)
		}
	}
	if c := find(t, checks, "platform"); c.Status != OK {
		t.Errorf("%+v", c)
	}
	if c := find(t, checks, "data folder"); c.Status != OK {
		t.Errorf("%+v", c)
	}
}

func TestFailures(t *testing.T) {
	h := Host{Data: "/proc/none", User: "no-such-account", Program: "/bin/true", Driver: shim.DriverConfig{Binary: "no-such-qemu"}}
	checks := Run(t.Context(), h)
	for _, name := range []string{"qemu", "account", "disk"} {
		if c := find(t, checks, name); c.Status != Fail || c.Fix == "" {
			t.Errorf("%+v", c)
		}
	}
	if !Failed(checks) {
		t.Error("nothing failed")
	}
}

func TestExisting(t *testing.T) {
	dir := t.TempDir()
	if got := existing(filepath.Join(dir, "a", "b")); got != dir {
		t.Errorf("%s", got)
	}
	if got := existing(dir); got != dir {
		t.Errorf("%s", got)
	}
}

func TestLongRuntimeFolder(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root's is in /run")
	}
	t.Setenv("XDG_RUNTIME_DIR", "/"+strings.Repeat("x", 90))
	if c := (Host{Data: "/data"}).sockets(); c.Status != Fail {
		t.Errorf("%+v", c)
	}
}

func TestLastLine(t *testing.T) {
	for name, c := range map[string]struct {
		writes []string
		want   string
	}{
		"nothing":           {nil, ""},
		"one":               {[]string{"hib: no\n"}, "no"},
		"the last of many":  {[]string{"a\nb\n", "hib: c\n"}, "c"},
		"in pieces":         {[]string{"a\nhib", ": b"}, "b"},
		"a line goes on":    {[]string{"a", "b\nc", "d\n"}, "cd"},
		"of one write only": {[]string{"a\nb\nc"}, "c"},
	} {
		t.Run(name, func(t *testing.T) {
			var all strings.Builder
			l := lastLine{to: &all}
			for _, w := range c.writes {
				if _, err := l.Write([]byte(w)); err != nil {
					t.Fatal(err)
				}
			}
			if got := l.String(); got != c.want {
				t.Errorf("%q", got)
			}
			if all.String() != strings.Join(c.writes, "") {
				t.Errorf("passed on %q", all.String())
			}
		})
	}
}

// TestGuestsOfTheDaemon are told where one runs, and that it does not answer.
func TestGuestsOfTheDaemon(t *testing.T) {
	h := Host{Data: t.TempDir()}
	if checks := h.guests(t.Context()); checks != nil {
		t.Errorf("without a daemon: %+v", checks)
	}
	daemon := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/host" || r.Header.Get("X-API-Key") != "e2b_00" {
			http.NotFound(w, r)
			return
		}
		json.NewEncoder(w).Encode(api.Host{Guests: 3, MemoryPromised: 6 << 30, MemoryLimit: 12 << 30, DiskReserve: 1 << 30})
	}))
	info, err := json.Marshal(api.DaemonInfo{URL: daemon.URL})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{api.DaemonFile: string(info), api.KeyFile: "e2b_00\n"} {
		if err := os.WriteFile(filepath.Join(h.Data, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := find(t, h.guests(t.Context()), "guests")
	if c.Status != OK || !strings.HasPrefix(c.Detail, "3 run, 6.0 GiB of memory promised of 12.0 GiB") {
		t.Errorf("%+v", c)
	}
	daemon.Close()
	if c = find(t, h.guests(t.Context()), "guests"); c.Status != Warn || c.Fix == "" {
		t.Errorf("of a daemon that is gone: %+v", c)
	}
}
