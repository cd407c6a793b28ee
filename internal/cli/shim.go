package cli

import (
	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/internal/shim"
)

// newShimCommand is how the daemon starts the process that holds one VM.
func newShimCommand() *cobra.Command {
	return &cobra.Command{
		Use:         "shim CONFIG",
		Short:       "Hold one virtual machine (started by the daemon)",
		Hidden:      true,
		Args:        exactArgs(1),
		Annotations: map[string]string{ownSignals: "yes"},
		RunE:        func(cmd *cobra.Command, args []string) error { return shim.Run(cmd.Context(), args[0]) },
	}
}
