package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
)

type execOptions struct {
	id          string
	cmd         []string
	interactive bool
	tty         bool
	detach      bool
	keepAwake   bool
	attach      uint32
	env         []string
	cwd, user   string
}

const execName = "exec"

// isExec tells whether the exit codes of a command are those of exec.
func isExec(cmd *cobra.Command) bool { return cmd != nil && cmd.Name() == execName }

func newExecCommand(a *app) *cobra.Command {
	var o execOptions
	cmd := &cobra.Command{
		Use:   execName + " [flags] ID [--] COMMAND [ARG...]",
		Short: "Run a command in a sandbox, and wake it for that",
		Long: `Run a command in a sandbox, and wake it for that. Signals are passed on, and hib
ends with the command's exit code (128 + N if signal N ended it), or with 125 if
hib itself failed.

A process lives in the sandbox, not in this command: when the connection breaks
it goes on. -d starts one and prints its PID; --attach PID follows one that runs. While
somebody follows a process the sandbox stays awake. Otherwise it may hibernate
under it, and the process goes on when the sandbox wakes, unless --keep-awake
says that it is to be left to work.`,
		Example: `  hib exec ID uname -a
  hib exec -it ID bash
  hib exec -d ID -- python3 -m http.server 8000
  hib exec -d --keep-awake ID -- ./train.sh
  hib exec --attach 412 ID`,
		Annotations: map[string]string{ownSignals: "yes"},
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.keepAwake && o.attach != 0:
				return usagef("--keep-awake is for a command that starts, not for --attach")
			case len(args) == 0, o.attach == 0 && len(commandOf(args)) == 0:
				return usagef("usage: %s", cmd.UseLine())
			case o.attach != 0 && len(commandOf(args)) > 0:
				return usagef("--attach takes no command")
			case o.detach && (o.interactive || o.tty || o.attach != 0):
				return usagef("-d goes with none of -i, -t and --attach")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.id, o.cmd = args[0], commandOf(args)
			return runExec(cmd.Context(), a, o)
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false) // what follows the ID is the command's
	f.BoolVarP(&o.interactive, "interactive", "i", false, "pass standard input on")
	f.BoolVarP(&o.tty, "tty", "t", false, "give the command a terminal")
	f.BoolVarP(&o.detach, "detach", "d", false, "print the PID and leave the command running")
	f.BoolVar(&o.keepAwake, "keep-awake", false, "keep the sandbox awake for as long as the command runs, also when nobody follows it")
	f.Uint32Var(&o.attach, "attach", 0, "follow the process `PID` that runs already")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment, `K=V`; K alone takes the value here")
	f.StringVarP(&o.cwd, "cwd", "w", "", "working `folder`")
	f.StringVarP(&o.user, "user", "u", "", "`user` in the sandbox")
	return cmd
}

// commandOf returns the command in the arguments behind the ID.
func commandOf(args []string) []string {
	args = args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	return args
}

func runExec(ctx context.Context, a *app, o execOptions) error {
	env, err := parsePairs("env", o.env, true)
	if err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	if a.json && !o.detach && o.attach == 0 {
		out, err := c.Exec(ctx, o.id, api.ExecRequest{Cmd: o.cmd, Env: env, Cwd: o.cwd, User: o.user, KeepAwake: o.keepAwake})
		if err != nil {
			return err
		}
		if err := a.printJSON(out); err != nil {
			return err
		}
		return commandExit(out.ExitCode)
	}
	hc, base := c.Agent(o.id, o.user)
	s := &execSession{app: a, o: o, procs: processconnect.NewProcessClient(hc, base)}
	return s.run(ctx, env)
}
