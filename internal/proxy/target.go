package proxy

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// pathPrefix begins the paths that name a target.
const pathPrefix = "/sandboxes/"

var (
	// A label of a host that is meant for a port, well-formed or not.
	portLabel = regexp.MustCompile(`^[0-9]+-`)
	// The path of a target, likewise.
	pathForm    = regexp.MustCompile(`^/sandboxes/[^/]*/ports/[^/]*(/|$)`)
	idOrName    = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	domainLabel = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)
)

// target is a port of a sandbox as a request names it.
type target struct {
	id     string // or a name
	port   int
	byPath bool
	owner  string // id as it stands in the path
	rest   string // of the path, escaped, "" or with a slash first; of path form only
}

// prefix is the part of the path that names the target, "" if the host does.
func (t target) prefix() string {
	if !t.byPath {
		return ""
	}
	return pathPrefix + t.owner + "/ports/" + strconv.Itoa(t.port)
}

// targetError is a request for what can be no port of a sandbox.
type targetError struct{ message string }

func (e targetError) Error() string { return e.message }

// hostLabel returns the label that names a port in front of the domain.
func (p *Proxy) hostLabel(host string) (label string, ok bool) {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	label, ok = strings.CutSuffix(strings.TrimSuffix(strings.ToLower(host), "."), p.domain)
	return label, ok && portLabel.MatchString(label) && !strings.Contains(label, ".")
}

// target reads what a request that Match picked is for.
func (p *Proxy) target(r *http.Request) (target, error) {
	if label, ok := p.hostLabel(r.Host); ok {
		port, id, _ := strings.Cut(label, "-")
		return newTarget(port, id, target{})
	}
	// The escaped form: a slash within a segment of the guest's is none of ours.
	rest := strings.TrimPrefix(r.URL.EscapedPath(), pathPrefix)
	id, rest, _ := strings.Cut(rest, "/")
	rest = strings.TrimPrefix(rest, "ports/")
	port, rest, slash := strings.Cut(rest, "/")
	if slash {
		rest = "/" + rest
	}
	return newTarget(port, id, target{byPath: true, owner: id, rest: rest})
}

func newTarget(port, id string, t target) (target, error) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || port[0] == '0' {
		return t, targetError{fmt.Sprintf("%.20q is no port: a port is a number from 1 to 65535", port)}
	}
	if !idOrName.MatchString(id) {
		return t, targetError{fmt.Sprintf("%.80q is no id or name of a sandbox", id)}
	}
	t.id, t.port = id, int(n)
	return t, nil
}

// outURL is the URL of the request to the guest for that of the client.
func (t target) outURL(in *url.URL, id string) *url.URL {
	u := &url.URL{Scheme: "http", Host: net.JoinHostPort(id, strconv.Itoa(t.port)), Path: in.Path, RawPath: in.RawPath, RawQuery: in.RawQuery, ForceQuery: in.ForceQuery}
	if t.byPath {
		if path, err := url.PathUnescape(t.rest); err == nil { // it was escaped a moment ago
			u.Path, u.RawPath = path, t.rest
		}
	}
	return u
}
