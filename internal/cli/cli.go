// Package cli is the command line of hib: one file a command. A command parses
// its flags (newXCommand) and runs (runX) against the daemon, by way of package
// client; only serve, doctor and a self-test touch the host themselves.
package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/client"
)

// Config is what the command line needs of its program.
type Config struct {
	Version string // of this build
	In      io.Reader
	Out     io.Writer
	Err     io.Writer
}

// Main runs hib with the process's own arguments and streams and returns its
// exit code.
func Main(version string) int {
	return Run(context.Background(), Config{Version: version, In: os.Stdin, Out: os.Stdout, Err: os.Stderr}, os.Args[1:])
}

// Run runs hib with args and returns its exit code (see ExitCodes).
func Run(ctx context.Context, c Config, args []string) int {
	a := &app{Config: c}
	root := newRootCommand(a)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if a.stop != nil {
		a.stop()
	}
	code := exitCode(err)
	if isExec(cmd) && err != nil {
		code = execExitCode(err)
	}
	if exitCode(err) == exitUsage {
		err = hintError{err: err, hint: helpFor(cmd)}
	}
	if text := describe(err); text != "" {
		fmt.Fprintln(c.Err, "hib: "+text)
	}
	return code
}

// app is what all commands share: the streams and the global flags.
type app struct {
	Config
	opts client.Options
	json bool
	stop func() // ends the handling of signals
}

// client returns a client of the daemon that the flags and the environment
// name.
func (a *app) client() (*client.Client, error) {
	o := a.opts
	if o.URL == "" {
		o.URL = os.Getenv(client.EnvURL)
	}
	if o.Key == "" {
		o.Key = os.Getenv(client.EnvKey)
	}
	return o.Client()
}

// data returns the data folder.
func (a *app) data() (string, error) {
	if a.opts.Data != "" {
		return a.opts.Data, nil
	}
	return client.DataFolder()
}

// ownSignals marks a command that handles signals itself.
const ownSignals = "own-signals"

func newRootCommand(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "hib",
		Short: "Sandboxes for AI agents that hibernate and wake where they stopped",
		Long: `hib runs sandboxes for AI agents: microVMs that go to sleep when nobody talks to
them, cost nothing while they sleep, and wake at the instruction where they
stopped, on the next request.

Start the daemon with "hib serve", then: hib template build, hib create, hib exec.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Annotations[ownSignals] == "" {
				ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
				context.AfterFunc(ctx, stop) // a second signal ends the process
				a.stop = stop
				cmd.SetContext(ctx)
			}
			return nil
		},
	}
	root.SetIn(a.In)
	root.SetOut(a.Out)
	root.SetErr(a.Err)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.CompletionOptions.HiddenDefaultCmd = true
	f := root.PersistentFlags()
	f.BoolVar(&a.json, "json", false, "print JSON as in the API")
	f.StringVar(&a.opts.URL, "api-url", "", "URL of the daemon (default: $HIB_API_URL, or that of the data folder's daemon)")
	f.StringVar(&a.opts.Key, "api-key", "", "API key (default: $HIB_API_KEY, or that of the data folder)")
	f.StringVar(&a.opts.Data, "data", "", "data folder of the daemon (default: $HIB_DATA, or "+defaultData()+")")
	root.AddCommand(
		newServeCommand(a), newDoctorCommand(a), newVersionCommand(a), newExitCodesTopic(),
		newTemplateCommand(a),
		newCreateCommand(a), newUpdateCommand(a), newDrainCommand(a), newLsCommand(a), newInspectCommand(a), newExecCommand(a),
		newHibernateCommand(a), newHoldCommand(a), newResumeCommand(a), newRmCommand(a), newLogsCommand(a), newEventsCommand(a), newWebhookCommand(a),
		newCheckpointCommand(a), newRestoreCommand(a), newForkCommand(a),
		newCpCommand(a), newPortForwardCommand(a), newURLCommand(a),
		newStoreCommand(a),
		newBenchCommand(a), newShimCommand(),
	)
	plainUseLines(root)
	return root
}

// plainUseLines takes "[flags]" from the usage of a command and those below.
func plainUseLines(cmd *cobra.Command) {
	cmd.DisableFlagsInUseLine = true
	for _, sub := range cmd.Commands() {
		plainUseLines(sub)
	}
}

// defaultData names the default data folder in help texts.
func defaultData() string {
	if os.Geteuid() == 0 {
		return "/var/lib/hibernacle"
	}
	return "~/.local/share/hibernacle"
}
