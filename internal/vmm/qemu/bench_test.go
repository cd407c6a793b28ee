package qemu

import (
	"bytes"
	"testing"
)

// BenchmarkStart measures the start of a machine that waits for a state, until
// it takes orders.
func BenchmarkStart(b *testing.B) {
	s := setup(b, Config{}, 1)
	rig := s.NewRig(b)
	for b.Loop() {
		m, err := s.Driver.Start(b.Context(), rig.Spec)
		check(b, err)
		b.StopTimer()
		check(b, m.Close())
		b.StartTimer()
	}
}

// BenchmarkPark measures a pause, a state that is saved, and the run that follows.
func BenchmarkPark(b *testing.B) {
	s := setup(b, Config{}, 1)
	rig := s.NewRig(b)
	m := s.Boot(b, rig, "")
	rig.Console.Wait(s.Context(b), b, 2)
	var size int
	for b.Loop() {
		var state bytes.Buffer
		check(b, m.Pause(b.Context()))
		check(b, m.SaveState(b.Context(), &state))
		check(b, m.Run(b.Context()))
		size = state.Len()
	}
	b.ReportMetric(float64(size), "state-bytes")
}

// BenchmarkResume measures a resume from a state and plain memory file, step by step.
func BenchmarkResume(b *testing.B) {
	s := setup(b, Config{}, 1)
	img := s.BootSnapshot(b)
	var load, run, step, dirty float64
	for b.Loop() {
		b.StopTimer()
		rig := s.NewRig(b)
		m := s.Start(b, rig)
		rig.Fill(b, img)
		b.StartTimer()
		load += milliseconds(func() { check(b, m.LoadState(b.Context(), bytes.NewReader(img.State))) })
		run += milliseconds(func() { check(b, m.Run(b.Context())) })
		step += milliseconds(func() { rig.Console.Wait(s.Context(b), b, 1) })
		b.StopTimer()
		check(b, m.Pause(b.Context()))
		dirty += milliseconds(func() {
			_, err := m.DirtyPages(b.Context())
			check(b, err)
		})
		check(b, m.Close())
		b.StartTimer()
	}
	for name, total := range map[string]float64{"load": load, "run": run, "first-step": step, "dirty": dirty} {
		b.ReportMetric(total/float64(b.N), name+"-ms/op")
	}
}
