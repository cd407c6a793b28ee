package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newStoreImportCommand(a *app) *cobra.Command {
	var r api.ImportRequest
	cmd := &cobra.Command{
		Use:   "import",
		Short: "Bring the sandboxes that the remote store holds to this host",
		Long: `Bring the sandboxes that the remote store holds to this host, in standby, with
the templates that they need. Their memory is read from the remote store when
they are resumed. What is here already is left alone, so an import that broke
off is repeated.

A store belongs to the node that wrote to it. With --take-over another node's is
taken from it: that node must be gone for good, since two nodes that write to
one store destroy each other's snapshots.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runStoreImport(cmd.Context(), a, r) },
	}
	cmd.Flags().BoolVar(&r.TakeOver, "take-over", false, "take the store from another node, which must be gone for good")
	return cmd
}

func runStoreImport(ctx context.Context, a *app, r api.ImportRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	p := newProgress(a.Err)
	got, err := c.Import(ctx, r, p.update)
	p.end()
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(got)
	}
	for _, id := range got.Sandboxes {
		fmt.Fprintln(a.Out, id)
	}
	for _, line := range got.Skipped {
		fmt.Fprintln(a.Out, "skipped: "+printable(line))
	}
	fmt.Fprintf(a.Out, "%d sandboxes, %d templates, %d skipped\n", len(got.Sandboxes), len(got.Templates), len(got.Skipped))
	return nil
}
