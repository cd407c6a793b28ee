package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// newGuestTransport returns a transport in which a host name is a sandbox's
// id. Connections are not kept for a later request: an idle one would look
// like use of the sandbox, and it would be dead after a hibernation.
func newGuestTransport(core Core) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			id, p, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			port, err := strconv.Atoi(p)
			if err != nil {
				return nil, err
			}
			conn, err := core.Dial(ctx, id, port)
			if dialled, ok := ctx.Value(dialledKey{}).(chan net.Conn); ok && err == nil {
				dialled <- conn
			}
			return conn, err
		},
		DisableKeepAlives:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		WriteBufferSize:        64 << 10,
		ReadBufferSize:         64 << 10,
	}
}

// dialledKey is the key of a channel that takes the connection into the guest
// that is made for a request.
type dialledKey struct{}

// cutAfterSleep breaks an answer off a moment after the guest that it comes from
// went to sleep, for clients who do not read. The request is to be made with the
// context that it returns; the caller calls stop before it returns.
func cutAfterSleep(ctx context.Context, w http.ResponseWriter) (_ context.Context, stop func()) {
	dialled := make(chan net.Conn, 1) // the transport dials once: connections are not kept
	watching, cancel := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		select {
		case <-watching.Done():
		case conn := <-dialled:
			defer sandbox.AfterSleep(watching, conn, func() {
				_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0))
			})()
			<-watching.Done()
		}
	}()
	return context.WithValue(ctx, dialledKey{}, dialled), func() { cancel(); <-over }
}

// guest is a sandbox as the target of calls to its agent.
type guest struct{ id, token string }

// guest finds the sandbox that a request names and wakes it for a request of
// the kind by. The answer will tell if it had to be resumed.
func (s *Server) guest(w http.ResponseWriter, r *http.Request, by string) (guest, error) {
	woken, err := s.wake(w, r, by)
	if err != nil {
		return guest{}, err
	}
	token, err := s.core.AgentToken(r.Context(), woken.ID)
	return guest{woken.ID, token}, err
}

// wake wakes the sandbox that a request names and has the answer tell of it.
func (s *Server) wake(w http.ResponseWriter, r *http.Request, by string) (sandbox.Woken, error) {
	woken, err := s.core.Wake(r.Context(), r.PathValue("id"), by)
	if text := woken.String(); text != "" {
		w.Header().Set(api.ResumeHeader, text)
	}
	return woken, err
}

// url returns the agent's URL for a path, which begins with a slash.
func (g guest) url(p string) *url.URL {
	return &url.URL{Scheme: "http", Host: net.JoinHostPort(g.id, strconv.Itoa(guestapi.Port)), Path: p}
}

// completeCall reads the request of a procedure call to its end. A stream's
// answer may begin before the last bytes of its request came, and HTTP/1.1 then
// takes these away from the proxy, whose connection to the guest breaks. Only
// the one procedure that takes a stream is left to flow, as files are: then the
// body is nil.
func completeCall(w http.ResponseWriter, r *http.Request, target string) (body []byte, err error) {
	call := strings.HasPrefix(target, "/"+processconnect.ProcessName+"/") || strings.HasPrefix(target, "/filesystem.Filesystem/")
	if !call || target == processconnect.ProcessStreamInputProcedure {
		return nil, nil
	}
	body, err = io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return nil, fmt.Errorf("the call is %w: at most %d bytes are taken", errTooLarge, maxBody)
	}
	if err != nil {
		return nil, requestError{message: "the call broke off: " + err.Error()}
	}
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	return body, nil
}

// RoundTrip sends a request to the agent with its token and says in words what
// went wrong if there is no answer.
func (s *Server) callAgent(g guest, r *http.Request) (*http.Response, error) {
	if g.token != "" {
		r.Header.Set(guestapi.AccessHeader, g.token)
	}
	resp, err := s.guests.RoundTrip(r)
	if err != nil {
		return nil, g.unanswered(err)
	}
	return resp, nil
}

// unanswered explains an error of a call to the agent: the core's own errors
// are left as they are, a broken connection is named.
func (g guest) unanswered(err error) error {
	if _, code := classify(err); code != api.CodeInternal {
		return err
	}
	return fmt.Errorf("the agent of sandbox %s did not answer (%v): %w", g.id, err, sandbox.ErrUnavailable)
}

