package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"mime"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

const (
	// settleTime is how long a port that nobody listens at yet is tried again
	// after a resume: a server that was just starting goes on from there.
	settleTime  = time.Second
	settlePause = 20 * time.Millisecond

	// continueTime is how long a guest may take to say whether it wants the body
	// of a request that asks first.
	continueTime = 2 * time.Second

	maxAnswerHeader = 256 << 10 // bytes
)

// pathPolicy keeps scripts of an answer from acting in the name of the host
// that the API has, which paths share.
const pathPolicy = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"

// connKey is the key of the connection that a request is to use.
type connKey struct{}

// newTransport returns a transport that uses the connection that the request's
// context carries, once.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return ctx.Value(connKey{}).(net.Conn), nil
		},
		DisableKeepAlives:      true,
		DisableCompression:     true,
		ExpectContinueTimeout:  continueTime,
		MaxResponseHeaderBytes: maxAnswerHeader,
		ReadBufferSize:         32 << 10,
		WriteBufferSize:        32 << 10,
	}
}

// transport returns the transport for a request and what to do with it
// afterwards. gRPC needs HTTP/2 to the guest, too: that gets one of its own,
// since HTTP/2 connections would be shared between requests.
func (p *Proxy) transport(r *http.Request) (_ *http.Transport, done func()) {
	if r.ProtoMajor < 2 || !strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		return p.http1, func() {}
	}
	t := newTransport()
	t.Protocols = new(http.Protocols)
	t.Protocols.SetUnencryptedHTTP2(true)
	return t, t.CloseIdleConnections
}

// open connects to a port and wakes the sandbox for that.
func (p *Proxy) open(ctx context.Context, id string, port int) (net.Conn, sandbox.Woken, error) {
	woken, err := p.core.Wake(ctx, id, fmt.Sprintf("http %d", port))
	if err != nil {
		return nil, woken, err
	}
	begun := time.Now()
	for {
		conn, err := p.core.Dial(ctx, id, port)
		if !woken.Resumed || !errors.Is(err, sandbox.ErrRefused) || time.Since(begun) > settleTime {
			return conn, woken, err
		}
		select {
		case <-ctx.Done():
			return nil, woken, err
		case <-time.After(settlePause):
		}
	}
}

// forward sends the request over conn and passes the answer on. An error says
// that nothing was answered yet.
func (p *Proxy) forward(w *answerWriter, r *http.Request, t target, id string, conn net.Conn, woken sandbox.Woken) error {
	ctx, cancel := context.WithCancelCause(context.WithValue(r.Context(), connKey{}, conn))
	defer cancel(nil)
	if r.Header.Get("Upgrade") != "" && !p.stream(ctx, cancel) {
		return errStopping
	}
	defer sandbox.AfterSleep(ctx, conn, func() { cancel(errAsleep); w.cut() })()
	transport, done := p.transport(r)
	defer done()
	var failed error
	end := func() {} // of a session
	defer func() { end() }()
	rp := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		Rewrite:       func(pr *httputil.ProxyRequest) { rewrite(pr, t, id) },
		ModifyResponse: func(resp *http.Response) error {
			if isEndless(resp) && !p.stream(ctx, cancel) {
				return errStopping
			}
			if isPreview(resp) {
				ended, err := p.core.Session(id, sandbox.SessionPreview)
				if err != nil {
					return err
				}
				end = ended
			}
			clean(resp.Header, t)
			if s := woken.String(); s != "" {
				resp.Header.Set(api.ResumeHeader, s)
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, _ *http.Request, err error) { failed = err },
	}
	r = r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		// Either direction may go on when the other has begun; HTTP/2 needs no word.
		_ = http.NewResponseController(w).EnableFullDuplex()
		body := &requestBody{body: r.Body}
		r.Body = body
		if r.ProtoMajor == 1 {
			w.request = body
		}
		defer body.finish(w)
	}
	rp.ServeHTTP(w, r)
	switch cause := context.Cause(ctx); {
	case failed == nil || w.status != 0:
		return nil
	case errors.Is(cause, errStopping), errors.Is(cause, errAsleep):
		return cause
	case ctx.Err() != nil:
		return ctx.Err() // the client's loss
	case sandbox.IsAsleep(conn):
		return errAsleep
	}
	return upstreamError{id, t.port, failed}
}

