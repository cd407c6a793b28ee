package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newDrainCommand(a *app) *cobra.Command {
	var r api.DrainRequest
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Hibernate everything, for a restart of the host",
		Long: `Hibernate every sandbox that runs and let none start from now on, so that the
host can be restarted or upgraded. Requests to sandboxes are told to come back
later. The next start of the daemon ends it, and so does --undo.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runDrain(cmd.Context(), a, r) },
	}
	cmd.Flags().BoolVar(&r.Undo, "undo", false, "let sandboxes start again")
	return cmd
}

func runDrain(ctx context.Context, a *app, r api.DrainRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	p := newProgress(a.Err)
	got, err := c.Drain(ctx, r, p.update)
	p.end()
	if err != nil {
		return err
	}
	if a.json {
		err = a.printJSON(got)
	} else if !r.Undo {
		for _, id := range got.Hibernated {
			fmt.Fprintln(a.Out, id)
		}
	}
	if err != nil || len(got.Failed) == 0 {
		return err
	}
	for _, id := range slices.Sorted(maps.Keys(got.Failed)) {
		fmt.Fprintln(a.Err, "hib: "+printable(got.Failed[id]))
	}
	return fmt.Errorf("%d sandboxes did not hibernate. repeat hib drain when the reasons are gone, or delete them", len(got.Failed))
}
