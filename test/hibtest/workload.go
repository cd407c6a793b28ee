package hibtest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"testing"

	"crypto/sha3"

	"github.com/hibernacle/hibernacle/internal/bench"
)

// Answer is what the Python server in the sandbox says.
type Answer struct {
	PID        int     `json:"pid"`
	Counter    int     `json:"counter"`     // counts up 20 times a second
	Time       float64 `json:"time"`        // the guest's wall clock, in Unix seconds
	LongestGap float64 `json:"longest_gap"` // between two counts, in seconds of guest time
	Sum        uint32  `json:"sum"`         // CRC-32 of the state, for the path /sum
}

// Server is a Python HTTP server with state, running in a sandbox.
type Server struct {
	d    *Daemon
	ID   string // of the sandbox
	Port int
	MiB  int
}

// StartServer starts the server in the sandbox id and waits until it answers.
func (d *Daemon) StartServer(id string, mib, port int) *Server {
	d.t.Helper()
	d.WriteFile(id, "/home/user/server.py", []byte(bench.ServerScript))
	d.Hib("exec", "-d", id, "--", "python3", "/home/user/server.py", fmt.Sprint(mib), fmt.Sprint(port))
	s := &Server{d: d, ID: id, Port: port, MiB: mib}
	Eventually(d.t, "the Python server answers", func() bool {
		_, err := s.get("/")
		return err == nil
	})
	return s
}

// Get asks the server, from inside the sandbox; the request wakes it.
func (s *Server) Get(path string) Answer {
	s.d.t.Helper()
	a, err := s.get(path)
	if err != nil {
		s.d.t.Fatal(err)
	}
	return a
}

func (s *Server) get(path string) (Answer, error) {
	var a Answer
	out, stderr, code := s.d.Try("exec", s.ID, "--", "curl", "-sS", fmt.Sprintf("http://127.0.0.1:%d%s", s.Port, path))
	if code != 0 {
		return a, fmt.Errorf("GET %s from the server in %s: exit %d: %s", path, s.ID, code, stderr)
	}
	return a, json.Unmarshal([]byte(out), &a)
}

var sums sync.Map // MiB → CRC-32

// WantSum returns the right checksum of the server's state, computed on the host.
func (s *Server) WantSum() uint32 {
	if sum, ok := sums.Load(s.MiB); ok {
		return sum.(uint32)
	}
	state := make([]byte, s.MiB<<20)
	copy(state, sha3.SumSHAKE128([]byte("hibernacle"), len(state)))
	sum := crc32.ChecksumIEEE(state)
	sums.Store(s.MiB, sum)
	return sum
}

// Forward asks the server at a port of the sandbox through "hib port-forward".
func (d *Daemon) Forward(t testing.TB, id string, port int) Answer {
	t.Helper()
	cmd := exec.Command(filepath.Join(d.bin, "hib"), "port-forward", id, fmt.Sprintf("0:%d", port))
	cmd.Env = d.env
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("port-forward printed %q: %v", line, err)
	}
	addr := regexp.MustCompile(`127\.0\.0\.1:\d+`).FindString(line)
	client := http.Client{Timeout: Patience}
	resp, err := client.Get("http://" + addr + "/")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var a Answer
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil {
		t.Fatal(err)
	}
	client.CloseIdleConnections()
	return a
}

// TryGet asks the server and does not mind a failure.
func (s *Server) TryGet(path string) { _, _ = s.get(path) }
