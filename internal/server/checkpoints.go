package server

import (
	"net/http"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

func (s *Server) listCheckpoints(w http.ResponseWriter, r *http.Request) {
	all, err := s.core.Checkpoints(r.Context(), r.PathValue("id"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	out := make([]api.Checkpoint, 0, len(all))
	for _, k := range all {
		out = append(out, toCheckpoint(k))
	}
	writeJSON(w, http.StatusOK, out)
}

func (s *Server) createCheckpoint(w http.ResponseWriter, r *http.Request) {
	var req api.CheckpointRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	k, err := s.core.Checkpoint(r.Context(), r.PathValue("id"), req.Name)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusCreated, toCheckpoint(k))
}

func (s *Server) deleteCheckpoint(w http.ResponseWriter, r *http.Request) {
	if err := s.core.RemoveCheckpoint(r.Context(), r.PathValue("id"), r.PathValue("checkpoint")); err != nil {
		s.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) restoreSandbox(w http.ResponseWriter, r *http.Request) {
	var req api.RestoreRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	sb, kept, err := s.core.Restore(r.Context(), r.PathValue("id"), req.Checkpoint)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, api.Restored{Sandbox: s.toSandbox(sb), Kept: kept})
}

func (s *Server) forkSandbox(w http.ResponseWriter, r *http.Request) {
	var req api.ForkRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	forks, err := s.core.Fork(r.Context(), r.PathValue("id"), sandbox.ForkOptions(req))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	out := make([]api.Sandbox, 0, len(forks))
	for _, f := range forks {
		out = append(out, s.toSandbox(f))
	}
	writeJSON(w, http.StatusCreated, out)
}

func (s *Server) createTemplateFrom(w http.ResponseWriter, r *http.Request) {
	var req api.TemplateFromRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	t, err := s.core.CreateTemplateFrom(r.Context(), req.Sandbox, req.Checkpoint, r.PathValue("name"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusCreated, toTemplate(t))
}

func toCheckpoint(k sandbox.Checkpoint) api.Checkpoint {
	out := api.Checkpoint{Name: k.Name, Kind: string(k.Kind), CreatedAt: k.CreatedAt, Snapshot: toSnapshot(k.Snapshot), Current: k.Current}
	if k.Report != nil {
		out.Report = toHibernateReport(*k.Report)
	}
	return out
}
