package server

import (
	"net/http"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

func (s *Server) getHealth(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) getVersion(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, s.version)
}

func (s *Server) getHost(w http.ResponseWriter, r *http.Request) {
	h, err := s.core.Host(r.Context())
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, api.Host(h))
}

func (s *Server) getOpenAPI(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(api.OpenAPI)
}

func (s *Server) getStoreStatus(w http.ResponseWriter, r *http.Request) {
	st, err := s.core.StoreStatus(r.Context())
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, toStoreStatus(st))
}

// verifyStore streams the progress of a verification.
func (s *Server) verifyStore(w http.ResponseWriter, r *http.Request) {
	var req api.VerifyRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	out := &lines{w: w}
	v, err := s.core.StoreVerify(r.Context(), sandbox.VerifyOptions(req), func(done, total int64) {
		out.write(api.Progress{Phase: "verify", Done: done, Total: total})
	})
	s.finish(out, r, err, func() api.Progress {
		found := toVerify(v)
		return api.Progress{Phase: "done", Verify: &found}
	})
}

func (s *Server) collectStore(w http.ResponseWriter, r *http.Request) {
	var req api.CollectRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	c, err := s.core.Collect(r.Context(), sandbox.CollectOptions(req))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, toCollected(c))
}

// importStore streams the progress of an import.
func (s *Server) importStore(w http.ResponseWriter, r *http.Request) {
	var req api.ImportRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	out := &lines{w: w}
	got, err := s.core.Import(r.Context(), req.TakeOver, func(done, total int64) {
		out.write(api.Progress{Phase: "import", Done: done, Total: total})
	})
	s.finish(out, r, err, func() api.Progress {
		found := toImported(got)
		return api.Progress{Phase: "done", Imported: &found}
	})
}
