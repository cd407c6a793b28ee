package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

func newURLCommand(a *app) *cobra.Command {
	var bare bool
	cmd := &cobra.Command{
		Use:   "url ID PORT",
		Short: "Print the URL of an HTTP server in a sandbox",
		Long: `Print the URL of an HTTP server that listens at PORT in a sandbox. A request to it
wakes the sandbox. Unless the port is public, the URL holds the sandbox's token:
whoever has it reaches all ports of the sandbox.`,
		Example: `  curl "$(hib url ID 8000)"
  curl -H "Hib-Access-Token: TOKEN" "$(hib url --bare ID 8000)"`,
		Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runURL(cmd.Context(), a, args[0], args[1], bare)
		},
	}
	cmd.Flags().BoolVar(&bare, "bare", false, "leave the token out")
	return cmd
}

// urlJSON is the JSON of hib url.
type urlJSON struct {
	URL   string `json:"url"`   // without the token
	Token string `json:"token"` // "" if the port needs none
}

func runURL(ctx context.Context, a *app, id, portText string, bare bool) error {
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil || port == 0 {
		return usagef("%q is no port: a port is a number from 1 to 65535", portText)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	sb, err := c.Get(ctx, id)
	if err != nil {
		return err
	}
	portText = strconv.FormatUint(port, 10)
	out := urlJSON{URL: strings.ReplaceAll(sb.PortURL, "{port}", portText)}
	if out.URL == "" {
		return fmt.Errorf("the daemon at %s has no URL for ports of sandboxes", c.URL())
	}
	if sb.Policy.Ports[portText] != api.PortPublic {
		out.Token = sb.TrafficToken
	}
	if a.json {
		return a.printJSON(out)
	}
	if out.Token != "" && !bare {
		out.URL += "?" + api.TokenParameter + "=" + out.Token
	}
	_, err = fmt.Fprintln(a.Out, out.URL)
	return err
}
