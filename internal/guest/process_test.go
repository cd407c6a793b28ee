package guest

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	processpb "github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

func bash(script string) *processpb.StartRequest {
	stdin := false
	return &processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", script}}, Stdin: &stdin,
	}
}

func interactive(script string) *processpb.StartRequest {
	r := bash(script)
	r.Stdin = nil
	return r
}

// events reads a stream of either call.
type events struct {
	t       *testing.T
	receive func() *processpb.ProcessEvent // nil at the end
	err     func() error
	pid     uint32
	stdout, stderr,
	pty bytes.Buffer
	keepalives int
	end        *processpb.ProcessEvent_EndEvent
}

func (g *guestUnderTest) start(ctx context.Context, t *testing.T, req *processpb.StartRequest, headers ...string) *events {
	t.Helper()
	r := connect.NewRequest(req)
	for i := 0; i < len(headers); i += 2 {
		r.Header().Set(headers[i], headers[i+1])
	}
	s, err := g.process.Start(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	e := &events{t: t, err: s.Err, receive: func() *processpb.ProcessEvent {
		if !s.Receive() {
			return nil
		}
		return s.Msg().GetEvent()
	}}
	e.first()
	return e
}

func (g *guestUnderTest) attach(ctx context.Context, t *testing.T, sel *processpb.ProcessSelector, replay bool) *events {
	t.Helper()
	r := connect.NewRequest(&processpb.ConnectRequest{Process: sel})
	if replay {
		r.Header().Set(guestapi.ReplayHeader, "1")
	}
	s, err := g.process.Connect(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	e := &events{t: t, err: s.Err, receive: func() *processpb.ProcessEvent {
		if !s.Receive() {
			return nil
		}
		return s.Msg().GetEvent()
	}}
	e.first()
	return e
}

// first reads the start event, if there is no error instead of it.
func (e *events) first() {
	e.t.Helper()
	ev := e.receive()
	if ev == nil {
		return
	}
	if ev.GetStart().GetPid() == 0 {
		e.t.Fatalf("the first event is %v", ev)
	}
	e.pid = ev.GetStart().GetPid()
}

func (e *events) next() bool {
	ev := e.receive()
	switch {
	case ev == nil:
		return false
	case ev.GetEnd() != nil:
		e.end = ev.GetEnd()
	case ev.GetKeepalive() != nil:
		e.keepalives++
	default:
		e.stdout.Write(ev.GetData().GetStdout())
		e.stderr.Write(ev.GetData().GetStderr())
		e.pty.Write(ev.GetData().GetPty())
	}
	return true
}

func (e *events) all() *events {
	for e.next() {
	}
	return e
}

// until reads events up to one after which the condition holds.
func (e *events) until(what string, condition func() bool) {
	e.t.Helper()
	for !condition() {
		if !e.next() {
			e.t.Fatalf("the stream ended before: %s (error %v)", what, e.err())
		}
	}
}

func byPID(pid uint32) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
}

func byTag(tag string) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Tag{Tag: tag}}
}

func stdinOf(s string) *processpb.ProcessInput {
	return &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte(s)}}
}

func TestRunReportsOutputAndEnd(t *testing.T) {
	g := newGuest(t, nil)
	for _, c := range []struct {
		name, script, stdout, stderr, status string
		code                                 int32
		exited                               bool
	}{
		{"success", "echo out; echo err >&2", "out\n", "err\n", "exit status 0", 0, true},
		{"failure", "exit 42", "", "", "exit status 42", 42, true},
		{"signal", "kill -TERM $$", "", "", "signal: terminated", -1, false},
		{"empty input", "wc -c", "0\n", "", "exit status 0", 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := g.start(testContext(t), t, bash(c.script)).all()
			if e.err() != nil || e.end == nil {
				t.Fatalf("error %v, end %v", e.err(), e.end)
			}
			if e.stdout.String() != c.stdout || e.stderr.String() != c.stderr {
				t.Errorf("stdout %q, stderr %q", e.stdout.String(), e.stderr.String())
			}
			if e.end.ExitCode != c.code || e.end.Exited != c.exited || e.end.Status != c.status {
				t.Errorf("end %v", e.end)
			}
			if (e.end.Error != nil) != (c.code != 0) {
				t.Errorf("error in the end event: %v", e.end.Error)
			}
		})
	}
}

