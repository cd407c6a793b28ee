package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/bench"
)

const (
	stateMiB = 200
	port     = 8000
	memory   = 512
	cycles   = 10
)

// answer is what the Python server in the sandbox says.
type answer struct {
	PID     int     `json:"pid"`
	Counter int     `json:"counter"`
	Time    float64 `json:"time"`
	Sum     uint32  `json:"sum"`
}

// story is one sandbox's life.
type story struct {
	d    *daemon
	id   string
	git  *http.Server
	repo string
}

func (s *story) play(ctx context.Context) error {
	for _, chapter := range []func(context.Context) error{s.create, s.work, s.sleep, s.secondDeath, s.measure} {
		if err := chapter(ctx); err != nil {
			return err
		}
	}
	return nil
}

// cleanUp works after ctx has ended, too.
func (s *story) cleanUp() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if s.id != "" {
		_ = s.d.c.Delete(ctx, s.id)
	}
	if s.git != nil {
		_ = s.git.Close()
	}
	if s.repo != "" {
		_ = os.RemoveAll(s.repo)
	}
}

// create makes the sandbox, with a rule that opens the host's git server to it.
func (s *story) create(ctx context.Context) error {
	gitPort, err := s.serveGit(ctx)
	if err != nil {
		return err
	}
	rule := fmt.Sprintf("host:%d", gitPort)
	step("hib create base --memory %d --allow %s", memory, rule)
	begun := time.Now()
	sb, err := s.d.c.Create(ctx, api.CreateRequest{Template: "base", MemoryMiB: memory, Policy: &api.PolicyPatch{IdleTimeout: new(api.Duration), Egress: &api.Egress{Allow: []string{rule}}}})
	if err != nil {
		return err
	}
	s.id = sb.ID
	hello, err := s.sh(ctx, "uname -sr; id -un")
	if err != nil {
		return err
	}
	figure("create → first answer: %d ms (%s)", time.Since(begun).Milliseconds(), strings.Join(strings.Fields(hello), " "))

	step("in it: git clone http://host.hib.internal:%d/repo.git", gitPort)
	begun = time.Now()
	out, err := s.sh(ctx, fmt.Sprintf("git clone -q http://host.hib.internal:%d/repo.git && git -C repo rev-parse HEAD && git -C repo fsck --no-progress && ls repo | wc -l", gitPort))
	if err != nil {
		return err
	}
	want, err := exec.CommandContext(ctx, "git", "rev-parse", "HEAD").Output()
	if err != nil {
		return err
	}
	if err := claim(strings.HasPrefix(out, strings.TrimSpace(string(want))), "this project's repository is in the sandbox, at %.12s, whole (git fsck), %.1f s", out, time.Since(begun).Seconds()); err != nil {
		return err
	}
	other, err := s.sh(ctx, fmt.Sprintf("curl -sS -m 5 http://host.hib.internal:%d/ 2>&1 || true", gitPort+1))
	if err != nil {
		return err
	}
	return claim(strings.Contains(other, "curl:"), "no other port of the host is open to it")
}

