package e2e

import (
	"math"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestClonesDiffer makes eight sandboxes of one template at once.
func TestClonesDiffer(t *testing.T) {
	d := hibtest.Start(t)
	const clones = 8
	ids := make([]string, clones)
	var wg sync.WaitGroup
	for i := range clones {
		wg.Go(func() {
			out, stderr, code := d.Try("create", "base", "--memory", "512", "--idle-timeout", "never")
			if code != 0 {
				t.Errorf("create: %s", stderr)
			}
			ids[i] = strings.TrimSpace(out)
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	seen := map[string]string{}
	for _, id := range ids {
		checkClock(t, d, id)
		for _, what := range []string{
			"od -An -tx1 -N32 /dev/urandom",
			"python3 -c 'import os; print(os.getrandom(32).hex())'",
			"cat /etc/machine-id",
			"hostname",
			"cat /proc/sys/kernel/random/uuid",
			"cat /proc/sys/kernel/random/boot_id",
		} {
			got := d.Shell(id, what)
			if got == "" {
				t.Errorf("%s: %q printed nothing", id, what)
			}
			if other, twice := seen[got]; twice {
				t.Errorf("%s and %s have the same output of %q: %q", id, other, what, got)
			}
			seen[got] = id
		}
	}
}

func checkClock(t *testing.T, d *hibtest.Daemon, id string) {
	t.Helper()
	before := time.Now()
	out := d.Shell(id, "date +%s.%N")
	after := time.Now()
	guest, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
	if err != nil {
		t.Fatalf("date in %s: %q", id, out)
	}
	low, high := float64(before.UnixNano())/1e9-1, float64(after.UnixNano())/1e9+1
	if guest < low || guest > high {
		t.Errorf("the clock of %s shows %.2f, the host's was between %.2f and %.2f", id, guest, low+1, high-1)
	}
}

// TestClockAfterAMonth: the VMM of the sandbox that goes to sleep lives thirty
// days ago (its own clock, by libfaketime, and the guest's), the one that wakes
// it lives today.
func TestClockAfterAMonth(t *testing.T) {
	d := hibtest.StartBare(t, fakeTime("-30d")) // every VMM is of its daemon
	id := d.Create("--memory", "512")
	d.Shell(id, "sudo date -s '-30 days' && date")
	d.Hib("exec", "-d", id, "--", "bash", "-c", "while sleep 0.2; do date +%s >> ticks; done")
	hibtest.Eventually(t, "the guest lives a month ago", func() bool {
		out, _, code := d.Try("exec", id, "--", "tail", "-1", "ticks")
		v, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
		return code == 0 && err == nil && math.Abs(float64(time.Now().Unix())-v-30*86400) < 60
	})
	// The machine's own clock tells that its VMM lives a month ago.
	rtc, err := strconv.ParseFloat(d.Shell(id, "cat /sys/class/rtc/rtc0/since_epoch"), 64)
	if err != nil || math.Abs(float64(time.Now().Unix())-rtc-30*86400) > 60 {
		t.Fatalf("the machine's own clock shows %v (%v): the VMM's time is not shifted", rtc, err)
	}
	uptime := d.Shell(id, "cut -d' ' -f1 /proc/uptime")
	d.Hib("hibernate", id)
	d.Restart() // without the wrapper: today
	checkClock(t, d, id)
	up0, _ := strconv.ParseFloat(uptime, 64)
	up1, _ := strconv.ParseFloat(d.Shell(id, "cut -d' ' -f1 /proc/uptime"), 64)
	if up1 < up0 || up1 > up0+600 {
		t.Errorf("monotonic time went from %v to %v over the month", up0, up1)
	}
	// A fresh sandbox whose VMM lives in the future gets the right time, too.
	d.Restart(fakeTime("+30d"))
	checkClock(t, d, d.Create("--memory", "512"))
}

// fakeTime makes the daemon start its VMMs under libfaketime.
func fakeTime(offset string) string {
	return "HIB_VMM_WRAP=env LD_PRELOAD=/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1 FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME=" + offset
}
