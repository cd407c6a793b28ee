package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
)

// Exit codes of hib.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitConflict    = 4
	exitUnreachable = 5
	exitExec        = 125
)

// ExitCodes describes the exit codes, for the help.
const ExitCodes = `Exit codes:
  0    done
  1    failed
  2    wrong usage
  3    not found
  4    the state does not allow it, or the sandbox has failed
  5    the daemon can't be reached

hib exec ends with the exit code of its command (128 + N if signal N ended it),
and with 125 if hib itself failed.
`

// newExitCodesTopic is help without a command: "hib help exit-codes".
func newExitCodesTopic() *cobra.Command {
	return &cobra.Command{Use: "exit-codes", Short: "What the exit codes mean", Long: strings.TrimSpace(ExitCodes)}
}

// usageError is a command line that makes no sense.
type usageError struct{ err error }

// helpFor is the hint for wrong usage of a command.
func helpFor(cmd *cobra.Command) string { return "see: " + cmd.CommandPath() + " --help" }

func (e usageError) Error() string { return e.err.Error() }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// hintError says what could not be done because of err, and what to do about
// it.
type hintError struct {
	what string // "" leaves err to speak for itself
	err  error
	hint string
}

func (e hintError) Error() string {
	if e.what == "" {
		return e.err.Error()
	}
	return e.what + ": " + e.err.Error()
}

func (e hintError) Unwrap() error { return e.err }

// commandExit is the exit code of a command in a sandbox; nothing is said of it.
type commandExit int

func (e commandExit) Error() string { return fmt.Sprintf("the command ended with %d", int(e)) }

// exitCode is the one map from errors to exit codes.
func exitCode(err error) int {
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage), strings.HasPrefix(err.Error(), "unknown command"):
		return exitUsage
	case errors.Is(err, client.ErrUnreachable):
		return exitUnreachable
	}
	switch client.CodeOf(err) {
	case api.CodeNotFound:
		return exitNotFound
	case api.CodeConflict, api.CodeFailed:
		return exitConflict
	}
	return exitFailure
}

// execExitCode is exitCode for hib exec: all codes but one are the command's.
func execExitCode(err error) int {
	if code, ok := errors.AsType[commandExit](err); ok {
		return int(code)
	}
	return exitExec
}

// describe returns what is said of an error: what happened, and what to do
// about it. "" means nothing.
func describe(err error) string {
	if _, ok := errors.AsType[commandExit](err); ok || err == nil {
		return ""
	}
	what, hints := explain(err)
	for _, h := range hints {
		if h != "" {
			what += ". " + h
		}
	}
	return printable(what)
}

func explain(err error) (what string, hints []string) {
	if h, ok := errors.AsType[hintError](err); ok {
		what, hints = explain(h.err)
		if h.what != "" {
			what = h.what + ": " + what
		}
		return what, append(hints, h.hint)
	}
	if e, ok := errors.AsType[*client.Error](err); ok {
		if e.Code == api.CodeUnauthorized {
			return e.Message, []string{"set " + client.EnvKey + " to what " + api.KeyFile + " in the daemon's data folder holds"}
		}
		if strings.Contains(e.Hint, "/v1/openapi.json") {
			return e.Message, nil // a hint for those who write requests; the message says what was wrong with this one
		}
		return e.Message, []string{e.Hint}
	}
	if errors.Is(err, client.ErrUnreachable) {
		return unreachable(err), []string{"start it with: hib serve"}
	}
	if errors.Is(err, context.Canceled) {
		return "interrupted", nil
	}
	if e, ok := errors.AsType[*connect.Error](err); ok {
		return e.Message(), nil
	}
	return err.Error(), nil
}

// unreachable cuts what connect and HTTP put around an error of the client.
func unreachable(err error) string {
	text := err.Error()
	if i := strings.Index(text, client.ErrUnreachable.Error()); i > 0 {
		text = text[i:]
	}
	return text
}

// printable drops from a text, which may come from a guest, what would move
// the terminal's cursor or worse.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return -1
		}
		return r
	}, s)
}

// noArgs, exactArgs and minArgs check the number of arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasSubCommands() {
		return usagef("unknown command %q for %q", args[0], cmd.CommandPath())
	}
	return usagef("%s takes no arguments", cmd.CommandPath())
}

func exactArgs(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return usagef("usage: %s", cmd.UseLine())
		}
		return nil
	}
}

func rangeArgs(min, max int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < min || len(args) > max {
			return usagef("usage: %s", cmd.UseLine())
		}
		return nil
	}
}

func minArgs(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < n {
			return usagef("usage: %s", cmd.UseLine())
		}
		return nil
	}
}
