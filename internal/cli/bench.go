package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/internal/bench"
)

type benchOptions struct {
	quick, full bool
	template    string
	samples     int
	scale       int
	cycles      int
	scenarios   []string
	workloads   []string
	caches      []string
	memory      []int
	burst       []int
	sandbox     string
	get         string
	json        string // file, "-" for standard output
	svg         string
	restart     bool
}

func newBenchCommand(a *app) *cobra.Command {
	var o benchOptions
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure create, hibernate and resume on this machine",
		Long: `Measure the running daemon on this machine: create, hibernate and resume, in
every state that the caches may be in, next to a cold boot and to QEMU's own
restore of the same guest. It ends with what the figures are held against.

The sandboxes that it makes are deleted again. With --sandbox it measures one of
yours instead: it is hibernated and resumed many times, and left as it was.

--quick takes a few minutes, --full about twenty-five. The other flags choose from
either. docs/bench.md tells how to read the result.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runBench(cmd.Context(), a, o) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.quick, "quick", false, "what gives a picture in a few minutes (default)")
	f.BoolVar(&o.full, "full", false, "everything")
	cmd.MarkFlagsMutuallyExclusive("quick", "full")
	f.StringVar(&o.template, "template", defaultTemplate, "`TEMPLATE` of the sandboxes")
	f.IntVarP(&o.samples, "samples", "n", 0, "samples of each row (default: quick 5, full 10, fewer of rows that no bar needs)")
	f.StringSliceVar(&o.scenarios, "scenario", nil, "only these: "+strings.Join(bench.Scenarios, ", "))
	f.StringSliceVar(&o.workloads, "workload", nil, "only these: "+strings.Join(bench.Workloads, ", "))
	f.StringSliceVar(&o.caches, "cache", nil, "only these cache states: "+strings.Join(bench.Caches, ", "))
	f.IntSliceVar(&o.memory, "memory", nil, "only sandboxes of these sizes in MiB")
	f.IntSliceVar(&o.burst, "burst", nil, "how many sandboxes are resumed at once")
	f.IntVar(&o.cycles, "cycles", 0, "hibernations in the scenario cycles")
	f.IntVar(&o.scale, "scale", 0, "sandboxes in the scenario scale")
	f.StringVar(&o.sandbox, "sandbox", "", "measure the sandbox `ID`, which is hibernated and resumed")
	f.StringVar(&o.get, "get", "", "its first useful request, `PORT/PATH`")
	cmd.MarkFlagsRequiredTogether("sandbox", "get")
	f.StringVar(&o.json, "json", "", "print JSON, or write it to `FILE` and print the tables too")
	f.Lookup("json").NoOptDefVal = "-"
	f.StringVar(&o.svg, "svg", "", "draw the first answers into `FILE`")
	f.BoolVar(&o.restart, "restart-daemon", false, "end the daemon to time its start; something must start it again")
	return cmd
}

// choose returns what the flags choose.
func (o benchOptions) choose() bench.Options {
	c := bench.Quick()
	if o.full {
		c = bench.Full()
	}
	c.Template = o.template
	if o.samples != 0 { // so many of each row
		c.N, c.Sparse = o.samples, false
	}
	c.Cycles, c.Scale = cmp.Or(o.cycles, c.Cycles), cmp.Or(o.scale, c.Scale)
	if o.workloads != nil || o.sandbox != "" { // of any size and in any state, unless that is chosen too
		all := bench.Full()
		c.MemoryMiB, c.Caches = all.MemoryMiB, all.Caches
	}
	override(&c.Scenarios, o.scenarios)
	override(&c.Workloads, o.workloads)
	override(&c.Caches, o.caches)
	override(&c.MemoryMiB, o.memory)
	override(&c.Burst, o.burst)
	return c
}

func override[T any](list *[]T, chosen []T) {
	if chosen != nil {
		*list = chosen
	}
}

func runBench(ctx context.Context, a *app, o benchOptions) error {
	chosen := o.choose()
	if err := chosen.Check(); err != nil {
		return usageError{err}
	}
	own, err := o.own()
	if err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	status := newStatus(a.Err)
	var saying sync.Mutex
	chosen.Progress = func(text string) {
		saying.Lock()
		defer saying.Unlock()
		status.set(text)
	}
	res, err := a.measure(ctx, c, chosen, own, o)
	status.end()
	if err != nil && len(res.Rows) == 0 {
		return err
	}
	return errors.Join(a.showBench(res, o), err) // what was measured until a failure is worth having
}

// measure runs the benchmark of this daemon, or that of the user's own sandbox.
func (a *app) measure(ctx context.Context, c *client.Client, chosen bench.Options, own bench.Own, o benchOptions) (bench.Result, error) {
	if own.ID != "" {
		fmt.Fprintf(a.Err, "Sandbox %s is hibernated and resumed up to %d times. Its processes go on; connections to it break. It is left as it is now.\n",
			own.ID, 2*chosen.N*len(chosen.Caches))
		return bench.RunOwn(ctx, c, chosen, own)
	}
	if host, ok := a.benchHost(c, o.restart); ok {
		chosen.Host, chosen.NewPeer = host, host.newPeer(o.template)
	}
	return bench.Run(ctx, c, chosen)
}

// own reads the flags --sandbox and --get. Without them it returns nothing.
func (o benchOptions) own() (bench.Own, error) {
	if o.sandbox == "" {
		return bench.Own{}, nil
	}
	port, path, _ := strings.Cut(o.get, "/")
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return bench.Own{}, usagef("--get %q: it must be of the form PORT/PATH, for example 8000/health", o.get)
	}
	if strings.ContainsAny(path, " \r\n") {
		return bench.Own{}, usagef("--get %q: the path must be encoded as in a URL", o.get)
	}
	return bench.Own{ID: o.sandbox, Port: int(n), Path: "/" + path}, nil
}

// showBench prints and writes a result.
func (a *app) showBench(res bench.Result, o benchOptions) error {
	if o.svg != "" {
		if err := writeTo(o.svg, func(w io.Writer) error { return bench.WriteSVG(w, res) }); err != nil {
			return err
		}
	}
	switch o.json {
	case "":
	case "-":
		return a.printJSON(res)
	default:
		err := writeTo(o.json, func(w io.Writer) error {
			enc := json.NewEncoder(w)
			enc.SetIndent("", "  ")
			return enc.Encode(res)
		})
		if err != nil {
			return err
		}
	}
	return a.printBench(res)
}

// writeTo makes a file.
func writeTo(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	err = write(f)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return err
}

func (a *app) printBench(res bench.Result) error {
	m := res.Meta
	fmt.Fprintf(a.Out, "Accelerator: %s (%s)\nMachine: %s, %d cores, %s, Linux %s\n", m.Accel, m.VMM, m.CPU, m.Cores, size(m.Memory), m.Kernel)
	if len(res.Rows) > 0 {
		fmt.Fprintln(a.Out)
		if err := table(a.Out, benchRows(res.Rows)); err != nil {
			return err
		}
	}
	if len(res.Facts) > 0 {
		facts := [][]string{{"FIGURE", "WORKLOAD", "STATE", "MEMORY", "VALUE", "UNIT"}}
		for _, f := range res.Facts {
			memory := ""
			if f.MemoryMiB != 0 {
				memory = strconv.Itoa(f.MemoryMiB)
			}
			state := f.Cache
			if f.Prefetch != nil && !*f.Prefetch {
				state += ", no prefetch"
			}
			facts = append(facts, []string{f.Name, or(f.Workload), or(state), or(memory), strconv.FormatFloat(f.Value, 'f', -1, 32), f.Unit})
		}
		fmt.Fprintln(a.Out)
		if err := table(a.Out, facts); err != nil {
			return err
		}
	}
	for i, n := range res.Notes {
		if i == 0 {
			fmt.Fprintln(a.Out, "\nNotes:")
		}
		fmt.Fprintln(a.Out, "- "+printable(n))
	}
	return a.printBars(res.Bars)
}

// benchRows lays out rows as a table.
func benchRows(rows []bench.Row) [][]string {
	out := [][]string{{"WORKLOAD", "MEMORY", "STATE", "AT ONCE", "METRIC", "P50 ms", "P95 ms", "P99 ms", "MAX ms", "N", "OK", "FETCHED"}}
	for _, r := range rows {
		ms := func(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }
		state := r.Cache
		switch {
		case r.Peer != bench.PeerSelf:
			state = r.Peer
		case r.Resumed() && !r.Prefetch && r.Cache != bench.CacheParked:
			state += ", no prefetch"
		}
		fetched := "-"
		if r.BytesFetched > 0 && r.WorkingSetBytes > 0 {
			fetched = fmt.Sprintf("%.2f × set", float64(r.BytesFetched)/float64(r.WorkingSetBytes))
		}
		out = append(out, []string{r.Workload, strconv.Itoa(r.MemoryMiB), state, strconv.Itoa(r.Concurrency), r.Metric,
			ms(r.P50), ms(r.P95), ms(r.P99), ms(r.Max), strconv.Itoa(r.N), fmt.Sprintf("%.0f%%", 100*r.SuccessRate), fetched})
	}
	return out
}

func (a *app) printBars(bars []bench.Bar) error {
	if len(bars) == 0 {
		return nil
	}
	out := [][]string{{"WHAT", "MEASURED", "BAR", "MET"}}
	for _, b := range bars {
		met := "-"
		switch {
		case b.Met != nil && *b.Met:
			met = "yes"
		case b.Met != nil:
			met = "NO"
		}
		out = append(out, []string{b.What, b.Measured, b.Bar, met})
	}
	fmt.Fprintln(a.Out)
	return table(a.Out, out)
}
