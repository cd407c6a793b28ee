package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newInspectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect ID",
		Short: "Show everything about a sandbox",
		Args:  exactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return runInspect(cmd.Context(), a, args[0]) },
	}
}

func runInspect(ctx context.Context, a *app, id string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	sb, err := c.Get(ctx, id)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(sb)
	}
	rows := [][]string{
		{"ID", sb.ID}, {"Name", or(sb.Name)}, {"Template", sb.Template}, {"State", string(sb.State)},
	}
	if sb.Reason != "" {
		rows = append(rows, []string{"Reason", printable(sb.Reason)})
	}
	rows = append(rows,
		[]string{"Created", sb.CreatedAt.Local().Format("2006-01-02 15:04:05") + " (" + age(sb.CreatedAt) + " ago)"},
		[]string{"Memory", strconv.Itoa(sb.MemoryMiB) + " MiB"},
		[]string{"CPUs", strconv.Itoa(sb.CPUs)},
		[]string{"Labels", or(pairs(sb.Labels))})
	if sb.ForkedFrom != "" {
		rows = append(rows, []string{"Forked from", sb.ForkedFrom})
	}
	if sb.Checkpoints > 0 {
		rows = append(rows, []string{"Checkpoints", strconv.Itoa(sb.Checkpoints)})
	}
	if sb.PortURL != "" {
		rows = append(rows, []string{"Ports", sb.PortURL})
	}
	if x := sb.Activity; x != nil {
		rows = append(rows, []string{"Activity", activityLine(x)})
		for _, p := range x.KeepAwake {
			rows = append(rows, []string{"Kept awake by", fmt.Sprintf("process %d: %s", p.PID, printable(p.Command))})
		}
	}
	for _, l := range sb.Leases {
		rows = append(rows, []string{"Lease", leaseLine(l)})
	}
	rows = append(rows, []string{"Next", next(sb)})
	rows = append(rows, policyRows(sb.Policy)...)
	if s := sb.Snapshot; s != nil {
		rows = append(rows, []string{"Snapshot", fmt.Sprintf("%s, %s ago, %s stored of %s changed", s.ID, age(s.CreatedAt), size(s.StoredBytes), size(s.DirtyBytes))})
	}
	if r := sb.Replication; r != nil {
		line := r.State
		if r.Error != "" {
			line += ": " + printable(r.Error)
		}
		rows = append(rows, []string{"Replication", line})
	}
	rows = append(rows, []string{"Usage", usageLine(sb.Usage)})
	if r := sb.LastHibernate; r != nil {
		rows = append(rows, []string{"Last hibernate", hibernateLine(r)})
	}
	if r := sb.LastResume; r != nil {
		rows = append(rows, []string{"Last resume", resumeLine(r)})
	}
	return table(a.Out, rows)
}

// policyRows tells a policy, without what is as it is unless somebody says
// otherwise.
func policyRows(p api.Policy) [][]string {
	var idle []string
	if p.IdleTimeout > 0 {
		after := "hibernates after " + p.IdleTimeout.String() + " without traffic"
		if p.Idle == api.IdleCPU {
			after += " and processor time"
		}
		idle = append(idle, after)
	}
	if p.OnSessionClose == api.SessionHibernate {
		idle = append(idle, "hibernates at the end of the last session")
	}
	if len(idle) == 0 {
		idle = append(idle, "does not hibernate when idle")
	}
	rows := [][]string{{"Idle", strings.Join(idle, ", ")}}
	var limits []string
	for _, l := range []struct {
		name  string
		limit *api.Limit
	}{{"ttl", p.TTL}, {"ttl-idle", p.TTLIdle}, {"timeout", p.Timeout}} {
		if l.limit != nil {
			limits = append(limits, fmt.Sprintf("%s %s (%s)", l.name, l.limit.After, l.limit.Action))
		}
	}
	if x := p.Expires; x != nil {
		limits = append(limits, fmt.Sprintf("expires %s (%s)", x.At.Local().Format("2006-01-02 15:04:05"), x.Action))
	}
	if len(limits) > 0 {
		rows = append(rows, []string{"Limits", strings.Join(limits, ", ")})
	}
	if len(p.Ports) > 0 {
		rows = append(rows, []string{"Port access", pairs(p.Ports)})
	}
	egress := p.Egress.Profile
	if len(p.Egress.Allow) > 0 {
		egress += ", allow " + strings.Join(p.Egress.Allow, " ")
	}
	if len(p.Egress.Deny) > 0 {
		egress += ", deny " + strings.Join(p.Egress.Deny, " ")
	}
	rows = append(rows, []string{"Egress", egress})
	for _, h := range p.Hooks {
		rows = append(rows, []string{"Hook", fmt.Sprintf("%s %s: %s", h.Event, h.Name, printable(strings.Join(h.Command, " ")))})
	}
	if s := p.Checkpoints; s != nil {
		rows = append(rows, []string{"Schedule", fmt.Sprintf("a checkpoint every %s, the last %d are kept", s.Every, s.Keep)})
	}
	return rows
}
