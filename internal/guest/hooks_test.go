package guest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// hookGuest is a guest whose image has hooks of its own in dir.
type hookGuest struct {
	*guestUnderTest
	dir, trace string
}

func newHookGuest(t *testing.T) *hookGuest {
	g := &hookGuest{dir: t.TempDir()}
	g.trace = filepath.Join(g.dir, "trace")
	g.guestUnderTest = newGuest(t, func(c *Config) { c.Hooks = g.dir })
	g.boot(t)
	return g
}

// image puts a hook into the image that adds a line to the trace first.
func (g *hookGuest) image(t *testing.T, path, script string, mode os.FileMode) {
	t.Helper()
	file := filepath.Join(g.dir, path)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	writeFile(t, file, "#!/bin/sh\necho "+filepath.Base(path)+" $HIB_REASON >>"+g.trace+"\n"+script)
	if err := os.Chmod(file, mode); err != nil {
		t.Fatal(err)
	}
}

func (g *hookGuest) traced(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(g.trace)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(b)), " ")
}

func (g *hookGuest) freeze(t *testing.T, attempt uint64, hooks ...guestapi.Hook) guestapi.FreezeResponse {
	t.Helper()
	resp, err := g.control.Freeze(testContext(t), "token", guestapi.FreezeRequest{Attempt: attempt, Deadline: time.Minute, Hooks: hooks})
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func pre(name, script string) guestapi.Hook {
	return guestapi.Hook{Name: name, Event: guestapi.EventPreHibernate, Command: []string{"sh", "-c", script}}
}

func post(name, script string) guestapi.Hook {
	return guestapi.Hook{Name: name, Event: guestapi.EventPostResume, Command: []string{"sh", "-c", script}}
}

func TestHooksOfTheImageRunInTheirOrder(t *testing.T) {
	g := newHookGuest(t)
	for path, mode := range map[string]os.FileMode{
		"pre-hibernate.d/20-b": 0o755, "pre-hibernate.d/10-a": 0o700,
		"pre-hibernate.d/30-not-executable": 0o644, "pre-hibernate.d/40.dpkg-old": 0o755, "pre-hibernate.d/50~": 0o755,
		"post-resume.d/10-c": 0o755,
	} {
		g.image(t, path, "", mode)
	}
	g.image(t, "pre-hibernate.d/60-others-may-write", "", 0o777)
	resp := g.freeze(t, 1, pre("own", "echo own >>"+g.trace), post("late", "echo late $HIB_REASON >>"+g.trace))
	if got, want := g.traced(t), "10-a hibernate 20-b hibernate own"; got != want {
		t.Errorf("ran %s, want %s", got, want)
	}
	if len(resp.Hooks) != 3 || resp.Hooks[0].Name != "10-a" || resp.Hooks[2].ExitCode != 0 || resp.Steps["hooks"] <= 0 {
		t.Errorf("answer %+v", resp)
	}
	if len(resp.Warnings) != 1 || !strings.Contains(resp.Warnings[0], "60-others-may-write") {
		t.Errorf("warnings %q", resp.Warnings)
	}
	if !g.system.isFrozen() {
		t.Error("not frozen")
	}
	if err := os.Remove(g.trace); err != nil {
		t.Fatal(err)
	}
	if _, err := g.control.Init(testContext(t), "token", resumeRequest(2)); err != nil {
		t.Fatal(err)
	}
	if got, want := g.traced(t), "10-c resume"; got != want {
		t.Errorf("ran %s, want %s: the hooks of an init are those that come with it", got, want)
	}
}

func TestAHookSeesWhatHappened(t *testing.T) {
	g := newHookGuest(t)
	req := resumeRequest(7)
	req.Reason, req.SleptSeconds, req.Snapshot = guestapi.ReasonRestore, 61.5, "s1"
	h := post("show", `echo "$HIB_EVENT $HIB_REASON $HIB_SLEPT_SECONDS $HIB_SNAPSHOT $HIB_GENERATION $EXTRA $USER" >&2; exit 3`)
	h.Env = map[string]string{"EXTRA": "more", "HIB_REASON": "mine"}
	req.Hooks = []guestapi.Hook{h, pre("other", "exit 1")}
	resp, err := g.control.Init(testContext(t), "token", req)
	if err != nil || len(resp.Hooks) != 1 {
		t.Fatalf("%+v, %v", resp, err)
	}
	r := resp.Hooks[0]
	if want := "post-resume restore 61 s1 7 more root\n"; r.Output != want || r.ExitCode != 3 || r.Reason != guestapi.ReasonRestore {
		t.Errorf("got %+v, want %q", r, want)
	}
	if len(resp.Warnings) != 1 || resp.Warnings[0] != "post-resume hook show: exit code 3" {
		t.Errorf("warnings %q", resp.Warnings)
	}
	again, err := g.control.Init(testContext(t), "token", req)
	if err != nil || len(again.Hooks) != 0 {
		t.Errorf("a repeated init ran hooks again, or reported them again: %+v, %v", again, err)
	}
}

func TestHooksRunAsTheirUser(t *testing.T) {
	g := newHookGuest(t)
	h := pre("who", "id -u; pwd")
	h.User = "user"
	unknown := pre("nobody", "true")
	unknown.User = "stranger"
	resp := g.freeze(t, 1, h, unknown)
	if resp.Hooks[0].Output != "65534\n"+g.home+"\n" {
		t.Errorf("%+v", resp.Hooks[0])
	}
	if !resp.Hooks[1].Failed() || !strings.Contains(resp.Hooks[1].Error, "stranger") {
		t.Errorf("%+v", resp.Hooks[1])
	}
}

// TestHooksThatMisbehave: none keeps the guest from being frozen.
func TestHooksThatMisbehave(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		check  func(guestapi.HookResult) bool
	}{
		"fails":      {"exit 9", func(r guestapi.HookResult) bool { return r.ExitCode == 9 }},
		"hangs":      {"sleep 100", func(r guestapi.HookResult) bool { return r.TimedOut && r.Signal == "SIGKILL" }},
		"kills":      {"kill -9 $$", func(r guestapi.HookResult) bool { return r.Signal == "SIGKILL" && !r.TimedOut }},
		"leaves":     {"sleep 100 & echo $! >pid; echo left", func(r guestapi.HookResult) bool { return r.ExitCode == 0 && r.Output == "left\n" }},
		"is no text": {`printf '\033[2J\377'`, func(r guestapi.HookResult) bool { return r.Output == "?[2J?" }},
		"prints": {"head -c 100000000 /dev/zero; echo; echo end", func(r guestapi.HookResult) bool {
			return r.ExitCode == 0 && strings.HasSuffix(r.Output, "\nend\n") && len(r.Output) < guestapi.MaxHookOutput+100 &&
				r.DroppedBytes > 99_000_000 && strings.Contains(r.Output, "bytes left out")
		}},
		"prints on": {"exec yes", func(r guestapi.HookResult) bool { return r.TimedOut && r.DroppedBytes > 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			g := newHookGuest(t)
			h := pre("bad", "cd "+g.dir+"; "+c.script)
			t.Cleanup(func() {
				if pid, err := os.ReadFile(filepath.Join(g.dir, "pid")); err == nil {
					n, _ := strconv.Atoi(strings.TrimSpace(string(pid)))
					_ = syscall.Kill(n, syscall.SIGKILL)
				}
			})
			if name == "hangs" || name == "prints on" {
				h.Timeout = 200 * time.Millisecond
			} else {
				h.Timeout = guestapi.MaxHookTimeout
			}
			resp := g.freeze(t, 1, h, pre("next", "echo next"))
			if len(resp.Hooks) != 2 || !c.check(resp.Hooks[0]) {
				t.Errorf("%+v", resp.Hooks)
			}
			if resp.Hooks[1].Output != "next\n" || !g.system.isFrozen() {
				t.Errorf("what came after: %+v, frozen %t", resp.Hooks[1], g.system.isFrozen())
			}
		})
	}
}

