package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newCheckpointCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "checkpoint",
		Short: "Keep what a sandbox is under a name, to go back to it or to copy it",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCheckpointCreateCommand(a), newCheckpointLsCommand(a), newCheckpointRmCommand(a))
	return cmd
}

type checkpointOptions struct {
	every string
	keep  int
}

func newCheckpointCreateCommand(a *app) *cobra.Command {
	var o checkpointOptions
	cmd := &cobra.Command{
		Use:   "create [flags] ID [NAME]",
		Short: "Keep what a sandbox is now, or do so again and again",
		Long: `Keep what a sandbox is now and print the name of the checkpoint, which is one
that says when if none is given. A sandbox that runs stands still for a moment
and goes on with its connections. One that sleeps is not woken.

With --every nothing is kept now: the sandbox is checkpointed again and again
while it runs, and the last of these checkpoints are kept. --every never ends that.`,
		Args: rangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("keep") && o.every == "" {
				return usagef("--keep needs --every")
			}
			if o.every != "" {
				if len(args) > 1 {
					return usagef("--every gives its checkpoints names of their own")
				}
				return runCheckpointEvery(cmd.Context(), a, args[0], o)
			}
			return runCheckpointCreate(cmd.Context(), a, args[0], append(args, "")[1])
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.every, "every", "", "keep one every `D` while it runs, such as 10m; never")
	f.IntVar(&o.keep, "keep", 6, "with --every: how many of them stay")
	return cmd
}

func runCheckpointCreate(ctx context.Context, a *app, id, name string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	k, err := c.Checkpoint(ctx, id, name)
	if err != nil {
		return err
	}
	if k.Report != nil {
		printWarnings(a.Err, k.Report.Warnings)
	}
	if a.json {
		return a.printJSON(k)
	}
	fmt.Fprintln(a.Out, k.Name)
	return nil
}

func runCheckpointEvery(ctx context.Context, a *app, id string, o checkpointOptions) error {
	every, err := api.ParseDuration(o.every)
	if err != nil {
		return usagef("--every: %v", err)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	sb, err := c.Update(ctx, id, api.UpdateRequest{Policy: &api.PolicyPatch{Checkpoints: &api.Schedule{Every: every, Keep: o.keep}}})
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(sb)
	}
	fmt.Fprintln(a.Out, sb.ID)
	return nil
}

func newCheckpointLsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "ls ID",
		Short: "List the checkpoints of a sandbox",
		Args:  exactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return runCheckpointLs(cmd.Context(), a, args[0]) },
	}
}

func runCheckpointLs(ctx context.Context, a *app, id string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.Checkpoints(ctx, id)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(all)
	}
	rows := [][]string{{"NAME", "KIND", "STORED", "AGE", ""}}
	for _, k := range all {
		note := ""
		if k.Current {
			note = "current"
		}
		rows = append(rows, []string{k.Name, k.Kind, size(k.Snapshot.StoredBytes), age(k.CreatedAt), note})
	}
	return table(a.Out, rows)
}

func newCheckpointRmCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "rm ID NAME...",
		Short: "Delete checkpoints; what was made of them stays",
		Args:  minArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runCheckpointRm(cmd.Context(), a, args[0], args[1:])
		},
	}
}

func runCheckpointRm(ctx context.Context, a *app, id string, names []string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	for i, name := range names {
		if err := c.DeleteCheckpoint(ctx, id, name); err != nil {
			names = names[:i]
			if a.json {
				_ = a.printJSON(names)
			}
			return err
		}
		if !a.json {
			fmt.Fprintln(a.Out, name)
		}
	}
	if a.json {
		return a.printJSON(names)
	}
	return nil
}
