package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

func newHibernateCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "hibernate ID",
		Short: "Bring a sandbox to standby",
		Long: `Bring a sandbox to standby: its memory and devices are saved, and nothing of it
runs any more. When the command returns the snapshot is durable; the paused
machine is kept or ended behind that. The next exec, file call or connection
wakes it.`,
		Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runHibernate(cmd.Context(), a, args[0]) },
	}
}

func runHibernate(ctx context.Context, a *app, id string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	sb, err := c.Hibernate(ctx, id)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(sb)
	}
	if r := sb.LastHibernate; r != nil {
		printWarnings(a.Err, r.Warnings)
		fmt.Fprintf(a.Out, "%s %s in %s\n", sb.ID, sb.State, hibernateLine(r))
		return nil
	}
	fmt.Fprintf(a.Out, "%s %s\n", sb.ID, sb.State)
	return nil
}
