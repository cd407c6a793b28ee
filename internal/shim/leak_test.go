package shim

import (
	"context"
	"io"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// openFiles counts the descriptors of this process.
func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestNothingLeaks: many shims, one after the other, leave neither goroutines
// nor descriptors, whatever they were doing when they were released.
func TestNothingLeaks(t *testing.T) {
	store, ref := sealed(t)
	round := func(i int) {
		r := newRig(t, rigOptions{store: store, driver: streamDriver(nil)})
		switch i % 5 {
		case 0:
			r.prepare(false)
		case 1:
			r.prepare(true)
		case 2:
			r.resume(ref)
			defer r.dial(portFlood).Close()
		case 3:
			r.resume(ref)
			r.capture(1)
		case 4:
			r.prepare(false)
			bad := resumeRequest(ref)
			bad.Key = nil
			if _, err := r.client.Resume(context.Background(), bad); err == nil {
				t.Error("a machine of another key was resumed")
			}
		}
		r.end()
	}
	for i := range 5 { // what is made once is made now
		round(i)
	}
	goroutines, files := goleak.IgnoreCurrent(), openFiles(t)
	for i := range 50 {
		round(i)
	}
	if now := openFiles(t); now > files {
		t.Errorf("%d descriptors are open, %d were before", now, files)
	}
	if err := goleak.Find(goroutines); err != nil {
		t.Error(err)
	}
}

// TestLifelineInProcess: a lifeline that ends before the adoption ends the
// shim, and later it does not.
func TestLifelineInProcess(t *testing.T) {
	t.Run("before", func(t *testing.T) {
		lifeline, hold := io.Pipe()
		r := newRig(t, rigOptions{lifeline: lifeline})
		r.prepare(true)
		hold.Close()
		if err := <-r.served; err != nil {
			t.Error(err)
		}
		r.ended = true
		r.client.Close()
		r.stop()
		if left := r.driver.Machines(); len(left) > 0 {
			t.Error("the machine lives on")
		}
	})
	t.Run("after", func(t *testing.T) {
		lifeline, hold := io.Pipe()
		r := newRig(t, rigOptions{lifeline: lifeline})
		r.boot()
		if err := r.client.Adopt(context.Background()); err != nil {
			t.Fatal(err)
		}
		hold.Close()
		r.goesOn()
		if s := r.status(); !s.Adopted {
			t.Errorf("the status is %+v", s)
		}
	})
	t.Run("the context", func(t *testing.T) {
		r := newRig(t, rigOptions{})
		r.boot()
		r.stop()
		if err := <-r.served; err != nil {
			t.Error(err)
		}
		r.ended = true
		r.client.Close()
	})
}
