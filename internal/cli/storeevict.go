package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newStoreEvictCommand(a *app) *cobra.Command {
	var r api.EvictRequest
	cmd := &cobra.Command{
		Use:   "evict ID",
		Short: "Let go of cached copies of a sandbox in standby",
		Long: `Let go of cached copies of what a sandbox in standby is resumed from. Nothing is
lost by that; the next resume takes longer. Say with a flag what is to go.`,
		Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runStoreEvict(cmd.Context(), a, args[0], r) },
	}
	f := cmd.Flags()
	f.BoolVar(&r.Parked, "parked", false, "the paused machine")
	f.BoolVar(&r.PageCache, "page-cache", false, "the host's page cache of the snapshot's files")
	f.BoolVar(&r.Local, "local", false, "the local packs, which must be replicated")
	return cmd
}

func runStoreEvict(ctx context.Context, a *app, id string, r api.EvictRequest) error {
	if r == (api.EvictRequest{}) {
		return usagef("say what is to go: --parked, --page-cache, --local")
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	got, err := c.Evict(ctx, id, r)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(got)
	}
	fmt.Fprintf(a.Out, "%d local packs, %s\n", got.Packs, size(got.Bytes))
	return nil
}
