package api_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

func TestDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"never": 0, "0s": 0, "15s": 15 * time.Second, "10m": 10 * time.Minute, "1h30m": 90 * time.Minute,
		"30d": 720 * time.Hour, "1d12h": 36 * time.Hour, "1500ms": 1500 * time.Millisecond, "36500d": 36500 * 24 * time.Hour,
	} {
		got, err := api.ParseDuration(text)
		if err != nil || time.Duration(got) != want {
			t.Errorf("%q is %v (%v), want %v", text, time.Duration(got), err, want)
		}
		again, err := api.ParseDuration(got.String())
		if err != nil || again != got {
			t.Errorf("%q is written %q, which is read as %v (%v)", text, got, time.Duration(again), err)
		}
	}
	for _, text := range []string{"", "-1s", "15", "d", "1d-2h", "-3d", "36501d", "9999999h", "1.5d", "soon", "1h d", "2562047h"} {
		if got, err := api.ParseDuration(text); err == nil {
			t.Errorf("%q is taken as %v", text, got)
		}
	}
	for d, want := range map[time.Duration]string{time.Hour: "1h", 90 * time.Minute: "1h30m", 15 * time.Second: "15s", 25 * time.Hour: "1d1h", time.Minute + time.Second: "1m1s"} {
		if got := api.Duration(d).String(); got != want {
			t.Errorf("%v is written %q, want %q", d, got, want)
		}
	}
	var v struct{ D api.Duration }
	if err := json.Unmarshal([]byte(`{"D":"2d"}`), &v); err != nil || time.Duration(v.D) != 48*time.Hour {
		t.Errorf("%v, %v", v, err)
	}
}

func FuzzParseDuration(f *testing.F) {
	f.Add("1d2h3m4s")
	f.Add("never")
	f.Fuzz(func(t *testing.T, text string) {
		d, err := api.ParseDuration(text)
		if err != nil {
			return
		}
		if again, err := api.ParseDuration(d.String()); err != nil || again != d || d < 0 {
			t.Fatalf("%q is %v, written %q, read as %v (%v)", text, time.Duration(d), d, time.Duration(again), err)
		}
	})
}
