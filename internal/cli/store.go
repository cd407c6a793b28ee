package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newStoreCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "store",
		Short: "Look after the store of snapshots",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		&cobra.Command{
			Use:   "status",
			Short: "Show what the store holds",
			Args:  noArgs,
			RunE:  func(cmd *cobra.Command, _ []string) error { return runStoreStatus(cmd.Context(), a) },
		},
		newStoreVerifyCommand(a), newStoreGCCommand(a), newStoreImportCommand(a), newStoreEvictCommand(a),
	)
	return cmd
}

func runStoreStatus(ctx context.Context, a *app) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	s, err := c.StoreStatus(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(s)
	}
	row := func(what string, n int, bytes int64) []string { return []string{what, strconv.Itoa(n), size(bytes)} }
	objects := [][]string{
		{"OBJECTS", "COUNT", "SIZE"},
		row("packs", s.Packs, s.PackBytes),
		row("manifests", s.Manifests, s.ManifestBytes),
		row("states", s.States, s.StateBytes),
		row("base images", s.BaseImages, s.BaseBytes),
		{"free", "", size(s.FreeBytes)},
	}
	for i, t := range [][][]string{objects, tierRows(s.Tiers), storeSandboxRows(s.Sandboxes)} {
		if i > 0 {
			fmt.Fprintln(a.Out)
		}
		if err := table(a.Out, t); err != nil {
			return err
		}
	}
	return nil
}

func tierRows(tiers []api.TierStatus) [][]string {
	rows := [][]string{{"TIER", "WHERE", "OBJECTS", "SIZE", "BUDGET", "PENDING", "ERROR"}}
	for _, t := range tiers {
		budget := "-"
		if t.Budget > 0 {
			budget = size(t.Budget)
		}
		rows = append(rows, []string{t.Tier, or(t.Where), strconv.Itoa(t.Objects), size(t.Bytes), budget, strconv.Itoa(t.Pending), or(printable(t.Error))})
	}
	return rows
}

func storeSandboxRows(sandboxes []api.StoreSandbox) [][]string {
	rows := [][]string{{"SANDBOX", "NAME", "PACKS", "LIVE", "STORED", "LOCAL", "REPLICATION"}}
	for _, s := range sandboxes {
		row := []string{s.ID, or(s.Name), strconv.Itoa(s.Packs), size(s.LiveBytes), size(s.StoredBytes), size(s.LocalBytes), or(s.Replication)}
		if s.Error != "" {
			row = append(row, printable(s.Error))
		}
		rows = append(rows, row)
	}
	return rows
}

func newStoreVerifyCommand(a *app) *cobra.Command {
	var r api.VerifyRequest
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Read every object and compare it with its hash",
		Long: `Read every object on the local disk and compare it with its hash. With --remote
the same is done with everything in the remote store, which is downloaded for that.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runStoreVerify(cmd.Context(), a, r) },
	}
	cmd.Flags().BoolVar(&r.Remote, "remote", false, "read everything in the remote store, too")
	return cmd
}

// runStoreVerify fails if a fault was found.
func runStoreVerify(ctx context.Context, a *app, r api.VerifyRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	p := newProgress(a.Err)
	v, err := c.VerifyStore(ctx, r, p.update)
	p.end()
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printJSON(v); err != nil {
			return err
		}
	} else {
		for _, f := range v.Faults {
			fmt.Fprintln(a.Out, printable(f))
		}
		fmt.Fprintf(a.Out, "%d objects, %s, %d faults\n", v.Objects, size(v.Bytes), len(v.Faults))
	}
	if n := len(v.Faults); n > 0 {
		return hintError{"", fmt.Errorf("the store has %d faults", n), "sandboxes that need these objects can't be resumed"}
	}
	return nil
}
