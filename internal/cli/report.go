package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// hibernateLine says in one line how a hibernation went.
func hibernateLine(r *api.HibernateReport) string {
	line := fmt.Sprintf("%.0f ms, paused for %.0f ms (%s)", r.TotalMS, r.PauseMS, phases(r.Phases))
	if r.Trigger != "" && r.Trigger != "call" {
		line += ", by " + r.Trigger
	}
	return line
}

// resumeLine says in one line how a resume went.
func resumeLine(r *api.ResumeReport) string {
	by := ""
	if r.By != "" {
		by = ", for " + printable(r.By)
	}
	return fmt.Sprintf("%.0f ms, tier %s%s, %s read in %d faults (%s)", r.TotalMS, r.Tier, by, size(r.BytesRead), r.Faults, phases(r.Phases))
}

// usageLine says in one line what a sandbox has used.
func usageLine(u api.Usage) string {
	return fmt.Sprintf("awake %s, standby %s, CPU %s, %s stored", span(u.AwakeS), span(u.StandbyS), span(u.CPUS), size(u.StoredBytes))
}

// span prints seconds for people.
func span(s float64) string {
	unit := time.Second
	if s < 60 {
		unit = 100 * time.Millisecond
	}
	return time.Duration(s * float64(time.Second)).Round(unit).String()
}

// printWarnings says what a transition could not do.
func printWarnings(w io.Writer, warnings []string) {
	for _, text := range warnings {
		fmt.Fprintln(w, "hib: warning: "+printable(text))
	}
}
