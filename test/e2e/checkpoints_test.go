package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestCheckpointsKeepMemory: checkpoints and hibernations in turn, of a guest
// that goes on, hold its memory to the bit, and so does each of the
// checkpoints that it is rolled back to.
func TestCheckpointsKeepMemory(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512", "--idle-timeout", "never")
	t.Cleanup(func() {
		if t.Failed() {
			out, stderr, _ := d.Try("inspect", id)
			logs, _, _ := d.Try("logs", id)
			t.Logf("%s%s\n%s", out, stderr, logs[max(0, len(logs)-2000):])
		}
	})
	srv := d.StartServer(id, 64, 8000)
	d.Hib("exec", "-d", id, "--", "bash", "-c", "while sleep 0.05; do date +%s%N >> ticks; head -c 4096 /dev/urandom > noise; done")
	first := srv.Get("/sum")
	last := first
	var names []string
	for cycle := 1; cycle <= 6; cycle++ {
		d.Shell(id, fmt.Sprintf("echo %d >> log; head -c 300000 /dev/urandom > data; sha256sum data > sum", cycle))
		switch cycle % 3 {
		case 0:
			d.Hib("hibernate", id)
		default:
			var k api.Checkpoint
			d.JSON(&k, "checkpoint", "create", id, fmt.Sprintf("cycle-%d", cycle))
			if k.Report == nil || k.Report.PauseMS <= 0 || !k.Current {
				t.Errorf("the checkpoint is %+v", k)
			}
			if state := d.Inspect(id).State; state != api.StateRunning {
				t.Errorf("behind a checkpoint it is %s", state)
			}
			names = append(names, k.Name)
		}
		if cycle == 4 {
			d.Restart()
		}
		now := srv.Get("/sum")
		if now.PID != first.PID || now.Counter < last.Counter || now.Sum != srv.WantSum() {
			t.Fatalf("cycle %d: the server says %+v, before %+v", cycle, now, last)
		}
		if out := d.Shell(id, "sha256sum -c sum"); !strings.Contains(out, "OK") {
			t.Fatalf("cycle %d: %s", cycle, out)
		}
		last = now
	}
	for i := len(names) - 1; i >= 0; i-- {
		var r api.Restored
		d.JSON(&r, "restore", id, names[i])
		if r.Sandbox.State != api.StateRunning || !strings.HasPrefix(r.Kept, "before-restore-") {
			t.Errorf("restored: %s, kept as %q", r.Sandbox.State, r.Kept)
		}
		now := srv.Get("/sum")
		if now.PID != first.PID || now.Sum != srv.WantSum() {
			t.Errorf("at %s the server says %+v", names[i], now)
		}
		want := strings.TrimPrefix(names[i], "cycle-")
		if got := d.Shell(id, "sha256sum -c sum && tail -1 log"); !strings.HasSuffix(got, "OK\n"+want) {
			t.Errorf("at %s: %q", names[i], got)
		}
		checkClock(t, d, id)
	}
	d.Hib("store", "verify")
}

