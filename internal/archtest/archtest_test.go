package archtest

import (
	"encoding/json"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

func TestImportsFollowTheTable(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range packages(t) {
		name := strings.TrimPrefix(p.ImportPath, Module+"/")
		if len(p.GoFiles) == 0 {
			continue // tests only
		}
		seen[name] = true
		allowed, listed := Allowed[name]
		if !listed {
			t.Errorf("package %s is not in the table", name)
			continue
		}
		for _, imp := range p.Imports {
			dep, own := strings.CutPrefix(imp, Module+"/")
			if own && !slices.Contains(allowed, dep) {
				t.Errorf("%s imports %s, which the table does not allow", name, dep)
			}
		}
	}
	for name := range Allowed {
		if !seen[name] {
			t.Errorf("the table lists %s, which does not exist", name)
		}
	}
}

// TestTheGuestStaysSmall keeps the host's libraries out of the agent, whose
// every page is memory of every sandbox.
func TestTheGuestStaysSmall(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", Module+"/cmd/hib-guest").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, forbidden := range []string{"gvisor.dev/", "github.com/hanwen/go-fuse", "go.etcd.io/bbolt", "github.com/spf13/cobra"} {
		if strings.Contains(string(out), forbidden) {
			t.Errorf("the agent links %s", forbidden)
		}
	}
}

type goPackage struct {
	ImportPath string
	GoFiles    []string
	Imports    []string
}

func packages(t *testing.T) []goPackage {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,GoFiles,Imports", Module+"/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []goPackage
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		if err := dec.Decode(&p); err == io.EOF {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}
