package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newLogsCommand(a *app) *cobra.Command {
	var follow, hooks bool
	cmd := &cobra.Command{
		Use:   "logs ID",
		Short: "Show what a sandbox printed on its console",
		Args:  exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if hooks {
				return runHookLogs(cmd.Context(), a, args[0])
			}
			return runLogs(cmd.Context(), a, args[0], follow)
		},
	}
	cmd.Flags().BoolVar(&hooks, "hooks", false, "show how its hooks ran, and what they printed, instead")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what is printed from now on")
	cmd.MarkFlagsMutuallyExclusive("hooks", "follow")
	return cmd
}

func runHookLogs(ctx context.Context, a *app, id string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	runs, err := c.HookRuns(ctx, id)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(runs)
	}
	for _, r := range runs {
		when, what := r.StartedAt.Local().Format("2006-01-02 15:04:05"), r.Event
		if r.Background {
			what += " (background)"
		}
		fmt.Fprintf(a.Out, "%s  %s %s, reason %s: %s, %.0f ms\n", when, what, printable(r.Name), printable(r.Reason), hookOutcome(r), r.DurationMS)
		for line := range strings.Lines(r.Output) {
			fmt.Fprintf(a.Out, "  %s\n", printable(strings.TrimSuffix(line, "\n")))
		}
	}
	return nil
}

// hookOutcome says how a hook ended.
func hookOutcome(r api.HookRun) string {
	switch {
	case r.TimedOut:
		return "killed at its timeout"
	case r.Error != "":
		return printable(r.Error)
	case r.Signal != "":
		return "ended by " + printable(r.Signal)
	case r.ExitCode == 0:
		return "done"
	}
	return fmt.Sprintf("exit code %d", r.ExitCode)
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
