package e2e

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// apiClient returns a Go client of a daemon.
func apiClient(t testing.TB, d *hibtest.Daemon) *client.Client {
	t.Helper()
	c, err := client.New(d.URL, d.Key)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// slept waits until a sandbox hibernated by itself and returns its report and
// when its snapshot was taken.
func slept(t testing.TB, d *hibtest.Daemon, id string) (api.HibernateReport, time.Time) {
	t.Helper()
	var sb api.Sandbox
	hibtest.Eventually(t, "sandbox "+id+" is in standby", func() bool {
		for _, sb = range d.List() {
			if sb.ID == id {
				return sb.State == api.StateStandby
			}
		}
		return false
	})
	r := *sb.LastHibernate
	if _, ok := r.Phases["detect"]; !ok || r.Trigger != "idle" {
		t.Errorf("sandbox %s hibernated by %q: %v", id, r.Trigger, r.Phases)
	}
	t.Logf("detected %.0f ms late, asleep %.0f ms later: %v", r.Phases["detect"], r.TotalMS, r.Phases)
	return r, sb.Snapshot.CreatedAt
}

// TestIdle: a sandbox that nobody uses hibernates by itself, also when the
// daemon was restarted in between, and a request wakes it. What is used in the
// ways that count stays awake until that ends.
func TestIdle(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512", "--idle-timeout", "3s")
	srv := d.StartServer(id, 20, 8000)
	slept(t, d, id)
	if got := srv.Get("/sum").Sum; got != srv.WantSum() {
		t.Errorf("checksum is %d, want %d", got, srv.WantSum())
	}
	d.Restart()
	slept(t, d, id)

	t.Run("exec", func(t *testing.T) {
		d.Shell(id, "true")
		before := d.Inspect(id).LastHibernate.Phases
		done := make(chan struct{})
		go func() {
			defer close(done)
			d.Try("exec", id, "--", "sleep", "10")
		}()
		hibtest.Eventually(t, "the exec holds a lease", func() bool {
			l := d.Inspect(id).Leases
			return len(l) == 1 && l[0].Kind == "exec" && strings.Contains(l[0].Owner, "sleep 10")
		})
		<-done
		if after := d.Inspect(id).LastHibernate.Phases; fmt.Sprint(after) != fmt.Sprint(before) {
			t.Error("it hibernated under the command")
		}
		slept(t, d, id)
	})

	t.Run("keep awake", func(t *testing.T) {
		d.Hib("exec", "-d", "--keep-awake", id, "--", "sh", "-c", "sleep 10; touch done")
		if a := d.Inspect(id).Activity; a == nil || len(a.KeepAwake) != 1 || !strings.Contains(a.KeepAwake[0].Command, "touch done") {
			t.Errorf("the activity is %+v", a)
		}
		slept(t, d, id)
		d.Shell(id, "test -e done")
		d.Hib("exec", "-d", id, "--", "sh", "-c", "sleep 1000; touch never")
		slept(t, d, id)
	})

	t.Run("hold", func(t *testing.T) {
		d.Shell(id, "true")
		d.Hib("hold", id, "12s", "--reason", "a demo")
		held := d.Inspect(id).Leases
		if len(held) != 1 || held[0].Owner != "a demo" || held[0].Until == nil {
			t.Fatalf("the leases are %+v", held)
		}
		d.Restart()
		if _, at := slept(t, d, id); at.Before(*held[0].Until) {
			t.Errorf("it hibernated at %v, held until %v", at, *held[0].Until)
		}
	})

	for name, serve := range map[string]func(http.Handler) *httptest.Server{"http": httptest.NewServer, "https": httptest.NewTLSServer} {
		t.Run("awaited reply over "+name, func(t *testing.T) {
			release := make(chan time.Time, 1)
			host := serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				select { // a model that thinks
				case <-time.After(10 * time.Second):
				case <-r.Context().Done():
				}
				release <- time.Now()
				io.WriteString(w, "the answer")
			}))
			defer host.Close()
			_, port, _ := net.SplitHostPort(host.Listener.Addr().String())
			d.Hib("update", id, "--allow", "host:"+port)
			d.Hib("hibernate", id) // its next machine has the rule
			d.Hib("exec", "-d", id, "--", "sh", "-c", fmt.Sprintf("curl -sk %s://host.hib.internal:%s/ > reply 2>&1", name, port))
			at := <-release
			if _, asleep := slept(t, d, id); asleep.Before(at) {
				t.Error("it hibernated while it waited")
			}
			if got := d.Shell(id, "cat reply"); got != "the answer" {
				t.Errorf("the reply is %q", got)
			}
		})
	}

	t.Run("silent connection", func(t *testing.T) {
		d.Hib("update", id, "--connection-cap", "6s")
		d.Shell(id, "true")
		conn, err := apiClient(t, d).DialPort(t.Context(), id, 8000)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		opened := time.Now()
		if _, at := slept(t, d, id); at.Before(opened.Add(3 * time.Second)) {
			t.Errorf("it hibernated at %v, with a connection of %v", at, opened)
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("the connection lives on")
		}
	})
}

