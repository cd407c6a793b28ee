package shim

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

const (
	collectLimit = 5 * time.Second // for the agent's answer
	maxPending   = 4               // lists of results that are kept until somebody asks
)

// noHooks is the warning where hooks were asked for and the agent knows none.
const noHooks = "hooks are not run: the agent in this snapshot is older than they are"

// agentCall makes one call of the agent as the best that it knows: as a frame
// with hooks, as one without, or over HTTP. dialing bounds the time until a
// connection stands. sent is called just before each try.
func agentCall[Resp any](h *host, ctx context.Context, dialing time.Duration,
	hooks, plain func(context.Context, net.Conn) (Resp, error), http func(context.Context, *guestapi.Client) (Resp, error)) (resp Resp, err error) {
	for {
		conn, port, err := h.reachAgent(ctx, dialing)
		if err != nil {
			return resp, err
		}
		switch {
		case port == guestapi.Port:
			once := guestapi.NewClient(func(context.Context) (net.Conn, error) { return conn, nil })
			resp, err = http(ctx, once)
			once.Close()
		case h.plain:
			resp, err = plain(ctx, conn)
		default:
			resp, err = hooks(ctx, conn)
		}
		_ = conn.Close()
		if !errors.Is(err, guestapi.ErrNoHooks) || h.plain {
			return resp, err
		}
		h.plain = true
	}
}

// errNoAnswer means that the agent was not reached, or that its answer did not
// come in time.
var errNoAnswer = errors.New("the agent in the guest does not answer")

// reachAgent connects to the agent within limit.
func (h *host) reachAgent(ctx context.Context, limit time.Duration) (net.Conn, uint16, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errNoAnswer)
	defer cancel()
	conn, port, err := h.dialAgent(ctx, guestapi.CallPort, guestapi.Port)
	if err != nil && context.Cause(ctx) == errNoAnswer {
		err = errors.Join(errNoAnswer, err)
	}
	return conn, port, err
}

// keepHooks keeps results for whoever asks, the last ones if there are many.
func (h *host) keepHooks(results []guestapi.HookResult) {
	if len(results) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hooks = append(h.hooks, results...)
	if over := len(h.hooks) - maxPending*guestapi.MaxHooks; over > 0 {
		h.hooks = append([]guestapi.HookResult(nil), h.hooks[over:]...)
	}
}

// takeHooks returns what was kept, each result once.
func (h *host) takeHooks() []guestapi.HookResult {
	h.mu.Lock()
	defer h.mu.Unlock()
	kept := h.hooks
	h.hooks = nil
	return kept
}

// collectHooks returns the results that no report had so far. Those that an
// agent has which does not answer are left with it.
func (h *host) collectHooks(ctx context.Context, req HooksRequest) (HooksReport, error) {
	if req.KeptOnly {
		return HooksReport{Hooks: h.takeHooks()}, nil
	}
	end, err := h.begin(ctx, PhaseRunning)
	if err != nil {
		return HooksReport{}, err
	}
	defer end()
	kept := h.takeHooks()
	if h.plain {
		return HooksReport{Hooks: kept}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, collectLimit)
	defer cancel()
	ctx, stop := h.whileRunning(ctx)
	defer stop()
	resp, err := h.agent.Hooks(ctx, h.token)
	if err != nil && len(kept) == 0 {
		return HooksReport{}, h.guestError("collect the results of hooks", err)
	}
	return HooksReport{Hooks: append(kept, resp.Hooks...)}, nil
}