// rewrite makes the request to the guest of that of the client.
func rewrite(pr *httputil.ProxyRequest, t target, id string) {
	pr.Out.URL = t.outURL(pr.In.URL, id)
	pr.Out.Host = pr.In.Host // what links of a page are made with
	pr.Out.Trailer = pr.In.Trailer
	if fromHere(pr.In.RemoteAddr) { // by way of a TLS proxy on this host
		pr.Out.Header["X-Forwarded-For"] = pr.In.Header["X-Forwarded-For"]
	}
	pr.SetXForwarded()
	if fromHere(pr.In.RemoteAddr) {
		for _, name := range []string{"X-Forwarded-Proto", "X-Forwarded-Host"} {
			if v := pr.In.Header.Get(name); v != "" {
				pr.Out.Header.Set(name, v)
			}
		}
	}
	pr.Out.Header.Del("X-Forwarded-Prefix")
	if t.byPath {
		pr.Out.Header.Set("X-Forwarded-Prefix", t.prefix())
	}
}

// fromHere tells whether a peer is on this host.
func fromHere(addr string) bool {
	ap, err := netip.ParseAddrPort(addr)
	return err == nil && ap.Addr().Unmap().IsLoopback()
}

// clean takes out of an answer what a guest must not say in another's name, and
// makes what it says of paths fit those of the client.
func clean(h http.Header, t target) {
	h.Del(api.ResumeHeader)
	cookies := h["Set-Cookie"]
	h.Del("Set-Cookie")
	for _, line := range cookies {
		if line, ok := ownCookie(line, t); ok {
			h.Add("Set-Cookie", line)
		}
	}
	if !t.byPath {
		return
	}
	h.Add("Content-Security-Policy", pathPolicy)
	if l := h.Get("Location"); strings.HasPrefix(l, "/") && !strings.HasPrefix(l, "//") && !strings.HasPrefix(l+"/", t.prefix()+"/") {
		h.Set("Location", t.prefix()+l)
	}
}

// ownCookie makes of a cookie one of the target alone: a guest sets none for
// other hosts of the domain, nor for other paths of the API's host.
func ownCookie(line string, t target) (string, bool) {
	c, err := http.ParseSetCookie(line)
	if err != nil || c.Name == tokenName {
		return "", false
	}
	if c.Domain == "" && !t.byPath {
		return line, true
	}
	c.Domain = ""
	if t.byPath {
		if !strings.HasPrefix(c.Path, "/") {
			c.Path = "/"
		}
		if !strings.HasPrefix(c.Path+"/", t.prefix()+"/") {
			c.Path = t.prefix() + c.Path
		}
	}
	line = c.String()
	return line, line != ""
}

// isEndless tells whether an answer lasts as long as its client likes.
func isEndless(resp *http.Response) bool {
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	return kind == "text/event-stream"
}

// requestBody is the body of a request, which the transport reads while the
// answer is passed on. When the request is over nobody may read it any more, or
// the server meets that reader on its connection.
type requestBody struct {
	mu    sync.Mutex // held while it is read
	over  atomic.Bool
	ended atomic.Bool // there is nothing more to be read
	body  io.Reader
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.body.Read(p)
	if err != nil {
		b.ended.Store(true)
	}
	return n, err
}

// Close leaves the body to the server.
func (b *requestBody) Close() error { return nil }

// finish ends reading. What is still read then was not wanted to the end.
func (b *requestBody) finish(w http.ResponseWriter) {
	b.over.Store(true)
	if b.ended.Load() {
		return
	}
	if !b.mu.TryLock() {
		_ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0))
		b.mu.Lock()
	}
	b.mu.Unlock()
}

// isPreview tells whether a WebSocket begins: somebody looks at a preview.
func isPreview(resp *http.Response) bool {
	return resp.StatusCode == http.StatusSwitchingProtocols && strings.EqualFold(resp.Header.Get("Upgrade"), "websocket")
}

// answerWriter remembers the status of an answer and can break it off.
type answerWriter struct {
	http.ResponseWriter
	status   int          // 0 until the header is written
	request  *requestBody // of a connection that takes one request after the other; nil: there is none
	hijacked chan net.Conn
}

func newAnswerWriter(w http.ResponseWriter) *answerWriter {
	return &answerWriter{ResponseWriter: w, hijacked: make(chan net.Conn, 1)}
}

func (w *answerWriter) WriteHeader(status int) {
	if status == http.StatusContinue {
		return // the server says so itself when the body is read, which is now
	}
	if w.status == 0 && status >= http.StatusOK { // what comes before is no answer
		w.status = status
		if w.request != nil && !w.request.ended.Load() {
			// What is left of the request stands in the way of the next one.
			w.Header().Set("Connection", "close")
		}
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *answerWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController reach flushing and deadlines.
func (w *answerWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Hijack takes the connection over and remembers it.
func (w *answerWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err == nil {
		w.status = http.StatusSwitchingProtocols
		w.hijacked <- conn
	}
	return conn, rw, err
}

// cut has writes of the answer fail from now on, also those under way.
func (w *answerWriter) cut() {
	select {
	case conn := <-w.hijacked:
		conn.Close()
	default:
		_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Unix(1, 0))
	}
}