func TestProcessRunsAsTheCallersAccount(t *testing.T) {
	g := newGuest(t, nil)
	const script = `echo "$(id -u) $(id -g) $(id -G) $HOME $USER $LOGNAME $SHELL $PWD"`
	for _, c := range []struct{ header, want string }{
		{"", fmt.Sprintf("65534 65534 65534 7777 %s user user /bin/bash %s\n", g.home, g.home)},
		{"Basic " + base64.StdEncoding.EncodeToString([]byte("root:")), "0 0 0 /root root root /bin/bash /root\n"},
	} {
		e := g.start(testContext(t), t, bash(script), "Authorization", c.header).all()
		if e.stdout.String() != c.want {
			t.Errorf("%q: got %q, want %q (%s)", c.header, e.stdout.String(), c.want, e.stderr.String())
		}
	}
}

func TestEnvironmentAndFolderOfTheRequestWin(t *testing.T) {
	g := newGuest(t, nil)
	g.agent.setIdentity(&guestapi.Identity{Env: map[string]string{"A": "default", "B": "default"}})
	if err := os.Mkdir(filepath.Join(g.home, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	req := bash("echo $A $B $C; pwd")
	sub := "sub"
	req.Process.Cwd, req.Process.Envs = &sub, map[string]string{"B": "request", "C": "request"}
	e := g.start(testContext(t), t, req).all()
	if want := "default request request\n" + g.home + "/sub\n"; e.stdout.String() != want {
		t.Errorf("got %q, want %q", e.stdout.String(), want)
	}
}

func TestStartFailuresSayWhy(t *testing.T) {
	g := newGuest(t, nil)
	script := filepath.Join(g.home, "script")
	writeFile(t, script, "#!/no/such/interpreter\n")
	if err := os.Chmod(script, 0o755); err != nil {
		t.Fatal(err)
	}
	missing := "/no/such/folder"
	ghost := "Basic " + base64.StdEncoding.EncodeToString([]byte("ghost:"))
	for _, c := range []struct {
		name, auth string
		cfg        *processpb.ProcessConfig
		code       connect.Code
	}{
		{"no command", "", nil, connect.CodeInvalidArgument},
		{"unknown name", "", &processpb.ProcessConfig{Cmd: "no-such-program"}, connect.CodeNotFound},
		{"unknown path", "", &processpb.ProcessConfig{Cmd: "/no/such/program"}, connect.CodeNotFound},
		{"no interpreter", "", &processpb.ProcessConfig{Cmd: script}, connect.CodeNotFound},
		{"not executable", "", &processpb.ProcessConfig{Cmd: "/etc/passwd"}, connect.CodeInvalidArgument},
		{"folder", "", &processpb.ProcessConfig{Cmd: "/etc"}, connect.CodeInvalidArgument},
		{"working folder", "", &processpb.ProcessConfig{Cmd: "true", Cwd: &missing}, connect.CodeInvalidArgument},
		{"variable", "", &processpb.ProcessConfig{Cmd: "true", Envs: map[string]string{"A=B": "c"}}, connect.CodeInvalidArgument},
		{"NUL", "", &processpb.ProcessConfig{Cmd: "true", Args: []string{"a\x00"}}, connect.CodeInvalidArgument},
		{"unknown user", ghost, &processpb.ProcessConfig{Cmd: "true"}, connect.CodeUnauthenticated},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := g.start(testContext(t), t, &processpb.StartRequest{Process: c.cfg}, "Authorization", c.auth)
			wantCode(t, e.err(), c.code)
		})
	}
}

func TestNothingIsLostForAClientThatReads(t *testing.T) {
	g := newGuest(t, func(c *Config) { c.Journal = 256 << 10 })
	const size = 100 << 20
	e := g.start(testContext(t), t, bash(fmt.Sprintf("head -c %d /dev/zero", size)))
	total := 0
	for e.next() {
		total += e.stdout.Len()
		e.stdout.Reset()
	}
	if total != size || e.end.GetExitCode() != 0 {
		t.Fatalf("got %d of %d bytes, end %v, error %v", total, size, e.end, e.err())
	}
}

func TestProcessOutlivesItsClientAndIsFoundAgain(t *testing.T) {
	g := newGuest(t, nil)
	ctx, cancel := context.WithCancel(testContext(t))
	tag := "job"
	req := interactive("echo before; read line; echo after $line")
	req.Tag = &tag
	e := g.start(ctx, t, req)
	e.until("output", func() bool { return e.stdout.String() == "before\n" })
	cancel()
	e.all()

	ctx = testContext(t)
	list, err := g.process.List(ctx, connect.NewRequest(&processpb.ListRequest{}))
	if err != nil || len(list.Msg.Processes) != 1 || list.Msg.Processes[0].Pid != e.pid || list.Msg.Processes[0].GetTag() != tag {
		t.Fatalf("list %v, error %v", list, err)
	}
	plain, replayed := g.attach(ctx, t, byPID(e.pid), false), g.attach(ctx, t, byTag(tag), true)
	_, err = g.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: byTag(tag), Input: stdinOf("hello\n")}))
	if err != nil {
		t.Fatal(err)
	}
	if got := plain.all().stdout.String(); got != "after hello\n" {
		t.Errorf("a plain client got %q", got)
	}
	if got := replayed.all().stdout.String(); got != "before\nafter hello\n" {
		t.Errorf("a replaying client got %q", got)
	}
	late := g.attach(ctx, t, byTag(tag), true).all()
	if late.stdout.String() != "before\nafter hello\n" || late.end == nil {
		t.Errorf("a late client got %q and end %v", late.stdout.String(), late.end)
	}
	list, err = g.process.List(ctx, connect.NewRequest(&processpb.ListRequest{}))
	if err != nil || len(list.Msg.Processes) != 0 {
		t.Errorf("the ended process is listed: %v, %v", list, err)
	}
}

