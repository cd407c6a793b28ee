package shim

import (
	"context"
	"errors"
	"io"
	"os"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/page"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

func (g *guest) park(attempt uint64) ParkReport {
	g.t.Helper()
	report, err := g.client.Park(context.Background(), ParkRequest{Attempt: attempt})
	if err != nil {
		g.t.Fatal(err)
	}
	return report
}

func unparkRequest(attempt uint64, ref snapshot.Ref) UnparkRequest {
	return UnparkRequest{Attempt: attempt, Snapshot: ref, Init: guestapi.InitRequest{
		Reason: guestapi.ReasonResume, Generation: 10 + attempt, Snapshot: string(ref.ID)}}
}

func (g *guest) unpark(attempt uint64, ref snapshot.Ref) StartReport {
	g.t.Helper()
	report, err := g.client.Unpark(context.Background(), unparkRequest(attempt, ref))
	if err != nil {
		g.t.Fatal(err)
	}
	return report
}

// TestParked: a parked machine stands still without connections, and takes no
// other order than to go on from exactly its snapshot.
func TestParked(t *testing.T) {
	store, ref := sealed(t)
	r := newRig(t, rigOptions{store: store, driver: streamDriver(nil)})
	r.resume(ref)
	flood := r.dial(portFlood)
	if _, err := r.client.Park(context.Background(), ParkRequest{Attempt: 1}); Code(err) != CodeInvalid {
		t.Errorf("a running machine was parked: %v", err)
	}
	next := r.capture(1).Snapshot
	if _, err := r.client.Park(context.Background(), ParkRequest{Attempt: 2}); Code(err) != CodeInvalid {
		t.Errorf("parked at another attempt: %v", err)
	}
	for range 2 { // the order may be repeated
		if report := r.park(1); report.MemoryBytes <= 0 {
			t.Errorf("the report is %+v", report)
		}
	}
	if s := r.status(); s.Phase != PhaseParked || s.Attempt != 1 || s.VMMPID == 0 {
		t.Errorf("the status is %+v", s)
	}
	r.standsStill()
	if _, err := io.Copy(io.Discard, flood); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a stream into the parked guest is open")
	}
	if _, err := r.client.Dial(context.Background(), portPush); Code(err) != CodeInvalid {
		t.Errorf("somebody reached a parked guest: %v", err)
	}
	wantCode(t, r.client.Thaw(context.Background(), ThawRequest{Attempt: 1}), CodeInvalid)
	if _, err := r.client.Capture(context.Background(), captureRequest(2)); Code(err) != CodeInvalid {
		t.Errorf("a parked guest was captured: %v", err)
	}
	if _, err := r.client.Unpark(context.Background(), unparkRequest(2, next)); Code(err) != CodeInvalid {
		t.Errorf("unparked at another attempt: %v", err)
	}
	r.standsStill()
}

// TestUnpark: the guest goes on with a fresh clock, randomness and generation,
// and what changes from then on is all that the next snapshot stores.
func TestUnpark(t *testing.T) {
	store, ref := sealed(t)
	r := newRig(t, rigOptions{store: store})
	r.resume(ref)
	for page := 700; page < 1000; page++ {
		r.write(page, page%200+1)
	}
	first := r.capture(1)
	r.park(1)
	report := r.unpark(1, first.Snapshot)
	for _, phase := range []string{"unpause", "guest_init"} {
		if _, ok := report.Phases[phase]; !ok {
			t.Errorf("the report has no phase %s: %v", phase, report.Phases)
		}
	}
	r.goesOn()
	if env := r.env(); env.Init.Generation != 11 || env.Init.SleptSeconds <= 0 || env.Init.Snapshot != string(first.Snapshot.ID) {
		t.Errorf("the guest was told %+v", env.Init)
	}
	r.refuses(1)
	r.write(1005, 77)
	second := r.capture(2)
	if m := second.Metadata; m.Parent != first.Snapshot.ID || m.StoredBytes > first.Metadata.StoredBytes/10 {
		t.Errorf("the second snapshot is %+v, the first stored %d bytes", m, first.Metadata.StoredBytes)
	}
	r.park(2)
	r.unpark(2, second.Snapshot)
	r.write(1006, 78)
	third := r.capture(3).Snapshot
	r.end()

	again := newRig(t, rigOptions{store: store})
	again.resume(third)
	for page, want := range map[int]int{1005: 77, 1006: 78, 620: 1, 700: 101, 999: 200} {
		if got := again.read(page); got != want {
			t.Errorf("page %d holds %d, want %d", page, got, want)
		}
	}
}

