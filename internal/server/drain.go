package server

import (
	"net/http"

	"github.com/hibernacle/hibernacle/api"
)

// drain hibernates everything and streams how far it is, or ends a drain.
func (s *Server) drain(w http.ResponseWriter, r *http.Request) {
	var req api.DrainRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	out := &lines{w: w}
	if req.Undo {
		s.core.Undrain()
		s.finish(out, r, nil, func() api.Progress { return api.Progress{Phase: "done", Drained: toDrained(nil, nil)} })
		return
	}
	d, err := s.core.Drain(r.Context(), func(done, total int64) {
		out.write(api.Progress{Phase: "drain", Done: done, Total: total})
	})
	s.finish(out, r, err, func() api.Progress {
		return api.Progress{Phase: "done", Drained: toDrained(d.Hibernated, d.Failed)}
	})
}

func toDrained(hibernated []string, failed map[string]string) *api.Drained {
	return &api.Drained{Hibernated: append([]string{}, hibernated...), Failed: orEmpty(failed)}
}