func TestHungClientHoldsNobodyUpForLong(t *testing.T) {
	g := newGuest(t, func(c *Config) { c.Journal, c.Stall = 128<<10, 300*time.Millisecond })
	ctx := testContext(t)
	e := g.start(ctx, t, interactive("read x; head -c 50000000 /dev/zero; echo; echo done >&2"))

	// A client that attaches and then reads nothing, with all its buffers small.
	conn, err := g.dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	body := fmt.Sprintf(`{"process":{"pid":%d}}`, e.pid)
	envelope := append([]byte{0, 0, 0, 0, byte(len(body))}, body...)
	fmt.Fprintf(conn, "POST /process.Process/Connect HTTP/1.1\r\nHost: guest\r\nContent-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\nContent-Length: %d\r\n\r\n%s", len(envelope), envelope)
	p, err := g.agent.processes.table.find(byPID(e.pid))
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the hung client to be attached", func() bool { return attached(p.out) == 2 })

	if _, err := g.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: byPID(e.pid), Input: stdinOf("\n")})); err != nil {
		t.Fatal(err)
	}
	total := 0
	for e.next() {
		total += e.stdout.Len()
		e.stdout.Reset()
	}
	if total != 50000001 || e.end == nil {
		t.Errorf("the client that reads got %d bytes and end %v, error %v", total, e.end, e.err())
	}
}

// attached returns how many follow a journal.
func attached(j *journal) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.followers)
}

func TestBackgroundChildDoesNotHoldTheEndUp(t *testing.T) {
	g := newGuest(t, nil)
	alive := filepath.Join(g.home, "alive")
	e := g.start(testContext(t), t, bash(`(trap "" HUP; while [ ! -e go ]; do sleep 0.02; done; echo late; echo still > alive) & head -c 60000 /dev/zero`)).all()
	if e.end == nil || e.stdout.Len() != 60000 {
		t.Fatalf("got %d bytes and end %v", e.stdout.Len(), e.end)
	}
	writeFile(t, filepath.Join(g.home, "go"), "")
	// It writes to the pipe first: a closed one would have killed it.
	waitFor(t, "the child to write its file", func() bool {
		raw, err := os.ReadFile(alive)
		return err == nil && string(raw) == "still\n"
	})
}

func TestTerminal(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	req := interactive(`stty size; tty; trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.02; done`)
	req.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: 100, Rows: 30}}
	e := g.start(ctx, t, req)
	e.until("the shell to be ready", func() bool { return strings.Contains(e.pty.String(), "ready") })
	_, err := g.process.Update(ctx, connect.NewRequest(&processpb.UpdateRequest{
		Process: byPID(e.pid), Pty: &processpb.PTY{Size: &processpb.PTY_Size{Cols: 132, Rows: 43}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	e.all()
	if got := e.pty.String(); !strings.Contains(got, "30 100\r\n/dev/pts/") || !strings.HasSuffix(got, "43 132\r\n") {
		t.Errorf("the terminal showed %q", got)
	}
	if e.end.GetExitCode() != 3 {
		t.Errorf("end %v", e.end)
	}
}

func TestTerminalInput(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	req := interactive("")
	req.Process = &processpb.ProcessConfig{Cmd: "cat"}
	req.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: 80, Rows: 24}}
	e := g.start(ctx, t, req)
	send := func(in *processpb.ProcessInput) error {
		_, err := g.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: byPID(e.pid), Input: in}))
		return err
	}
	wantCode(t, send(stdinOf("x")), connect.CodeFailedPrecondition)
	_, err := g.process.CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: byPID(e.pid)}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	if err := send(&processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: []byte("hi\n\x04")}}); err != nil {
		t.Fatal(err)
	}
	if got := e.all().pty.String(); got != "hi\r\nhi\r\n" || e.end.GetExitCode() != 0 {
		t.Errorf("the terminal showed %q, end %v", got, e.end)
	}
}

