package cli

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"
)

func newLogsCommand(a *app) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs ID",
		Short: "Show what a sandbox printed on its console",
		Args:  exactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return runLogs(cmd.Context(), a, args[0], follow) },
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what is printed from now on")
	return cmd
}

func runLogs(ctx context.Context, a *app, id string, follow bool) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	logs, err := c.Logs(ctx, id, follow)
	if err != nil {
		return err
	}
	defer logs.Close()
	_, err = io.Copy(a.Out, logs)
	if follow && errors.Is(err, context.Canceled) {
		return nil // that is how one stops following
	}
	return err
}
