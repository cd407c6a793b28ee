package server

// Routes returns method and path of every route; a method of "" is any.
func (s *Server) Routes() (all [][2]string) {
	for _, r := range s.routes() {
		all = append(all, [2]string{r.method, r.path})
	}
	return all
}

// StartRequest reads the request of process.Process/Start from a call's body.
var StartRequest = startRequest