// TestForksDiffer in all that identifies a sandbox, share what they do not
// change, and live without what they were made of.
func TestForksDiffer(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512", "--label", "a=b", "--env", "KEY=value", "--idle-timeout", "never")
	srv := d.StartServer(id, 64, 8000)
	before := srv.Get("/sum")
	d.Hib("hibernate", id)
	d.Hib("resume", id)
	stored := d.StoreBytes()
	ids := append(strings.Fields(d.Hib("fork", id, "--count", "4", "--name", "copy")), id)
	if len(ids) != 5 {
		t.Fatalf("forks: %v", ids)
	}
	if grown := d.StoreBytes() - stored; grown > 20<<20 {
		t.Errorf("the store grew by %d bytes", grown)
	}
	seen := map[string]string{}
	for _, each := range ids {
		checkClock(t, d, each)
		for _, what := range []string{
			"od -An -tx1 -N32 /dev/urandom",
			"python3 -c 'import os; print(os.getrandom(32).hex())'",
			"cat /etc/machine-id",
			"hostname",
			"cat /proc/sys/kernel/random/uuid",
		} {
			got := d.Shell(each, what)
			if other, twice := seen[got]; twice || got == "" {
				t.Errorf("%s and %s have the same output of %q: %q", each, other, what, got)
			}
			seen[got] = each
		}
		if got := d.Shell(each, "echo $KEY"); got != "value" {
			t.Errorf("%s: the environment has %q", each, got)
		}
		now := d.Shell(each, "curl -sS http://127.0.0.1:8000/sum")
		if !strings.Contains(now, fmt.Sprintf(`"sum": %d`, srv.WantSum())) || !strings.Contains(now, fmt.Sprintf(`"pid": %d`, before.PID)) {
			t.Errorf("%s: the server says %s", each, now)
		}
		sb := d.Inspect(each)
		if sb.Labels["a"] != "b" || each != id && sb.ForkedFrom != id {
			t.Errorf("a fork is %+v", sb)
		}
	}
	d.Hib("rm", id)
	d.Hib("store", "gc")
	d.Hib("hibernate", "copy-1")
	d.RestartWith(hibtest.Bare)
	for _, name := range []string{"copy-1", "copy-2"} {
		if now := d.Shell(name, "curl -sS http://127.0.0.1:8000/sum"); !strings.Contains(now, fmt.Sprintf(`"sum": %d`, srv.WantSum())) {
			t.Errorf("%s: the server says %s", name, now)
		}
	}
}

// TestCheckpointOfADatabase takes checkpoints under a writer: each that is
// restored is a whole database, with all that was committed before.
func TestCheckpointOfADatabase(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512", "--idle-timeout", "never")
	d.WriteFile(id, "/home/user/writer.py", []byte(`
import os, sqlite3
db = sqlite3.connect("/home/user/db", isolation_level=None)
db.execute("pragma journal_mode=wal")
db.execute("create table if not exists t(n integer primary key, text blob)")
while True:
    db.execute("begin")
    for _ in range(20):
        db.execute("insert into t(text) values(?)", (os.urandom(500),))
    db.execute("commit")
    open("/home/user/count", "w").write(str(db.execute("select max(n) from t").fetchone()[0]))
`))
	d.Hib("exec", "-d", id, "--", "python3", "/home/user/writer.py")
	count := func() int {
		n, _ := strconv.Atoi(d.Shell(id, "cat count 2>/dev/null || echo 0"))
		return n
	}
	hibtest.Eventually(t, "the writer writes", func() bool { return count() > 0 })
	least := map[string]int{}
	for i := range 3 {
		name := fmt.Sprintf("k%d", i)
		least[name] = count()
		d.Hib("checkpoint", "create", id, name)
		hibtest.Eventually(t, "the writer goes on", func() bool { return count() > least[name] })
	}
	for name, rows := range least {
		d.Hib("restore", id, name)
		check := `python3 -c 'import sqlite3; db=sqlite3.connect("/home/user/db"); print(db.execute("pragma integrity_check").fetchone()[0], db.execute("select count(*) from t").fetchone()[0])'`
		fields := strings.Fields(d.Shell(id, check))
		if len(fields) != 2 || fields[0] != "ok" {
			t.Fatalf("at %s the database is %v", name, fields)
		}
		if n, _ := strconv.Atoi(fields[1]); n < rows || n%20 != 0 {
			t.Errorf("at %s it has %d rows, at least %d were committed", name, n, rows)
		}
		at := count()
		hibtest.Eventually(t, "the writer goes on", func() bool { return count() > at })
	}
}