func TestInput(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	e := g.start(ctx, t, interactive("cat"))
	in := g.process.StreamInput(ctx)
	for _, m := range []*processpb.StreamInputRequest{
		{Event: &processpb.StreamInputRequest_Start{Start: &processpb.StreamInputRequest_StartEvent{Process: byPID(e.pid)}}},
		{Event: &processpb.StreamInputRequest_Data{Data: &processpb.StreamInputRequest_DataEvent{Input: stdinOf("one ")}}},
		{Event: &processpb.StreamInputRequest_Keepalive{}},
		{Event: &processpb.StreamInputRequest_Data{Data: &processpb.StreamInputRequest_DataEvent{Input: stdinOf("two")}}},
	} {
		if err := in.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := in.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	closeStdin := func() error {
		_, err := g.process.CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: byPID(e.pid)}))
		return err
	}
	if err := closeStdin(); err != nil {
		t.Fatal(err)
	}
	if got := e.all().stdout.String(); got != "one two" {
		t.Errorf("got %q", got)
	}
	wantCode(t, closeStdin(), connect.CodeNotFound)
	_, err := g.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: byPID(e.pid), Input: stdinOf("x")}))
	wantCode(t, err, connect.CodeNotFound)
	_, err = g.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Input: stdinOf("x")}))
	wantCode(t, err, connect.CodeInvalidArgument)
}

func TestInputThatNobodyReadsEndsWithItsCall(t *testing.T) {
	g := newGuest(t, nil)
	e := g.start(testContext(t), t, interactive("sleep 600"))
	ctx, cancel := context.WithTimeout(testContext(t), 200*time.Millisecond)
	defer cancel()
	_, err := g.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{
		Process: byPID(e.pid), Input: stdinOf(strings.Repeat("x", 1<<20)),
	}))
	wantCode(t, err, connect.CodeDeadlineExceeded)
}

func TestSignalReachesTheWholeGroup(t *testing.T) {
	g := newGuest(t, nil)
	ctx := testContext(t)
	e := g.start(ctx, t, bash("sleep 600 & echo $!; wait"))
	e.until("the child's pid", func() bool { return strings.Contains(e.stdout.String(), "\n") })
	var child int
	fmt.Sscan(e.stdout.String(), &child)
	send := func(s processpb.Signal) error {
		_, err := g.process.SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{Process: byPID(e.pid), Signal: s}))
		return err
	}
	wantCode(t, send(0), connect.CodeInvalidArgument)
	if err := send(processpb.Signal_SIGNAL_SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e.all(); e.end.GetExited() || e.end.GetStatus() != "signal: killed" {
		t.Errorf("end %v", e.end)
	}
	waitFor(t, "the child to die", func() bool {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child))
		return err != nil || strings.Contains(string(raw), ") Z ")
	})
	wantCode(t, send(processpb.Signal_SIGNAL_SIGTERM), connect.CodeNotFound)
}

func TestTimeoutOfStartKillsTheProcess(t *testing.T) {
	g := newGuest(t, nil)
	ctx, cancel := context.WithTimeout(testContext(t), 300*time.Millisecond)
	defer cancel()
	e := g.start(ctx, t, bash("sleep 600"))
	p, err := g.agent.processes.table.find(byPID(e.pid))
	if err != nil {
		t.Fatal(err)
	}
	e.all()
	wantCode(t, e.err(), connect.CodeDeadlineExceeded)
	select {
	case <-p.done:
	case <-time.After(patience):
		t.Fatal("the process goes on")
	}
}

func TestKeepalive(t *testing.T) {
	g := newGuest(t, nil)
	e := g.start(testContext(t), t, bash("sleep 600"), keepaliveHeader, "1")
	e.until("a keepalive", func() bool { return e.keepalives > 0 })
}

func TestSpawnerReapsOnlyOrphans(t *testing.T) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
	s := newSpawner()
	for i := range 20 {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		// The shell leaves an orphan that ends at once, and ends with a status of its own.
		p, err := s.start("/bin/sh", []string{"sh", "-c", fmt.Sprintf("(exec sh -c 'echo $$') & exit %d", i)},
			&os.ProcAttr{Files: []*os.File{nil, w, nil}})
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
		out, err := io.ReadAll(r) // ends when both have ended
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		waitFor(t, "the shell to end", func() bool { return endedChild() != 0 })
		for s.reapOne() {
		}
		state, err := s.wait(p)
		if err != nil || state.ExitCode() != i {
			t.Fatalf("status %v, error %v", state, err)
		}
		var orphan int
		fmt.Sscan(string(out), &orphan)
		waitFor(t, "the orphan to be reaped", func() bool {
			s.reapOne()
			return errors.Is(unix.Kill(orphan, 0), unix.ESRCH)
		})
	}
}
