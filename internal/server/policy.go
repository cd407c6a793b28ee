package server

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// updateSandbox changes the policy and the labels of a sandbox.
func (s *Server) updateSandbox(w http.ResponseWriter, r *http.Request) {
	var req api.UpdateRequest
	if err := decode(w, r, &req); err != nil {
		s.fail(w, r, err)
		return
	}
	sb, err := s.core.Update(r.Context(), r.PathValue("id"), func(now *sandbox.Settings) error {
		if len(req.Labels) > 0 {
			labels := maps.Clone(now.Labels)
			if labels == nil {
				labels = map[string]string{}
			}
			for k, v := range req.Labels {
				if v == nil {
					delete(labels, k)
				} else {
					labels[k] = *v
				}
			}
			now.Labels = labels
		}
		now.RestartTimeout = req.Policy != nil && req.Policy.Timeout != nil
		return patchPolicy(&now.Policy, req.Policy)
	})
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, s.toSandbox(sb))
}

// patchPolicy changes what the patch names. The core checks the outcome.
func patchPolicy(p *sandbox.Policy, patch *api.PolicyPatch) error {
	if patch == nil {
		return nil
	}
	if d := patch.IdleTimeout; d != nil {
		p.IdleTimeout = time.Duration(*d)
	}
	if mode := patch.Idle; mode != nil {
		p.Idle = sandbox.IdleMode(*mode)
	}
	if d := patch.ConnectionCap; d != nil {
		p.ConnectionCap = time.Duration(*d)
	}
	if action := patch.OnSessionClose; action != nil {
		p.OnSessionClose = sandbox.SessionAction(*action)
	}
	for dst, src := range map[*sandbox.Limit]*api.Limit{&p.TTL: patch.TTL, &p.TTLIdle: patch.TTLIdle, &p.Timeout: patch.Timeout} {
		if src != nil {
			*dst = sandbox.Limit{After: time.Duration(src.After), Action: sandbox.Action(src.Action)}
		}
	}
	if x := patch.Expires; x != nil {
		p.Expires = sandbox.Expires{At: x.At.UTC(), Action: sandbox.Action(x.Action)}
	}
	if g := patch.Egress; g != nil {
		p.Egress = sandbox.Egress(*g)
	}
	if c := patch.Checkpoints; c != nil {
		p.Checkpoints = sandbox.Schedule{Every: time.Duration(c.Every), Keep: c.Keep}
	}
	if patch.Hooks != nil {
		p.Hooks = nil
		for _, h := range *patch.Hooks {
			p.Hooks = append(p.Hooks, sandbox.Hook{Name: h.Name, Event: h.Event, Command: h.Command, User: h.User,
				Timeout: time.Duration(h.Timeout), Env: h.Env, Background: h.Background})
		}
	}
	return patchPorts(p, patch.Ports)
}

func patchPorts(p *sandbox.Policy, ports map[string]string) error {
	if len(ports) == 0 {
		return nil
	}
	public := slices.Clone(p.Public)
	for text, access := range ports {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil || port == 0 {
			return requestError{fmt.Sprintf("%q is no port", text), "a port is a number from 1 to 65535"}
		}
		public = slices.DeleteFunc(public, func(n int) bool { return n == int(port) })
		switch access {
		case api.PortPublic:
			public = append(public, int(port))
		case api.PortPrivate:
		default:
			return requestError{fmt.Sprintf("port %d is to be %q", port, access), "take public or private"}
		}
	}
	p.Public = public
	return nil
}

func toPolicy(p sandbox.Policy) api.Policy {
	out := api.Policy{
		IdleTimeout: api.Duration(p.IdleTimeout), Idle: string(p.Idle), ConnectionCap: api.Duration(p.ConnectionCap), OnSessionClose: string(p.OnSessionClose),
		TTL: toLimit(p.TTL), TTLIdle: toLimit(p.TTLIdle), Timeout: toLimit(p.Timeout),
		Ports: map[string]string{}, Egress: api.Egress(p.Egress), Hooks: []api.Hook{},
	}
	if !p.Expires.At.IsZero() {
		out.Expires = &api.Expires{At: p.Expires.At, Action: string(p.Expires.Action)}
	}
	if p.Checkpoints.Every > 0 {
		out.Checkpoints = &api.Schedule{Every: api.Duration(p.Checkpoints.Every), Keep: p.Checkpoints.Keep}
	}
	for _, port := range p.Public {
		out.Ports[strconv.Itoa(port)] = api.PortPublic
	}
	for _, h := range p.Hooks {
		out.Hooks = append(out.Hooks, api.Hook{Name: h.Name, Event: h.Event, Command: h.Command, User: h.User,
			Timeout: api.Duration(h.Timeout), Env: h.Env, Background: h.Background})
	}
	return out
}

func toLimit(l sandbox.Limit) *api.Limit {
	if l.After == 0 {
		return nil
	}
	return &api.Limit{After: api.Duration(l.After), Action: string(l.Action)}
}
