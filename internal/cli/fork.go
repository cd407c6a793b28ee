package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newForkCommand(a *app) *cobra.Command {
	var req api.ForkRequest
	cmd := &cobra.Command{
		Use:   "fork [flags] ID",
		Short: "Make copies of a sandbox and print their IDs",
		Long: `Make sandboxes that begin as copies of one, as it is now or was at a checkpoint,
and print their IDs. Each has an identity, randomness and tokens of its own, and
the labels, environment and policy of the one it was made of. What neither
changes they share. The sandbox itself goes on, and may be deleted.

All copies are made, or none is.`,
		Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runFork(cmd.Context(), a, args[0], req) },
	}
	f := cmd.Flags()
	f.IntVar(&req.Count, "count", 1, "make `N` copies")
	f.StringVar(&req.Checkpoint, "checkpoint", "", "of the checkpoint `NAME` (default: what it is now)")
	f.StringVar(&req.Name, "name", "", "unique name of the copy; several are NAME-1, NAME-2 …")
	f.BoolVar(&req.Standby, "standby", false, "do not start them: they wake on the first request")
	return cmd
}

func runFork(ctx context.Context, a *app, id string, req api.ForkRequest) error {
	if req.Count < 1 {
		return usagef("--count: %d is no number of copies", req.Count)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	forks, err := c.Fork(ctx, id, req)
	if err != nil {
		return err
	}
	for _, f := range forks {
		if f.LastResume != nil {
			printWarnings(a.Err, f.LastResume.Warnings)
		}
	}
	if a.json {
		return a.printJSON(forks)
	}
	for _, f := range forks {
		fmt.Fprintln(a.Out, f.ID)
	}
	return nil
}
