package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newLsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the sandboxes",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return runLs(cmd.Context(), a) },
	}
}

// next says what will happen to a sandbox by itself, and when.
func next(s api.Sandbox) string {
	var parts []string
	switch {
	case s.State == api.StateRunning && len(s.Leases) > 0:
		parts = append(parts, "runs on: "+held(s.Leases))
	case s.State == api.StateRunning && s.Policy.IdleTimeout > 0:
		parts = append(parts, "hibernate when idle for "+s.Policy.IdleTimeout.String())
	}
	switch {
	case s.Next == nil:
	case s.Next.Action == api.ActionNotify:
		parts = append(parts, fmt.Sprintf("notify of %s in %s", s.Next.Limit, until(s.Next.At)))
	default:
		parts = append(parts, fmt.Sprintf("%s in %s", s.Next.Action, until(s.Next.At)))
	}
	switch {
	case len(parts) > 0:
		return strings.Join(parts, ", ")
	case s.State == api.StateRunning:
		return "runs on"
	case s.State == api.StateStandby, s.State == api.StateFailed:
		return "kept"
	}
	return "-"
}

// held says for how long leases keep a sandbox awake, as far as that is known.
func held(leases []api.Lease) string {
	last := leases[0]
	for _, l := range leases {
		if l.Until == nil {
			return l.Kind
		}
		if l.Until.After(*last.Until) {
			last = l
		}
	}
	return last.Kind + " for " + until(*last.Until)
}

// until says how long it is to an instant, to the nearest unit: what was set
// to 30 days a moment ago is 30 days away.
func until(at time.Time) string {
	d := time.Until(at)
	switch {
	case d < time.Second:
		return "no time"
	case d < time.Minute:
		d = d.Round(time.Second)
	case d < time.Hour:
		d = d.Round(time.Minute)
	case d < 48*time.Hour:
		d = d.Round(time.Hour)
	default:
		d = d.Round(24 * time.Hour)
	}
	return brief(d)
}

func runLs(ctx context.Context, a *app) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.List(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(all)
	}
	failed := slices.ContainsFunc(all, func(s api.Sandbox) bool { return s.Reason != "" })
	head := []string{"ID", "NAME", "STATE", "TEMPLATE", "MEM", "AGE", "NEXT"}
	if failed {
		head = append(head, "REASON")
	}
	rows := [][]string{head}
	for _, s := range all {
		row := []string{s.ID, or(s.Name), string(s.State), s.Template, strconv.Itoa(s.MemoryMiB) + " MiB", age(s.CreatedAt), next(s)}
		if failed {
			row = append(row, printable(s.Reason))
		}
		rows = append(rows, row)
	}
	return table(a.Out, rows)
}
