package proxy

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"net/http"
	"strconv"
	"strings"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// errAsleep says that the guest went to sleep before it answered.
var errAsleep = errors.New("the sandbox was hibernated before it answered")

// goneError is a request for a sandbox that is being deleted.
type goneError struct{ id string }

func (e goneError) Error() string { return "sandbox " + e.id + " is being deleted" }

// upstreamError is a server in a sandbox that did not answer.
type upstreamError struct {
	id   string
	port int
	err  error
}

func (e upstreamError) Error() string {
	return fmt.Sprintf("the server at port %d of sandbox %s broke the connection off before it answered: %v", e.port, e.id, e.err)
}

func (e upstreamError) Unwrap() error { return e.err }

// answer is what a client is told instead of the guest's answer.
type answer struct {
	status int
	retry  int // seconds until another try is worth it, 0: it is not said
	body   api.Error
}

// How long a client may wait before it tries again, in seconds: where the
// obstacle passes by itself, and where somebody has to make room first.
const (
	retrySoon  = 1
	retryLater = 5
)

// answerTo is the one map from errors to answers. What it does not know is a
// fault of ours.
func answerTo(err error) answer {
	var (
		malformed targetError
		gone      goneError
		upstream  upstreamError
	)
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	a := answer{body: api.Error{Message: err.Error(), Hint: sandbox.Hint(err)}}
	set := func(status, retry int, code, hint string) answer {
		a.status, a.retry, a.body.Code, a.body.Hint = status, retry, code, cmp.Or(a.body.Hint, hint)
		return a
	}
	switch {
	case errors.As(err, &malformed):
		return set(http.StatusNotFound, 0, api.CodeNotFound, "a host is of the form PORT-ID.DOMAIN, a path of the form /sandboxes/ID/ports/PORT/; hib url ID PORT prints one")
	case errors.As(err, &gone):
		return set(http.StatusGone, 0, api.CodeNotFound, "hib ls shows the sandboxes")
	case is(errNoPass):
		return set(http.StatusUnauthorized, 0, api.CodeUnauthorized, "send the sandbox's traffic_token as the header "+tokenHeader+" or, in a browser, as ?"+tokenName+"=TOKEN; hib url ID PORT prints such a URL")
	case is(errAgentPass):
		return set(http.StatusUnauthorized, 0, api.CodeUnauthorized, "send the access token as the header "+guestapi.AccessHeader)
	case is(errWrongPass):
		return set(http.StatusForbidden, 0, api.CodeUnauthorized, "hib url ID PORT prints a URL with the right one")
	case is(errHostsOnly):
		return set(http.StatusForbidden, 0, api.CodeUnauthorized, "servers in a sandbox may use every other port")
	case is(errAsleep):
		return set(http.StatusServiceUnavailable, retrySoon, api.CodeUnavailable, "send it again if it does no harm twice: that wakes the sandbox")
	case is(errStopping):
		return set(http.StatusServiceUnavailable, retryLater, api.CodeUnavailable, "try again when the daemon is back")
	case errors.As(err, &upstream):
		return set(http.StatusBadGateway, 0, api.CodeUnavailable, "look at what the server in the sandbox printed")
	}
	return answerToCore(err, set)
}

// answerToCore is the part of the map for the core's errors.
func answerToCore(err error, set func(status, retry int, code, hint string) answer) answer {
	kind := err
	if e, ok := errors.AsType[*sandbox.Error](err); ok {
		kind = e.Kind // the outermost one, whatever lies beneath
	}
	switch {
	case errors.Is(kind, sandbox.ErrNotFound):
		return set(http.StatusNotFound, 0, api.CodeNotFound, "hib ls shows the sandboxes")
	case errors.Is(kind, sandbox.ErrRefused):
		return set(http.StatusBadGateway, 0, api.CodeUnavailable, "start a server there")
	case errors.Is(kind, sandbox.ErrFailed): // until somebody sees to it
		return set(http.StatusServiceUnavailable, 0, api.CodeFailed, "")
	case errors.Is(kind, sandbox.ErrConflict):
		return set(http.StatusServiceUnavailable, retrySoon, api.CodeConflict, "try again")
	case errors.Is(kind, sandbox.ErrNoSpace):
		return set(http.StatusServiceUnavailable, retryLater, api.CodeNoSpace, "free some disk space")
	case errors.Is(kind, sandbox.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		return set(http.StatusServiceUnavailable, retryLater, api.CodeUnavailable, "try again")
	}
	return set(http.StatusInternalServerError, 0, api.CodeInternal, "the daemon's log has more")
}

// fail answers a request with err.
func (p *Proxy) fail(w *answerWriter, r *http.Request, t target, woken sandbox.Woken, err error) {
	if r.Context().Err() != nil { // nobody is there to be told
		panic(http.ErrAbortHandler)
	}
	a := answerTo(err)
	if t.port == guestapi.Port && (a.status == http.StatusNotFound || a.status == http.StatusGone) {
		a.status = http.StatusBadGateway // what clients of the agent take for a sandbox that is no more
	}
	if a.status >= http.StatusInternalServerError && a.status != http.StatusBadGateway { // that is the guest's
		p.log.Warn("a request to a sandbox was not answered", "sandbox", t.id, "port", t.port, "status", a.status, "error", err)
	}
	h := w.Header()
	clear(h)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if s := woken.String(); s != "" {
		h.Set(api.ResumeHeader, s)
	}
	if a.retry > 0 {
		h.Set("Retry-After", strconv.Itoa(a.retry))
	}
	if a.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="hibernacle"`)
	}
	if !wantsPage(r) {
		h.Set("Content-Type", "application/json")
		w.WriteHeader(a.status)
		_ = json.NewEncoder(w).Encode(a.body)
		return
	}
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	w.WriteHeader(a.status)
	title := fmt.Sprintf("%d %s", a.status, http.StatusText(a.status))
	fmt.Fprintf(w, page, title, title, html.EscapeString(a.body.Message), html.EscapeString(a.body.Hint))
}

// page is the answer to a browser: title, heading, message, hint.
const page = `<!doctype html>
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>%s</title>
<body style="font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:15vh auto;padding:0 1em">
<h1 style="font-size:1.3em">%s</h1><p>%s<p style="color:#666">%s
`

// wantsPage tells whether a client would rather have a page than JSON.
func wantsPage(r *http.Request) bool {
	for _, line := range r.Header.Values("Accept") {
		if strings.Contains(line, "text/html") {
			return true
		}
	}
	return false
}
