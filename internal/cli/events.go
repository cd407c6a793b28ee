package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
)

type eventsOptions struct {
	follow  bool
	sandbox string
	types   []string
	since   string
}

func newEventsCommand(a *app) *cobra.Command {
	var o eventsOptions
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show what happened, or what happens",
		Long: `Show the events that are kept, or with -f those from now on. With -f it goes on
when the daemon restarts at the same address, and misses nothing. With --json
each event is one line.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runEvents(cmd.Context(), a, o) },
	}
	f := cmd.Flags()
	f.BoolVarP(&o.follow, "follow", "f", false, "go on with what happens")
	f.StringVar(&o.sandbox, "sandbox", "", "only about the sandbox `ID`")
	f.StringSliceVar(&o.types, "type", nil, "only of the `TYPE`s, such as resumed,hibernated")
	f.StringVar(&o.since, "since", "", "begin behind the event `ID`; 0 begins with the oldest")
	return cmd
}

func runEvents(ctx context.Context, a *app, o eventsOptions) error {
	wanted := client.EventsOptions{Follow: o.follow, Sandbox: o.sandbox, Types: o.types}
	if o.since != "" {
		id, err := strconv.ParseUint(o.since, 10, 63)
		if err != nil {
			return usagef("--since %q: it must be the id of an event, or 0", o.since)
		}
		wanted.After = &id
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	for e, err := range c.Events(ctx, wanted) {
		switch {
		case o.follow && errors.Is(err, context.Canceled):
			return nil // that is how one stops following
		case err != nil:
			return err
		case a.json:
			err = json.NewEncoder(a.Out).Encode(e)
		default:
			_, err = fmt.Fprintln(a.Out, eventLine(e))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// eventLine tells an event in one line.
func eventLine(e api.Event) string {
	who := e.Sandbox
	switch {
	case e.Name != "":
		who = e.Name + " (" + e.Sandbox + ")"
	case who == "":
		who = "-"
	}
	line := fmt.Sprintf("%d  %s  %-12s %s", e.ID, e.Time.Local().Format(time.DateTime), e.Type, who)
	if d := eventData(e.Data); d != "" {
		line += "  " + d
	}
	return printable(line)
}

// eventData prints an event's data as K=V. What is nested is left to --json,
// but for the subject of a denial and of a hook's run.
func eventData(data json.RawMessage) string {
	var fields map[string]any
	if json.Unmarshal(data, &fields) != nil {
		return ""
	}
	if d, ok := fields["denied"].(map[string]any); ok {
		maps.Copy(fields, d)
		maps.DeleteFunc(fields, func(_ string, v any) bool { return v == "" || v == 0.0 }) // a question for a name has neither address nor port
	}
	if h, ok := fields["hook"].(map[string]any); ok {
		fields["hook"], fields["event"], fields["duration_ms"] = h["name"], h["event"], h["duration_ms"]
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(fields)) {
		switch v := fields[k].(type) {
		case string:
			if strings.ContainsAny(v, " \t\n\"") {
				v = strconv.Quote(v)
			}
			parts = append(parts, k+"="+v)
		case float64:
			if strings.HasSuffix(k, "_ms") {
				parts = append(parts, fmt.Sprintf("%s=%.1f", k, v))
			} else {
				parts = append(parts, k+"="+strconv.FormatFloat(v, 'f', -1, 64))
			}
		case bool:
			parts = append(parts, k+"="+strconv.FormatBool(v))
		case []any:
			parts = append(parts, fmt.Sprintf("%s=%v", k, v))
		}
	}
	return strings.Join(parts, " ")
}
