package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
)

func newWebhookCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "webhook",
		Short: "Have events posted to URLs",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	one := func(use, short string, run func(context.Context, *app, *client.Client, string) error) *cobra.Command {
		return &cobra.Command{Use: use, Short: short, Args: exactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return run(cmd.Context(), a, c, args[0])
		}}
	}
	cmd.AddCommand(
		newWebhookAddCommand(a),
		&cobra.Command{
			Use:   "ls",
			Short: "List the webhooks and how they do",
			Args:  noArgs,
			RunE:  func(cmd *cobra.Command, _ []string) error { return runWebhookLs(cmd.Context(), a) },
		},
		one("rm ID", "Remove a webhook", runWebhookRm),
		one("test ID", "Post an event of the type test once", runWebhookTest),
		one("resume ID", "Let a paused webhook go on where it stopped", runWebhookResume),
	)
	return cmd
}

func newWebhookAddCommand(a *app) *cobra.Command {
	var r api.WebhookRequest
	cmd := &cobra.Command{
		Use:   "add URL",
		Short: "Have events posted to a URL, signed, from now on",
		Long: `Have events posted to a URL from now on: one at a time, in order, at least once,
signed with a secret. The secret is shown this once.`,
		Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r.URL = args[0]
			return runWebhookAdd(cmd.Context(), a, r)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&r.Types, "type", nil, "only events of the `TYPE`s, such as failed,deleted")
	f.StringVar(&r.Sandbox, "sandbox", "", "only events about the sandbox `ID`")
	f.StringVar(&r.Secret, "secret", "", "`SECRET` that posts are signed with, at least 16 characters (default: one is made)")
	return cmd
}

func runWebhookAdd(ctx context.Context, a *app, r api.WebhookRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	w, err := c.AddWebhook(ctx, r)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(w)
	}
	fmt.Fprintln(a.Out, w.ID)
	if r.Secret == "" {
		fmt.Fprintln(a.Err, "secret (it is not shown again): "+w.Secret)
	}
	return nil
}

func runWebhookLs(ctx context.Context, a *app) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.Webhooks(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(all)
	}
	rows := [][]string{{"ID", "STATE", "URL", "SANDBOX", "TYPES", "EVENT", "NEXT TRY", "LAST ERROR"}}
	for _, w := range all {
		next := "-"
		if w.NextTry != nil {
			next = "in " + max(0, time.Until(*w.NextTry)).Round(time.Second).String()
		}
		rows = append(rows, []string{w.ID, w.State, printable(w.URL), or(printable(w.Sandbox)), or(strings.Join(w.Types, ",")), fmt.Sprint(w.Cursor), next, or(printable(w.LastError))})
	}
	return table(a.Out, rows)
}

func runWebhookRm(ctx context.Context, a *app, c *client.Client, id string) error {
	if err := c.RemoveWebhook(ctx, id); err != nil {
		return err
	}
	if a.json {
		return a.printJSON([]string{id})
	}
	fmt.Fprintln(a.Out, id)
	return nil
}

// runWebhookTest fails if the endpoint did not take the event.
func runWebhookTest(ctx context.Context, a *app, c *client.Client, id string) error {
	t, err := c.TestWebhook(ctx, id)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printJSON(t); err != nil {
			return err
		}
	}
	switch {
	case !t.OK:
		return fmt.Errorf("webhook %s did not take the event after %.0f ms: %s", id, t.MS, printable(t.Error))
	case !a.json:
		fmt.Fprintf(a.Out, "%s answered %d in %.0f ms\n", id, t.Status, t.MS)
	}
	return nil
}

func runWebhookResume(ctx context.Context, a *app, c *client.Client, id string) error {
	w, err := c.ResumeWebhook(ctx, id)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(w)
	}
	fmt.Fprintf(a.Out, "%s goes on behind event %d\n", w.ID, w.Cursor)
	return nil
}
