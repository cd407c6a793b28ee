package api

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Duration is a length of time in text: "15s", "10m", "1h30m", "30d". Zero is
// "never": what it would bring does not happen.
type Duration time.Duration

// Never is the text of the zero Duration.
const Never = "never"

// maxDuration bounds what a policy may wait for: 100 years.
const maxDuration = 100 * 365 * 24 * time.Hour

// ParseDuration reads a Duration. Days may stand alone or before the rest
// ("30d", "1d12h"). A negative one is an error, and so is one of more than 100 years.
func ParseDuration(text string) (Duration, error) {
	if text == Never {
		return 0, nil
	}
	rest, days := text, time.Duration(0)
	if digits, tail, ok := strings.Cut(text, "d"); ok {
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil {
			return 0, badDuration(text)
		}
		rest, days = tail, time.Duration(n)*24*time.Hour
	}
	var d time.Duration
	if rest != "" {
		var err error
		if d, err = time.ParseDuration(rest); err != nil {
			return 0, badDuration(text)
		}
	}
	if text == "" || d < 0 || d+days > maxDuration || d > maxDuration {
		return 0, badDuration(text)
	}
	return Duration(d + days), nil
}

func badDuration(text string) error {
	if len(text) > 40 {
		text = text[:40] + "…"
	}
	return fmt.Errorf("%q is no duration: write for instance 15s, 10m, 1h30m, 30d or never", text)
}

// String returns the duration as ParseDuration reads it.
func (d Duration) String() string {
	if d == 0 {
		return Never
	}
	var b strings.Builder
	rest := time.Duration(d)
	if days := rest / (24 * time.Hour); days > 0 {
		fmt.Fprintf(&b, "%dd", days)
		rest -= days * 24 * time.Hour
	}
	if rest > 0 {
		s := rest.String()
		if strings.HasSuffix(s, "m0s") {
			s = strings.TrimSuffix(s, "0s")
		}
		if strings.HasSuffix(s, "h0m") {
			s = strings.TrimSuffix(s, "0m")
		}
		b.WriteString(s)
	}
	return b.String()
}

// MarshalText returns String.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText is ParseDuration.
func (d *Duration) UnmarshalText(text []byte) (err error) {
	*d, err = ParseDuration(string(text))
	return err
}
