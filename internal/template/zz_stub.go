// Package template stands in for the real one.
package template

import (
	"context"
	"time"
)

type Artifacts struct {
	Dir, BaseImage, Kernel, Initrd string
	BaseDigest, KernelDigest       string
	BaseBytes                      int64
	KernelRelease, Cmdline         string
	BuiltAt                        time.Time
}
type Options struct{ Name, Out, CacheDir, GuestBinary string }
type Progress struct {
	Phase, Message string
	Done, Total    int64
}

func Build(ctx context.Context, o Options, progress func(Progress)) (Artifacts, error) {
	return Artifacts{}, nil
}
func Load(dir string) (Artifacts, error) { return Artifacts{}, nil }
func (a Artifacts) Verify() error        { return nil }
