package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestAdmission: what the host's memory cannot carry is refused at once with
// the reason, and parked machines are given up before that.
func TestAdmission(t *testing.T) {
	// Two guests of 512 MiB with what their machines take up beside, and little more.
	d := hibtest.StartWith(t, []string{"--guest-memory", "1290M", "--pool", "0", "--parked-memory", "1G"})
	first, second := d.Create("--memory", "512"), d.Create("--memory", "512")
	refused := func(method, path, body string) {
		t.Helper()
		e := request(t, d, method, path, body, http.StatusServiceUnavailable)
		if e.Code != api.CodeUnavailable || !strings.Contains(e.Message, "no memory") || !strings.Contains(e.Hint, "--guest-memory") {
			t.Errorf("%s %s: %+v", method, path, e)
		}
	}
	refused(http.MethodPost, "/v1/sandboxes", `{"template":"base","memory_mib":512}`)
	if n := len(d.List()); n != 2 {
		t.Fatalf("there are %d sandboxes", n)
	}
	d.Shell(first, "echo kept > note")
	d.Hibernate(first)
	if n := len(d.Parked()); n != 1 {
		t.Fatalf("%d machines are parked", n)
	}
	third := d.Create("--memory", "512")
	hibtest.Eventually(t, "the parked machine is given up", func() bool { return len(d.Parked()) == 0 })

	refused(http.MethodPost, "/v1/sandboxes/"+first+"/exec", `{"cmd":["true"]}`)
	refused(http.MethodPost, "/v1/sandboxes/"+first+"/resume", "")
	if sb := d.Inspect(first); sb.State != api.StateStandby {
		t.Errorf("it is %s (%s)", sb.State, sb.Reason)
	}
	d.Hib("hibernate", second)
	if got := d.Shell(first, "cat note"); got != "kept" {
		t.Errorf("it has %q", got)
	}
	d.Hib("rm", "--force", third)
	d.Shell(second, "true")
}
