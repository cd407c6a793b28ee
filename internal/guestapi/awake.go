package guestapi

import (
	"context"
	"strings"
	"unicode"
)

const (
	// KeepAwakeHeader with the value 1 makes process.Process/Start begin a
	// process that holds the sandbox awake for as long as it runs.
	KeepAwakeHeader = "Hib-Keep-Awake"

	// AwakePath is the control call that tells of these processes, over HTTP
	// alone: agents of before answer 404.
	AwakePath = "/awake"

	// MaxKeepAwake is how many of them are told of, and MaxCommand how many
	// bytes of each command.
	MaxKeepAwake = 32
	MaxCommand   = 200
)

// AwakeRequest asks which processes hold the sandbox awake.
type AwakeRequest struct{}

// AwakeResponse tells them, by pid, at most MaxKeepAwake.
type AwakeResponse struct {
	Processes []KeepAwake `json:"processes"`
}

// KeepAwake is a process that holds its sandbox awake.
type KeepAwake struct {
	PID     uint32 `json:"pid"`
	Command string `json:"command"` // and its arguments, at most MaxCommand bytes
}

// Awake asks for the processes that hold the sandbox awake.
func (c *Client) Awake(ctx context.Context, token string) (AwakeResponse, error) {
	var resp AwakeResponse
	if err := c.post(ctx, AwakePath, token, AwakeRequest{}, &resp); err != nil {
		return AwakeResponse{}, err
	}
	resp.Processes = resp.Processes[:min(len(resp.Processes), MaxKeepAwake)]
	for i := range resp.Processes {
		p := &resp.Processes[i]
		p.Command = Shorten(strings.Map(orQuestion, p.Command))
	}
	return resp, nil
}

// orQuestion returns r, or a question mark for what a terminal would act on.
func orQuestion(r rune) rune {
	if unicode.IsPrint(r) {
		return r
	}
	return '?'
}

// Shorten cuts a command to MaxCommand bytes of valid UTF-8.
func Shorten(command string) string {
	if len(command) > MaxCommand {
		const more = "…"
		command = strings.ToValidUTF8(command[:MaxCommand-len(more)], "") + more
	}
	return command
}
