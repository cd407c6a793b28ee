package daemon

import (
	"fmt"
	"net"
	"strings"

	"github.com/hibernacle/hibernacle/internal/proxy"
)

// reach says how clients reach ports of sandboxes.
type reach struct {
	scheme string
	domain string // of hosts
	port   string // of the listener or of the proxy before it, "" is that of the scheme
}

// parseDomain reads "[SCHEME://]DOMAIN[:PORT]". Without a scheme it is the
// listener's own port that clients come to, with one that of a proxy before it.
// Without listener (nil) the port stays empty.
func parseDomain(text string, listener net.Addr) (reach, error) {
	r := reach{scheme: "http", domain: text}
	scheme, rest, ok := strings.Cut(text, "://")
	if ok {
		r.scheme, r.domain = scheme, rest
	} else if tcp, isTCP := listener.(*net.TCPAddr); isTCP {
		r.port = fmt.Sprint(tcp.Port)
	}
	if domain, port, err := net.SplitHostPort(r.domain); err == nil {
		r.domain, r.port = domain, port
	}
	if r.domain == "" && !ok {
		r.domain = proxy.DefaultDomain
	}
	if r.scheme != "http" && r.scheme != "https" {
		return r, fmt.Errorf("domain %q: the scheme must be http or https", text)
	}
	return r, proxy.CheckDomain(r.domain)
}

// portURL returns the URL of a port of a sandbox, with {port} and {id} in it.
func (r reach) portURL() string {
	host := "{port}-{id}." + r.domain
	if r.port != "" {
		host += ":" + r.port
	}
	return r.scheme + "://" + host + "/"
}
