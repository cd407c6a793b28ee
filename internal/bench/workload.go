package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/hibernacle/hibernacle/api"
)

// The workloads.
const (
	workloadShell     = "shell"     // a small command
	workloadPython50  = "python50"  // a Python HTTP server with 50 MB of state
	workloadPython300 = "python300" // the same with 300 MB
	workloadBigHeap   = "bigheap"   // the same with 2 GiB, whose answer touches pages all over it
	workloadGit       = "git"       // clone of a repository, and its tests
	workloadNode      = "node"      // a Node.js HTTP server, where the template has Node.js
	workloadOwn       = "own"       // the user's own sandbox
)

// Workloads are the names of all workloads.
var Workloads = []string{workloadShell, workloadPython50, workloadPython300, workloadBigHeap, workloadGit, workloadNode}

// errAbsent says that the template lacks what a workload needs.
var errAbsent = errors.New("the template does not have it")

// workload is what runs in a sandbox. prepare starts it, ask makes its first
// useful request, differently for each seed where that matters.
type workload struct {
	name    string
	prepare func(ctx context.Context, target Target, id string) error
	ask     func(ctx context.Context, target Target, id string, seed int) error
	share   int // of the samples: one in so many
}

// bigTouches is how many places of its state bigheap's answer reads.
const bigTouches = 256

// workloadOf returns a workload by its name.
func workloadOf(name string) workload {
	switch name {
	case workloadPython50:
		return python(name, 50, "/", 1)
	case workloadPython300:
		return python(name, 300, "/", 1)
	case workloadBigHeap:
		return python(name, 2048, "/touch/%d/"+fmt.Sprint(bigTouches), 1)
	case workloadGit:
		return git()
	case workloadNode:
		return node()
	}
	return workload{name: workloadShell, share: 1,
		prepare: func(context.Context, Target, string) error { return nil },
		ask: func(ctx context.Context, target Target, id string, _ int) error {
			_, err := run(ctx, target, id, "echo $((6 * 7)) > /tmp/answer && cat /tmp/answer", "")
			return err
		},
	}
}

// python is the Python server with records as state. path may hold a %d for
// the seed.
func python(name string, mib int, path string, share int) workload {
	return workload{name: name, share: share,
		prepare: func(ctx context.Context, target Target, id string) error {
			return startServer(ctx, target, id, ServerScript, serverCommand("/tmp/server", mib, serverPort, "records"), serverPort)
		},
		ask: askPath(path),
	}
}

// askPath asks the server of a workload.
func askPath(path string) func(context.Context, Target, string, int) error {
	return func(ctx context.Context, target Target, id string, seed int) error {
		p := path
		if p != "/" {
			p = fmt.Sprintf(path, seed)
		}
		_, err := Ask(ctx, target, id, serverPort, p)
		return err
	}
}

// gitOrigin makes a repository with modules and tests.
const gitOrigin = `set -e
command -v git >/dev/null && command -v python3 >/dev/null || exit 42
rm -rf ~/origin && mkdir ~/origin && cd ~/origin
git init -q . && git config user.email bench@example.org && git config user.name bench
python3 - <<'PROGRAM'
import os
for folder in "lib", "tests":
    os.mkdir(folder)
    open(folder + "/__init__.py", "w").close()
for i in range(60):
    with open(f"lib/m{i}.py", "w") as f:
        f.write(f"def double(n):\n    return 2 * n  # of module {i}\n\n\nTABLE = {{\n")
        f.writelines(f"    {k}: 'entry {k * i}',\n" for k in range(200))
        f.write("}\n")
for i in range(3):
    with open(f"tests/test_{i}.py", "w") as f:
        f.write(f"import unittest\nfrom lib import m{i}\n\n\nclass Test(unittest.TestCase):\n"
                f"    def test(self):\n        self.assertEqual(m{i}.double(21), 42)\n")
PROGRAM
git add -A && git commit -qm 'first' && echo '# more' >> lib/m1.py && git commit -qam 'second'`

// gitWork clones it and runs its tests.
const gitWork = `set -e
rm -rf ~/work && git clone -q ~/origin ~/work && cd ~/work && python3 -m unittest discover -q -s tests -t . 2>&1`

func git() workload {
	return workload{name: workloadGit, share: 2,
		prepare: func(ctx context.Context, target Target, id string) error {
			return runOrAbsent(ctx, target, id, gitOrigin)
		},
		ask: func(ctx context.Context, target Target, id string, _ int) error {
			_, err := run(ctx, target, id, gitWork, "")
			return err
		},
	}
}

const nodeServer = `const rows = Array.from({length: 200000}, (_, i) => ({id: i, name: "user " + i, score: i * 0.37}));
require("http").createServer((q, a) => a.end(JSON.stringify({pid: process.pid, rows: rows.length}))).listen(8000, "0.0.0.0");
`

func node() workload {
	return workload{name: workloadNode, share: 1,
		prepare: func(ctx context.Context, target Target, id string) error {
			if err := runOrAbsent(ctx, target, id, "command -v node >/dev/null || exit 42"); err != nil {
				return err
			}
			return startServer(ctx, target, id, nodeServer, "node /tmp/server", serverPort)
		},
		ask: askPath("/"),
	}
}

// absentCode is what a script ends with where something that it needs is missing.
const absentCode = 42

// runOrAbsent is run for a script that may end with absentCode: errAbsent.
func runOrAbsent(ctx context.Context, target Target, id, script string) error {
	resp, err := target.Exec(ctx, id, api.ExecRequest{Cmd: []string{"bash", "-c", script}})
	switch {
	case err != nil:
		return err
	case resp.ExitCode == absentCode:
		return errAbsent
	case resp.ExitCode != 0:
		return fmt.Errorf("exit %d: %s", resp.ExitCode, resp.Stderr)
	}
	return nil
}