// TestAThawEndsHooks: who cancels a hibernation does not wait for a hook's time-out.
func TestAThawEndsHooks(t *testing.T) {
	g := newHookGuest(t)
	started := filepath.Join(g.dir, "started")
	slow := pre("slow", "touch "+started+"; sleep 100")
	slow.Timeout = guestapi.MaxHookTimeout
	frozen := make(chan error, 1)
	go func() {
		_, err := g.control.Freeze(testContext(t), "token", guestapi.FreezeRequest{Attempt: 1, Deadline: 5 * time.Minute,
			Hooks: []guestapi.Hook{slow, post("back", "echo $HIB_REASON")}})
		frozen <- err
	}()
	waitFor(t, "the hook", func() bool { _, err := os.Stat(started); return err == nil })
	g.agent.control.abort.giveUp(1, "wrong") // who does not know the token ends nothing
	resp, err := g.control.Thaw(testContext(t), "token", guestapi.ThawRequest{Attempt: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-frozen; err == nil {
		t.Error("the freeze was taken after its thaw")
	}
	if g.system.isFrozen() || len(resp.Hooks) != 2 {
		t.Fatalf("frozen %t, hooks %+v", g.system.isFrozen(), resp.Hooks)
	}
	if r := resp.Hooks[0]; r.Name != "slow" || r.TimedOut || !strings.Contains(r.Error, "cancelled") {
		t.Errorf("%+v", r)
	}
	if r := resp.Hooks[1]; r.Output != "cancelled\n" {
		t.Errorf("%+v", r)
	}
	if r := g.freeze(t, 2); len(r.Hooks) != 0 || !g.system.isFrozen() {
		t.Errorf("the next attempt: %+v", r)
	}
}

func TestAHibernationThatNobodyFinishesRunsItsHooks(t *testing.T) {
	g := newHookGuest(t)
	g.image(t, "post-resume.d/10-c", "", 0o755)
	if _, err := g.control.Freeze(testContext(t), "token", guestapi.FreezeRequest{Attempt: 1, Deadline: 10 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the hook", func() bool { return g.traced(t) == "10-c cancelled" })
	var got []guestapi.HookResult
	waitFor(t, "its result", func() bool {
		resp, err := g.control.Hooks(testContext(t), "token")
		got = append(got, resp.Hooks...)
		return err != nil || len(got) > 0
	})
	if len(got) != 1 || got[0].Name != "10-c" {
		t.Errorf("%+v", got)
	}
}

func TestBackgroundHooksAreNotWaitedFor(t *testing.T) {
	g := newHookGuest(t)
	gate := filepath.Join(g.dir, "gate")
	g.image(t, "post-resume.d/10-slow.background", "while ! test -e "+gate+"; do sleep 0.05; done; echo done", 0o755)
	resp, err := g.control.Init(testContext(t), "token", resumeRequest(2))
	if err != nil || len(resp.Hooks) != 0 {
		t.Fatalf("%+v, %v", resp, err)
	}
	// The next resume ends the one before.
	if _, err := g.control.Init(testContext(t), "token", resumeRequest(3)); err != nil {
		t.Fatal(err)
	}
	writeFile(t, gate, "")
	var got []guestapi.HookResult
	waitFor(t, "both results", func() bool {
		resp, err := g.control.Hooks(testContext(t), "token")
		got = append(got, resp.Hooks...)
		return err != nil || len(got) == 2
	})
	if len(got) != 2 || !strings.Contains(got[0].Error, "resumed anew") || got[1].Output != "done\n" || !got[1].Background {
		t.Errorf("%+v", got)
	}
}

func TestTooManyHooksAreToldOf(t *testing.T) {
	g := newHookGuest(t)
	var many []guestapi.Hook
	for range guestapi.MaxHooks + 2 {
		many = append(many, pre("x", "true"))
	}
	resp := g.freeze(t, 1, many...)
	if len(resp.Hooks) != guestapi.MaxHooks || len(resp.Warnings) != 1 || !strings.Contains(resp.Warnings[0], "2 of 34") {
		t.Errorf("%d results, warnings %q", len(resp.Hooks), resp.Warnings)
	}
}
