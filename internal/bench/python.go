package bench

import (
	"bufio"
	"context"
	_ "embed"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// ServerScript is a Python HTTP server with arguments SIZE (MiB of computed
// state) and PORT. It answers every path with a JSON object of pid, counter,
// time and longest_gap, and /sum with the CRC-32 of its state besides.
//
//go:embed server.py
var ServerScript string

const serverPort = 8000

// cycles hibernates and wakes one sandbox with the Python server again and again.
func (r *runner) cycles(ctx context.Context) error {
	sb, err := r.create(ctx, false)
	if err != nil {
		return err
	}
	defer func() { _ = r.delete(ctx, sb.ID) }()
	if err := StartServer(ctx, r.target, sb.ID, r.opts.StateMiB, serverPort); err != nil {
		return err
	}
	// One cycle puts the heap into the snapshot; those that follow are alike.
	if _, err := r.target.Hibernate(ctx, sb.ID); err != nil {
		return err
	}
	if _, err := Ask(ctx, r.target, sb.ID, serverPort, "/"); err != nil {
		return err
	}
	return r.cycle(ctx, sb.ID, serverPort)
}

// Cycles measures the hibernation and the waking of the sandbox id, in which
// the Python server answers at port, n times. The sandbox runs afterwards.
func Cycles(ctx context.Context, target Target, id string, port, n int) ([]Row, error) {
	version, err := target.Version(ctx)
	if err != nil {
		return nil, err
	}
	sb, err := target.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	if _, err := Ask(ctx, target, id, port, "/"); err != nil {
		return nil, err
	}
	r := &runner{target: target, opts: Options{N: n}, memory: sb.MemoryMiB, accel: version.Accel}
	err = r.cycle(ctx, id, port)
	return r.rows, err
}

func (r *runner) cycle(ctx context.Context, id string, port int) error {
	var hibernate, running, first []float64
	for i := range r.opts.N {
		r.say("hibernate and resume %d of %d", i+1, r.opts.N)
		start := time.Now()
		if _, err := r.target.Hibernate(ctx, id); err != nil {
			return err
		}
		hibernate = append(hibernate, since(start))
		start = time.Now()
		if _, err := Ask(ctx, r.target, id, port, "/"); err != nil {
			return err
		}
		first = append(first, since(start))
		now, err := r.target.Get(ctx, id)
		if err != nil {
			return err
		}
		running = append(running, UntilRunning(now.LastResume))
	}
	r.add("python", PeerSelf, MetricHibernate, hibernate, len(hibernate))
	r.add("python", PeerSelf, MetricRunning, running, len(running))
	r.add("python", PeerSelf, MetricFirst, first, len(first))
	return nil
}

// UntilRunning returns the milliseconds from the resume request until the vCPUs ran.
func UntilRunning(report *api.ResumeReport) float64 {
	if report == nil {
		return 0
	}
	var sum float64
	for _, phase := range []string{"record", "vmm", "bind", "state", "unpause"} {
		sum += report.Phases[phase]
	}
	return sum
}

// StartServer starts the Python server in a sandbox and waits until it answers.
func StartServer(ctx context.Context, target Target, id string, mib, port int) error {
	cmd := fmt.Sprintf("cat > /tmp/server.py; setsid python3 /tmp/server.py %d %d </dev/null >/dev/null 2>&1 &", mib, port)
	resp, err := target.Exec(ctx, id, api.ExecRequest{Cmd: []string{"bash", "-c", cmd}, Stdin: ServerScript})
	if err != nil {
		return err
	}
	if resp.ExitCode != 0 {
		return fmt.Errorf("start the Python server: exit %d: %s", resp.ExitCode, resp.Stderr)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for {
		_, err := Ask(ctx, target, id, port, "/")
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the Python server does not answer: %w", err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Ask sends GET path to an HTTP server in the sandbox, which it wakes, and
// returns the body of its answer.
func Ask(ctx context.Context, target Target, id string, port int, path string) ([]byte, error) {
	conn, err := target.DialPort(ctx, id, port)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n", path); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, 1<<20))
}