// TestUnparkBooted: a machine that was booted has no snapshot below it until
// its first was parked.
func TestUnparkBooted(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	r.write(700, 7)
	ref := r.capture(1).Snapshot
	for attempt := uint64(1); attempt < 4; attempt++ {
		r.park(attempt)
		r.unpark(attempt, ref)
		r.write(800+int(attempt), 9)
		ref = r.capture(attempt + 1).Snapshot
	}
	r.end()
	again := newRig(t, rigOptions{store: r.cfg.Store})
	again.resume(ref)
	for page, want := range map[int]int{801: 9, 802: 9, 803: 9, 700: 7} {
		if got := again.read(page); got != want {
			t.Errorf("page %d holds %d, want %d", page, got, want)
		}
	}
}

// TestUnparkKeepsWhatItWasBoundTo: the pager reads the snapshot that the
// machine was started from, though the guest is generations ahead.
func TestUnparkKeepsWhatItWasBoundTo(t *testing.T) {
	store, ref := sealed(t)
	r := newRig(t, rigOptions{store: store})
	r.resume(ref)
	next := r.capture(1).Snapshot
	r.park(1)
	if _, err := r.repo().Collect(context.Background(), []snapshot.ID{next.ID, ref.ID}, nil); err != nil {
		t.Fatal(err)
	}
	r.unpark(1, next)
	for page := 600; page < 640; page++ {
		if got := r.read(page); got != 1 {
			t.Fatalf("page %d holds %d", page, got)
		}
	}
}

// TestUnparkUponACompactedSnapshot: what took the place of the snapshot while
// the machine was parked is what the next capture builds upon.
func TestUnparkUponACompactedSnapshot(t *testing.T) {
	origin := newRig(t, rigOptions{})
	origin.boot()
	base := origin.capture(1).Snapshot
	last, _ := grown(t, origin.repo(), base)
	origin.end()
	r := newRig(t, rigOptions{store: origin.cfg.Store})
	r.resume(last)
	r.write(1100, 5)
	sealed := r.capture(1).Snapshot
	r.park(1)
	compacted, _, done, err := r.repo().Compact(context.Background(), snapshot.CompactInput{Ref: sealed, ID: snapshot.NewID()})
	if err != nil || compacted == sealed {
		t.Fatalf("Compact = %+v, %v", done, err)
	}
	if err := r.repo().Delete(context.Background(), sealed.ID); err != nil {
		t.Fatal(err)
	}
	r.unpark(1, compacted)
	r.write(1101, 6)
	next := r.capture(2)
	if next.Metadata.Parent != compacted.ID {
		t.Errorf("the parent is %s, want %s", next.Metadata.Parent, compacted.ID)
	}
	r.end()
	again := newRig(t, rigOptions{store: origin.cfg.Store})
	again.resume(next.Snapshot)
	for page, want := range map[int]int{1100: 5, 1101: 6} {
		if got := again.read(page); got != want {
			t.Errorf("page %d holds %d, want %d", page, got, want)
		}
	}
}

// TestUnparkOfAnotherSnapshot ends the machine: its guest must not be taken for that one.
func TestUnparkOfAnotherSnapshot(t *testing.T) {
	store, ref := sealed(t)
	for name, other := range map[string]snapshot.Ref{
		"of another attempt": ref,
		"missing":            {ID: snapshot.NewID(), Manifest: ref.Manifest},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, rigOptions{store: store})
			r.resume(ref)
			r.capture(2)
			r.park(2)
			if _, err := r.client.Unpark(context.Background(), unparkRequest(2, other)); err == nil {
				t.Error("it was unparked")
			}
			r.waitPhase(PhaseStopped)
		})
	}
}

// TestPrivateMemory: what a process alone uses is counted.
func TestPrivateMemory(t *testing.T) {
	const size = 256 << 20
	before, err := privateMemory(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	for i := 0; i < size; i += page.Size {
		b[i] = 1
	}
	after, err := privateMemory(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if grown := after - before; grown < size/2 || grown > size*2 {
		t.Errorf("%d bytes were touched, and %d more are counted", size, grown)
	}
	if _, err := privateMemory(os.Getpid(), 1<<30); err == nil {
		t.Error("a process that is not there was measured")
	}
}

// A report of an unpark counts what happened since, each counter once.
func TestSubtract(t *testing.T) {
	after := StartReport{BytesRead: 30, Faults: 9, DemandPages: 8, PrefetchedBytes: 70, BytesFetched: 50, WorkingSetBytes: 6, Remote: true}
	after.subtract(StartReport{BytesRead: 10, Faults: 4, DemandPages: 5, PrefetchedBytes: 60, BytesFetched: 20, WorkingSetBytes: 6})
	if want := (StartReport{BytesRead: 20, Faults: 5, DemandPages: 3, PrefetchedBytes: 10, BytesFetched: 30, Remote: true}); !reflect.DeepEqual(after, want) {
		t.Errorf("%+v, want %+v", after, want)
	}
}
