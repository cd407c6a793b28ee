package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

func newResumeCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "resume ID",
		Short: "Wake a sandbox, a failed one from its last snapshot",
		Args:  exactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return runResume(cmd.Context(), a, args[0]) },
	}
}

func runResume(ctx context.Context, a *app, id string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	sb, err := c.Resume(ctx, id)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(sb)
	}
	if r := sb.LastResume; r != nil {
		printWarnings(a.Err, r.Warnings)
		fmt.Fprintf(a.Out, "%s %s in %s\n", sb.ID, sb.State, resumeLine(r))
		return nil
	}
	fmt.Fprintf(a.Out, "%s %s\n", sb.ID, sb.State)
	return nil
}
