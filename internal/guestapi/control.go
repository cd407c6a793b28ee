// Package guestapi owns the protocol between the host and the agent in the
// guest: the control calls below, which only the host may make, and (in
// api/process and api/filesystem) the services that SDKs speak. Both ends
// import it: the agent serves it, the shim and the tests call it.
//
// Everything goes over HTTP/1.1 on Port. Control calls carry TokenHeader with
// the control token, the others AccessHeader with the access token. What a
// guest answers is not trusted: Client bounds every answer.
package guestapi

import (
	"path"
	"strings"
	"time"
)

const (
	// Port is the TCP port of the agent.
	Port = 49983
	// TokenHeader carries the control token.
	TokenHeader = "Hib-Control-Token"
	// AccessHeader carries the access token of the process, filesystem and file calls.
	AccessHeader = "X-Access-Token"
	// ReplayHeader with the value 1 makes process.Process/Connect begin with the output that the agent still holds.
	ReplayHeader = "Hib-Replay"
	// Version is the level of the E2B agent protocol that the agent implements (envdVersion).
	Version = "0.5.7"
)

// The paths of the control calls. All are POST with a JSON body.
const (
	InitPath   = "/init"
	FreezePath = "/freeze"
	ThawPath   = "/thaw"
	ClockPath  = "/clock"
	HooksPath  = "/hooks"
	HealthPath = "/health" // GET, no token: 204 once the agent serves
)

// IsControl tells whether a path of a request, in whatever spelling, leads to a
// control call. What lets others through to the agent refuses it.
func IsControl(p string) bool {
	p = strings.ToLower(path.Clean("/" + p))
	for _, call := range []string{InitPath, FreezePath, ThawPath, ClockPath, HooksPath, AwakePath} {
		if p == call || strings.HasPrefix(p, call+"/") {
			return true
		}
	}
	return false
}

// Reasons for an Init, passed on to hooks as HIB_REASON.
const (
	ReasonBoot      = "boot"      // the first one after a cold boot: sets the first control token
	ReasonCreate    = "create"    // a base snapshot becomes a sandbox
	ReasonResume    = "resume"    // after standby
	ReasonFork      = "fork"      // a copy becomes a sandbox of its own
	ReasonRestore   = "restore"   // back to a checkpoint
	ReasonCancelled = "cancelled" // a hibernation that did not happen
)

// InitRequest prepares the guest for its first request after it started to
// run. The agent acts in this order: clock, entropy, identity, sockets,
// generation, thaw, post-resume hooks. It is idempotent for one Generation.
type InitRequest struct {
	Reason       string    `json:"reason"`
	UnixNano     int64     `json:"unix_nano"`               // host's CLOCK_REALTIME, taken just before the call is sent; 0: leave the clock
	Entropy      []byte    `json:"entropy"`                 // ≥ 32 fresh random bytes
	Generation   uint64    `json:"generation"`              // written to /run/hib/generation; grows with each resume
	Snapshot     string    `json:"snapshot,omitempty"`      // snapshot that the guest came from
	SleptSeconds float64   `json:"slept_seconds,omitempty"` // between that snapshot and now
	Identity     *Identity `json:"identity,omitempty"`      // on boot, create and fork
	Hooks        []Hook    `json:"hooks,omitempty"`         // of the sandbox; those that are not post-resume hooks are left alone
}

// Identity is what makes a guest itself.
type Identity struct {
	ID           string            `json:"id"`            // the sandbox's id, written to /run/hib/id
	Hostname     string            `json:"hostname"`      // RFC 1123 label
	MachineID    string            `json:"machine_id"`    // 32 lower-case hexadecimal digits
	ControlToken string            `json:"control_token"` // replaces the one that this call was made with
	AccessToken  string            `json:"access_token"`  // "" leaves process and file calls open to whoever reaches the port
	Env          map[string]string `json:"env,omitempty"` // default environment of every process started later
}

// InitResponse reports what the agent did.
type InitResponse struct {
	AgentVersion     string             `json:"agent_version"`
	SocketsDestroyed int                `json:"sockets_destroyed"`
	Steps            map[string]float64 `json:"steps"`              // milliseconds by step
	Warnings         []string           `json:"warnings,omitempty"` // what could not be done
	Hooks            []HookResult       `json:"hooks,omitempty"`    // that ended during the call
}

// FreezeRequest runs the pre-hibernate hooks and stops the user's processes for a
// snapshot. Post-resume hooks are remembered for a thaw. If neither a thaw
// nor a snapshot follows within Deadline the agent thaws by itself.
type FreezeRequest struct {
	Attempt  uint64        `json:"attempt"`            // of the hibernation; an attempt that was thawed is refused
	Deadline time.Duration `json:"deadline"`           // nanoseconds of guest time, from the arrival of the call
	Reason   string        `json:"reason,omitempty"`   // for hooks: ReasonHibernate, which is the default, or ReasonCheckpoint
	Snapshot string        `json:"snapshot,omitempty"` // that is to be made, for hooks

	// Generation is the one that the guest runs at. A call that was under way when
	// a snapshot was taken, and comes to the guest in its next life, is refused.
	// 0: of a host of before.
	Generation uint64 `json:"generation,omitempty"`

	Hooks []Hook `json:"hooks,omitempty"` // of the sandbox
}

// FreezeResponse reports what the agent did.
type FreezeResponse struct {
	Steps    map[string]float64 `json:"steps"`              // milliseconds by step
	Warnings []string           `json:"warnings,omitempty"` // what hung or failed without stopping the freeze
	Hooks    []HookResult       `json:"hooks,omitempty"`    // that ended during the call, and background ones since the last
}

// ClockRequest sets the wall clock once more, after an init that took too long
// to leave it right.
type ClockRequest struct {
	UnixNano int64 `json:"unix_nano"` // as in InitRequest
}

// ThawRequest lets the user's processes go on after a freeze that was
// cancelled, and runs the post-resume hooks if the attempt got as far as its own
// hooks. Hooks that are being run before a freeze are ended. The attempt is
// refused from then on.
type ThawRequest struct {
	Attempt  uint64 `json:"attempt"`
	UnixNano int64  `json:"unix_nano"`        // as in InitRequest: the clock stood still while the guest was paused
	Reason   string `json:"reason,omitempty"` // for hooks: ReasonCancelled, which is the default, or ReasonCheckpoint
}

// ThawResponse reports what the agent did.
type ThawResponse struct {
	Warnings []string     `json:"warnings,omitempty"`
	Hooks    []HookResult `json:"hooks,omitempty"` // that ended during the call
}