// TestEndOfSession: the end of the last terminal hibernates the sandbox, if its
// policy says so.
func TestEndOfSession(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512", "--on-session-close", "hibernate")
	d.Shell(id, "true") // is none
	hc, base := apiClient(t, d).Agent(id, "")
	procs := processconnect.NewProcessClient(hc, base)
	var streams []interface{ Close() error }
	for range 2 {
		stream, err := procs.Start(t.Context(), connect.NewRequest(&process.StartRequest{
			Process: &process.ProcessConfig{Cmd: "cat"}, Pty: &process.PTY{Size: &process.PTY_Size{Cols: 80, Rows: 24}},
		}))
		if err != nil {
			t.Fatal(err)
		}
		if !stream.Receive() {
			t.Fatal(stream.Err())
		}
		streams = append(streams, stream)
	}
	streams[0].Close()
	hibtest.Eventually(t, "one session is left", func() bool { return len(d.Inspect(id).Leases) == 1 })
	if sb := d.Inspect(id); sb.State != api.StateRunning || sb.LastHibernate != nil {
		t.Errorf("with a session it is %s", sb.State)
	}
	streams[1].Close()
	if sb := d.WaitState(id, api.StateStandby); sb.LastHibernate.Trigger != "session" {
		t.Errorf("it hibernated by %q", sb.LastHibernate.Trigger)
	}
}

// idleTime names the environment variable that says how long TestIdleTraffic
// lets its clients work.
const idleTime = "HIB_TEST_IDLE_TIME"

// TestIdleTraffic has clients use eight sandboxes at random times, which sleep
// and wake: every request is answered, none is lost or done twice, and in the
// end states and records agree.
func TestIdleTraffic(t *testing.T) {
	long := 30 * time.Second
	if text := os.Getenv(idleTime); text != "" {
		var err error
		if long, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d, %v", seed, long)
	d := hibtest.Start(t)
	c := apiClient(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), long)
	defer cancel()
	const sandboxes = 8
	var ids []string
	for range sandboxes {
		ids = append(ids, d.Create("--memory", "512", "--idle-timeout", "2s"))
	}
	var requests, woke atomic.Int64
	var group sync.WaitGroup
	counts := make([]int, sandboxes)
	for i, id := range ids {
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		group.Go(func() {
			for ctx.Err() == nil {
				sb, err := c.Get(t.Context(), id)
				if err != nil {
					t.Error(err)
					return
				}
				if sb.State == api.StateStandby {
					woke.Add(1)
				}
				// It appends a line and tells how many there are.
				out, err := c.Exec(t.Context(), id, api.ExecRequest{Cmd: []string{"sh", "-c", "echo x >> lines; wc -l < lines"}})
				if err != nil {
					t.Errorf("request %d to %s: %v", counts[i]+1, id, err)
					return
				}
				counts[i]++
				requests.Add(1)
				if got := strings.TrimSpace(out.Stdout); got != fmt.Sprint(counts[i]) {
					t.Errorf("request %d to %s was the guest's number %s %s", counts[i], id, got, out.Stderr)
					return
				}
				select {
				case <-ctx.Done():
				case <-time.After(time.Duration(rnd.Int64N(int64(8 * time.Second)))):
				}
			}
		})
	}
	group.Wait()
	for _, id := range ids {
		slept(t, d, id)
	}
	t.Logf("%d requests were answered, %d of them by a sandbox that slept", requests.Load(), woke.Load())
	d.Restart()
	for i, id := range ids {
		if sb := d.Inspect(id); sb.State != api.StateStandby {
			t.Errorf("%s is recorded as %s", id, sb.State)
		}
		if got := strings.TrimSpace(d.Shell(id, "wc -l < lines")); got != fmt.Sprint(counts[i]) {
			t.Errorf("%s has %s lines, want %d", id, got, counts[i])
		}
	}
}

// idleMany names the environment variable that says how many sandboxes
// TestIdleCost puts to sleep; it looks at the daemon for a minute then.
const idleMany = "HIB_TEST_IDLE_MANY"

// TestIdleCost: sandboxes that went to sleep by themselves cost the daemon no
// processor time.
func TestIdleCost(t *testing.T) {
	many, long := 5, 5*time.Second
	if text := os.Getenv(idleMany); text != "" {
		var err error
		if many, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
		long = time.Minute
	}
	d := hibtest.StartBare(t)
	var ids []string
	for range many {
		ids = append(ids, d.Create("--memory", "512", "--idle-timeout", "1s"))
	}
	for _, id := range ids {
		slept(t, d, id)
	}
	d.Settle() // what follows a hibernation is done
	before := processorTime(t, d.PID())
	time.Sleep(long) // the measurement itself
	took := processorTime(t, d.PID()) - before
	t.Logf("%d sandboxes in standby: the daemon took %v of processor time in %v", many, took, long)
	if took > long/100 {
		t.Errorf("%d sandboxes in standby cost %v in %v", many, took, long)
	}
}

// processorTime returns what a process took, in steps of 10 ms.
func processorTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	user, err1 := strconv.Atoi(fields[11])
	kernel, err2 := strconv.Atoi(fields[12])
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	return time.Duration(user+kernel) * 10 * time.Millisecond
}
