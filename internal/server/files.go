package server

import (
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// agentFilesPath is the agent's route for the content of files.
const agentFilesPath = "/files"

// fileQuery checks the query of a file call and returns the agent's form.
func fileQuery(r *http.Request) (url.Values, error) {
	in := r.URL.Query()
	if in.Get("path") == "" {
		return nil, requestError{"the query parameter \"path\" is missing", "it names the file in the sandbox, for example ?path=/home/user/a.txt"}
	}
	out := url.Values{"path": {in.Get("path")}}
	if user := in.Get("user"); user != "" {
		out.Set("username", user)
	}
	return out, nil
}

// downloadFile streams a file out of the guest.
func (s *Server) downloadFile(w http.ResponseWriter, r *http.Request) {
	resp, release, err := s.callFiles(w, r, http.MethodGet, nil)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer release()
	defer resp.Body.Close()
	w.Header().Set("Content-Type", "application/octet-stream")
	if resp.ContentLength >= 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(resp.ContentLength, 10))
	}
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return
	}
	if _, err := io.Copy(w, resp.Body); err != nil {
		note(r.Context(), err)
		panic(http.ErrAbortHandler) // the client must not take the rest for the whole
	}
}

// uploadFile streams a file into the guest, where the agent makes missing
// folders and replaces what was there.
func (s *Server) uploadFile(w http.ResponseWriter, r *http.Request) {
	resp, release, err := s.callFiles(w, r, http.MethodPost, r.Body)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer release()
	resp.Body.Close()
	w.WriteHeader(http.StatusNoContent)
}

// callFiles calls the agent's file route and returns its answer if that is a
// success. The caller calls release when it is done with that.
func (s *Server) callFiles(w http.ResponseWriter, r *http.Request, method string, body io.Reader) (_ *http.Response, release func(), err error) {
	q, err := fileQuery(r)
	if err != nil {
		return nil, nil, err
	}
	g, err := s.guest(w, r, "files")
	if err != nil {
		return nil, nil, err
	}
	kind := sandbox.LeaseDownload
	if body != nil {
		kind = sandbox.LeaseUpload
	}
	release, err = s.hold(r, g.id, kind, printable(q.Get("path")))
	if err != nil {
		return nil, nil, err
	}
	resp, err := s.sendFiles(r, g, method, q, body)
	if err != nil {
		release()
		return nil, nil, err
	}
	return resp, release, nil
}

func (s *Server) sendFiles(r *http.Request, g guest, method string, q url.Values, body io.Reader) (*http.Response, error) {
	u := g.url(agentFilesPath)
	u.RawQuery = q.Encode()
	req, err := http.NewRequestWithContext(r.Context(), method, u.String(), body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.ContentLength = r.ContentLength
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	resp, err := s.callAgent(g, req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, readAgentError(g, resp)
	}
	return resp, nil
}
