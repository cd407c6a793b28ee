package cli

import (
	"fmt"
	"io"

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

// printWarnings says what a transition could not do.
func printWarnings(w io.Writer, warnings []string) {
	for _, text := range warnings {
		fmt.Fprintln(w, "hib: warning: "+printable(text))
	}
}