// serveGit serves this repository over HTTP on the host's loopback.
func (s *story) serveGit(ctx context.Context) (int, error) {
	dir, err := os.MkdirTemp("", "hib-demo")
	if err != nil {
		return 0, err
	}
	s.repo = dir
	bare := filepath.Join(dir, "repo.git")
	for _, args := range [][]string{{"clone", "-q", "--bare", ".", bare}, {"-C", bare, "repack", "-qad"}, {"-C", bare, "update-server-info"}} {
		if out, err := exec.CommandContext(ctx, "git", args...).CombinedOutput(); err != nil {
			return 0, fmt.Errorf("git %s: %w: %s", args[0], err, out)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	s.git = &http.Server{Handler: http.FileServer(http.Dir(dir)), ReadHeaderTimeout: time.Minute}
	go func() { _ = s.git.Serve(ln) }()
	return ln.Addr().(*net.TCPAddr).Port, nil
}

// work installs something, writes files and starts the server.
func (s *story) work(ctx context.Context) error {
	step("in it: install a command, write files")
	if _, err := s.sh(ctx, `
		printf '#!/bin/sh\necho "squirrel $(cat /proc/sys/kernel/hostname)"\n' > squirrel
		sudo install -m 755 squirrel /usr/local/bin/squirrel
		mkdir -p notes && for i in $(seq 500); do echo "note $i" > notes/$i; done`); err != nil {
		return err
	}
	step("in it: python3 server.py %d %d (a server with %d MB of computed state and a counter)", stateMiB, port, stateMiB)
	begun := time.Now()
	if err := bench.StartServer(ctx, s.d.c, s.id, stateMiB, port); err != nil {
		return err
	}
	figure("computed in %.1f s", time.Since(begun).Seconds())
	return nil
}

// sleep hibernates, kills the daemon and wakes by a request.
func (s *story) sleep(ctx context.Context) error {
	before, err := s.ask(ctx, "/sum")
	if err != nil {
		return err
	}
	files, err := s.files(ctx)
	if err != nil {
		return err
	}
	if err := s.hibernate(ctx); err != nil {
		return err
	}
	machines, err := s.d.lastMachines(ctx)
	if err != nil {
		return err
	}
	if err := claim(len(machines) == 0, "no VMM process and no guest memory is left"); err != nil {
		return err
	}
	step("kill -9 the daemon, start it again, ask the sandbox")
	if err := s.d.killAndRestart(ctx); err != nil {
		return err
	}
	begun := time.Now()
	now, err := s.ask(ctx, "/")
	if err != nil {
		return err
	}
	woke := time.Since(begun)
	clock := math.Abs(now.Time - float64(time.Now().UnixNano())/1e9)
	figure("the request woke it and was answered in %d ms", woke.Milliseconds())
	sum, err := s.ask(ctx, "/sum")
	if err != nil {
		return err
	}
	filesNow, err := s.files(ctx)
	if err != nil {
		return err
	}
	return errors.Join(
		claim(now.PID == before.PID, "the same process, pid %d", now.PID),
		claim(now.Counter >= before.Counter, "its counter goes on: %d, then %d", before.Counter, now.Counter),
		claim(sum.Sum == before.Sum, "checksum of the %d MB is unchanged: %08x", stateMiB, sum.Sum),
		claim(filesNow == files, "its files are there, what was installed too: %.16s…", files),
		claim(clock < 1, "its clock is right (off by %.0f ms at most)", clock*1000),
	)
}

// secondDeath kills the daemon under the running sandbox.
func (s *story) secondDeath(ctx context.Context) error {
	step("kill -9 the daemon under the running sandbox, start it again a second later")
	before, err := s.ask(ctx, "/")
	if err != nil {
		return err
	}
	machines, err := s.d.machines()
	if err != nil {
		return err
	}
	begun := time.Now()
	if err := s.d.kill(); err != nil {
		return err
	}
	time.Sleep(time.Second) // long enough for a guest that stands still to show
	if err := s.d.start(ctx); err != nil {
		return err
	}
	now, err := s.ask(ctx, "/")
	if err != nil {
		return err
	}
	away := time.Since(begun)
	after, err := s.d.machines()
	if err != nil {
		return err
	}
	sb, err := s.d.c.Get(ctx, s.id)
	if err != nil {
		return err
	}
	// It counts twenty times a second; half of that is allowed to an emulated machine.
	counted := float64(now.Counter - before.Counter)
	if err := errors.Join(
		claim(sb.State == api.StateRunning && strings.Join(machines, " ") == strings.Join(after, " "), "the very same machine runs on"),
		claim(now.PID == before.PID && counted >= away.Seconds()*10-1, "the guest never noticed: it counted %.0f times in the %d ms", counted, away.Milliseconds()),
	); err != nil {
		return err
	}
	if err := s.hibernate(ctx); err != nil {
		return err
	}
	sb, err = s.d.c.Get(ctx, s.id)
	if err != nil {
		return err
	}
	return claim(sb.Snapshot.StoredBytes < 40e6, "the second snapshot is small: %.1f MB of %d MB of memory", float64(sb.Snapshot.StoredBytes)/1e6, sb.Snapshot.MemoryBytes/1e6)
}

// hibernate hibernates and shows what that cost and stored.
func (s *story) hibernate(ctx context.Context) error {
	step("hib hibernate %s", s.id)
	before, err := s.d.c.StoreStatus(ctx)
	if err != nil {
		return err
	}
	begun := time.Now()
	sb, err := s.d.c.Hibernate(ctx, s.id)
	if err != nil {
		return err
	}
	took := time.Since(begun)
	after, err := s.d.c.StoreStatus(ctx)
	if err != nil {
		return err
	}
	figure("durable and acknowledged in %d ms, the guest stood still for %.0f ms", took.Milliseconds(), sb.LastHibernate.PauseMS)
	figure("stored: %.1f MB in packs, %.2f MB device state, %.2f MB manifest; %.1f MB were changed",
		float64(after.PackBytes-before.PackBytes)/1e6, float64(after.StateBytes-before.StateBytes)/1e6,
		float64(after.ManifestBytes-before.ManifestBytes)/1e6, float64(sb.Snapshot.DirtyBytes)/1e6)
	return claim(sb.State == api.StateStandby, "the sandbox is in standby")
}

// measure ends with the table.
func (s *story) measure(ctx context.Context) error {
	step("measure: %d times each, fewer cold boots", cycles)
	o := bench.Quick()
	o.N, o.Caches = cycles, []string{bench.CacheWarm}
	res, err := bench.RunOwn(ctx, s.d.c, o, bench.Own{ID: s.id, Port: port, Path: "/"})
	if err != nil {
		return err
	}
	o.Template, o.Scenarios, o.MemoryMiB = "base", []string{bench.ScenarioCreate}, []int{memory}
	created, err := bench.Run(ctx, s.d.c, o)
	if err != nil {
		return err
	}
	fmt.Printf("\n    %-32s %9s %9s %4s\n", "", "p50 ms", "worst ms", "n")
	for _, r := range append(created.Rows, res.Rows...) {
		title := titles[r.Metric]
		switch {
		case r.SuccessRate != 1:
			return fmt.Errorf("%s: only %.0f%% succeeded", r.Metric, 100*r.SuccessRate)
		case r.Peer == bench.PeerBoot:
			title = "cold boot → first answer"
		case r.Resumed() && !r.Prefetch:
			continue
		}
		fmt.Printf("    %-32s %9.0f %9.0f %4d\n", title, r.P50, r.Max, r.N)
	}
	return nil
}

var titles = map[string]string{
	bench.MetricCreate:    "create → first answer",
	bench.MetricHibernate: "hibernate → acknowledged",
	bench.MetricRunning:   "resume → vCPUs running",
	bench.MetricFirst:     "resume → first answer",
}

// files returns a checksum of what the story wrote and installed.
func (s *story) files(ctx context.Context) (string, error) {
	return s.sh(ctx, "{ squirrel; cat $(find notes repo -type f -not -path '*/.git/*' | sort); } | sha256sum")
}

// ask wakes the sandbox, if need be, and asks its server.
func (s *story) ask(ctx context.Context, path string) (answer, error) {
	var a answer
	body, err := bench.Ask(ctx, s.d.c, s.id, port, path)
	if err != nil {
		return a, err
	}
	return a, json.NewDecoder(bytes.NewReader(body)).Decode(&a)
}

// sh runs a script in the sandbox and returns what it printed.
func (s *story) sh(ctx context.Context, script string) (string, error) {
	out, err := s.d.c.Exec(ctx, s.id, api.ExecRequest{Cmd: []string{"bash", "-ec", script}})
	if err != nil {
		return "", err
	}
	if out.ExitCode != 0 {
		return "", fmt.Errorf("in the sandbox: exit %d: %s%s", out.ExitCode, out.Stdout, out.Stderr)
	}
	return strings.TrimSpace(out.Stdout), nil
}
