package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// bring takes a fresh rig to a phase.
var bring = map[string]func(r *rig, ref snapshot.Ref){
	"idle":     func(*rig, snapshot.Ref) {},
	"to boot":  func(r *rig, _ snapshot.Ref) { r.prepare(true) },
	"prepared": func(r *rig, _ snapshot.Ref) { r.prepare(false) },
	"running":  func(r *rig, ref snapshot.Ref) { r.resume(ref) },
	"sealed":   func(r *rig, ref snapshot.Ref) { r.resume(ref); r.capture(5) },
	"stopped": func(r *rig, ref snapshot.Ref) {
		r.resume(ref)
		r.driver.Machines()[0].Crash(vmm.ReasonShutdown)
		r.waitPhase(PhaseStopped)
	},
}

func TestOrdersFitPhases(t *testing.T) {
	const ok = ""
	orders := []struct {
		name string
		give func(r *rig, ref snapshot.Ref) error
		want map[string]string // phase → code
	}{
		{"adopt", func(r *rig, _ snapshot.Ref) error { return r.client.Adopt(context.Background()) }, map[string]string{
			"idle": ok, "to boot": ok, "prepared": ok, "running": ok, "sealed": ok, "stopped": ok}},
		{"prepare", func(r *rig, _ snapshot.Ref) error {
			return r.client.Prepare(context.Background(), r.prepareRequest(false))
		}, map[string]string{
			"idle": ok, "to boot": CodeInvalid, "prepared": CodeInvalid, "running": CodeInvalid, "sealed": CodeInvalid, "stopped": CodeStopped}},
		{"boot", func(r *rig, _ snapshot.Ref) error {
			_, err := r.client.Boot(context.Background(), bootRequest())
			return err
		}, map[string]string{
			"idle": CodeInvalid, "to boot": ok, "prepared": CodeInvalid, "running": CodeInvalid, "sealed": CodeInvalid, "stopped": CodeStopped}},
		{"resume", func(r *rig, ref snapshot.Ref) error {
			_, err := r.client.Resume(context.Background(), resumeRequest(ref))
			return err
		}, map[string]string{
			"idle": CodeInvalid, "to boot": CodeInvalid, "prepared": ok, "running": CodeInvalid, "sealed": CodeInvalid, "stopped": CodeStopped}},
		{"capture", func(r *rig, _ snapshot.Ref) error {
			_, err := r.client.Capture(context.Background(), captureRequest(5))
			return err
		}, map[string]string{
			"idle": CodeInvalid, "to boot": CodeInvalid, "prepared": CodeInvalid, "running": ok, "sealed": ok, "stopped": CodeStopped}},
		{"capture another", func(r *rig, _ snapshot.Ref) error {
			_, err := r.client.Capture(context.Background(), captureRequest(6))
			return err
		}, map[string]string{
			"idle": CodeInvalid, "to boot": CodeInvalid, "prepared": CodeInvalid, "running": ok, "sealed": CodeInvalid, "stopped": CodeStopped}},
		{"capture attempt 0", func(r *rig, _ snapshot.Ref) error {
			_, err := r.client.Capture(context.Background(), captureRequest(0))
			return err
		}, map[string]string{
			"idle": CodeInvalid, "to boot": CodeInvalid, "prepared": CodeInvalid, "running": CodeInvalid, "sealed": CodeInvalid, "stopped": CodeStopped}},
		{"capture to a bad id", func(r *rig, _ snapshot.Ref) error {
			req := captureRequest(6)
			req.ID = "../x"
			_, err := r.client.Capture(context.Background(), req)
			return err
		}, map[string]string{
			"idle": CodeInvalid, "to boot": CodeInvalid, "prepared": CodeInvalid, "running": CodeInvalid, "sealed": CodeInvalid, "stopped": CodeStopped}},
		{"thaw", func(r *rig, _ snapshot.Ref) error {
			return r.client.Thaw(context.Background(), ThawRequest{Attempt: 5})
		}, map[string]string{
			"idle": CodeInvalid, "to boot": CodeInvalid, "prepared": CodeInvalid, "running": ok, "sealed": ok, "stopped": CodeStopped}},
		{"activity", func(r *rig, _ snapshot.Ref) error {
			_, err := r.client.Activity(context.Background(), ActivityRequest{})
			return err
		}, map[string]string{
			"idle": CodeInvalid, "to boot": CodeInvalid, "prepared": CodeInvalid, "running": ok, "sealed": CodeInvalid, "stopped": CodeStopped}},
		{"egress", func(r *rig, _ snapshot.Ref) error {
			return r.client.SetEgress(context.Background(), EgressRequest{Profile: "none"})
		}, map[string]string{
			"idle": CodeInvalid, "to boot": CodeInvalid, "prepared": CodeInvalid, "running": ok, "sealed": ok, "stopped": CodeStopped}},
		{"dial", func(r *rig, _ snapshot.Ref) error {
			c, err := r.client.Dial(context.Background(), 7)
			if err == nil {
				c.Close()
			}
			return err
		}, map[string]string{
			"idle": CodeInvalid, "running": ok, "sealed": ok, "stopped": CodeStopped}},
		{"release", func(r *rig, _ snapshot.Ref) error { r.end(); return nil }, map[string]string{
			"idle": ok, "to boot": ok, "prepared": ok, "running": ok, "sealed": ok, "stopped": ok}},
	}
	origin := newRig(t, rigOptions{})
	origin.boot()
	base := origin.capture(1).Snapshot
	origin.end()
	for _, o := range orders {
		for phase, code := range o.want {
			t.Run(o.name+" when "+phase, func(t *testing.T) {
				d := newDriver()
				d.ports = map[int]func(net.Conn){7: func(c net.Conn) {}}
				r := newRig(t, rigOptions{store: origin.cfg.Store, driver: d})
				bring[phase](r, base)
				if err := o.give(r, base); Code(err) != code {
					t.Errorf("the answer is %v, want code %q", err, code)
				}
			})
		}
	}
}

