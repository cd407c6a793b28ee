package e2e

import (
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestGigabyteFile: 1 GB goes into a sandbox and out of it, and neither daemon
// nor shim nor agent holds it in memory.
func TestGigabyteFile(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "4096")
	local := filepath.Join(d.Data, "..", "gigabyte")
	want := writeRandom(t, local, 1<<30)
	d.Hib("cp", local, id+":/home/user/big")
	if got := d.Shell(id, "sha256sum < big"); got != want+"  -" {
		t.Fatalf("in the sandbox: %q, want %s", got, want)
	}
	back := local + ".back"
	d.Hib("cp", id+":/home/user/big", back)
	if got := hashFile(t, back); got != want {
		t.Errorf("back on the host: %s, want %s", got, want)
	}
	const bound = 200 << 20
	if peak := hibtest.PeakRSS(t, d.PID()); peak > bound {
		t.Errorf("the daemon's memory peaked at %d MiB", peak>>20)
	} else {
		t.Logf("daemon peak RSS: %d MiB", peak>>20)
	}
	for _, h := range d.Shims() {
		peak := hibtest.PeakRSS(t, h.PID)
		t.Logf("shim peak RSS: %d MiB", peak>>20)
		if peak > bound {
			t.Errorf("the shim's memory peaked at %d MiB", peak>>20)
		}
	}
	agent := d.Shell(id, "grep VmHWM /proc/1/status")
	t.Logf("agent: %s", strings.Join(strings.Fields(agent), " "))
	var kib int64
	if _, err := fmt.Sscanf(agent, "VmHWM: %d kB", &kib); err != nil || kib<<10 > bound {
		t.Errorf("the agent's memory peaked at %q", agent)
	}
}

func writeRandom(t *testing.T, path string, size int64) string {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	random := rand.NewChaCha8([32]byte{1})
	if _, err := io.Copy(io.MultiWriter(f, h), io.LimitReader(random, size)); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func hashFile(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}
