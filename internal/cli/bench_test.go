package cli

import (
	"slices"
	"testing"

	"github.com/hibernacle/hibernacle/internal/bench"
)

func TestBenchChoices(t *testing.T) {
	quick, full := bench.Quick(), bench.Full()
	if got := (benchOptions{}).choose(); got.N != quick.N || !slices.Equal(got.Scenarios, quick.Scenarios) {
		t.Errorf("without flags: %+v", got)
	}
	if got := (benchOptions{full: true, samples: 3, scale: 7}).choose(); got.N != 3 || got.Scale != 7 || got.Cycles != full.Cycles {
		t.Errorf("full, 3 samples, 7 sandboxes: %+v", got)
	}
	// A workload that quick leaves out has a size that quick leaves out.
	if got := (benchOptions{workloads: []string{"bigheap"}}).choose(); !slices.Equal(got.MemoryMiB, full.MemoryMiB) || !slices.Equal(got.Caches, full.Caches) {
		t.Errorf("bigheap: %+v", got)
	}
	if got := (benchOptions{workloads: []string{"shell"}, memory: []int{512}, caches: []string{"warm"}}).choose(); !slices.Equal(got.MemoryMiB, []int{512}) ||
		!slices.Equal(got.Caches, []string{"warm"}) {
		t.Errorf("shell, warm, 512: %+v", got)
	}
}

func TestBenchRequest(t *testing.T) {
	for get, want := range map[string]bench.Own{
		"8000/":            {ID: "x", Port: 8000, Path: "/"},
		"8000":             {ID: "x", Port: 8000, Path: "/"},
		"80/a/b?c=d%20e/f": {ID: "x", Port: 80, Path: "/a/b?c=d%20e/f"},
	} {
		if got, err := (benchOptions{sandbox: "x", get: get}).own(); err != nil || got != want {
			t.Errorf("%s: %+v %v", get, got, err)
		}
	}
	for _, bad := range []string{"", "/", "x/", "0/", "65536/", "-1/", "80/a b", "80/\r\nX: y"} {
		if got, err := (benchOptions{sandbox: "x", get: bad}).own(); err == nil {
			t.Errorf("%q is taken: %+v", bad, got)
		}
	}
}