// TestOrdersTakeTurns: while an order is under way the others wait, but a
// status, a thaw and a release do not.
func TestOrdersTakeTurns(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	held := make(chan struct{})
	r.driver.at(func(_ *machine, step string) error {
		if step == stepState {
			close(held)
			<-held
		}
		return nil
	})
	r.driver.SetFaults(hangingFreeze())
	captured := make(chan error, 1)
	go func() {
		_, err := r.client.Capture(context.Background(), captureRequest(1))
		captured <- err
	}()
	r.waitPhase(PhaseCapturing)
	ctx, cancel := context.WithCancel(context.Background())
	waiting := make(chan error, 1)
	go func() {
		_, err := r.client.Capture(ctx, captureRequest(2))
		waiting <- err
	}()
	if s := r.status(); s.Attempt != 1 || s.Phase != PhaseCapturing {
		t.Errorf("the status is %+v", s)
	}
	cancel()
	if err := <-waiting; err == nil {
		t.Error("a second capture overtook the first")
	}
	r.thaw(1)
	wantCode(t, <-captured, CodeRefused)
	r.driver.SetFaults(noFaults)
	r.driver.at(nil)
	r.goesOn()
	r.refuses(1)
	r.capture(3) // the shim may have learned late that nobody waits for attempt 2
}

// TestOrdersAfterTheEnd: what comes on a connection that still stands is told so.
func TestOrdersAfterTheEnd(t *testing.T) {
	h := &host{order: make(chan struct{}, 1), ended: make(chan struct{}), changed: make(chan struct{}), phase: PhaseRunning}
	h.order <- struct{}{}
	h.end()
	h.end()
	for range 20 { // the lock is free as well: what select takes must not matter
		_, err := h.begin(context.Background(), PhaseRunning)
		wantCode(t, err, CodeStopped, "ending")
	}
	wantCode(t, h.adopt(), CodeStopped, "ending")
	if h.trackStream() != nil {
		t.Error("a stream begins after the end")
	}
}

