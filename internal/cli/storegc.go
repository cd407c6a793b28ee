package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newStoreGCCommand(a *app) *cobra.Command {
	var r api.CollectRequest
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Delete what no sandbox and no template needs any more",
		Long: `Delete what no sandbox and no template needs any more, from the local disk and
from the remote store. The daemon does so by itself after deletions.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runStoreGC(cmd.Context(), a, r) },
	}
	cmd.Flags().BoolVar(&r.DryRun, "dry-run", false, "only list what would go")
	return cmd
}

// runStoreGC fails if a tier could not be collected.
func runStoreGC(ctx context.Context, a *app, r api.CollectRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	got, err := c.Collect(ctx, r)
	if err != nil {
		return err
	}
	if a.json {
		err = a.printJSON(got)
	} else {
		printCollected(a, got)
	}
	for _, t := range got.Tiers {
		if t.Error != "" && err == nil {
			err = hintError{"", fmt.Errorf("the %s tier was not collected: %s", t.Tier, printable(t.Error)), "nothing is lost by that; try again"}
		}
	}
	return err
}

func printCollected(a *app, got api.Collected) {
	for _, key := range got.Objects {
		fmt.Fprintln(a.Out, printable(key))
	}
	what := "deleted"
	if got.DryRun {
		what = "to delete"
	}
	for _, t := range got.Tiers {
		if t.Error != "" {
			continue
		}
		line := fmt.Sprintf("%s: %d objects, %s %s", t.Tier, t.Objects, size(t.Bytes), what)
		if t.InUse > 0 {
			line += fmt.Sprintf(", %d in use", t.InUse)
		}
		fmt.Fprintln(a.Out, line)
	}
}
