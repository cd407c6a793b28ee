package hibtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob/s3"
	"github.com/hibernacle/hibernacle/internal/blob/s3/faultproxy"
	"github.com/hibernacle/hibernacle/internal/blob/s3/s3test"
)

// Remote is a real S3 server behind a proxy that can break what daemons ask of it.
type Remote struct {
	Proxy *faultproxy.Proxy

	cfg s3.Config
	dir string // of the server
}

// StartRemote starts a server. Daemons that are started afterwards, until the
// end of the test, have its credentials.
func StartRemote(t testing.TB) *Remote {
	t.Helper()
	dir := t.TempDir()
	server, err := s3test.Serve(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	cfg, err := server.Config(t.Context(), "hibtest", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", cfg.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", cfg.SecretKey)
	return &Remote{faultproxy.Start(t, server.Address), cfg, dir}
}

// Flags are the flags of a daemon without caches whose remote store is that
// prefix. Requests are given up early.
func (r *Remote) Flags(prefix string) []string {
	url := "s3://" + r.cfg.Bucket + "/" + prefix + "?endpoint=http://" + r.Proxy.Address + "&region=" + r.cfg.Region + "&timeout=2s"
	return append([]string{"--store", url}, Bare...)
}

// Objects returns the paths of the files that hold the objects under a prefix
// and a kind of object, such as "packs".
func (r *Remote) Objects(t testing.TB, prefix, kind string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(r.dir, "objects", r.cfg.Bucket, prefix, kind, "*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no object %s/%s/* in the bucket (%v)", prefix, kind, err)
	}
	return files
}

// Damage does something to each of the files, and returns what puts them back.
func Damage(t testing.TB, files []string, how func(path string) error) (repair func()) {
	t.Helper()
	content := map[string][]byte{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		content[f] = b
		if err := how(f); err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		t.Helper()
		for f, b := range content {
			if err := os.WriteFile(f, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}
