package template

import (
	"errors"
	"os"
	"testing"
)

func TestCheckerReadsAgainWhatWasTouched(t *testing.T) {
	art, err := newBench(t, "").build(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var c Checker
	if err := c.Check(art); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(art.BaseImage)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(art.BaseImage, b, 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.Check(art); !errors.Is(err, ErrCorrupt) {
			t.Errorf("a flipped bit in the base image: %v, want ErrCorrupt", err)
		}
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(art.BaseImage, b, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := c.Check(art); err != nil {
		t.Errorf("after the repair: %v", err)
	}
	if err := os.Remove(art.Kernel); err != nil {
		t.Fatal(err)
	}
	if err := c.Check(art); !errors.Is(err, ErrCorrupt) {
		t.Errorf("without the kernel: %v, want ErrCorrupt", err)
	}
}
