package e2e

import (
	"strconv"
	"testing"

	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestSnapshotHoldsOnlyWhatChanged compares what a hibernation stored with the
// dirty pages that the test itself counts in /proc before it.
func TestSnapshotHoldsOnlyWhatChanged(t *testing.T) {
	d := hibtest.StartBare(t) // a parked machine counts from its start, not from the last snapshot
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 20, 8000)
	d.Hib("hibernate", id)
	for i := range 60 { // a minute of light use, without the waiting
		srv.Get("/")
		d.Shell(id, "echo line >> notes; ls -la >/dev/null")
		if i%20 == 0 {
			d.Shell(id, "git --version; python3 -c 'print(sum(range(1000)))'")
		}
	}
	counted := d.DirtyBytes(id)
	d.Hib("hibernate", id)
	snap := d.Inspect(id).Snapshot
	t.Logf("dirty pages counted from /proc: %d bytes; reported %d; stored %d (%.2f of the count)",
		counted, snap.DirtyBytes, snap.StoredBytes, float64(snap.StoredBytes)/float64(counted))
	if float64(snap.StoredBytes) > 0.8*float64(counted) {
		t.Errorf("stored %d bytes of %d dirty ones, want at most 0.8 of them", snap.StoredBytes, counted)
	}
	if snap.DirtyBytes < counted {
		t.Errorf("the snapshot reports %d dirty bytes, /proc showed %d before", snap.DirtyBytes, counted)
	}
}

// TestBaseImageIsNotInTheSnapshot reads 100 MB of the base's files.
func TestBaseImageIsNotInTheSnapshot(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	d.Shell(id, "true")
	d.Hib("hibernate", id)
	before := d.StoreBytes()
	read := d.Shell(id, "cat /usr/lib/x86_64-linux-gnu/*.so* /usr/bin/* 2>/dev/null | wc -c")
	if n, err := strconv.Atoi(read); err != nil || n < 100e6 {
		t.Fatalf("only %q bytes of the base were read", read)
	}
	d.Hib("hibernate", id)
	snap := d.Inspect(id).Snapshot
	grown := d.StoreBytes() - before
	t.Logf("read %s bytes of the base image; dirty %d, stored %d, the store grew by %d", read, snap.DirtyBytes, snap.StoredBytes, grown)
	if snap.StoredBytes > 10e6 {
		t.Errorf("the snapshot grew by %d bytes, want less than 10 MB", snap.StoredBytes)
	}
}
