package failpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// childEnv makes the test binary run child instead of its tests.
const childEnv = "HIB_FAILPOINT_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
	}
	os.Exit(m.Run())
}

// child passes the failpoints "first" and "second" and prints what it met.
func child() {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("the test's context ended"))
	for _, name := range []string{"first", "second"} {
		fmt.Printf("%s: %v\n", name, Hit(ctx, name))
	}
	os.Exit(0)
}

func runChild(t *testing.T, env ...string) (string, *os.ProcessState) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, childEnv+"=1", "GORACE=atexit_sleep_ms=0")...)
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState
}

func TestHit(t *testing.T) {
	tests := []struct {
		name, env, want string
		killed          bool
	}{
		{"unset", "", "first: <nil>\nsecond: <nil>\n", false},
		{"error", "second=error", "first: <nil>\nsecond: failpoint second: injected failure\n", false},
		{"hang", "first=hang", "first: failpoint first: the test's context ended\nsecond: <nil>\n", false},
		{"kill", "second=kill", "first: <nil>\n", true},
		{"several", "other=kill, first=error,second=hang",
			"first: failpoint first: injected failure\nsecond: failpoint second: the test's context ended\n", false},
		{"syntax error", "first", "first: HIB_FAILPOINT: \"first\" is not of the form NAME=ACTION\n" +
			"second: HIB_FAILPOINT: \"first\" is not of the form NAME=ACTION\n", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			out, state := runChild(t, Env+"="+tt.env)
			if out != tt.want {
				t.Errorf("the child printed\n%swant\n%s", out, tt.want)
			}
			status := state.Sys().(syscall.WaitStatus)
			if killed := status.Signaled() && status.Signal() == syscall.SIGKILL; killed != tt.killed {
				t.Errorf("the child ended with %v, killed must be %v", state, tt.killed)
			}
		})
	}
}

func TestErrInjectedIsWrapped(t *testing.T) {
	if err := actionError.do(t.Context(), "here"); !errors.Is(err, ErrInjected) {
		t.Errorf("got %v, want an error that wraps ErrInjected", err)
	}
}

func TestParse(t *testing.T) {
	tests := []struct {
		in, wantErr string
		want        int
	}{
		{"", "", 0},
		{" ", "", 0},
		{"a=kill", "", 1},
		{"a=kill,b=hang , c=error", "", 3},
		{"a=kill,", "not of the form", 0},
		{"=kill", "not of the form", 0},
		{"a=explode", "unknown action \"explode\"", 0},
		{"a=", "unknown action", 0},
		{"a=kill,a=error", "named twice", 0},
	}
	for _, tt := range tests {
		got, err := parse(tt.in)
		switch {
		case tt.wantErr == "" && err != nil:
			t.Errorf("parse(%q): %v", tt.in, err)
		case tt.wantErr != "" && (err == nil || !strings.Contains(err.Error(), tt.wantErr)):
			t.Errorf("parse(%q) returned error %v, want one with %q", tt.in, err, tt.wantErr)
		case len(got) != tt.want:
			t.Errorf("parse(%q) has %d failpoints, want %d", tt.in, len(got), tt.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("a=kill,b=error")
	f.Add("=,")
	f.Fuzz(func(t *testing.T, s string) {
		points, err := parse(s)
		if err != nil && points != nil {
			t.Errorf("parse(%q) returned both failpoints and error %v", s, err)
		}
	})
}

func BenchmarkHitUnset(b *testing.B) {
	for b.Loop() {
		if err := Hit(b.Context(), "nothing"); err != nil {
			b.Fatal(err)
		}
	}
}
