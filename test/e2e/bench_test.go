package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/bench"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestBench measures a real daemon for a moment, and then a sandbox of the
// user's, which stays as it was.
func TestBench(t *testing.T) {
	d := hibtest.Start(t)
	dir := t.TempDir()
	result, plot := filepath.Join(dir, "result.json"), filepath.Join(dir, "plot.svg")
	tables := d.Hib("bench", "--quick", "-n", "1", "--scenario", "states", "--workload", "python50", "--memory", "512",
		"--cache", "awake,warm", "--json="+result, "--svg", plot)
	for _, want := range []string{"Accelerator: ", "python50", "BAR"} {
		if !strings.Contains(tables, want) {
			t.Errorf("the tables lack %q:\n%s", want, tables)
		}
	}
	var res bench.Result
	b, err := os.ReadFile(result)
	if err == nil {
		err = json.Unmarshal(b, &res)
	}
	if err != nil {
		t.Fatal(err)
	}
	answered := map[string]bool{}
	for _, r := range res.Rows {
		if r.SuccessRate != 1 || r.P50 <= 0 || r.Max < r.P50 || r.Accel != res.Meta.Accel {
			t.Errorf("%+v", r)
		}
		if r.Metric == bench.MetricFirst {
			answered[r.Peer+" "+strings.TrimSuffix(r.Cache, "_nopool")] = true
		}
	}
	for _, want := range []string{"hib awake", "hib warm", "qemu_migrate warm"} {
		if !answered[want] {
			t.Errorf("no row tells of %s: %+v\nnotes: %q", want, res.Rows, res.Notes)
		}
	}
	if svg, err := os.ReadFile(plot); err != nil || !strings.HasSuffix(string(svg), "</svg>\n") {
		t.Errorf("the plot is no picture: %v", err)
	}
	if left := d.List(); len(left) != 0 {
		t.Errorf("sandboxes are left: %+v", left)
	}

	id := d.Create("--memory", "512")
	d.StartServer(id, 1, 8000)
	d.Hib("hibernate", id)
	var own bench.Result
	d.JSON(&own, "bench", "--sandbox", id, "--get", "8000/sum", "-n", "1", "--cache", "awake,warm")
	if len(own.Rows) == 0 || own.Rows[0].Workload != "own" {
		t.Errorf("%+v", own)
	}
	if sb := d.Inspect(id); sb.State != "standby" {
		t.Errorf("the sandbox was in standby and is %s", sb.State)
	}
}
