package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/internal/bench"
)

func newBenchCommand(a *app) *cobra.Command {
	var o bench.Options
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure create, hibernate and resume on this machine",
		Long: `Measure the running daemon on this machine: cold boot, create, hibernate and
resume of sandboxes of the given sizes, with a Python HTTP server as the load.
The sandboxes that it makes are deleted again.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runBench(cmd.Context(), a, o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.Template, "template", "base", "`TEMPLATE` of the sandboxes")
	f.IntVarP(&o.N, "samples", "n", 20, "samples of each metric (cold boots: a quarter)")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{512, 4096}, "sizes of the sandboxes in MiB")
	f.IntVar(&o.StateMiB, "state", 50, "`MiB` of state that the Python server holds")
	f.StringSliceVar(&o.Metrics, "metric", nil, "metrics: boot, create, hibernate, vcpus_running, first_answer (default all)")
	return cmd
}

func runBench(ctx context.Context, a *app, o bench.Options) error {
	if o.N < 1 || o.StateMiB < 1 {
		return usagef("--samples and --state must be at least 1")
	}
	if err := bench.CheckMetrics(o.Metrics); err != nil {
		return usageError{err}
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	status := newStatus(a.Err)
	o.Progress = status.set
	rows, err := bench.Run(ctx, c, o)
	status.end()
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(rows)
	}
	out := [][]string{{"MEMORY", "LOAD", "METRIC", "P50 ms", "P95 ms", "P99 ms", "MAX ms", "N", "OK"}}
	for _, r := range rows {
		ms := func(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }
		name := r.Metric
		if r.Peer != bench.PeerSelf {
			name += " (" + r.Peer + ")"
		}
		out = append(out, []string{strconv.Itoa(r.MemoryMiB), r.Workload, name, ms(r.P50), ms(r.P95), ms(r.P99), ms(r.Max),
			strconv.Itoa(r.N), fmt.Sprintf("%.0f%%", 100*r.SuccessRate)})
	}
	return table(a.Out, out)
}
