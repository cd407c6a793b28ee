package template

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestCommandRunsInABareEnvironment(t *testing.T) {
	t.Setenv("HIB_SECRET", "secret")
	var out bytes.Buffer
	c := command{name: "sh", args: []string{"-c", "env; cat; pwd; tty"}, dir: "/", env: map[string]string{"EXTRA": "extra"}, stdin: "input\n", stdout: &out}
	err := c.run(t.Context()) // tty fails without a terminal
	if err == nil || !strings.Contains(out.String(), "not a tty") {
		t.Errorf("it had a terminal: %v, %q", err, out.String())
	}
	for _, want := range []string{"EXTRA=extra\n", "LC_ALL=C.UTF-8\n", "input\n", "\n/\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q: %q", want, out.String())
		}
	}
	if strings.Contains(out.String(), "secret") {
		t.Error("it saw the caller's environment")
	}
}

func TestCommandReportsTheLastMessages(t *testing.T) {
	var logged []string
	c := command{name: "sh", args: []string{"-c", `for i in $(seq 100); do echo "message $i" >&2; done; echo "E: cannot fetch http://me:pw@mirror.example/x and https://t@h.example" >&2; exit 3`},
		log: func(line string) { logged = append(logged, line) }}
	err := c.run(t.Context())
	if err == nil {
		t.Fatal("no error")
	}
	if len(logged) != 101 || logged[0] != "message 1" {
		t.Errorf("%d messages were logged", len(logged))
	}
	for _, want := range []string{"sh: exit status 3", "message 100", "E: cannot fetch http://mirror.example/x and https://h.example"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
	if strings.Contains(err.Error(), "pw") || strings.Contains(err.Error(), "message 50\n") {
		t.Errorf("the error says too much: %v", err)
	}
}

func TestCommandEndsWithItsContext(t *testing.T) {
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	started := make(chan int, 1)
	c := command{
		name: "sh", args: []string{"-c", `sleep 1000 & echo $! >&2; wait`},
		log: func(line string) { pid, _ := strconv.Atoi(line); started <- pid },
	}
	var child int
	go func() { child = <-started; cancel() }()
	begin := time.Now()
	if err := c.run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
	if d := time.Since(begin); d > stopGrace {
		t.Errorf("it took %v to end", d)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		// A zombie waits for the system's init, and runs no more.
		state, _ := os.ReadFile("/proc/" + strconv.Itoa(child) + "/stat")
		if syscall.Kill(child, 0) == syscall.ESRCH || strings.Contains(string(state), ") Z ") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("its child %d still runs", child)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestCommandThatIsNotInstalled(t *testing.T) {
	if err := (command{name: "hib-no-such-program"}).run(t.Context()); !errors.Is(err, ErrTool) {
		t.Errorf("error %v, want ErrTool", err)
	}
}
