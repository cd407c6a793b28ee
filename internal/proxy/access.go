package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// Where a request may show a pass. What is in these two headers is always a
// pass; the others are the guest's own unless they hold one.
const (
	tokenHeader    = api.TokenHeader
	e2bTokenHeader = "E2b-Traffic-Access-Token"
	keyHeader      = "X-Api-Key"
	tokenName      = api.TokenParameter // of a query parameter and of a cookie
)

// headers that are taken for passes wherever they stand.
var passHeaders = []string{tokenHeader, e2bTokenHeader}

var (
	errNoPass    = errors.New("the port is private, and the request shows no token")
	errWrongPass = errors.New("the port is private, and the token is wrong")
	errAgentPass = errors.New("the agent's port needs the agent's access token or the API key")
	errHostsOnly = errors.New("that port is the host's own")
)

// same compares secrets in a time that depends on neither.
func same(shown, want string) bool {
	a, b := sha256.Sum256([]byte(shown)), sha256.Sum256([]byte(want))
	return want != "" && subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// admit checks that a request may reach its target and takes the passes out of
// it. It may answer by itself: a browser that shows the token in its address
// gets it as a cookie.
func (p *Proxy) admit(w http.ResponseWriter, r *http.Request, t target, sb sandbox.Sandbox) (answered bool, err error) {
	switch t.port {
	case guestapi.CallPort:
		return false, errHostsOnly
	case guestapi.Port:
		return false, p.admitAgent(r, t, sb)
	}
	shown := p.takePasses(r, t.byPath, sb.TrafficToken)
	if shown.address && !t.byPath && isPage(r) {
		setCookie(w, r, sb.TrafficToken)
		redirect(w, r, http.StatusSeeOther, r.URL.EscapedPath(), r.URL.RawQuery)
		return true, nil
	}
	switch {
	case shown.good || isPublic(sb, t.port):
		return false, nil
	case shown.bad:
		return false, errWrongPass
	}
	return false, errNoPass
}

// isPublic tells whether a port needs no pass.
func isPublic(sb sandbox.Sandbox, port int) bool { return slices.Contains(sb.Policy.Public, port) }

// admitAgent checks a call to the agent. The host's own calls are refused
// besides, as the agent does that needs another token for them.
func (p *Proxy) admitAgent(r *http.Request, t target, sb sandbox.Sandbox) error {
	if guestapi.IsControl(t.outURL(r.URL, sb.ID).Path) {
		return errHostsOnly
	}
	token, err := p.core.AgentToken(r.Context(), sb.ID)
	if err != nil {
		return err
	}
	if !same(r.Header.Get(guestapi.AccessHeader), token) && !same(r.Header.Get(keyHeader), p.key) {
		return errAgentPass
	}
	p.takePasses(r, false, sb.TrafficToken)
	r.Header.Del(guestapi.TokenHeader)
	r.Header.Set(guestapi.AccessHeader, token)
	return nil
}

// passes says what a request showed.
type passes struct {
	good, bad bool // one that is right, one that is wrong
	address   bool // a right one stood in the URL
}

// takePasses finds the passes in a request and takes them out of it.
func (p *Proxy) takePasses(r *http.Request, byPath bool, token string) passes {
	var shown passes
	note := func(pass string) bool {
		ok := same(pass, token) || same(pass, p.key)
		shown.good, shown.bad = shown.good || ok, shown.bad || !ok
		return ok
	}
	for _, name := range passHeaders {
		for _, pass := range r.Header.Values(name) {
			note(pass)
		}
		r.Header.Del(name)
	}
	// These may be the guest's own: they count only if they are a pass.
	takeOwn(r.Header, keyHeader, func(v string) bool {
		ok := same(v, p.key)
		shown.good = shown.good || ok
		return ok
	})
	takeOwn(r.Header, "Authorization", func(v string) bool {
		scheme, pass, _ := strings.Cut(v, " ")
		pass = strings.TrimSpace(pass)
		ok := strings.EqualFold(scheme, "Bearer") && (same(pass, token) || same(pass, p.key))
		shown.good = shown.good || ok
		return ok
	})
	for _, pass := range takeQuery(r.URL) {
		if note(pass) {
			shown.address = true
		}
	}
	// Scripts of every sandbox share the host of path form, and so its cookies.
	for _, pass := range takeCookie(r.Header) {
		if !byPath {
			note(pass)
		}
	}
	return shown
}

// takeOwn takes the values of a header that are passes out of it, wherever
// among others they stand.
func takeOwn(h http.Header, name string, isPass func(string) bool) {
	left := slices.DeleteFunc(slices.Clone(h.Values(name)), isPass)
	h.Del(name)
	for _, v := range left {
		h.Add(name, v)
	}
}

// takeQuery takes the parameters of that name out of a query, byte for byte
// leaving the others, and returns their values.
func takeQuery(u *url.URL) (values []string) {
	if !strings.Contains(u.RawQuery, tokenName) {
		return nil
	}
	kept := slices.DeleteFunc(strings.Split(u.RawQuery, "&"), func(pair string) bool {
		name, value, _ := strings.Cut(pair, "=")
		if unescaped, err := url.QueryUnescape(name); err != nil || unescaped != tokenName {
			return false
		}
		value, _ = url.QueryUnescape(value)
		values = append(values, value)
		return true
	})
	u.RawQuery = strings.Join(kept, "&")
	return values
}

// takeCookie takes the cookies of that name out of a header and returns their
// values.
func takeCookie(h http.Header) (values []string) {
	lines := h.Values("Cookie")
	if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, tokenName) }) {
		return nil
	}
	var left []string
	for _, line := range lines {
		for part := range strings.SplitSeq(line, ";") {
			part = strings.TrimSpace(part)
			if name, value, _ := strings.Cut(part, "="); strings.TrimSpace(name) == tokenName {
				values = append(values, strings.TrimSpace(value))
			} else if part != "" {
				left = append(left, part)
			}
		}
	}
	h.Del("Cookie")
	if len(left) > 0 {
		h.Set("Cookie", strings.Join(left, "; "))
	}
	return values
}

// isPage tells whether a browser asks for a page to show.
func isPage(r *http.Request) bool {
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && wantsPage(r) && r.Header.Get("Upgrade") == ""
}

// setCookie gives a browser the token for this host alone. Scripts cannot read it.
func setCookie(w http.ResponseWriter, r *http.Request, token string) {
	http.SetCookie(w, &http.Cookie{
		Name: tokenName, Value: token, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode,
		Secure: r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https",
	})
}

// redirect sends a client to a path of the same host.
func redirect(w http.ResponseWriter, r *http.Request, status int, path, query string) {
	where := "/" + strings.TrimLeft(path, `/\`) // "//x" would be another host
	if query != "" {
		where += "?" + query
	}
	h := w.Header()
	h.Set("Location", where)
	h.Set("Cache-Control", "no-store")
	h.Set("Referrer-Policy", "no-referrer")
	w.WriteHeader(status)
}
