package guestapi

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// The events that hooks are run at.
const (
	EventPreHibernate = "pre-hibernate" // before the user's processes are frozen
	EventPostResume   = "post-resume"   // after they were thawed, before the first request
)

// Reasons that only pre-hibernate hooks get as HIB_REASON.
const (
	ReasonHibernate  = "hibernate"  // the sandbox goes to standby, or its template's base snapshot is taken
	ReasonCheckpoint = "checkpoint" // it goes on after the snapshot
)

// Bounds of hooks.
const (
	DefaultHookTimeout    = 5 * time.Second // of a hook that is waited for
	BackgroundHookTimeout = time.Minute     // of a background hook, where none is given
	MaxHookTimeout        = time.Minute     // of one hook, and of all that are waited for at one event together
	MaxHooks              = 32              // of one event, and of one list
	MaxHookOutput         = 64 << 10        // bytes of output kept of one run: the first and the last half
	maxHookOutputs        = 256 << 10       // bytes of output in one answer
	maxHookDuration       = 1e9             // milliseconds; what is more makes no sense

	// HookOutputMark stands in the place of output that was not kept; with the
	// number of its bytes.
	HookOutputMark = "\n[… %d bytes left out …]\n"
)

// Hook is a command that is run in the guest at an event, beside those of the
// image (see docs/agents.md).
type Hook struct {
	Name       string            `json:"name"`                 // for reports
	Event      string            `json:"event"`                // EventPreHibernate or EventPostResume
	Command    []string          `json:"command"`              // a program and its arguments
	User       string            `json:"user,omitempty"`       // "": root
	Timeout    time.Duration     `json:"timeout,omitempty"`    // nanoseconds; 0: the default; at most MaxHookTimeout
	Env        map[string]string `json:"env,omitempty"`        // on top of the sandbox's
	Background bool              `json:"background,omitempty"` // of post-resume hooks: the first request does not wait for it
}

// HookResult is how a hook's run went. It comes from the guest: the host
// bounds it and makes it printable.
type HookResult struct {
	Name         string    `json:"name"`
	Event        string    `json:"event"`
	Reason       string    `json:"reason"`              // HIB_REASON of the run
	ExitCode     int       `json:"exit_code"`           // -1: it did not exit by itself
	Signal       string    `json:"signal,omitempty"`    // that ended it
	TimedOut     bool      `json:"timed_out,omitempty"` // it was killed at its time-out
	Error        string    `json:"error,omitempty"`     // why it did not run or was given up, "" if it ran to its end
	DurationMS   float64   `json:"duration_ms"`
	Output       string    `json:"output,omitempty"`        // stdout and stderr
	DroppedBytes int64     `json:"dropped_bytes,omitempty"` // of output that was read and not kept
	Background   bool      `json:"background,omitempty"`
	StartedAt    time.Time `json:"started_at"` // by the guest's clock
}

// Failed says whether the hook did not do what it was there for.
func (r HookResult) Failed() bool { return r.ExitCode != 0 || r.Error != "" }

// Describe says in a few words how the run went.
func (r HookResult) Describe() string {
	switch {
	case r.TimedOut:
		return fmt.Sprintf("killed at its time-out after %.0f ms", r.DurationMS)
	case r.Error != "":
		return r.Error
	case r.Signal != "":
		return "ended by signal " + r.Signal
	}
	return fmt.Sprintf("exit code %d", r.ExitCode)
}

// HooksRequest asks for the results of background hooks.
type HooksRequest struct{}

// HooksResponse has the results of the background hooks that have ended since
// they were last asked for or came with another answer.
type HooksResponse struct {
	Hooks []HookResult `json:"hooks,omitempty"`
}

// CheckHook says what is wrong with a hook, nil if nothing is.
func CheckHook(h Hook) error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("hook %q: "+format, append([]any{h.Name}, args...)...)
	}
	switch {
	case h.Name == "" || len(h.Name) > 64 || strings.ContainsFunc(h.Name, func(r rune) bool { return !unicode.IsPrint(r) || r == '/' }):
		return fail("its name must have 1 to 64 printable characters and no slash")
	case h.Event != EventPreHibernate && h.Event != EventPostResume:
		return fail("unknown event %q: %s or %s", h.Event, EventPreHibernate, EventPostResume)
	case len(h.Command) == 0 || h.Command[0] == "":
		return fail("it has no command")
	case h.Background && h.Event != EventPostResume:
		return fail("only %s hooks run in the background", EventPostResume)
	case h.Timeout < 0 || h.Timeout > MaxHookTimeout:
		return fail("a time-out of %v is not within 0 and %v", h.Timeout, MaxHookTimeout)
	}
	for _, word := range append([]string{h.User}, h.Command...) {
		if strings.ContainsRune(word, 0) {
			return fail("there is a NUL byte in it")
		}
	}
	for k, v := range h.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return fail("environment variable %q makes no sense", k)
		}
	}
	return nil
}

// BoundHookResults makes results that a guest sent fit to be kept and shown.
func BoundHookResults(in []HookResult) []HookResult {
	if len(in) == 0 {
		return nil
	}
	left := maxHookOutputs
	out := make([]HookResult, 0, min(len(in), 2*MaxHooks))
	for _, r := range in[:min(len(in), 2*MaxHooks)] {
		for _, text := range []*string{&r.Name, &r.Event, &r.Reason, &r.Signal, &r.Error} {
			*text = printable(*text)
		}
		if !(r.DurationMS >= 0 && r.DurationMS < maxHookDuration) {
			r.DurationMS = 0
		}
		if year := r.StartedAt.Year(); year < 1970 || year > 9999 {
			r.StartedAt = time.Time{}
		}
		r.DroppedBytes = max(r.DroppedBytes, 0)
		r.Output, r.DroppedBytes = boundOutput(r.Output, r.DroppedBytes, min(left, MaxHookOutput+len(HookOutputMark)+16))
		left -= len(r.Output)
		out = append(out, r)
	}
	return out
}

// boundOutput returns what is to be kept of an output, without what a terminal
// would act on, and how much of it is dropped in all.
func boundOutput(s string, dropped int64, limit int) (string, int64) {
	if len(s) > limit {
		dropped += int64(len(s) - limit)
		s = s[:limit]
	}
	return CleanOutput(s), dropped // never longer
}

// CleanOutput replaces what a terminal would act on, and what is no text, by
// question marks.
func CleanOutput(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || r != utf8.RuneError && unicode.IsPrint(r) {
			return r
		}
		if r == '\r' {
			return -1
		}
		return '?'
	}, s)
}

// encodeList puts a list into a text of a frame: nothing for an empty one,
// else JSON. Hooks are rare, and who has none pays nothing.
func encodeList[T any](list []T) string {
	if len(list) == 0 {
		return ""
	}
	b, err := json.Marshal(list)
	if err != nil {
		return "" // cannot be: only texts and numbers are in it
	}
	return string(b)
}

func decodeList[T any](d *decoder) (list []T) {
	text := d.text()
	if text == "" || d.err != nil {
		return nil
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		d.err = fmt.Errorf("a list in the frame: %s", printable(err.Error()))
	}
	return list
}
