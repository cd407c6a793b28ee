package server

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/webhook"
)

// hooks returns the manager of webhooks, or answers that there is none.
func (s *Server) hooks(w http.ResponseWriter, r *http.Request) (*webhook.Manager, bool) {
	if s.webhooks == nil {
		s.fail(w, r, fmt.Errorf("webhooks: %w", errors.ErrUnsupported))
	}
	return s.webhooks, s.webhooks != nil
}

func (s *Server) createWebhook(w http.ResponseWriter, r *http.Request) {
	m, ok := s.hooks(w, r)
	if !ok {
		return
	}
	var req api.WebhookRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	h, secret, err := m.Add(r.Context(), webhook.Spec(req))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	out := toWebhook(h)
	out.Secret = secret
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, http.StatusCreated, out)
}

func (s *Server) listWebhooks(w http.ResponseWriter, r *http.Request) {
	m, ok := s.hooks(w, r)
	if !ok {
		return
	}
	out := []api.Webhook{}
	for _, h := range m.List() {
		out = append(out, toWebhook(h))
	}
	writeJSON(w, http.StatusOK, out)
}

func (s *Server) deleteWebhook(w http.ResponseWriter, r *http.Request) {
	m, ok := s.hooks(w, r)
	if !ok {
		return
	}
	if err := m.Remove(r.Context(), r.PathValue("id")); err != nil {
		s.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) resumeWebhook(w http.ResponseWriter, r *http.Request) {
	m, ok := s.hooks(w, r)
	if !ok {
		return
	}
	h, err := m.Resume(r.Context(), r.PathValue("id"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, toWebhook(h))
}

func (s *Server) testWebhook(w http.ResponseWriter, r *http.Request) {
	m, ok := s.hooks(w, r)
	if !ok {
		return
	}
	t, err := m.Test(r.Context(), r.PathValue("id"))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, api.WebhookTest{OK: t.Error == "", Status: t.Status, MS: float64(t.Time.Microseconds()) / 1000, Error: t.Error})
}

func toWebhook(h webhook.Hook) api.Webhook {
	out := api.Webhook{
		ID: h.ID, URL: h.URL, Sandbox: h.Sandbox, Types: orNone(h.Types), CreatedAt: h.CreatedAt,
		State: h.State, Cursor: h.Cursor, Failures: h.Failures, LastError: h.Error,
	}
	if !h.NextTry.IsZero() {
		out.NextTry = &h.NextTry
	}
	return out
}

// getMetrics answers scrapes of Prometheus.
func (s *Server) getMetrics(w http.ResponseWriter, r *http.Request) {
	if s.metrics == nil {
		s.fail(w, r, fmt.Errorf("metrics: %w", errors.ErrUnsupported))
		return
	}
	s.metrics.ServeHTTP(w, r)
}
