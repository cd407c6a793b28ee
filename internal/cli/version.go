package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

// versions is the JSON of hib version; daemon is null where none answers.
type versions struct {
	Client api.Version  `json:"client"`
	Daemon *api.Version `json:"daemon"`
}

// apiVersion is the version of the REST interface.
const apiVersion = 1

func newVersionCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version of hib and of the daemon",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return runVersion(cmd.Context(), a) },
	}
}

func runVersion(ctx context.Context, a *app) error {
	v := versions{Client: api.Version{Version: a.Version, API: apiVersion}}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := a.client()
	if err == nil {
		var daemon api.Version
		if daemon, err = c.Version(ctx); err == nil {
			v.Daemon = &daemon
		}
	}
	if a.json {
		return a.printJSON(v)
	}
	fmt.Fprintf(a.Out, "hib %s\n", v.Client.Version)
	if v.Daemon == nil {
		fmt.Fprintf(a.Out, "daemon: %s\n", describe(err))
		return nil
	}
	fmt.Fprintf(a.Out, "daemon %s (API %d, %s, %s)\n", v.Daemon.Version, v.Daemon.API, v.Daemon.VMM, v.Daemon.Accel)
	return nil
}