// proxyAgent passes a request on to the agent, for clients that speak its
// process, filesystem and file services. Both directions flow at once.
func (s *Server) proxyAgent(w http.ResponseWriter, r *http.Request) {
	target := path.Clean("/" + r.PathValue("path"))
	if guestapi.IsControl(target) {
		s.fail(w, r, routeError{r.URL.Path + " (control calls are the host's)"})
		return
	}
	g, err := s.guest(w, r, "agent")
	if err != nil {
		s.fail(w, r, err)
		return
	}
	ctx, done := s.stream(r.Context())
	defer done()
	body, err := completeCall(w, r, target)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	release, err := s.holdForCall(r, g.id, target, body)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer release()
	ctx, stop := cutAfterSleep(ctx, w)
	defer stop()
	proxy := &httputil.ReverseProxy{
		Transport:     s.guests,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		Rewrite: func(p *httputil.ProxyRequest) {
			u := g.url(target)
			u.RawQuery = p.In.URL.RawQuery
			p.Out.URL, p.Out.Host = u, ""
			cleanForGuest(p.Out.Header)
			if g.token != "" {
				p.Out.Header.Set(guestapi.AccessHeader, g.token)
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			// What a guest answers must not act in our name in a browser.
			resp.Header.Del("Set-Cookie")
			resp.Header.Set("Content-Security-Policy", "sandbox")
			resp.Header.Del(requestIDHeader)
			resp.Header.Del(api.ResumeHeader)
			resp.Header.Set(api.GuestHeader, "1")
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if cause := context.Cause(ctx); errors.Is(cause, errStopping) {
				err = cause
			}
			s.fail(w, r, g.unanswered(err))
		},
	}
	proxy.ServeHTTP(w, r.WithContext(ctx))
}

// cleanForGuest drops from a header what the guest must not see or be told:
// our key, and the tokens that are ours to set. Basic credentials stay, they
// name the user in the guest.
func cleanForGuest(h http.Header) {
	h.Del(keyHeader)
	h.Del("Cookie")
	h.Del(guestapi.TokenHeader)
	h.Del(guestapi.AccessHeader)
	scheme, _, _ := strings.Cut(h.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Basic") {
		h.Del("Authorization")
	}
}

// agentError is an error that the agent answered with. Its text comes from the
// guest: bounded, and printable.
type agentError struct {
	status  int
	message string
}

func (e agentError) Error() string { return e.message }

func (e agentError) classify() (status int, code string) {
	switch e.status {
	case http.StatusBadRequest, http.StatusUnprocessableEntity:
		return http.StatusBadRequest, api.CodeInvalid
	case http.StatusNotFound:
		return http.StatusNotFound, api.CodeNotFound
	case http.StatusConflict, http.StatusForbidden:
		return http.StatusConflict, api.CodeConflict
	case http.StatusRequestEntityTooLarge:
		return http.StatusRequestEntityTooLarge, api.CodeTooLarge
	case http.StatusInsufficientStorage:
		return http.StatusInsufficientStorage, api.CodeNoSpace
	case http.StatusNotImplemented:
		return http.StatusNotImplemented, api.CodeNotSupported
	case http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout:
		return http.StatusServiceUnavailable, api.CodeUnavailable
	}
	return http.StatusInternalServerError, api.CodeInternal
}

// maxAgentMessage bounds the text of an agent's error, in bytes.
const maxAgentMessage = 4 << 10

// readAgentError reads the error that an answer of the agent carries.
func readAgentError(g guest, resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxAgentMessage))
	var e struct {
		Message string `json:"message"`
	}
	text := string(body)
	if json.Unmarshal(body, &e) == nil && e.Message != "" {
		text = e.Message
	}
	text = printable(text)
	if text == "" {
		text = "status " + strconv.Itoa(resp.StatusCode)
	}
	return agentError{resp.StatusCode, fmt.Sprintf("sandbox %s: %s", g.id, text)}
}

// printable makes one line of printable text of what a guest said.
func printable(text string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "")))
}
