package cli

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hibernacle/hibernacle/api"
)

// policyFlags are the flags that create and update have in common: what of
// them was given makes a patch.
type policyFlags struct {
	flags *pflag.FlagSet

	idleTimeout, idle, connectionCap, onSessionClose string
	ttl, ttlIdle, expires, timeout                   string
	ports, allow, deny                               []string
	egress, hooks, every                             string
	keep                                             int
}

func (p *policyFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	p.flags = f
	f.StringVar(&p.idleTimeout, "idle-timeout", "15s", "hibernate after `D` without traffic, such as 15s or 10m; never")
	f.StringVar(&p.idle, "idle", api.IdleNetwork, "what keeps it awake: network, or cpu for processor time, too")
	f.StringVar(&p.connectionCap, "connection-cap", "15m", "an inbound connection without a byte for `D` does not keep it awake; never")
	f.StringVar(&p.onSessionClose, "on-session-close", api.SessionNone, "at the end of the last interactive session: none or hibernate")
	f.StringVar(&p.ttl, "ttl", api.Never, "delete it `D` after its creation; D,notify only tells")
	f.StringVar(&p.ttlIdle, "ttl-idle", api.Never, "delete it after `D` in standby; D,notify only tells")
	f.StringVar(&p.expires, "expires", api.Never, "delete it at `TIME` (2030-01-31 or 2030-01-31T12:00:00Z); TIME,notify only tells")
	f.StringVar(&p.timeout, "timeout", api.Never, "hibernate it after `D` of running time, which standby does not use up; D,delete deletes it")
	f.StringArrayVar(&p.ports, "port", nil, "access to a port, `PORT=public` or PORT=private (needs the sandbox's token)")
	f.StringVar(&p.egress, "egress", api.EgressInternet, "what it may reach: internet (public addresses), none, or allow-list (what --allow names)")
	f.StringArrayVar(&p.allow, "allow", nil, "let it reach `RULE`: CIDR[:PORT], DOMAIN[:PORT] (example.com, *.example.com, *), or host:PORT on the host's loopback")
	f.StringArrayVar(&p.deny, "deny", nil, "keep it from `RULE`: CIDR[:PORT] or DOMAIN[:PORT]; wins over an --allow that is not more specific")
	f.StringVar(&p.hooks, "hooks", "", "`FILE` with a JSON list of hooks to run in the guest, or the list itself; [] takes them away")
	f.StringVar(&p.every, "checkpoint-every", api.Never, "make a checkpoint every `D` while it runs")
	f.IntVar(&p.keep, "checkpoint-keep", 6, "how many of those checkpoints are kept")
}

// patch returns what the flags ask for, nil if none was given. now is the
// egress policy that flags leave as it is.
func (p *policyFlags) patch(now api.Egress) (*api.PolicyPatch, error) {
	out, given := &api.PolicyPatch{}, false
	var failed error
	take := func(flag string, fn func() error) {
		if !p.flags.Changed(flag) || failed != nil {
			return
		}
		given = true
		if err := fn(); err != nil {
			failed = usagef("--%s: %v", flag, err)
		}
	}
	take("idle-timeout", func() error { return parseInto(&out.IdleTimeout, p.idleTimeout) })
	take("idle", func() error { out.Idle = &p.idle; return nil })
	take("connection-cap", func() error { return parseInto(&out.ConnectionCap, p.connectionCap) })
	take("on-session-close", func() error { out.OnSessionClose = &p.onSessionClose; return nil })
	take("ttl", func() error { return parseLimit(&out.TTL, p.ttl) })
	take("ttl-idle", func() error { return parseLimit(&out.TTLIdle, p.ttlIdle) })
	take("timeout", func() error { return parseLimit(&out.Timeout, p.timeout) })
	take("expires", func() (err error) { out.Expires, err = parseExpires(p.expires); return err })
	take("port", func() (err error) { out.Ports, err = parsePorts(p.ports); return err })
	egress := now
	take("egress", func() error { egress.Profile = p.egress; out.Egress = &egress; return nil })
	take("allow", func() error { egress.Allow = ruleList(p.allow); out.Egress = &egress; return nil })
	take("deny", func() error { egress.Deny = ruleList(p.deny); out.Egress = &egress; return nil })
	take("hooks", func() (err error) { out.Hooks, err = readHooks(p.hooks); return err })
	schedule := func() error {
		every, err := api.ParseDuration(p.every)
		out.Checkpoints = &api.Schedule{Every: every, Keep: p.keep}
		return err
	}
	take("checkpoint-every", schedule)
	if p.flags.Changed("checkpoint-keep") && !p.flags.Changed("checkpoint-every") {
		return nil, usagef("--checkpoint-keep needs --checkpoint-every")
	}
	if failed != nil || !given {
		return nil, failed
	}
	return out, nil
}

// changesEgress reports whether a flag changes a part of the egress policy.
func (p *policyFlags) changesEgress() bool {
	return p.flags.Changed("egress") || p.flags.Changed("allow") || p.flags.Changed("deny")
}

// ruleList returns the rules of a repeated flag; a single empty one takes all away.
func ruleList(given []string) []string {
	if len(given) == 1 && given[0] == "" {
		return nil
	}
	return given
}

func parseInto(dst **api.Duration, text string) error {
	d, err := api.ParseDuration(text)
	*dst = &d
	return err
}

// parseLimit reads DURATION[,ACTION].
func parseLimit(dst **api.Limit, text string) error {
	after, action, _ := strings.Cut(text, ",")
	d, err := api.ParseDuration(after)
	*dst = &api.Limit{After: d, Action: action}
	return err
}

// parseExpires reads TIME[,ACTION]; a day stands for its begin here.
func parseExpires(text string) (*api.Expires, error) {
	at, action, _ := strings.Cut(text, ",")
	if at == api.Never {
		return &api.Expires{}, nil
	}
	t, err := time.Parse(time.RFC3339, at)
	if err != nil {
		if t, err = time.ParseInLocation(time.DateOnly, at, time.Local); err != nil {
			return nil, fmt.Errorf("%q is no time: write for instance 2030-01-31 or 2030-01-31T12:00:00Z", at)
		}
	}
	return &api.Expires{At: t, Action: action}, nil
}

func parsePorts(list []string) (map[string]string, error) {
	ports := map[string]string{}
	for _, text := range list {
		port, access, ok := strings.Cut(text, "=")
		if _, err := strconv.ParseUint(port, 10, 16); err != nil || !ok {
			return nil, fmt.Errorf("%q: write for instance 8000=public", text)
		}
		ports[port] = access
	}
	return ports, nil
}

// readHooks reads a list of hooks from a file, or from the flag itself if that
// is a list.
func readHooks(text string) (*[]api.Hook, error) {
	data := []byte(text)
	if !strings.HasPrefix(text, "[") {
		var err error
		if data, err = os.ReadFile(text); err != nil {
			return nil, err
		}
	}
	var hooks []api.Hook
	if err := json.Unmarshal(data, &hooks); err != nil {
		return nil, fmt.Errorf("it is no list of hooks: %w", err)
	}
	return &hooks, nil
}
