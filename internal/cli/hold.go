package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

type holdOptions struct {
	id, duration, reason string
	release              bool
}

func newHoldCommand(a *app) *cobra.Command {
	var o holdOptions
	cmd := &cobra.Command{
		Use:   "hold [flags] ID [DURATION]",
		Short: "Keep a sandbox from hibernating by itself for a while",
		Long: `Keep a sandbox from hibernating by itself for DURATION (30m, 12h, up to 30d), also
when the daemon restarts meanwhile. A second hold takes the place of the first.
It does not wake the sandbox, and hib hibernate goes ahead regardless.`,
		Example: `  hib hold ID 30m --reason "a demo"
  hib hold ID --release`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.release && len(args) == 1, !o.release && len(args) == 2:
				return nil
			case o.release && len(args) == 2:
				return usagef("--release takes no duration")
			}
			return usagef("usage: %s", cmd.UseLine())
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.id = args[0]
			if !o.release {
				o.duration = args[1]
			}
			return runHold(cmd.Context(), a, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.reason, "reason", "", "what for, as hib inspect shows it")
	f.BoolVar(&o.release, "release", false, "end the hold")
	return cmd
}

func runHold(ctx context.Context, a *app, o holdOptions) error {
	var d api.Duration
	if !o.release {
		var err error
		if d, err = api.ParseDuration(o.duration); err != nil || d == 0 {
			return usagef("%q is no length of time for a hold: write for instance 30m", o.duration)
		}
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	var sb api.Sandbox
	if o.release {
		sb, err = c.ReleaseHold(ctx, o.id)
	} else {
		sb, err = c.Hold(ctx, o.id, api.HoldRequest{For: d, Reason: o.reason})
	}
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(sb)
	}
	fmt.Fprintln(a.Out, sb.ID)
	return nil
}

// leaseLine says in one line what a lease is.
func leaseLine(l api.Lease) string {
	line := fmt.Sprintf("%s, since %s", l.Kind, age(l.Since))
	if l.Until != nil {
		line += ", for another " + until(*l.Until)
	}
	if l.Owner != "" {
		line += ": " + printable(l.Owner)
	}
	return line
}

// activityLine says in one line how busy a sandbox is.
func activityLine(x *api.Activity) string {
	line := fmt.Sprintf("quiet for %s, %d connections open, %d replies awaited",
		time.Duration(x.IdleMS*float64(time.Millisecond)).Round(100*time.Millisecond), x.Open, x.Awaiting)
	if x.AgentError != "" {
		line += "; " + printable(x.AgentError)
	}
	return line
}
