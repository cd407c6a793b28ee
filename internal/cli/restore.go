package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

func newRestoreCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "restore ID CHECKPOINT",
		Short: "Roll a sandbox back to a checkpoint",
		Long: `Roll a sandbox back to a checkpoint. What it is now is kept first, as a
checkpoint whose name is printed: restoring that one is the way back. Of these
the last five stay. A sandbox that ran runs again, one in standby stays there.`,
		Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error { return runRestore(cmd.Context(), a, args[0], args[1]) },
	}
}

func runRestore(ctx context.Context, a *app, id, name string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	r, err := c.Restore(ctx, id, name)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(r)
	}
	fmt.Fprintf(a.Out, "%s %s at %s", r.Sandbox.ID, r.Sandbox.State, name)
	if r.Kept != "" {
		fmt.Fprintf(a.Out, "; what it was is %s", r.Kept)
	}
	fmt.Fprintln(a.Out)
	return nil
}
