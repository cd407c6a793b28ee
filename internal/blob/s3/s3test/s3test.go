// Package s3test runs a real S3 server on a folder of this machine, for tests
// and to try things by hand (see scripts/s3server).
package s3test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/hibernacle/hibernacle/internal/blob/s3"
)

const (
	program    = "versitygw" // that the Makefile builds into bin
	startLimit = 30 * time.Second
)

// Server is an S3 server with one account that may do everything, and one that
// may only read and list. Stop and Restart are not for use by many goroutines at a time.
type Server struct {
	Address string // host:port, the same after a restart

	dir           string
	binary        string
	health        string // path of a check that no other server knows
	owner, reader keys
	cmd           *exec.Cmd
	exited        chan struct{}
	output        bytes.Buffer

	making sync.Mutex // held while a bucket is made: the server fails if two are at it
}

type keys struct{ access, secret string }

func newKeys() keys { return keys{rand.Text()[:16], rand.Text()} }

// Start runs a server on a temporary folder until the test ends.
func Start(t testing.TB) *Server {
	t.Helper()
	s, err := Serve(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// Serve runs a server on a folder, which it makes if it is missing. The caller
// stops it.
func Serve(ctx context.Context, dir string) (*Server, error) {
	binary, err := findBinary()
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, binary: binary, health: "/health-" + rand.Text(), owner: newKeys(), reader: newKeys()}
	users, err := json.Marshal(map[string]any{"accessAccounts": map[string]any{
		s.reader.access: map[string]any{"access": s.reader.access, "secret": s.reader.secret, "role": "user"},
	}})
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"objects", "attributes", "accounts"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "accounts", "users.json"), users, 0o600); err != nil {
		return nil, err
	}
	// A free port can be lost before the server takes it: then another.
	for range 5 {
		if s.Address, err = freeAddress(); err != nil {
			return nil, err
		}
		if err = s.Restart(ctx); err == nil || ctx.Err() != nil {
			break
		}
	}
	return s, err
}

// findBinary looks for the server in HIB_TEST_BIN, else in this module's bin.
func findBinary() (string, error) {
	dir := os.Getenv("HIB_TEST_BIN")
	if dir == "" {
		out, err := exec.Command("go", "env", "GOMOD").Output()
		if err != nil {
			return "", fmt.Errorf("find the module's folder: %w", err)
		}
		dir = filepath.Join(filepath.Dir(string(out)), "bin")
	}
	path := filepath.Join(dir, program)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("the S3 server of the tests is not built: run make bin/%s (%w)", program, err)
	}
	return path, nil
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// Restart starts the server that was stopped, with the same objects, address
// and credentials, and waits until it answers.
func (s *Server) Restart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	s.output.Reset()
	cmd := exec.Command(s.binary, "--port", s.Address, "--health", s.health, "--keep-alive", "--quiet",
		"--iam-dir", filepath.Join(s.dir, "accounts"),
		// Not every folder of tests is on a file system with extended attributes.
		"posix", "--sidecar", filepath.Join(s.dir, "attributes"), filepath.Join(s.dir, "objects"))
	cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+s.owner.access, "ROOT_SECRET_KEY="+s.owner.secret)
	cmd.Stdout, cmd.Stderr = &s.output, &s.output
	// A test that runs out of time stops nothing. The signal comes when the
	// thread that started the server ends, so that one waits.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, exited := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
			close(exited)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start the S3 server: %w", err)
	}
	s.cmd, s.exited = cmd, exited
	for {
		resp, err := http.Get("http://" + s.Address + s.health)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
			err = errors.New(resp.Status)
		}
		select {
		case <-exited:
			return fmt.Errorf("the S3 server ended: %s", s.output.String())
		case <-ctx.Done():
			s.Stop()
			return fmt.Errorf("the S3 server does not answer: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stop kills the server. Its folder stays.
func (s *Server) Stop() {
	s.cmd.Process.Kill() // fails only if it has ended
	<-s.exited
}

// Done is closed when the server has ended.
func (s *Server) Done() <-chan struct{} { return s.exited }

// Config makes a bucket, if it is missing, and returns a config of a store in
// it for the account that may do everything.
func (s *Server) Config(ctx context.Context, bucket, prefix string) (s3.Config, error) {
	client, err := s.client()
	if err != nil {
		return s3.Config{}, err
	}
	s.making.Lock()
	defer s.making.Unlock()
	err = client.MakeBucket(ctx, bucket, minio.MakeBucketOptions{Region: s3.DefaultRegion})
	if code := minio.ToErrorResponse(err).Code; err != nil && code != "BucketAlreadyOwnedByYou" && code != "BucketAlreadyExists" {
		return s3.Config{}, fmt.Errorf("make bucket %s: %w", bucket, err)
	}
	return s3.Config{
		Bucket: bucket, Prefix: prefix, Endpoint: "http://" + s.Address, Region: s3.DefaultRegion, PathStyle: true,
		AccessKey: s.owner.access, SecretKey: s.owner.secret,
	}, nil
}

// ReadOnly returns cfg, which Config returned, for the account that may only
// read and list, by the policy that the manual recommends.
func (s *Server) ReadOnly(ctx context.Context, cfg s3.Config) (s3.Config, error) {
	client, err := s.client()
	if err != nil {
		return s3.Config{}, err
	}
	policy := fmt.Sprintf(`{"Version": "2012-10-17", "Statement": [
		{"Effect": "Allow", "Principal": {"AWS": [%q]}, "Action": ["s3:ListBucket"], "Resource": ["arn:aws:s3:::%s"]},
		{"Effect": "Allow", "Principal": {"AWS": [%q]}, "Action": ["s3:GetObject"], "Resource": ["arn:aws:s3:::%s/*"]}]}`,
		s.reader.access, cfg.Bucket, s.reader.access, cfg.Bucket)
	if err := client.SetBucketPolicy(ctx, cfg.Bucket, policy); err != nil {
		return s3.Config{}, fmt.Errorf("set the policy of bucket %s: %w", cfg.Bucket, err)
	}
	cfg.AccessKey, cfg.SecretKey = s.reader.access, s.reader.secret
	return cfg, nil
}

func (s *Server) client() (*minio.Client, error) {
	return minio.New(s.Address, &minio.Options{
		Creds:  credentials.NewStaticV4(s.owner.access, s.owner.secret, ""),
		Region: s3.DefaultRegion,
	})
}
