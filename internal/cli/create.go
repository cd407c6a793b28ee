package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

type createOptions struct {
	req         api.CreateRequest
	env, labels []string
	policy      policyFlags
}

func newCreateCommand(a *app) *cobra.Command {
	var o createOptions
	cmd := &cobra.Command{
		Use:   "create [flags] [TEMPLATE]",
		Short: "Make a sandbox and print its ID",
		Long: `Make a sandbox of a template (default: base) and print its ID. It is resumed
from the template's base snapshot, so it runs at once.

It hibernates after 15 seconds without traffic and wakes on the next request.
Without --allow and --deny it may reach public addresses, and neither the host
nor private ranges nor other sandboxes. hib update changes any of this later.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("usage: %s", cmd.UseLine())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				o.req.Template = args[0]
			}
			return runCreate(cmd.Context(), a, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.req.Name, "name", "", "unique name that may stand for the ID")
	f.IntVar(&o.req.MemoryMiB, "memory", 0, "memory in `MiB` (default: the template's)")
	f.IntVar(&o.req.CPUs, "cpus", 0, "number of CPUs (default: the template's)")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment of every process, `K=V`; K alone takes the value here")
	f.StringArrayVar(&o.labels, "label", nil, "label, `K=V`")
	f.BoolVar(&o.req.ColdBoot, "cold-boot", false, "boot instead of resuming the base snapshot")
	o.policy.register(cmd)
	return cmd
}

func runCreate(ctx context.Context, a *app, o createOptions) error {
	var err error
	if o.req.Env, err = parsePairs("env", o.env, true); err != nil {
		return err
	}
	if o.req.Labels, err = parsePairs("label", o.labels, false); err != nil {
		return err
	}
	if o.req.Policy, err = o.policy.patch(api.Egress{}); err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	sb, err := c.Create(ctx, o.req)
	if err != nil {
		return err
	}
	if sb.LastResume != nil {
		printWarnings(a.Err, sb.LastResume.Warnings)
	}
	if a.json {
		return a.printJSON(sb)
	}
	fmt.Fprintln(a.Out, sb.ID)
	return nil
}
