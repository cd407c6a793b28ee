package cli

import "github.com/spf13/cobra"

func newDoctorCommand(a *app) *cobra.Command { return &cobra.Command{Use: "doctor"} }
