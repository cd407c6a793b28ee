package cli

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/internal/daemon"
)

type serveOptions struct {
	config       daemon.Config
	guestMemory  string
	parkedMemory string
	localBudget  string
	dns          []string
	logFormat    string
	logLevel     string
}

func newServeCommand(a *app) *cobra.Command {
	var o serveOptions
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon",
		Long: `Run the daemon: API, catalog and store. It holds no guest: sandboxes run on while
it is stopped, restarted or upgraded.

The API key is made at the first start and kept in the data folder.

The credentials for --store come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Processes that hold a
sandbox get HIB_STORE_READ_ACCESS_KEY_ID and HIB_STORE_READ_SECRET_ACCESS_KEY instead where these are
set: credentials that may only read.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runServe(cmd.Context(), a, o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.config.Listen, "listen", "127.0.0.1:7070", "`ADDRESS` to listen at; port 0 takes a free one")
	f.StringVar(&o.config.Domain, "domain", "", "`DOMAIN` of the hosts PORT-ID.DOMAIN that lead to ports of sandboxes; behind a TLS proxy with its scheme: https://sandboxes.example.com (default: localhost)")
	f.StringVar(&o.config.User, "user", "", "unprivileged `ACCOUNT` for shims and VMMs when run as root (default: hibernacle if it exists, or nobody)")
	f.StringVar(&o.config.Accel, "accel", "", "accelerator: kvm or tcg (default: what the host has)")
	f.StringVar(&o.config.CPUModel, "cpu-model", "", "named CPU model of the guests (default: one that suits the accelerator)")
	f.StringVar(&o.config.Cache, "cache", "", "`FOLDER` for what template builds download (default: one in the data folder)")
	f.StringVar(&o.guestMemory, "guest-memory", "", "`SIZE` of the memory for guests that run, such as 12G, or none for no limit (default: the host's without 1 GiB or a tenth)")
	f.StringVar(&o.parkedMemory, "parked-memory", "", "`SIZE` of the memory that paused machines of sandboxes in standby may take up, 0 for none (default: an eighth of the host's)")
	f.IntVar(&o.config.Pool, "pool", 2, "`NUMBER` of machines that are kept ready for the next start")
	f.IntVar(&o.config.DiskReserve, "disk-reserve", 25, "`PERCENT` of the memory of guests that run; so much of the disk stays free for their hibernations")
	f.StringVar(&o.config.Store, "store", "", "`URL` of an S3-compatible store that snapshots are replicated to: s3://BUCKET/PREFIX?endpoint=https://HOST&region=REGION (default: none)")
	f.StringVar(&o.localBudget, "local-budget", "0", "`SIZE` that packs may take up on the local disk, such as 200G; what was not used for longest stays in --store only (0: no limit)")
	f.BoolVar(&o.config.MetricsOpen, "metrics-open", false, "serve /metrics to those without the key, too")
	f.StringArrayVar(&o.dns, "dns", nil, "`ADDRESS` of a DNS server that answers sandboxes, may be repeated (default: those of the host's /etc/resolv.conf)")
	f.StringVar(&o.logFormat, "log-format", daemon.LogText, "text or json")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

func runServe(ctx context.Context, a *app, o serveOptions) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return usagef("--log-level %q: it must be debug, info, warn or error", o.logLevel)
	}
	log, err := daemon.NewLog(a.Err, o.logFormat, level)
	if err != nil {
		return usageError{err}
	}
	c := o.config
	if c.GuestMemory, err = guestMemory(o.guestMemory); err != nil {
		return err
	}
	if c.ParkedMemory, err = parkedMemory(o.parkedMemory); err != nil {
		return err
	}
	if c.LocalBudget, err = parseSize(o.localBudget); err != nil {
		return usagef("--local-budget %q: it must be a size such as 200G or 512M, or 0", o.localBudget)
	}
	if c.Resolvers, err = resolvers(o.dns); err != nil {
		return err
	}
	c.Log, c.Version = log, a.Version
	if c.Data, err = a.data(); err != nil {
		return err
	}
	c.WrapVMM = strings.Fields(os.Getenv("HIB_VMM_WRAP"))
	if c.Program, err = os.Executable(); err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	return daemon.Run(ctx, c, func(s daemon.Started) { a.announce(s) })
}

// resolvers reads the flag dns.
func resolvers(flags []string) ([]string, error) {
	var servers []string
	for _, text := range flags {
		server, err := netip.ParseAddrPort(text)
		if err != nil {
			addr, err := netip.ParseAddr(text)
			if err != nil {
				return nil, usagef("--dns %q: it must be an IP address, or one with a port, such as 10.0.0.53 or 127.0.0.1:5353", text)
			}
			server = netip.AddrPortFrom(addr, 53)
		}
		servers = append(servers, server.String())
	}
	return servers, nil
}

// guestMemory reads the flag of that name.
func guestMemory(flag string) (int64, error) {
	switch flag {
	case "":
		return 0, nil
	case "none":
		return daemon.NoLimit, nil
	}
	n, err := parseSize(flag)
	if err != nil || n == 0 {
		return 0, usagef("--guest-memory %q: it must be a size such as 12G or 512M, or none", flag)
	}
	return n, nil
}

// parkedMemory reads the flag of that name.
func parkedMemory(flag string) (int64, error) {
	if flag == "" {
		return 0, nil
	}
	n, err := parseSize(flag)
	switch {
	case err != nil:
		return 0, usagef("--parked-memory %q: it must be a size such as 2G or 512M, or 0", flag)
	case n == 0:
		return daemon.NoParking, nil
	}
	return n, nil
}

// startedJSON is the JSON of hib serve.
type startedJSON struct {
	URL       string `json:"url"`
	KeyFile   string `json:"key_file"`
	Account   string `json:"account"`   // of shims and VMMs
	Templates int    `json:"templates"` // how many there are
}

// announce says where the daemon is and what to do next.
func (a *app) announce(s daemon.Started) {
	if a.json {
		_ = a.printJSON(startedJSON{s.URL, s.KeyFile, s.Account.Name, s.Templates})
		return
	}
	fmt.Fprintf(a.Out, "Hibernacle %s listens at %s\n", a.Version, s.URL)
	fmt.Fprintf(a.Out, "API key: %s\n", s.KeyFile)
	if s.Plain {
		fmt.Fprintln(a.Out, "Warning: other hosts can reach this address, and plain HTTP shows them the key and all data. Put a TLS proxy before it.")
	}
	next := "hib create"
	if s.Templates == 0 {
		next = "hib template build"
	}
	fmt.Fprintf(a.Out, "Next: %s\n", next)
}
