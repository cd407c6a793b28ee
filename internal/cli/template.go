package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/api"
)

// defaultTemplate is the template that build and create take if none is named.
const defaultTemplate = "base"

func newTemplateCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "template",
		Short: "Build and manage templates",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTemplateBuildCommand(a), newTemplateCreateFromCommand(a), newTemplateLsCommand(a), newTemplateInspectCommand(a), newTemplateRmCommand(a))
	return cmd
}

func newTemplateBuildCommand(a *app) *cobra.Command {
	var req api.BuildRequest
	cmd := &cobra.Command{
		Use:   "build [NAME]",
		Short: "Build a template (default: base)",
		Long: `Build a template: a root file system, a kernel, and a snapshot taken after boot.
A name that exists gets a new version; sandboxes of the old one keep theirs.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("usage: %s", cmd.UseLine())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Name = defaultTemplate
			if len(args) == 1 {
				req.Name = args[0]
			}
			return runTemplateBuild(cmd.Context(), a, req)
		},
	}
	cmd.Flags().IntVar(&req.MemoryMiB, "memory", 0, "default memory of its sandboxes in `MiB` (default 2048)")
	cmd.Flags().IntVar(&req.CPUs, "cpus", 0, "default number of CPUs of its sandboxes (default 1)")
	return cmd
}

func runTemplateBuild(ctx context.Context, a *app, req api.BuildRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	p := newProgress(a.Err)
	t, err := c.BuildTemplate(ctx, req, p.update)
	p.end()
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(t)
	}
	fmt.Fprintf(a.Out, "%s version %d\n", t.Name, t.Version)
	return nil
}

func newTemplateCreateFromCommand(a *app) *cobra.Command {
	var req api.TemplateFromRequest
	cmd := &cobra.Command{
		Use:   "create-from [flags] ID NAME",
		Short: "Make a template whose sandboxes begin where a sandbox is",
		Long: `Make a template whose sandboxes begin where a sandbox is now, or was at a
checkpoint, each with an identity of its own. It has the memory and CPUs of that
sandbox and no other. A name that exists gets a new version. The sandbox goes
on, and may be deleted.`,
		Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Sandbox = args[0]
			return runTemplateCreateFrom(cmd.Context(), a, args[1], req)
		},
	}
	cmd.Flags().StringVar(&req.Checkpoint, "checkpoint", "", "of the checkpoint `NAME` (default: what it is now)")
	return cmd
}

func runTemplateCreateFrom(ctx context.Context, a *app, name string, req api.TemplateFromRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	t, err := c.CreateTemplateFrom(ctx, name, req)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(t)
	}
	fmt.Fprintf(a.Out, "%s version %d\n", t.Name, t.Version)
	return nil
}

func newTemplateLsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the templates",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return runTemplateLs(cmd.Context(), a) },
	}
}

func runTemplateLs(ctx context.Context, a *app) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.Templates(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(all)
	}
	rows := [][]string{{"NAME", "VERSION", "MEM", "CPUS", "BASE", "KERNEL", "SANDBOXES", "AGE"}}
	for _, t := range all {
		rows = append(rows, []string{
			t.Name, strconv.Itoa(t.Version), strconv.Itoa(t.MemoryMiB) + " MiB", strconv.Itoa(t.CPUs),
			size(t.BaseBytes), t.Kernel, strconv.Itoa(t.SandboxRefs), age(t.CreatedAt),
		})
	}
	return table(a.Out, rows)
}

func newTemplateInspectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect NAME",
		Short: "Show everything about a template",
		Args:  exactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return runTemplateInspect(cmd.Context(), a, args[0]) },
	}
}

func runTemplateInspect(ctx context.Context, a *app, name string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	t, err := c.Template(ctx, name)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(t)
	}
	rows := [][]string{
		{"Name", t.Name}, {"Version", strconv.Itoa(t.Version)},
		{"Created", t.CreatedAt.Local().Format("2006-01-02 15:04:05") + " (" + age(t.CreatedAt) + " ago)"},
		{"Memory", strconv.Itoa(t.MemoryMiB) + " MiB"}, {"CPUs", strconv.Itoa(t.CPUs)},
		{"Base image", t.BaseDigest + ", " + size(t.BaseBytes)}, {"Kernel", t.Kernel},
		{"Sandboxes", strconv.Itoa(t.SandboxRefs)},
	}
	if t.MadeOf != "" {
		rows = append(rows, []string{"Made of", "sandbox " + t.MadeOf})
	}
	for _, b := range t.Bases {
		rows = append(rows, []string{"Base snapshot", fmt.Sprintf("%s: %d CPUs, %d MiB, %s stored", b.Snapshot, b.CPUs, b.MemoryMiB, size(b.StoredBytes))})
	}
	return table(a.Out, rows)
}

func newTemplateRmCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "rm NAME",
		Short: "Delete a template that no sandbox uses",
		Args:  exactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return runTemplateRm(cmd.Context(), a, args[0]) },
	}
}

func runTemplateRm(ctx context.Context, a *app, name string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	if err := c.DeleteTemplate(ctx, name); err != nil {
		return err
	}
	if a.json {
		return a.printJSON([]string{name})
	}
	fmt.Fprintln(a.Out, name)
	return nil
}
