package cli

import (
	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// newShimCommand is how the daemon starts the process that holds one VM. The
// folder is only there to be seen; what counts comes through standard input.
func newShimCommand() *cobra.Command {
	return &cobra.Command{
		Use:         "shim FOLDER",
		Short:       "Hold one virtual machine (started by the daemon)",
		Hidden:      true,
		Args:        exactArgs(1),
		Annotations: map[string]string{ownSignals: "yes"},
		RunE:        func(cmd *cobra.Command, _ []string) error { return shim.Run(cmd.Context()) },
	}
}
