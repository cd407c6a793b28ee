package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestPressureEnds: watching ends with its context, whatever the kernel offers.
func TestPressureEnds(t *testing.T) {
	p := newPressure(1 << 30)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.watch(ctx, func() {}) }()
	cancel()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestLowMemory: where there is no stall information, what is available tells.
func TestLowMemory(t *testing.T) {
	if isBelow(1) {
		t.Error("this host has no byte left")
	}
	if !(pressure{memory: 1 << 60}).isLow() {
		t.Error("this host has a tenth of an exabyte to spare")
	}
	if p := newPressure(1 << 62); p.trigger != nil {
		defer p.trigger.Close()
		if p.isLow() {
			t.Error("told twice")
		}
	}
}

func TestAvailableMemory(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want int64
		bad  bool
	}{
		"there":     {text: "MemTotal:       100 kB\nMemAvailable:   23 kB\n", want: 23 << 10},
		"not there": {text: "MemTotal:       100 kB\n", bad: true},
		"no number": {text: "MemAvailable:   much kB\n", bad: true},
		"empty":     {bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "meminfo")
			if err := os.WriteFile(path, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := availableMemory(path)
			if got != tt.want || (err != nil) != tt.bad {
				t.Errorf("got %d, %v", got, err)
			}
		})
	}
	if _, err := availableMemory(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a file that is not there was read")
	}
}
