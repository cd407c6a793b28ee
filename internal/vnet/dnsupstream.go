package vnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/miekg/dns"
)

const (
	resolvConf      = "/etc/resolv.conf"
	upstreamTimeout = 2 * time.Second // one exchange
	upstreamTotal   = 6 * time.Second // one question, whatever servers it takes
	upstreamRounds  = 2
	upstreamSize    = 1232 // bytes of a datagram that crosses every network whole
)

// upstream asks DNS servers that the host uses.
type upstream struct {
	servers []string // nil: those of resolvConf
}

// ask returns the first answer of a server to the guest's question. The message
// sent is made anew: nothing of the guest's but name, type and flags leaves.
func (u upstream) ask(ctx context.Context, query *dns.Msg) (*dns.Msg, error) {
	servers, err := u.list()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, upstreamTotal)
	defer cancel()
	q := query.Question[0]
	m := new(dns.Msg).SetQuestion(q.Name, q.Qtype)
	m.CheckingDisabled = query.CheckingDisabled
	opt := query.IsEdns0()
	m.SetEdns0(upstreamSize, opt != nil && opt.Do())

	for range upstreamRounds {
		for _, server := range servers {
			got, askErr := exchange(ctx, m, server)
			if askErr == nil && got.Rcode != dns.RcodeServerFailure {
				return got, nil
			}
			if askErr == nil {
				askErr = errors.New("server failure")
			}
			err = fmt.Errorf("ask DNS server %s: %w", server, askErr)
			if ctx.Err() != nil {
				return nil, err
			}
		}
	}
	return nil, err
}

func (u upstream) list() ([]string, error) {
	servers := u.servers
	if servers == nil {
		conf, err := dns.ClientConfigFromFile(resolvConf)
		if err != nil {
			return nil, fmt.Errorf("find the host's DNS servers: %w", err)
		}
		for _, s := range conf.Servers {
			servers = append(servers, net.JoinHostPort(s, conf.Port))
		}
	}
	if len(servers) == 0 {
		return nil, errors.New("the host has no DNS servers")
	}
	return servers, nil
}

// exchange asks by UDP, and by TCP when the answer does not fit a datagram.
func exchange(ctx context.Context, m *dns.Msg, server string) (*dns.Msg, error) {
	client := dns.Client{Net: "udp", Timeout: upstreamTimeout, UDPSize: upstreamSize}
	got, _, err := client.ExchangeContext(ctx, m, server)
	if err == nil && got.Truncated {
		client.Net = "tcp"
		got, _, err = client.ExchangeContext(ctx, m, server)
	}
	switch {
	case err != nil:
		return nil, err
	case !answers(got, m):
		return nil, errors.New("the answer is for another question")
	}
	return got, nil
}

func answers(got, asked *dns.Msg) bool {
	return got.Response && got.Id == asked.Id && len(got.Question) == 1 &&
		strings.EqualFold(got.Question[0].Name, asked.Question[0].Name) &&
		got.Question[0].Qtype == asked.Question[0].Qtype
}
