package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestWithoutUsableQEMU: a QEMU that is missing or too old is told by doctor
// and by serve, with what to install.
func TestWithoutUsableQEMU(t *testing.T) {
	hib := filepath.Join(os.Getenv("HIB_TEST_BIN"), "hib")
	for _, tt := range []struct{ name, script, says string }{
		{"missing", "", "qemu-system-x86"},
		{"too old", "#!/bin/sh\necho 'QEMU emulator version 5.2.0'\n", "too old"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := t.TempDir() // all that is found by name
			if tt.script != "" {
				if err := os.WriteFile(filepath.Join(path, "qemu-system-x86_64"), []byte(tt.script), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			data, err := os.MkdirTemp("", "hibtest")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(data)
			for _, args := range [][]string{{"doctor", "--data", data}, {"serve", "--data", data, "--listen", "127.0.0.1:0"}} {
				cmd := exec.Command(hib, args...)
				cmd.Env = []string{"PATH=" + path, "HOME=/root"}
				out, err := cmd.CombinedOutput()
				if err == nil {
					t.Errorf("hib %s succeeded: %s", args[0], out)
				}
				if !strings.Contains(string(out), "apt-get install") || !strings.Contains(string(out), "qemu-system-x86") || !strings.Contains(string(out), tt.says) {
					t.Errorf("hib %s does not say what to install:\n%s", args[0], out)
				}
			}
		})
	}
}
