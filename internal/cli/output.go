package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"
)

// printJSON prints a value as the API would send it, indented.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.Out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table prints rows in columns; the first is the head.
func table(w io.Writer, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(tw, strings.TrimRight(strings.Join(r, "\t"), "\t"))
	}
	return tw.Flush()
}

// size prints bytes for people.
func size(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n), -1
	for f >= unit && i < 4 {
		f /= unit
		i++
	}
	return fmt.Sprintf("%.1f %ciB", f, "KMGTP"[i])
}

// sizePattern is a number and a unit, in capitals.
var sizePattern = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?)(?:([KMGT])I?)?B?$`)

// parseSize reads a number of bytes as people write it: 512M, 1.5GiB, 4096.
// The units are powers of 1024.
func parseSize(s string) (int64, error) {
	m := sizePattern.FindStringSubmatch(strings.ToUpper(s))
	if m == nil {
		return 0, fmt.Errorf("%q is no size: take a number and K, M, G or T", s)
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if m[2] != "" {
		n *= float64(int64(1) << (10 * (1 + strings.Index("KMGT", m[2]))))
	}
	if err != nil || n >= 1<<60 {
		return 0, fmt.Errorf("%q is too large a size", s)
	}
	return int64(n), nil
}

// age prints how long ago t was.
func age(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return brief(max(0, time.Since(t)))
}

// brief writes a length of time in its largest unit.
func brief(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// phases prints milliseconds by name, the longest first.
func phases(m map[string]float64) string {
	names := slices.SortedFunc(maps.Keys(m), func(a, b string) int {
		if m[a] != m[b] {
			return int(max(-1, min(1, m[b]-m[a])*1e9))
		}
		return strings.Compare(a, b)
	})
	parts := make([]string, len(names))
	for i, n := range names {
		parts[i] = fmt.Sprintf("%s %.1f", n, m[n])
	}
	return strings.Join(parts, ", ")
}

// pairs prints a map as K=V, sorted.
func pairs(m map[string]string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, k+"="+m[k])
	}
	return strings.Join(parts, " ")
}

// or returns s, or a dash for nothing.
func or(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// parsePairs reads K=V flags. With inherit a K alone takes the value of this
// process's environment.
func parsePairs(flag string, in []string, inherit bool) (map[string]string, error) {
	out := make(map[string]string, len(in))
	for _, s := range in {
		k, v, ok := strings.Cut(s, "=")
		if !ok && inherit {
			if v, ok = os.LookupEnv(k); !ok {
				continue
			}
		}
		if !ok || k == "" {
			return nil, usagef("--%s %q: it must be of the form K=V", flag, s)
		}
		out[k] = v
	}
	return out, nil
}

// terminal returns the descriptor of a stream if that is a terminal.
func terminal(stream any) (fd int, ok bool) {
	f, ok := stream.(*os.File)
	if !ok {
		return -1, false
	}
	fd = int(f.Fd())
	return fd, term.IsTerminal(fd)
}
