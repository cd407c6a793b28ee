package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/client"
)

func newRmCommand(a *app) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "rm ID...",
		Short: "Delete sandboxes with all that is kept of them",
		Args:  minArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return runRm(cmd.Context(), a, args, force) },
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "a sandbox that does not exist is no error")
	return cmd
}

// runRm deletes as many as it can; the first error decides the exit code.
func runRm(ctx context.Context, a *app, ids []string, force bool) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	deleted := []string{}
	var first error
	for _, id := range ids {
		err := c.Delete(ctx, id)
		switch {
		case force && client.IsNotFound(err):
		case err != nil && first == nil:
			first = err
		case err != nil:
			fmt.Fprintln(a.Err, "hib: "+describe(err))
		default:
			deleted = append(deleted, id)
			if !a.json {
				fmt.Fprintln(a.Out, id)
			}
		}
	}
	if a.json {
		if err := a.printJSON(deleted); err != nil {
			return err
		}
	}
	return first
}
