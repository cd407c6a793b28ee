package qemu

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// fakeQEMU is the other end of a monitor.
type fakeQEMU struct{ net.Conn }

// newFakeQEMU returns a monitor and what it speaks with. Events go to the channel.
func newFakeQEMU(t *testing.T) (*monitor, *fakeQEMU, <-chan qmpEvent) {
	t.Helper()
	running := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, running) })
	ours, file, err := socketPair()
	check(t, err)
	defer file.Close()
	theirs, err := net.FileConn(file)
	check(t, err)
	events := make(chan qmpEvent, 16)
	m := newMonitor(ours, func(e qmpEvent) { events <- e })
	t.Cleanup(func() {
		theirs.Close()
		<-m.done
	})
	return m, &fakeQEMU{theirs}, events
}

// say sends lines, and expect reads one that must contain text.
func (q *fakeQEMU) say(t *testing.T, lines ...string) {
	t.Helper()
	_, err := q.Write([]byte(strings.Join(lines, "\n") + "\n"))
	check(t, err)
}

func (q *fakeQEMU) expect(t *testing.T, text string) {
	t.Helper()
	buffer := make([]byte, 1024)
	n, err := q.Read(buffer)
	check(t, err)
	if got := string(buffer[:n]); !strings.Contains(got, text) {
		t.Fatalf("the monitor sent %s, want something with %s", got, text)
	}
}

func TestMonitor(t *testing.T) {
	m, q, events := newFakeQEMU(t)
	done := make(chan error, 1)
	go func() { done <- m.handshake(t.Context()) }()
	q.say(t, `{"QMP": {"version": {}, "capabilities": ["oob"]}}`)
	q.expect(t, `"qmp_capabilities"`)
	q.say(t, `{"event": "RESUME", "data": {}}`, `{"return": {}, "id": 1}`)
	check(t, <-done)
	if e := <-events; e.Name != "RESUME" {
		t.Errorf("the event is %q", e.Name)
	}

	var status struct{ Status string }
	go func() { done <- m.execute(t.Context(), "query-status", nil, &status) }()
	q.expect(t, `"query-status"`)
	q.say(t, `{"return": {}, "id": 77}`, `{"return": {"status": "paused"}, "id": 2}`) // nobody waits for 77
	check(t, <-done)
	if status.Status != "paused" {
		t.Errorf("the status is %q", status.Status)
	}

	go func() { done <- m.execute(t.Context(), "cont", map[string]int{"x": 1}, nil) }()
	q.expect(t, `"arguments":{"x":1}`)
	q.say(t, `{"error": {"class": "GenericError", "desc": "no such thing"}, "id": 3}`)
	var refused *qmpError
	if err := <-done; !errors.As(err, &refused) || refused.Class != "GenericError" || !strings.Contains(err.Error(), "cont: no such thing") {
		t.Errorf("the refusal is %v", err)
	}
}

// TestMonitorBegins sends a command in two parts, and takes one back.
func TestMonitorBegins(t *testing.T) {
	m, q, _ := newFakeQEMU(t)
	received := func() string {
		buffer := make([]byte, 1024)
		n, err := q.Read(buffer)
		check(t, err)
		return string(buffer[:n])
	}
	load := map[string]string{"uri": "fd:6"}
	check(t, m.begin("load", load))
	first := received()
	done := make(chan error, 1)
	go func() { done <- m.execute(t.Context(), "load", load, nil) }()
	rest := received()
	if want := `{"execute":"load","arguments":{"uri":"fd:6"},"id":1}`; rest != "}" || first+rest != want {
		t.Errorf("the monitor sent %q and %q, want %s", first, rest, want)
	}
	q.say(t, `{"return": {}, "id": 1}`)
	check(t, <-done)

	check(t, m.begin("cont", nil))
	received()
	go func() { done <- m.execute(t.Context(), "stop", nil, nil) }()
	if got, want := received(), "\xff\n"+`{"execute":"stop","id":3}`; got != want {
		t.Errorf("the monitor sent %q, want %q", got, want)
	}
	q.say(t, `{"error": {"class": "GenericError", "desc": "JSON parse error"}}`, `{"return": {}, "id": 3}`)
	check(t, <-done)
	go func() { done <- m.execute(t.Context(), "cont", nil, nil) }()
	if got, want := received(), `{"execute":"cont","id":4}`; got != want {
		t.Errorf("the monitor sent %q, want %q", got, want)
	}
	q.say(t, `{"return": {}, "id": 4}`)
	check(t, <-done)
}

func TestMonitorSendsFile(t *testing.T) {
	m, q, _ := newFakeQEMU(t)
	path := filepath.Join(t.TempDir(), "file")
	check(t, os.WriteFile(path, []byte("sent along"), 0o600))
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.executeWithFile(ctx, "getfd", nil, nil, f) }()

	buffer, rights := make([]byte, 1024), make([]byte, 1024)
	n, rn, _, _, err := q.Conn.(*net.UnixConn).ReadMsgUnix(buffer, rights)
	check(t, err)
	if !strings.Contains(string(buffer[:n]), "getfd") || rn == 0 {
		t.Errorf("%d bytes of rights came with %s", rn, buffer[:n])
	}
	messages, err := unix.ParseSocketControlMessage(rights[:rn])
	check(t, err)
	fds, err := unix.ParseUnixRights(&messages[0])
	check(t, err)
	received := os.NewFile(uintptr(fds[0]), "received")
	defer received.Close()
	if text, _ := io.ReadAll(received); string(text) != "sent along" {
		t.Errorf("the file holds %q", text)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("a command that was given up returns %v", err)
	}
}

func TestMonitorEnds(t *testing.T) {
	ends := map[string]func(*testing.T, *fakeQEMU){
		"closed":     func(_ *testing.T, q *fakeQEMU) { q.Close() },
		"not QMP":    func(t *testing.T, q *fakeQEMU) { q.say(t, "hello") },
		"too long":   func(_ *testing.T, q *fakeQEMU) { q.Write([]byte(strings.Repeat("x", maxMessage+1))) },
		"wrong type": func(t *testing.T, q *fakeQEMU) { q.say(t, `{"id": "one"}`) },
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			m, q, _ := newFakeQEMU(t)
			done := make(chan error, 1)
			go func() { done <- m.execute(t.Context(), "stop", nil, nil) }()
			q.expect(t, `"stop"`)
			end(t, q)
			if err := <-done; !errors.Is(err, errDisconnected) {
				t.Errorf("a command under way returns %v", err)
			}
			<-m.done
			if err := m.execute(t.Context(), "stop", nil, nil); !errors.Is(err, errDisconnected) {
				t.Errorf("a later command returns %v", err)
			}
			if err := m.handshake(t.Context()); !errors.Is(err, errDisconnected) {
				t.Errorf("a later handshake returns %v", err)
			}
		})
	}
}

func TestTail(t *testing.T) {
	kept := &tail{max: 5}
	for _, text := range []string{"abc", "defg", "hijklmnop", "", "q"} {
		if n, err := kept.Write([]byte(text)); n != len(text) || err != nil {
			t.Fatalf("Write(%q) = %d, %v", text, n, err)
		}
	}
	if got := kept.String(); got != "mnopq" {
		t.Errorf("the tail is %q", got)
	}
}
