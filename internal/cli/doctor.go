package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/internal/doctor"
	"github.com/hibernacle/hibernacle/internal/shim"
)

type doctorOptions struct {
	user     string
	selfTest bool
	template string
	keep     bool
	accel    string
}

func newDoctorCommand(a *app) *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether sandboxes can run on this host",
		Long: `Check whether sandboxes can run on this host, and say how to mend what is missing.
Ends with 1 if a check failed.

With --selftest it also runs a daemon of its own in a temporary folder, builds a
template, and takes a sandbox through creation, hibernation, resume and deletion.
With --use-data it takes the data folder instead, and a template that is there;
no other daemon may run on it.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runDoctor(cmd.Context(), a, o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.user, "user", "", "`ACCOUNT` for shims and VMMs, as for hib serve")
	f.BoolVar(&o.selfTest, "selftest", false, "take a sandbox through its life")
	f.StringVar(&o.template, "template", defaultTemplate, "template of the self-test")
	f.BoolVar(&o.keep, "use-data", false, "use the data folder for the self-test")
	f.StringVar(&o.accel, "accel", "", "accelerator, as for hib serve")
	return cmd
}

// doctorReport is the JSON of hib doctor.
type doctorReport struct {
	Checks   []doctor.Check `json:"checks"`
	SelfTest *selfTestJSON  `json:"selftest,omitempty"`
}

type selfTestJSON struct {
	OK    bool   `json:"ok"`
	Error string `json:"error"`
}

func runDoctor(ctx context.Context, a *app, o doctorOptions) error {
	data, err := a.data()
	if err != nil {
		return err
	}
	if data, err = filepath.Abs(data); err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	host := doctor.Host{Data: data, User: o.user, Program: program, Driver: shim.DriverConfig{Accel: o.accel}}
	report := doctorReport{Checks: doctor.Run(ctx, host)}
	if !a.json {
		if err := printChecks(a.Out, report.Checks); err != nil {
			return err
		}
	}
	if doctor.Failed(report.Checks) {
		err = errors.New("this host can't run sandboxes as it is")
	}
	if o.selfTest && err == nil {
		err = a.selfTest(ctx, o, program, data)
		report.SelfTest = &selfTestJSON{OK: err == nil}
		if err != nil {
			report.SelfTest.Error = err.Error()
		}
	}
	if a.json {
		return errors.Join(a.printJSON(report), err)
	}
	return err
}

// printChecks prints a table of the checks, and below it how to mend.
func printChecks(w io.Writer, checks []doctor.Check) error {
	rows := [][]string{{"CHECK", "STATUS", "FOUND"}}
	for _, c := range checks {
		rows = append(rows, []string{c.Name, string(c.Status), printable(c.Detail)})
	}
	if err := table(w, rows); err != nil {
		return err
	}
	for _, c := range checks {
		if c.Fix != "" {
			fmt.Fprintf(w, "\n%s: %s\n", c.Name, c.Fix)
		}
	}
	return nil
}

// selfTest takes a sandbox through its life. What the daemon says is shown if
// that fails.
func (a *app) selfTest(ctx context.Context, o doctorOptions, program, data string) error {
	log, err := os.CreateTemp("", "hib-selftest-*.log")
	if err != nil {
		return err
	}
	defer log.Close()
	p := newProgress(a.Err)
	t := doctor.SelfTest{
		Program: program, Template: o.template, Log: log,
		Progress: p.update,
	}
	if o.keep {
		t.Data = data
	}
	if o.user != "" {
		t.Args = append(t.Args, "--user", o.user)
	}
	if o.accel != "" {
		t.Args = append(t.Args, "--accel", o.accel)
	}
	err = t.Run(ctx)
	p.end()
	if err != nil {
		return hintError{"the self-test failed", err, "the daemon's log is at " + log.Name()}
	}
	if !a.json {
		fmt.Fprintln(a.Out, "\nThe self-test passed: a sandbox slept and woke where it was.")
	}
	return os.Remove(log.Name())
}
