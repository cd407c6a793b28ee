package template

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"
)

func TestInitramfs(t *testing.T) {
	var b bytes.Buffer
	modules := []module{{"second-alphabetically.ko", []byte("b")}, {"first.ko", []byte("abc")}}
	if err := writeInitramfs(&b, []byte("agent"), modules); err != nil {
		t.Fatal(err)
	}
	// The reader knows no device numbers: fields 10 and 11 of the header.
	at := bytes.Index(b.Bytes(), []byte("dev/console\x00"))
	if at < 110 || string(b.Bytes()[at-110+6+9*8:at-110+6+11*8]) != "0000000500000001" {
		t.Error("dev/console is not the device 5:1")
	}
	files, inodes := map[string]string{}, map[int64]string{}
	r := cpio.NewReader(&b)
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := inodes[h.Inode]; ok {
			t.Errorf("%s and %s have one inode number", other, h.Name)
		}
		inodes[h.Inode] = h.Name
		files[h.Name] = h.Mode.String() + " " + string(content)
	}
	for name, want := range map[string]string{
		"init":                                 "0100755 agent",
		"hib/modules.list":                     "0100644 second-alphabetically.ko\nfirst.ko\n",
		"hib/modules/first.ko":                 "0100644 abc",
		"hib/modules/second-alphabetically.ko": "0100644 b",
		"proc":                                 "040755 ",
		"sys":                                  "040755 ",
		"dev":                                  "040755 ",
	} {
		if files[name] != want {
			t.Errorf("%s: %q, want %q", name, files[name], want)
		}
	}
}

// buildInit builds the stand-in for the guest agent.
func buildInit(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "init")
	cmd := exec.Command("go", "build", "-o", path, "./testdata/init")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build testdata/init: %v\n%s", err, out)
	}
	return path
}

func TestAgentMustBeStatic(t *testing.T) {
	if b, err := readAgent(buildInit(t)); err != nil || len(b) == 0 {
		t.Errorf("a static executable was refused: %v", err)
	}
	script := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cases := map[string]string{script: "no ELF", t.TempDir(): "regular file"}
	if runtime.GOARCH == "amd64" {
		cases["/bin/sh"] = "CGO_ENABLED=0"
	}
	for path, want := range cases {
		if _, err := readAgent(path); !errors.Is(err, errAgent) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one about %s", path, err, want)
		}
	}
	if _, err := readAgent("/nonexistent/agent"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing agent: error %v", err)
	}
}
