package cli

import "testing"

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "4096": 4096, "10B": 10, "1k": 1 << 10, "512M": 512 << 20, "12GiB": 12 << 30, "1.5g": 3 << 29, "2TB": 2 << 40,
		"": -1, "G": -1, "-1G": -1, "1X": -1, "1 G": -1, "1e9": -1, "9999999T": -1, "12iB": -1, "1.G": -1,
	} {
		got, err := parseSize(in)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("%q: %d, %v; want %d", in, got, err, want)
		}
	}
}

func TestGuestMemoryFlag(t *testing.T) {
	for in, want := range map[string]int64{"": 0, "none": -1, "3G": 3 << 30} {
		if got, err := guestMemory(in); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"0", "all", "-1"} {
		if _, err := guestMemory(in); err == nil {
			t.Errorf("%q was taken", in)
		}
	}
}
