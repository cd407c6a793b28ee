package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"
)

// requestIDHeader carries the id under which a request is logged.
const requestIDHeader = "X-Request-Id"

// Keys of the request log. Queries, headers and bodies are never logged: they
// may hold what is private. An error is logged where it is not the client's.
const (
	logRequest = "request"
	logMethod  = "method"
	logPath    = "path"
	logStatus  = "status"
	logTime    = "ms"
	logError   = "error"
)

// observe gives each request an id, logs it, and turns a panic into an answer
// without details.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := &record{}
		ow := &observedWriter{ResponseWriter: w}
		id := rand.Text()[:12]
		ow.Header().Set(requestIDHeader, id)
		ow.Header().Set("X-Content-Type-Options", "nosniff")
		r = r.WithContext(context.WithValue(r.Context(), recordKey{}, rec))
		start := time.Now()
		defer func() {
			v := recover()
			if v != nil {
				rec.err = fmt.Errorf("panic: %v", v)
				s.recovered(ow, v, id)
			}
			took := time.Since(start)
			s.logRequest(r, ow, rec.err, id, took)
			if s.answered != nil {
				s.answered(r.Pattern, ow.status, took) // the router has set the pattern
			}
			if ow.broken {
				panic(http.ErrAbortHandler) // cut the answer that had begun
			}
		}()
		next.ServeHTTP(ow, r)
	})
}

// recovered answers a request whose handler panicked, if it still can.
func (s *Server) recovered(w *observedWriter, v any, id string) {
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		w.broken = true
		return
	}
	s.log.Error("handler panicked", logRequest, id, "panic", v, "stack", string(debug.Stack()))
	if w.status != 0 {
		w.broken = true
		return
	}
	writeJSON(w, http.StatusInternalServerError, toError(errPanic))
}

func (s *Server) logRequest(r *http.Request, w *observedWriter, err error, id string, d time.Duration) {
	level := slog.LevelDebug
	if w.status >= 500 && r.Context().Err() == nil { // a client that left is no fault
		level = slog.LevelWarn
	}
	attrs := []slog.Attr{
		slog.String(logRequest, id), slog.String(logMethod, r.Method), slog.String(logPath, r.URL.Path),
		slog.Int(logStatus, w.status), slog.Int64(logTime, d.Milliseconds()),
	}
	if err != nil && w.status >= 500 {
		attrs = append(attrs, slog.String(logError, err.Error()))
	}
	s.log.LogAttrs(context.WithoutCancel(r.Context()), level, "answered", attrs...)
}

// record is what the request log learns from inside a handler.
type record struct{ err error }

type recordKey struct{}

// note tells the request log about an error that the client was told of.
func note(ctx context.Context, err error) {
	if rec, ok := ctx.Value(recordKey{}).(*record); ok {
		rec.err = err
	}
}

// observedWriter remembers the status of an answer.
type observedWriter struct {
	http.ResponseWriter
	status int  // 0 until the header is written
	broken bool // the answer can't be finished
}

func (w *observedWriter) WriteHeader(status int) {
	if w.status == 0 || w.status < 200 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *observedWriter) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController reach flushing and hijacking.
func (w *observedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