// TestTemplateFromSandbox: what a sandbox prepared is there at once in those of
// the template that was made of it, under identities of their own.
func TestTemplateFromSandbox(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512", "--idle-timeout", "never")
	d.Shell(id, "echo prepared > state")
	srv := d.StartServer(id, 5, 8000)
	d.Hib("template", "create-from", id, "ready")
	machine := d.Shell(id, "cat /etc/machine-id")
	d.Hib("rm", id)
	other := strings.TrimSpace(d.Hib("create", "ready", "--idle-timeout", "never"))
	if got := d.Shell(other, "cat state"); got != "prepared" {
		t.Errorf("its file has %q", got)
	}
	if got := d.Shell(other, "cat /etc/machine-id"); got == machine {
		t.Errorf("it has the machine id of what it was made of, %s", got)
	}
	if now := d.Shell(other, "curl -sS http://127.0.0.1:8000/sum"); !strings.Contains(now, fmt.Sprintf(`"sum": %d`, srv.WantSum())) {
		t.Errorf("the server says %s", now)
	}
	if _, stderr, code := d.Try("create", "ready", "--memory", "640"); code == 0 || !strings.Contains(stderr, "has no other") {
		t.Errorf("another shape: exit %d: %s", code, stderr)
	}
	d.Hib("hibernate", other)
	if got := d.Shell(other, "cat state"); got != "prepared" {
		t.Errorf("its file has %q", got)
	}
}

// TestEverythingAtOnce lets traffic, hibernation, resume, checkpoint, fork,
// restore and deletion meet at one instant on one sandbox.
func TestEverythingAtOnce(t *testing.T) {
	rounds := 50
	if text := os.Getenv("HIB_TEST_ROUNDS"); text != "" {
		var err error
		if rounds, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	d := hibtest.Start(t)
	// An answer that is right where others do something else with the sandbox.
	fair := []string{"hibernat", "resum", "cancelled by", "not found", "being deleted", "has failed", "is running", "is standby", "not captured"}
	for round := range rounds {
		id := d.Create("--memory", "512", "--idle-timeout", "never")
		d.Shell(id, "echo old > state")
		d.Hib("checkpoint", "create", id, "old")
		d.Shell(id, "echo now > state")
		deleted := round%2 == 1
		orders := [][]string{
			{"exec", id, "--", "cat", "state"}, {"exec", id, "--", "true"}, {"hibernate", id}, {"resume", id},
			{"checkpoint", "create", id}, {"restore", id, "old"}, {"fork", id}, {"fork", id, "--checkpoint", "old"},
		}
		if deleted {
			orders = append(orders, []string{"rm", "--force", id})
		}
		rand.Shuffle(len(orders), func(i, j int) { orders[i], orders[j] = orders[j], orders[i] })
		var mu sync.Mutex
		var copies []string
		var wg sync.WaitGroup
		for _, order := range orders {
			wg.Go(func() {
				out, stderr, code := d.Try(order...)
				known := false
				for _, word := range fair {
					known = known || strings.Contains(stderr, word)
				}
				if code != 0 && order[0] != "exec" && !known {
					t.Errorf("round %d: hib %v: exit %d: %s", round, order, code, stderr)
				}
				if order[0] == "fork" && code == 0 {
					mu.Lock()
					defer mu.Unlock()
					copies = append(copies, strings.Fields(out)...)
				}
			})
		}
		wg.Wait()
		if !deleted {
			if got := d.Shell(id, "cat state"); got != "old" {
				t.Errorf("round %d: it has %q", round, got)
			}
			copies = append(copies, id)
		}
		for _, each := range copies {
			if got := d.Shell(each, "cat state"); got != "old" && got != "now" {
				t.Errorf("round %d: a copy has %q", round, got)
			}
			d.Hib("rm", "--force", each)
		}
		if list := d.List(); len(list) != 0 {
			t.Fatalf("round %d: %d sandboxes are left", round, len(list))
		}
	}
	d.RestartWith(hibtest.Bare)
	d.Settle()
	if left := d.Processes(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
