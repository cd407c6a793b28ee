package server

import (
	"net/http"
	"net/http/pprof"
)

// healthPath needs no key, and metricsPath none if the operator says so.
const (
	healthPath  = "/v1/health"
	metricsPath = "/metrics"
)

// route is one entry of the table. An empty method stands for every method.
type route struct {
	method, path string
	handle       http.HandlerFunc
}

// routes is the whole interface; api/openapi.json describes the same.
func (s *Server) routes() []route {
	return []route{
		{"GET", healthPath, s.getHealth},
		{"GET", "/v1/version", s.getVersion},
		{"GET", "/v1/host", s.getHost},
		{"POST", "/v1/drain", s.drain},
		{"GET", "/v1/openapi.json", s.getOpenAPI},

		{"POST", "/v1/sandboxes", s.createSandbox},
		{"GET", "/v1/sandboxes", s.listSandboxes},
		{"GET", "/v1/sandboxes/{id}", s.getSandbox},
		{"PATCH", "/v1/sandboxes/{id}", s.updateSandbox},
		{"DELETE", "/v1/sandboxes/{id}", s.deleteSandbox},
		{"POST", "/v1/sandboxes/{id}/hold", s.holdSandbox},
		{"DELETE", "/v1/sandboxes/{id}/hold", s.releaseSandbox},
		{"POST", "/v1/sandboxes/{id}/hibernate", s.hibernateSandbox},
		{"POST", "/v1/sandboxes/{id}/evict", s.evictSandbox},
		{"POST", "/v1/sandboxes/{id}/resume", s.resumeSandbox},
		{"GET", "/v1/sandboxes/{id}/checkpoints", s.listCheckpoints},
		{"POST", "/v1/sandboxes/{id}/checkpoints", s.createCheckpoint},
		{"DELETE", "/v1/sandboxes/{id}/checkpoints/{checkpoint}", s.deleteCheckpoint},
		{"POST", "/v1/sandboxes/{id}/restore", s.restoreSandbox},
		{"POST", "/v1/sandboxes/{id}/fork", s.forkSandbox},
		{"GET", "/v1/sandboxes/{id}/logs", s.getLogs},
		{"GET", "/v1/sandboxes/{id}/hooks", s.getHooks},

		{"POST", "/v1/sandboxes/{id}/exec", s.exec},
		{"GET", "/v1/sandboxes/{id}/files", s.downloadFile},
		{"PUT", "/v1/sandboxes/{id}/files", s.uploadFile},
		{"", "/v1/sandboxes/{id}/agent/{path...}", s.proxyAgent},
		{"GET", "/v1/sandboxes/{id}/ports/{port}/connect", s.connectPort},

		{"GET", "/v1/events", s.getEvents},
		{"POST", "/v1/webhooks", s.createWebhook},
		{"GET", "/v1/webhooks", s.listWebhooks},
		{"DELETE", "/v1/webhooks/{id}", s.deleteWebhook},
		{"POST", "/v1/webhooks/{id}/resume", s.resumeWebhook},
		{"POST", "/v1/webhooks/{id}/test", s.testWebhook},
		{"GET", metricsPath, s.getMetrics},

		{"GET", "/v1/templates", s.listTemplates},
		{"POST", "/v1/templates", s.buildTemplate},
		{"GET", "/v1/templates/{name}", s.getTemplate},
		{"DELETE", "/v1/templates/{name}", s.deleteTemplate},
		{"POST", "/v1/templates/{name}/create-from", s.createTemplateFrom},

		{"GET", "/v1/store/status", s.getStoreStatus},
		{"POST", "/v1/store/verify", s.verifyStore},
		{"POST", "/v1/store/collect", s.collectStore},
		{"POST", "/v1/store/import", s.importStore},
	}
}

// debugPath is where profiles of the daemon itself are, for those with the
// key. They are no part of the interface.
const debugPath = "/debug/pprof/"

// router returns a handler for the routes that answers what it does not know
// in the same form as everything else.
func (s *Server) router() http.Handler {
	mux := http.NewServeMux()
	for _, r := range s.routes() {
		pattern := r.path
		if r.method != "" {
			pattern = r.method + " " + r.path
		}
		mux.HandleFunc(pattern, r.handle)
	}
	mux.HandleFunc("GET "+debugPath, pprof.Index)
	mux.HandleFunc("GET "+debugPath+"profile", pprof.Profile)
	mux.HandleFunc("GET "+debugPath+"trace", pprof.Trace)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}
		// The mux knows by itself whether only the method is wrong.
		var probe probeWriter
		h.ServeHTTP(&probe, r)
		if probe.status == http.StatusMethodNotAllowed {
			allow := probe.Header().Get("Allow")
			w.Header().Set("Allow", allow)
			s.fail(w, r, methodError{r.Method, r.URL.Path, allow})
			return
		}
		s.fail(w, r, routeError{r.URL.Path})
	})
}

// probeWriter keeps the status and the header of an answer and drops its body.
type probeWriter struct {
	status int
	header http.Header
}

func (p *probeWriter) Header() http.Header {
	if p.header == nil {
		p.header = http.Header{}
	}
	return p.header
}
func (p *probeWriter) WriteHeader(status int)      { p.status = status }
func (p *probeWriter) Write(b []byte) (int, error) { return len(b), nil }
