package e2e

import (
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/blob/s3/faultproxy"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// far is a daemon with a remote store, and a sandbox with a server whose
// answers must go on.
type far struct {
	*testing.T
	remote *hibtest.Remote
	d      *hibtest.Daemon
	id     string
	srv    *hibtest.Server
	last   hibtest.Answer
}

const farPrefix = "node"

// check asks the server, which wakes it: it is the same process, its memory is
// right to the bit, and it did not go back behind what it said before.
func (f *far) check(t *testing.T) {
	t.Helper()
	now := f.srv.Get("/sum")
	if now.PID != f.last.PID || now.Counter < f.last.Counter || now.Sum != f.srv.WantSum() {
		t.Fatalf("the server says %+v, before %+v; its sum should be %d", now, f.last, f.srv.WantSum())
	}
	f.last = now
}

func (f *far) replicated(t *testing.T) {
	t.Helper()
	hibtest.Eventually(t, "it is replicated", func() bool { return f.d.Inspect(f.id).Replication.State == "replicated" })
}

// asleep brings the sandbox to standby with nothing of it on the local disk
// that the remote store has.
func (f *far) asleep(t *testing.T) {
	t.Helper()
	if f.d.Inspect(f.id).State == api.StateRunning {
		f.last = f.srv.Get("/")
		f.d.Hib("hibernate", f.id)
	}
	f.replicated(t)
	hibtest.Eventually(t, "nothing of it is left here", func() bool { // a compaction may bring another snapshot
		_, _, code := f.d.Try("store", "evict", "--local", f.id)
		return code == 0
	})
}

// refused resumes the sandbox in vain and returns what was said.
func (f *far) refused(t *testing.T, want api.State) string {
	t.Helper()
	_, stderr, code := f.d.Try("resume", f.id)
	if code == 0 {
		t.Fatal("it resumed")
	}
	if sb := f.d.Inspect(f.id); sb.State != want {
		t.Fatalf("it is %s (%s), want %s", sb.State, sb.Reason, want)
	}
	t.Logf("exit %d: %s", code, strings.TrimSpace(stderr))
	return stderr
}

// TestRemoteStore: whatever happens to the remote store, nothing that was
// acknowledged is lost, and no guest ever sees wrong bytes.
func TestRemoteStore(t *testing.T) {
	remote := hibtest.StartRemote(t)
	d := hibtest.StartWith(t, remote.Flags(farPrefix))
	f := &far{T: t, remote: remote, d: d, id: d.Create("--memory", "512")}
	f.srv = d.StartServer(f.id, 20, 8000)
	f.last = f.srv.Get("/sum")
	t.Run("down during a hibernation", f.testDown)
	t.Run("resumed from afar", f.testResume)
	t.Run("damaged", f.testDamaged)
	t.Run("unreliable", f.testUnreliable)
	t.Run("verified", f.testVerify)
	t.Run("node lost", f.testNodeLost)
}

func (f *far) testDown(t *testing.T) {
	f.remote.Proxy.Always(faultproxy.Fault{Kind: faultproxy.Reset})
	for range 2 { // it hibernates and wakes as if there were no remote store
		f.d.Hib("hibernate", f.id)
		hibtest.Eventually(t, "the reason is shown", func() bool {
			r := f.d.Inspect(f.id).Replication
			return r.State == "local" && r.Error != ""
		})
		f.check(t)
	}
	f.d.Hib("hibernate", f.id)
	f.d.Restart() // nor does a daemon wait for it that starts
	if r := f.d.Inspect(f.id).Replication; r.State == "replicated" {
		t.Fatalf("it is replicated to a store that is down: %+v", r)
	}
	if _, stderr, code := f.d.Try("store", "evict", "--local", f.id); code == 0 {
		t.Fatalf("what is nowhere else was evicted: %s", stderr)
	}
	f.remote.Proxy.Set(nil)
	f.replicated(t)
	f.check(t)
}

func (f *far) testResume(t *testing.T) {
	f.asleep(t)
	f.check(t)
	if r := f.d.Inspect(f.id).LastResume; r.Tier != "remote" || r.BytesFetched == 0 {
		t.Errorf("it was resumed from %q, %d bytes were fetched", r.Tier, r.BytesFetched)
	}
	f.asleep(t)
	f.remote.Proxy.Always(faultproxy.Fault{Kind: faultproxy.Reset})
	f.refused(t, api.StateStandby)
	if e := request(t, f.d, http.MethodPost, "/v1/sandboxes/"+f.id+"/resume", "", http.StatusServiceUnavailable); e.Code != api.CodeUnavailable || !strings.Contains(e.Message, "remote store") {
		t.Errorf("%+v", e)
	}
	f.remote.Proxy.Set(nil)
	f.check(t)
}

func (f *far) testDamaged(t *testing.T) {
	for name, how := range map[string]func(path string) error{
		"deleted":   os.Remove,
		"cut off":   func(path string) error { return os.Truncate(path, 5000) },
		"corrupted": flipBits,
	} {
		t.Run(name, func(t *testing.T) {
			f.asleep(t)
			repair := hibtest.Damage(t, f.remote.Objects(t, farPrefix, "packs"), how)
			said := f.refused(t, api.StateFailed)
			reason := f.d.Inspect(f.id).Reason
			for _, text := range []string{said, reason} {
				if !strings.Contains(text, "packs/") || !strings.Contains(text, "remote store") {
					t.Errorf("the object and the tier are not named: %q", text)
				}
			}
			repair()
			f.d.Hib("resume", f.id)
			f.check(t)
		})
	}
}

func (f *far) testUnreliable(t *testing.T) {
	t.Run("now and then", func(t *testing.T) {
		f.asleep(t)
		var n atomic.Int64
		f.remote.Proxy.Set(func(*http.Request) faultproxy.Fault {
			if i := n.Add(1); i%3 == 0 {
				return faultproxy.Fault{Kind: faultproxy.Kinds[i/3%int64(len(faultproxy.Kinds))]}
			}
			return faultproxy.Fault{}
		})
		hibtest.Eventually(t, "it resumes", func() bool {
			_, stderr, code := f.d.Try("resume", f.id)
			if code != 0 {
				t.Logf("exit %d: %s", code, stderr)
			}
			return code == 0
		})
		f.srv.TryGet("/sum") // may take too long, but reads all of the memory
		f.remote.Proxy.Set(nil)
		f.check(t)
	})
	for _, kind := range []faultproxy.Kind{faultproxy.Truncated, faultproxy.Slow} {
		t.Run("always "+string(kind), func(t *testing.T) {
			f.asleep(t)
			f.remote.Proxy.Always(faultproxy.Fault{Kind: kind})
			if said := f.refused(t, api.StateStandby); !strings.Contains(said, "remote store") {
				t.Errorf("the tier is not named: %q", said)
			}
			f.remote.Proxy.Set(nil)
			f.check(t)
		})
	}
}

func (f *far) testVerify(t *testing.T) {
	f.asleep(t)
	packs := f.remote.Objects(t, farPrefix, "packs")
	repair := hibtest.Damage(t, packs, flipBits)
	out, _, code := f.d.Try("store", "verify", "--remote")
	if n := strings.Count(out, "remote tier: "); code != 1 || n != len(packs) {
		t.Errorf("exit %d, %d of %d packs are faulty: %s", code, n, len(packs), out)
	}
	repair()
	f.remote.Proxy.Always(faultproxy.Fault{Kind: faultproxy.Reset})
	f.d.Hib("store", "verify")
	if out, stderr, code := f.d.Try("store", "verify", "--remote"); code == 0 || strings.Contains(out, "remote tier: ") || !strings.Contains(stderr, "remote store") {
		t.Errorf("down, it is no damage: exit %d: %s %s", code, out, stderr)
	}
	f.remote.Proxy.Set(nil)
	f.check(t)
}

// testNodeLost takes the data folder away. Another node touches nothing of the
// remote store before it is told to, and then has everything; the old one, should it
// come back, touches nothing any more.
func (f *far) testNodeLost(t *testing.T) {
	f.d.Hib("hibernate", f.id)
	f.replicated(t)
	f.d.Stop()
	old := f.d.Data + "-old"
	if err := os.Rename(f.d.Data, old); err != nil {
		t.Fatal(err)
	}
	f.d.Run()
	objects := f.remote.Objects(t, farPrefix, "*")
	if _, stderr, code := f.d.Try("store", "import"); code == 0 || !strings.Contains(stderr, "--take-over") {
		t.Errorf("it took what belongs to another node: %s", stderr)
	}
	f.d.Try("store", "gc") // fails, or does nothing
	if now := f.remote.Objects(t, farPrefix, "*"); !slices.Equal(now, objects) {
		t.Fatalf("there were %d objects, now there are %d", len(objects), len(now))
	}
	t.Log(f.d.Hib("store", "import", "--take-over"))
	f.check(t)
	if r := f.d.Inspect(f.id).LastResume; r.Tier != "remote" {
		t.Errorf("it was resumed from %q", r.Tier)
	}
	f.d.Hib("rm", f.d.Create("--memory", "512")) // the template is here, too
	f.asleep(t)

	before := hibtest.StartOn(t, old, f.remote.Flags(farPrefix))
	objects = f.remote.Objects(t, farPrefix, "*")
	before.Hib("rm", "--force", f.id)
	if out, stderr, code := before.Try("store", "gc"); code == 0 || !strings.Contains(stderr, "another node") {
		t.Errorf("the old node collected: exit %d: %s %s", code, out, stderr)
	}
	if now := f.remote.Objects(t, farPrefix, "*"); !slices.Equal(now, objects) {
		t.Fatalf("there were %d objects, now there are %d", len(objects), len(now))
	}
	before.Stop()
	f.check(t)
}
