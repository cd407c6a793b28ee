package shim

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/blob/wrap"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// evicted is sealed with the packs of the snapshot in a store of their own,
// which fails as fault says.
func evicted(t *testing.T, fault func(op blobtest.Op, key string) error) (store string, ref snapshot.Ref, far *remote) {
	t.Helper()
	store, ref = sealed(t)
	dir := tempDir(t)
	if err := os.Rename(filepath.Join(store, "packs"), filepath.Join(dir, "packs")); err != nil {
		t.Fatal(err)
	}
	s, err := disk.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return store, ref, newRemote(&blobtest.Faulty{Store: s, Fault: fault}, wrap.Policy{Attempts: 1})
}

func TestResumeFromTheRemoteStore(t *testing.T) {
	store, ref, far := evicted(t, func(blobtest.Op, string) error { return nil })
	r := newRig(t, rigOptions{store: store, remote: far})
	r.prepare(false)
	req := resumeRequest(ref)
	req.StoreDelay = 20 * time.Millisecond
	report, err := r.client.Resume(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	if !report.Remote || report.BytesFetched == 0 || report.Phases["bind"] < 20 {
		t.Errorf("the report is %+v", report)
	}
	r.read(700)
	if w := r.capture(1).WorkingSet; w == nil || w.BytesFetched < report.BytesFetched {
		t.Errorf("%d bytes were fetched until the resume's report, and then %+v", report.BytesFetched, w)
	}
}

func TestLocalResumeAsksNoRemoteStore(t *testing.T) {
	store, ref := sealed(t)
	_, _, far := evicted(t, func(op blobtest.Op, key string) error {
		t.Errorf("it is asked to %s %s", op, key)
		return nil
	})
	r := newRig(t, rigOptions{store: store, remote: far})
	if report := r.resume(ref); report.Remote || report.BytesFetched != 0 {
		t.Errorf("the report is %+v", report)
	}
}

// TestRemoteStoreThatFails: one that does not answer is told apart from an
// object that is not there.
func TestRemoteStoreThatFails(t *testing.T) {
	down := fmt.Errorf("%w: it is down", blob.ErrUnavailable)
	for name, tt := range map[string]struct {
		op   blobtest.Op
		err  error
		code string
	}{
		"down":            {blobtest.OpOpen, down, CodeUnavailable},
		"down meanwhile":  {blobtest.OpRead, down, CodeUnavailable},
		"without a pack":  {blobtest.OpOpen, blob.ErrNotExist, CodeCorrupt},
		"losing its pack": {blobtest.OpRead, blob.ErrNotExist, CodeCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			store, ref, far := evicted(t, func(op blobtest.Op, _ string) error {
				if op == tt.op {
					return tt.err
				}
				return nil
			})
			r := newRig(t, rigOptions{store: store, remote: far})
			r.prepare(false)
			_, err := r.client.Resume(context.Background(), resumeRequest(ref))
			if Code(err) != tt.code || !strings.Contains(err.Error(), snapshot.KindPack.Key(ref.ID)) || !strings.Contains(err.Error(), "remote store") {
				t.Errorf("the error is %v (%s)", err, Code(err))
			}
		})
	}
}

// TestReadsThatFailUnderTheGuest: the index can be read, the pages can't.
func TestReadsThatFailUnderTheGuest(t *testing.T) {
	for code, cause := range map[string]error{CodeUnavailable: blob.ErrUnavailable, CodeCorrupt: blob.ErrNotExist} {
		var reads atomic.Int32
		store, ref, far := evicted(t, func(op blobtest.Op, _ string) error {
			if op != blobtest.OpRead {
				return nil
			}
			if reads.Add(1) > 1 { // the first brings the index
				return cause
			}
			return nil
		})
		r := newRig(t, rigOptions{store: store, remote: far})
		r.prepare(false)
		_, err := r.client.Resume(context.Background(), resumeRequest(ref))
		if Code(err) != code {
			t.Errorf("the error is %v (%s), want %s", err, Code(err), code)
		}
	}
}

func TestNoSecretsInProcesses(t *testing.T) {
	got := environment([]string{"PATH=/bin", "AWS_SECRET_ACCESS_KEY=x", "HIB_STORE_READ_SECRET_ACCESS_KEY=x", "HIB_FAILPOINT="})
	if !slices.Equal(got, []string{"PATH=/bin", "HIB_FAILPOINT="}) {
		t.Errorf("the environment is %v", got)
	}
	t.Setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
	l := newLauncher(t)
	l.Driver.CPUModel = "confidential" // stands for what the configuration holds
	g := launch(t, l, "vm1")
	for _, file := range []string{"environ", "cmdline"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", g.client.Handle().PID, file))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), "verysecret") || strings.Contains(string(b), "confidential") {
			t.Errorf("%s shows secrets: %q", file, b)
		}
		if file == "cmdline" && !strings.Contains(string(b), l.RunDir+"/vm1") {
			t.Errorf("the command line does not tell the machine's folder: %q", b)
		}
	}
}
