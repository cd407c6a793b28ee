package bench

import (
	"bufio"
	"context"
	_ "embed"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// ServerScript is a Python HTTP server with arguments SIZE (MiB of computed
// state), PORT and optionally KIND ("random" or "records"). It answers every
// path with a JSON object of pid, counter, time and longest_gap; /sum with the
// CRC-32 of its state besides; /touch/SEED/COUNT after it has read COUNT places of
// its state.
//
//go:embed server.py
var ServerScript string

// serverPort is where the servers of workloads listen.
const serverPort = 8000

// serverPatience bounds the time that a server takes to compute its state.
const serverPatience = 10 * time.Minute

// StartServer starts the Python server with random state in a sandbox and waits
// until it answers at port.
func StartServer(ctx context.Context, target Target, id string, mib, port int) error {
	return startServer(ctx, target, id, ServerScript, serverCommand("/tmp/server", mib, port, "random"), port)
}

// inBackground makes a command go on when the shell that starts it has ended.
func inBackground(command string) string {
	return "setsid " + command + " </dev/null >/tmp/server.log 2>&1 &"
}

// serverCommand returns the command line of the Python server that Python finds by script.
func serverCommand(script string, mib, port int, kind string) string {
	return fmt.Sprintf("python3 %s %d %d %s", script, mib, port, kind)
}

// startServer puts a program to /tmp/server, starts the command in the background
// and waits until it answers at port.
func startServer(ctx context.Context, target Target, id, program, command string, port int) error {
	if _, err := run(ctx, target, id, "cat > /tmp/server; "+inBackground(command), program); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, serverPatience)
	defer cancel()
	var last error
	answers := until(ctx, 100*time.Millisecond, func() bool {
		_, last = Ask(ctx, target, id, port, "/")
		return last == nil
	})
	if !answers {
		return fmt.Errorf("the server does not answer: %w (%v)", ctx.Err(), last)
	}
	return nil
}

// run runs a script in a sandbox, which must succeed, and returns its output.
func run(ctx context.Context, target Target, id, script, stdin string) (string, error) {
	resp, err := target.Exec(ctx, id, api.ExecRequest{Cmd: []string{"bash", "-c", script}, Stdin: stdin})
	if err != nil {
		return "", err
	}
	if resp.ExitCode != 0 {
		return "", fmt.Errorf("exit %d: %s", resp.ExitCode, resp.Stderr)
	}
	return resp.Stdout, nil
}

// Ask sends GET path to an HTTP server in the sandbox, which it wakes, and
// returns the body of its answer, which must be a success.
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
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("GET :%s%s answered %s", strconv.Itoa(port), path, resp.Status)
	}
	return body, err
}
