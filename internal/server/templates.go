package server

import (
	"net/http"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

func (s *Server) listTemplates(w http.ResponseWriter, r *http.Request) {
	all, err := s.core.Templates(r.Context())
	if err != nil {
		s.fail(w, r, err)
		return
	}
	out := make([]api.Template, 0, len(all))
	for _, t := range all {
		out = append(out, toTemplate(t))
	}
	writeJSON(w, http.StatusOK, out)
}

func (s *Server) getTemplate(w http.ResponseWriter, r *http.Request) {
	t, err := s.core.Template(r.Context(), r.PathValue("name"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, toTemplate(t))
}

func (s *Server) deleteTemplate(w http.ResponseWriter, r *http.Request) {
	if err := s.core.RemoveTemplate(r.Context(), r.PathValue("name")); err != nil {
		s.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// buildTemplate streams the progress of a build. An error that comes before
// any progress has its own status, a later one is the last line.
func (s *Server) buildTemplate(w http.ResponseWriter, r *http.Request) {
	var req api.BuildRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	out := &lines{w: w}
	t, err := s.core.BuildTemplate(r.Context(), fromBuild(req), func(p sandbox.Progress) { out.write(toProgress(p)) })
	s.finish(out, r, err, func() api.Progress {
		built := toTemplate(t)
		return api.Progress{Phase: "done", Template: &built}
	})
}

// finish ends a streamed answer with an error or with its result.
func (s *Server) finish(out *lines, r *http.Request, err error, result func() api.Progress) {
	switch {
	case err == nil:
		out.write(result())
	case out.begun():
		note(r.Context(), err)
		e := toError(err)
		out.write(api.Progress{Error: &e})
	default:
		s.fail(out.w, r, err)
	}
}
