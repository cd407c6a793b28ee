package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/webhook"
)

// Errors of the HTTP layer itself.
var (
	errUnauthorized = errors.New("the API key is missing or wrong")
	errStopping     = errors.New("the daemon is stopping")
	errTooLarge     = errors.New("too large")
	errPanic        = errors.New("internal error")
	errNoUpgrade    = errors.New("this route needs the header \"Upgrade: tcp\"")
)

// requestError is a request that is malformed; its text is for the caller.
type requestError struct{ message, hint string }

func (e requestError) Error() string { return e.message }

// Hint says what to do instead.
func (e requestError) Hint() string { return e.hint }

// routeError is a path that no route has.
type routeError struct{ path string }

func (e routeError) Error() string { return fmt.Sprintf("no such route: %s", e.path) }

// methodError is a method that a path does not take.
type methodError struct{ method, path, allow string }

func (e methodError) Error() string { return fmt.Sprintf("%s does not take %s", e.path, e.method) }

// Hint names the methods that the path takes.
func (e methodError) Hint() string { return "it takes " + e.allow }

// classify is the one map from errors to answers. What it does not know is a
// fault of ours.
func classify(err error) (status int, code string) {
	var (
		request requestError
		route   routeError
		method  methodError
		agent   agentError
	)
	switch {
	case errors.Is(err, errUnauthorized):
		return http.StatusUnauthorized, api.CodeUnauthorized
	case errors.As(err, &route):
		return http.StatusNotFound, api.CodeNotFound
	case errors.As(err, &method):
		return http.StatusMethodNotAllowed, api.CodeInvalid
	case errors.Is(err, errNoUpgrade):
		return http.StatusUpgradeRequired, api.CodeInvalid
	case errors.Is(err, errTooLarge):
		return http.StatusRequestEntityTooLarge, api.CodeTooLarge
	case errors.As(err, &request):
		return http.StatusBadRequest, api.CodeInvalid
	case errors.As(err, &agent):
		return agent.classify()

	case errors.Is(err, webhook.ErrNotFound):
		return http.StatusNotFound, api.CodeNotFound
	case errors.Is(err, webhook.ErrInvalid):
		return http.StatusBadRequest, api.CodeInvalid
	case errors.Is(err, errors.ErrUnsupported):
		return http.StatusNotImplemented, api.CodeNotSupported
	}
	return classifyCore(err)
}

// classifyCore is the part of the map for the core's errors.
func classifyCore(err error) (status int, code string) {
	kind := err
	if e, ok := errors.AsType[*sandbox.Error](err); ok {
		kind = e.Kind // the outermost one, whatever lies beneath
	}
	switch {
	case errors.Is(kind, sandbox.ErrNotFound):
		return http.StatusNotFound, api.CodeNotFound
	case errors.Is(kind, sandbox.ErrInvalid):
		return http.StatusBadRequest, api.CodeInvalid
	case errors.Is(kind, sandbox.ErrNoSpace):
		return http.StatusInsufficientStorage, api.CodeNoSpace
	case errors.Is(kind, sandbox.ErrFailed):
		return http.StatusConflict, api.CodeFailed
	case errors.Is(kind, sandbox.ErrConflict):
		return http.StatusConflict, api.CodeConflict
	case errors.Is(kind, sandbox.ErrUnavailable), errors.Is(kind, sandbox.ErrRefused), errors.Is(err, errStopping),
		errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return http.StatusServiceUnavailable, api.CodeUnavailable
	}
	return http.StatusInternalServerError, api.CodeInternal
}

// toError returns the body that tells a client of err.
func toError(err error) api.Error {
	_, code := classify(err)
	e := api.Error{Code: code, Message: err.Error(), Hint: sandbox.Hint(err)}
	var hinted interface{ Hint() string }
	if errors.As(err, &hinted) {
		e.Hint = hinted.Hint()
	}
	if e.Hint == "" {
		e.Hint = defaultHint(code)
	}
	return e
}

// defaultHint says what to do about a code where the error itself does not.
func defaultHint(code string) string {
	switch code {
	case api.CodeUnauthorized:
		return "send the key from the file " + api.KeyFile + " in the data folder as \"Authorization: Bearer KEY\" or \"X-API-Key: KEY\""
	case api.CodeInvalid:
		return "correct the request; /v1/openapi.json describes what is taken"
	case api.CodeNotFound:
		return "/v1/openapi.json lists the routes"
	case api.CodeTooLarge:
		return "send less in one request; files go through /v1/sandboxes/{id}/files in any size"
	case api.CodeConflict:
		return "look at the state with hib inspect, then try again"
	case api.CodeFailed:
		return "hib resume brings a failed sandbox back from its last snapshot"
	case api.CodeNotSupported:
		return "/v1/openapi.json describes what is supported"
	case api.CodeNoSpace:
		return "free some disk space; nothing that was kept is lost"
	case api.CodeUnavailable:
		return "try again"
	case api.CodeInternal:
		return "the daemon's log has more under this answer's X-Request-Id"
	}
	return ""
}

// retryAfter is when another try of what is not available is worth it, in seconds.
const retryAfter = "2"

// fail answers a request with err.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	status, _ := classify(err)
	note(r.Context(), err)
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", retryAfter)
	}
	writeJSON(w, status, toError(err))
}