func TestMalformedOrders(t *testing.T) {
	r := newRig(t, rigOptions{})
	tests := []struct {
		name, method, path, body string
		status                   int
		words                    string
	}{
		{"no JSON", "POST", "/v1/prepare", "hello", 400, "/v1/prepare"},
		{"empty", "POST", "/v1/prepare", "", 400, "/v1/prepare"},
		{"cut off", "POST", "/v1/capture", `{"attempt":1`, 400, "/v1/capture"},
		{"wrong type", "POST", "/v1/capture", `{"attempt":"one"}`, 400, "attempt"},
		{"negative attempt", "POST", "/v1/thaw", `{"attempt":-1}`, 400, "attempt"},
		{"more behind it", "POST", "/v1/thaw", `{"attempt":1}{}`, 400, "/v1/thaw"},
		{"too long", "POST", "/v1/prepare", `{"base_image":"` + strings.Repeat("x", maxOrder) + `"}`, 400, "too large"},
		{"unknown order", "POST", "/v1/dance", `{}`, 404, "/v1/dance"},
		{"wrong method", "GET", "/v1/capture", ``, 404, "GET /v1/capture"},
		{"another version", "POST", "/v9/capture", `{}`, 404, "/v9/capture"},
		{"no shape", "POST", "/v1/prepare", `{"base_image":"/dev/null"}`, 400, "0 MiB"},
		{"negative shape", "POST", "/v1/prepare", `{"shape":{"memory_mib":-4,"cpus":1}}`, 400, "-4 MiB"},
		{"no base image", "POST", "/v1/prepare", `{"shape":{"memory_mib":8,"cpus":1},"base_image":"/nowhere"}`, 500, "/nowhere"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req, err := http.NewRequest(tt.method, "http://shim"+tt.path, strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := r.client.http.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			var e Error
			if err != nil || json.Unmarshal(body, &e) != nil || e.Code == "" {
				t.Fatalf("the answer is no Error: %s (%v)", body, err)
			}
			if resp.StatusCode != tt.status || !strings.Contains(e.Message, tt.words) {
				t.Errorf("%d %+v, want %d with %q", resp.StatusCode, e, tt.status, tt.words)
			}
		})
	}
	if s := r.status(); s.Phase != PhaseIdle {
		t.Errorf("the machine is %s", s.Phase)
	}
}

func TestMalformedConnect(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	for _, host := range []string{"guest", "guest:0", "guest:x", "guest:65536", "guest:-1", ":", "[::1]:"} {
		t.Run(host, func(t *testing.T) {
			conn, err := r.client.connect(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := io.WriteString(conn, "CONNECT "+host+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			answer, err := io.ReadAll(conn)
			if err != nil || !bytes.HasPrefix(answer, []byte("HTTP/1.1 400")) {
				t.Errorf("%s (%v)", answer, err)
			}
		})
	}
	r.goesOn()
}

func TestAttachmentIsChecked(t *testing.T) {
	origin := newRig(t, rigOptions{})
	origin.boot()
	base := origin.capture(1).Snapshot
	r := newRig(t, rigOptions{store: origin.cfg.Store})
	r.prepare(false)
	bad := resumeRequest(base)
	bad.Attach.Allow = []string{"not a rule!"}
	_, err := r.client.Resume(context.Background(), bad)
	wantCode(t, err, CodeInvalid, "not a rule!")
	bad = resumeRequest(base)
	bad.Attach.Console = "/nowhere/console"
	_, err = r.client.Resume(context.Background(), bad)
	wantCode(t, err, CodeFailed, "/nowhere/console")
	// Nothing was done yet, so a right order still fits.
	if _, err := r.client.Resume(context.Background(), resumeRequest(base)); err != nil {
		t.Fatal(err)
	}
	r.goesOn()
}
