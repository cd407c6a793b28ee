package server

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// followEvery is how often a followed log is looked at for more.
const followEvery = 200 * time.Millisecond

// getLogs streams what the guest printed on its console; with follow=true it
// goes on with what is printed from now on.
func (s *Server) getLogs(w http.ResponseWriter, r *http.Request) {
	follow := false
	if v := r.URL.Query().Get("follow"); v != "" {
		var err error
		if follow, err = strconv.ParseBool(v); err != nil {
			s.fail(w, r, requestError{"the query parameter \"follow\" must be true or false", ""})
			return
		}
	}
	ctx, done := s.stream(r.Context())
	defer done()
	logs, err := s.core.Logs(ctx, r.PathValue("id"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer logs.Close()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	out := flushingWriter{w, http.NewResponseController(w)}
	_ = out.rc.Flush() // the answer begins also where there is nothing to say yet
	if _, err := io.Copy(out, logs); err != nil {
		note(ctx, err)
		return
	}
	if follow {
		s.follow(ctx, out, logs, r.PathValue("id"))
	}
}

// getHooks lists how hooks ran.
func (s *Server) getHooks(w http.ResponseWriter, r *http.Request) {
	runs, err := s.core.HookRuns(r.Context(), r.PathValue("id"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	out := make([]api.HookRun, 0, len(runs))
	for _, run := range runs {
		out = append(out, hookRun(run))
	}
	writeJSON(w, http.StatusOK, out)
}

func hookRun(r sandbox.HookRun) api.HookRun {
	return api.HookRun{
		Name: r.Name, Event: r.Event, Reason: r.Reason, ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut, Error: r.Error,
		DurationMS: r.DurationMS, Output: r.Output, DroppedBytes: r.DroppedBytes, Background: r.Background, StartedAt: r.StartedAt,
	}
}

// follow goes on with a log until the client, the server or the sandbox is
// gone.
func (s *Server) follow(ctx context.Context, w io.Writer, logs io.Reader, id string) {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		n, err := io.Copy(w, logs)
		if err != nil {
			note(ctx, err)
			return
		}
		if n == 0 {
			if _, err := s.core.Get(ctx, id); err != nil {
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// flushingWriter sends what is written at once.
type flushingWriter struct {
	w  io.Writer
	rc *http.ResponseController
}

func (f flushingWriter) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err == nil {
		err = f.rc.Flush()
	}
	return n, err
}
