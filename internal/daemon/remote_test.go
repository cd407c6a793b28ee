package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob/s3"
)

func TestShimsGetCredentialsThatOnlyRead(t *testing.T) {
	full := s3.Config{Bucket: "b", AccessKey: "full", SecretKey: "full secret", SessionToken: "token"}
	for _, c := range []struct {
		key, secret string
		want        s3.Config
		fails       bool
	}{
		{want: full},
		{key: "read", secret: "read secret", want: s3.Config{Bucket: "b", AccessKey: "read", SecretKey: "read secret"}},
		{key: "read", fails: true},
		{secret: "read secret", fails: true},
	} {
		env := map[string]string{readKeyEnv: c.key, readSecretEnv: c.secret}
		got, err := readOnly(full, func(name string) string { return env[name] })
		if (err != nil) != c.fails || got != c.want {
			t.Errorf("with %v: %+v, %v", env, got, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret ") {
			t.Errorf("the error shows a secret: %v", err)
		}
	}
}

func TestTheNodeKeepsItsID(t *testing.T) {
	f := FoldersOf(t.TempDir())
	first, err := f.node()
	if err != nil || !nodeForm.MatchString(first) {
		t.Fatalf("node = %q, %v", first, err)
	}
	if again, err := f.node(); again != first || err != nil {
		t.Errorf("then it is %q, %v", again, err)
	}
	if other, err := FoldersOf(t.TempDir()).node(); other == first || err != nil {
		t.Errorf("another folder's is %q, %v", other, err)
	}
	if err := os.WriteFile(filepath.Join(f.Data, "node.id"), []byte("../x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if id, err := f.node(); err == nil {
		t.Errorf("a damaged one is taken: %q", id)
	}
}

func TestAStoreIsCheckedBeforeTheStart(t *testing.T) {
	for _, c := range []struct {
		store  string
		budget int64
		want   string // in the error; "": none
	}{
		{"", 0, ""},
		{"s3://bucket/prefix?endpoint=http://localhost:9", 1 << 30, ""},
		{"http://bucket", 0, "s3://"},
		{"", 1 << 30, "--store"},
		{"s3://bucket", -1, "budget"},
	} {
		err := Config{Data: "/x", Listen: "127.0.0.1:0", Store: c.store, LocalBudget: c.budget}.check()
		if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("store %q, budget %d: %v", c.store, c.budget, err)
		}
	}
}
