package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

type updateOptions struct {
	labels, unlabel []string
	policy          policyFlags
}

func newUpdateCommand(a *app) *cobra.Command {
	var o updateOptions
	cmd := &cobra.Command{
		Use:   "update [flags] ID",
		Short: "Change the policy of a sandbox",
		Long: `Change what a sandbox does by itself, who may reach it and what it may reach.
What no flag names stays as it is. The sandbox is not woken, and one that runs
obeys at once.`,
		Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runUpdate(cmd.Context(), a, args[0], o) },
	}
	f := cmd.Flags()
	f.StringArrayVar(&o.labels, "label", nil, "set a label, `K=V`")
	f.StringArrayVar(&o.unlabel, "unlabel", nil, "remove the label `K`")
	o.policy.register(cmd)
	return cmd
}

func runUpdate(ctx context.Context, a *app, id string, o updateOptions) error {
	labels, err := parsePairs("label", o.labels, false)
	if err != nil {
		return err
	}
	req := api.UpdateRequest{Labels: map[string]*string{}}
	for k, v := range labels {
		req.Labels[k] = &v
	}
	for _, k := range o.unlabel {
		req.Labels[k] = nil
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	var egress api.Egress
	if o.policy.changesEgress() {
		sb, err := c.Get(ctx, id)
		if err != nil {
			return err
		}
		egress = sb.Policy.Egress
	}
	if req.Policy, err = o.policy.patch(egress); err != nil {
		return err
	}
	if req.Policy == nil && len(req.Labels) == 0 {
		return usagef("nothing to change: give at least one flag")
	}
	sb, err := c.Update(ctx, id, req)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(sb)
	}
	fmt.Fprintln(a.Out, sb.ID)
	return nil
}
