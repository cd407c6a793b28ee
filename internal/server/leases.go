package server

import (
	"encoding/binary"
	"net/http"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// holdSandbox keeps a sandbox awake until a time.
func (s *Server) holdSandbox(w http.ResponseWriter, r *http.Request) {
	var req api.HoldRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	if req.For == 0 {
		s.fail(w, r, requestError{"the field \"for\" is missing", `it says how long, for example "30m"; DELETE ends a hold`})
		return
	}
	sb, err := s.core.SetHold(r.Context(), r.PathValue("id"), time.Now().Add(time.Duration(req.For)), req.Reason)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, s.toSandbox(sb))
}

// releaseSandbox ends that.
func (s *Server) releaseSandbox(w http.ResponseWriter, r *http.Request) {
	sb, err := s.core.ReleaseHold(r.Context(), r.PathValue("id"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, s.toSandbox(sb))
}

// hold keeps a sandbox awake for a request that may last. what says what for.
// The caller calls release when the request ends.
func (s *Server) hold(r *http.Request, id, kind, what string) (release func(), err error) {
	return s.core.Hold(r.Context(), id, sandbox.Lease{Kind: kind, Owner: r.RemoteAddr + ": " + what})
}

// holdForCall takes the lease, and notes the session, of a call to the agent
// whose target and body are given: one that lasts as long as a process or a
// transfer does. Other calls are short, and their traffic keeps the sandbox
// awake long enough. The caller calls release when the call ends.
func (s *Server) holdForCall(r *http.Request, id, target string, body []byte) (release func(), err error) {
	switch {
	case target == processconnect.ProcessStartProcedure:
		return s.holdForProcess(r, id, startRequest(r.Header.Get("Content-Type"), body))
	case target == processconnect.ProcessConnectProcedure:
		return s.hold(r, id, sandbox.LeaseExec, "follows a process")
	case target == agentFilesPath && r.Method == http.MethodGet:
		return s.hold(r, id, sandbox.LeaseDownload, printable(r.URL.Query().Get("path")))
	case target == agentFilesPath:
		return s.hold(r, id, sandbox.LeaseUpload, printable(r.URL.Query().Get("path")))
	}
	return func() {}, nil
}

// holdForProcess is holdForCall for the start of a process. One with a terminal
// is an interactive session.
func (s *Server) holdForProcess(r *http.Request, id string, start *process.StartRequest) (release func(), err error) {
	what := commandLine(start.GetProcess().GetCmd(), start.GetProcess().GetArgs())
	if start.GetPty() == nil {
		return s.hold(r, id, sandbox.LeaseExec, what)
	}
	end, err := s.core.Session(id, sandbox.SessionPTY)
	if err != nil {
		return nil, err
	}
	drop, err := s.hold(r, id, sandbox.LeaseExec, what)
	if err != nil {
		end()
		return nil, err
	}
	return func() { drop(); end() }, nil
}

// maxCommandLine bounds what is shown of a command, in bytes.
const maxCommandLine = 200

// commandLine returns a command for people.
func commandLine(cmd string, args []string) string {
	line := cmd
	for _, arg := range args {
		if len(line) > maxCommandLine {
			break
		}
		line += " " + arg
	}
	return printable(line[:min(len(line), maxCommandLine)])
}

// startRequest reads the request of process.Process/Start from a call's body,
// an empty one where it cannot: the agent says what is wrong with that.
func startRequest(contentType string, body []byte) *process.StartRequest {
	req := &process.StartRequest{}
	// One message behind its flags, of which the lowest says that it is
	// compressed, and its length.
	const envelope = 5
	if len(body) < envelope || body[0]&1 != 0 {
		return req
	}
	size := binary.BigEndian.Uint32(body[1:envelope])
	message := body[envelope:]
	if uint64(size) > uint64(len(message)) {
		return req
	}
	message = message[:size]
	read := proto.Unmarshal
	if mediaType, _, _ := strings.Cut(contentType, ";"); strings.HasSuffix(strings.TrimSpace(mediaType), "json") {
		read = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal
	}
	if read(message, req) != nil {
		return &process.StartRequest{}
	}
	return req
}
