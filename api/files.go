package api

// Names of files in the data folder that clients on the same host read.
const (
	KeyFile    = "api.key"     // the API key, one line
	DaemonFile = "daemon.json" // where the running daemon listens, a DaemonInfo
)

// DefaultURL is where the daemon listens if nothing else was asked for.
const DefaultURL = "http://127.0.0.1:7070"

// KeyPrefix begins every API key; 40 hexadecimal digits follow. SDKs of this
// kind of service check the form.
const KeyPrefix = "e2b_"

// DaemonInfo is the content of DaemonFile.
type DaemonInfo struct {
	URL string `json:"url"`
	PID int    `json:"pid"`
	Run string `json:"run"` // runtime folder, with a folder for each machine
}

// GuestHeader marks an answer under …/agent/ that came from the guest: without
// it the answer is the daemon's own.
const GuestHeader = "Hib-Guest-Answer"
