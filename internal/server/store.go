package server

import (
	"net/http"

	"github.com/hibernacle/hibernacle/api"
)

func (s *Server) getHealth(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) getVersion(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, s.version)
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
	out := &lines{w: w}
	v, err := s.core.StoreVerify(r.Context(), func(done, total int64) {
		out.write(api.Progress{Phase: "verify", Done: done, Total: total})
	})
	s.finish(out, r, err, func() api.Progress {
		found := toVerify(v)
		return api.Progress{Phase: "done", Verify: &found}
	})
}
