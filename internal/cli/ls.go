package cli

import (
	"context"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newLsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the sandboxes",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return runLs(cmd.Context(), a) },
	}
}

func runLs(ctx context.Context, a *app) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.List(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(all)
	}
	failed := slices.ContainsFunc(all, func(s api.Sandbox) bool { return s.Reason != "" })
	head := []string{"ID", "NAME", "STATE", "TEMPLATE", "MEM", "AGE"}
	if failed {
		head = append(head, "REASON")
	}
	rows := [][]string{head}
	for _, s := range all {
		row := []string{s.ID, or(s.Name), string(s.State), s.Template, strconv.Itoa(s.MemoryMiB) + " MiB", age(s.CreatedAt)}
		if failed {
			row = append(row, printable(s.Reason))
		}
		rows = append(rows, row)
	}
	return table(a.Out, rows)
}
