package shim

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// ActivityRequest asks how busy a running guest is.
type ActivityRequest struct {
	InboundCap time.Duration `json:"inbound_cap"` // nanoseconds; inbound connections that were silent for longer do not count
	AwaitCap   time.Duration `json:"await_cap"`   // nanoseconds; nor do questions to others that are older

	// IdleAfter spares the guest: its agent is asked for processes that hold it
	// awake only if the network alone was idle that long. Nanoseconds; 0: in any case.
	IdleAfter time.Duration `json:"idle_after"`
}

// Activity says how busy a running guest is; see vnet.Activity for what counts.
type Activity struct {
	Open     int           `json:"open"`     // inbound connections
	Awaiting int           `json:"awaiting"` // outbound connections that wait for a reply
	Idle     time.Duration `json:"idle"`     // nanoseconds since the last payload, at most since the guest began to run
	Held     time.Duration `json:"held"`     // nanoseconds until none of those counts any more, if nothing passes
	Bytes    int64         `json:"bytes"`    // payload of connections, both ways, since the machine was started
	CPU      time.Duration `json:"cpu"`      // nanoseconds of processor time that the VMM took since it was started

	KeepAwake []KeepAwake `json:"keep_awake,omitempty"` // at most guestapi.MaxKeepAwake
	Asked     bool        `json:"asked"`                // KeepAwake is what the agent said
	AgentErr  string      `json:"agent_err,omitempty"`  // why the agent, which was asked, did not say it
}

// Quiet reports whether the network alone has been idle for d.
func (a Activity) Quiet(d time.Duration) bool {
	return a.Open == 0 && a.Awaiting == 0 && a.Idle >= d
}

// KeepAwake is a process of the guest that holds it awake.
type KeepAwake = guestapi.KeepAwake

// activity looks at a running guest. It takes no turn: nothing changes by it.
func (h *host) activity(ctx context.Context, req ActivityRequest) (Activity, error) {
	h.mu.Lock()
	err := h.check([]Phase{PhaseRunning})
	machine, network := h.machine, h.net
	token := h.token // it changes in other phases only
	h.mu.Unlock()
	if err != nil {
		return Activity{}, err
	}
	cpu, err := cpuTime(machine.PID())
	if err != nil {
		return Activity{}, fmt.Errorf("measure the machine's processor time: %w", err)
	}
	a := Activity{CPU: cpu}
	look := func() {
		n := network.Activity(req.InboundCap, req.AwaitCap)
		a.Open, a.Awaiting, a.Idle, a.Held, a.Bytes = n.Open, n.Awaiting, n.Idle, n.Held, n.Bytes
	}
	look()
	if req.IdleAfter > 0 && !a.Quiet(req.IdleAfter) {
		return a, nil
	}
	a.Asked = true
	if a.KeepAwake, err = h.keepAwake(ctx, token); err != nil {
		a.AgentErr = err.Error()
	}
	look() // the agent may have taken its time
	return a, nil
}

// keepAwake asks the agent for the processes that hold the guest awake. A guest
// that does not answer soon neither holds the order up nor itself awake.
func (h *host) keepAwake(ctx context.Context, token string) ([]KeepAwake, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, h.limits.awake, fmt.Errorf("the agent did not answer within %s", h.limits.awake))
	defer cancel()
	resp, err := h.agent.Awake(ctx, token)
	if ctx.Err() != nil && err != nil {
		err = context.Cause(ctx)
	}
	return resp.Processes, err
}

// cpuTime returns the processor time that a process took, in user and in
// kernel mode: the guest's, and what the VMM needs for it.
func cpuTime(pid int) (time.Duration, error) {
	const user, kernel = 11, 12 // fields 14 and 15 of proc(5)
	fields, err := processStat(pid, kernel)
	if err != nil {
		return 0, err
	}
	var ticks int64
	for _, f := range fields[user : kernel+1] {
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("look at process %d: %w", pid, err)
		}
		ticks += n
	}
	const perSecond = 100 // USER_HZ, the same on every architecture that matters
	return time.Duration(ticks) * (time.Second / perSecond), nil
}
