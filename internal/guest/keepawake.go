package guest

import (
	"net/http"
	"strings"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// awakeCall serves the control call that asks which processes hold the sandbox
// awake: those that were started so and run still.
func (a *Agent) awakeCall() http.HandlerFunc {
	return serveControl(func(in call, _ guestapi.AwakeRequest) (guestapi.AwakeResponse, error) {
		if err := a.control.check(in); err != nil {
			return guestapi.AwakeResponse{}, err
		}
		resp := guestapi.AwakeResponse{Processes: []guestapi.KeepAwake{}}
		for _, p := range a.processes.table.running() {
			if p.keepAwake && len(resp.Processes) < guestapi.MaxKeepAwake {
				resp.Processes = append(resp.Processes, guestapi.KeepAwake{PID: p.pid, Command: commandLine(p)})
			}
		}
		return resp, nil
	})
}

// commandLine returns what a process was started with, cut short.
func commandLine(p *process) string {
	var line strings.Builder
	line.WriteString(p.config.GetCmd())
	for _, arg := range p.config.GetArgs() {
		if line.Len() > guestapi.MaxCommand { // a command may be megabytes long
			break
		}
		line.WriteString(" " + arg)
	}
	return guestapi.Shorten(line.String())
}
