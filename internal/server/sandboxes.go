package server

import (
	"net/http"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

func (s *Server) createSandbox(w http.ResponseWriter, r *http.Request) {
	var req api.CreateRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	o, err := fromCreate(req)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	sb, err := s.core.Create(r.Context(), o)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	w.Header().Set("Location", "/v1/sandboxes/"+sb.ID)
	writeJSON(w, http.StatusCreated, s.toSandbox(sb))
}

func (s *Server) listSandboxes(w http.ResponseWriter, r *http.Request) {
	all, err := s.core.List(r.Context())
	if err != nil {
		s.fail(w, r, err)
		return
	}
	out := make([]api.Sandbox, 0, len(all))
	for _, sb := range all {
		out = append(out, s.toSandbox(sb))
	}
	writeJSON(w, http.StatusOK, out)
}

func (s *Server) getSandbox(w http.ResponseWriter, r *http.Request) {
	sb, err := s.core.Inspect(r.Context(), r.PathValue("id"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, s.toSandbox(sb))
}

func (s *Server) hibernateSandbox(w http.ResponseWriter, r *http.Request) {
	var req api.HibernateRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	sb, err := s.core.Hibernate(r.Context(), r.PathValue("id"), sandbox.HibernateOptions{NoPark: req.NoPark})
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, s.toSandbox(sb))
}

func (s *Server) resumeSandbox(w http.ResponseWriter, r *http.Request) {
	var req api.ResumeRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	o, err := fromResume(req)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	sb, err := s.core.Resume(r.Context(), r.PathValue("id"), o)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, s.toSandbox(sb))
}

func (s *Server) evictSandbox(w http.ResponseWriter, r *http.Request) {
	var req api.EvictRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	out, err := s.core.Evict(r.Context(), r.PathValue("id"), sandbox.EvictOptions(req))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, api.Evicted(out))
}

func (s *Server) deleteSandbox(w http.ResponseWriter, r *http.Request) {
	if err := s.core.Delete(r.Context(), r.PathValue("id")); err != nil {
		s.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
